"""Static configuration of one compiled step."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from specjax.config.rules import Rule
from specjax.decode.config import DecoderConfig
from specjax.decode.rules import RuleOptions
from specjax.drafters.base import Drafter
from specjax.models import sharding
from specjax.models.base import MeshAxes, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """A decoder's configuration, and the settings that differ between its steps.

    Attributes:
      drafter: built for K, or for K = 1 where K is 0 and the drafter absorbs hidden states; the
        empty drafter where K is 0 and it does not.
      num_speculative_tokens: K; 0 is plain decoding.
      taps: layers of the target whose hidden states the drafter absorbs; () where it absorbs none.
      kept: layers of the target whose hidden states are kept in windows; () where none are.
      max_drafts_per_shard: as in DecoderConfig, or a shard's share of Bucket.max_drafts.
    """

    decoder: DecoderConfig
    drafter: Drafter
    num_speculative_tokens: int
    max_drafts_per_shard: int | None = None
    taps: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    def __post_init__(self):
        if self.rules and self.token_bucket is not None:
            raise ValueError(
                f"rules={self.rules} compare whole rows, and token_bucket={self.token_bucket} "
                "decides token by token; under invariant numerics use none of them."
            )

    @property
    def read(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states a forward returns, each once."""
        return tuple(dict.fromkeys((*self.taps, *self.kept)))

    def absorbed(self, states: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns those of the states of `read` that the drafter absorbs."""
        return tuple(states[self.read.index(tap)] for tap in self.taps)

    def of_kept(self, states: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns those of the states of `read` that are kept."""
        return tuple(states[self.read.index(layer)] for layer in self.kept)

    def most_of_shards(self, value: Array) -> Array:
        """Returns the largest i32[] or bool[] of all data shards, so that all go the same way."""
        if self.decoder.num_shards == 1:
            return value
        most = lax.pmax(value.astype(jnp.int32), sharding.DATA)
        return most > 0 if value.dtype == bool else most

    @property
    def config(self) -> ModelConfig:
        """Configuration of the target."""
        return self.decoder.target

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Verification rules beyond equality that rows may use."""
        return self.decoder.rules

    @property
    def rule_options(self) -> RuleOptions:
        """Parameters of the lossy rules."""
        return self.decoder.rule_options

    @property
    def max_logprobs(self) -> int:
        """Most tokens whose log-probabilities are reported beside the committed one."""
        return self.decoder.engine.max_logprobs

    @property
    def logit_bytes(self) -> int:
        """Most bytes of float32 logits of the target that exist at once."""
        return self.decoder.engine.logit_bytes

    @property
    def token_bucket(self) -> int | None:
        """Number of tokens computed at once under invariant numerics; None: all of them."""
        return self.decoder.token_bucket

    @property
    def tensor_axis(self) -> MeshAxes | None:
        """Mesh axes that heads and MLP are split over; None without a mesh."""
        return sharding.tensor_axis(self.decoder.mesh)
