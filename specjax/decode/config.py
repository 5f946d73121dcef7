"""The static configuration of a decoder and of its executables."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import Mesh

from specjax.config.engine import EngineConfig
from specjax.config.rules import Rule
from specjax.decode.kept import KeptShape
from specjax.decode.rules import NO_OPTIONS, RuleOptions
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import DrafterSpec
from specjax.models import sharding
from specjax.models.base import ModelConfig
from specjax.paged import kv_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything static about a decoder. Equal configurations share their executables.

    Its repr names executables on disk, so the repr of every field is unique to its value and
    the same in every process. With a mesh, or a drafter from outside specjax, nothing is stored
    on disk.

    Attributes:
      target: the model that is decoded.
      drafter: spec of the drafter, which is built later, for each K.
      sizes: sizes of the decode state, over all shards.
      engine: capacities and numerics; `sizes` takes precedence over its sizes.
      rules: verification rules beyond equality that rows may use.
      rule_options: parameters of the lossy rules.
      max_drafts_per_shard: most draft tokens that the rows of one data shard verify per step,
        those likeliest to be accepted; None: no limit. Bucket.max_drafts counts all shards.
      mesh: axes "data" and "tensor", the latter in two factors where the drafter is split over
        part of it (`specjax.models.partition.factored`); None: one device.
      kept: the windows of hidden states that steps keep; None: they keep none.
      trusted_kernels: pairs of an op and a kernel that passed its self-test on the devices.
    """

    target: ModelConfig
    drafter: DrafterSpec
    sizes: Sizes
    engine: EngineConfig
    rules: tuple[Rule, ...] = ()
    rule_options: RuleOptions = NO_OPTIONS
    max_drafts_per_shard: int | None = None
    mesh: Mesh | None = None
    kept: KeptShape | None = None
    trusted_kernels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "rules", tuple(map(Rule, self.rules)))
        target = dataclasses.replace(self.target, activation_dtype=self.engine.activation_dtype)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "mesh", sharding.factored(self.mesh, self.drafter.num_shards))

    @property
    def num_shards(self) -> int:
        """Number of data shards, over which rows and pages are split evenly."""
        return sharding.axis_size(self.mesh, sharding.DATA)

    @property
    def pages_dtype(self) -> np.dtype:
        """dtype of the target's keys and values."""
        return kv_cache.pages_dtype(self.engine.kv_cache_dtype, self.sizes.dtype)

    @property
    def token_bucket(self) -> int | None:
        """Number of tokens computed at once under invariant numerics; None: all of them."""
        return self.engine.token_bucket if self.engine.numerics == "invariant" else None

    @property
    def narrows(self) -> bool:
        """Whether a step that drafts is as wide as what was drafted: see `verify.widths`."""
        return self.drafter.abstains and self.token_bucket is None
