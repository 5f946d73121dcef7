"""What a decoder is compiled for: the one description of its executables."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.config.engine import EngineConfig
from specjax.config.rules import Rule
from specjax.decode.rules import NO_OPTIONS, RuleOptions
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import DrafterSpec
from specjax.models.base import ModelConfig
from specjax.paged import kv_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything static about a decoder. Equal ones share their executables.

    Its repr names executables on disk, so every field has a repr that tells it from others
    and is the same in every process; a mesh, or a drafter of other code, is not kept there.

    Attributes:
      target: the model that is decoded.
      drafter: what drafts, not built yet: K decides how.
      sizes: of the decode state, of all shards together.
      engine: capacities and numerics; sizes win over its sizes.
      rules: beyond equality, that rows may use.
      rule_options: numbers of the lossy rules.
      max_drafts_per_shard: most draft tokens that the rows of one data shard verify per step,
        those likeliest to stand; None is all of them. Bucket.max_drafts is of all shards.
      mesh: axes "data" and "tensor"; None is one device.
    """

    target: ModelConfig
    drafter: DrafterSpec
    sizes: Sizes
    engine: EngineConfig
    rules: tuple[Rule, ...] = ()
    rule_options: RuleOptions = NO_OPTIONS
    max_drafts_per_shard: int | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        object.__setattr__(self, "rules", tuple(map(Rule, self.rules)))

    @property
    def num_shards(self) -> int:
        """Data shards, over which rows and pages are split evenly."""
        return sharding.axis_size(self.mesh, sharding.DATA)

    @property
    def pages_dtype(self) -> np.dtype:
        """Of the target's keys and values."""
        return kv_cache.pages_dtype(self.engine.kv_cache_dtype, self.sizes.dtype)

    @property
    def token_bucket(self) -> int | None:
        """Tokens that are computed at once under invariant numerics; None: all of them."""
        return self.engine.token_bucket if self.engine.numerics == "invariant" else None
