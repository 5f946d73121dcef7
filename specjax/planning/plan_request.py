"""The inputs of a plan: a model, a drafter and a device, none of them loaded or present."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.implementations import lowered_for
from specjax.config.engine import EngineConfig
from specjax.config.rules import Rule
from specjax.config.speculation import MAX_DEPTH
from specjax.decode.config import DecoderConfig
from specjax.decode.kept import KeptShape
from specjax.decode.rules import NO_OPTIONS, RuleOptions
from specjax.decode.sizes import Sizes, default_tokens, ridge_of
from specjax.drafters.spec import DrafterSpec, NoDrafter
from specjax.models.base import ModelConfig
from specjax.paged.page_sizes import with_page_size
from specjax.planning.devices import Device
from specjax.planning.drafter_split import TABLE_CONTEXT, draft_token_s, split_drafter
from specjax.runtime.stack_level import of_the_caller


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The inputs of a plan.

    Attributes:
      engine: its max_rows, row_buckets, max_context, page_size, margins and memory_bytes (of
        one device) are used.
      acceptance_rate: the probability, assumed to choose K, that a draft token is accepted.
      rules, rule_options: verification rules of the steps, beyond equality.
      max_drafts_per_shard: as in DecoderConfig.
      drafter_dtype: of the drafter's weights; by default that of the target and the pages.
      drafter_params: shapes of the drafter's weights; by default `abstract_params` of its spec.
      chooses_rows: whether the policy chooses row buckets where the engine names none.
      trusted_kernels: as in DecoderConfig.
      kept: the hidden states that steps keep, as in DecoderConfig.
      learner_bytes: of one device that a drafter that learns takes beside its weights and steps.
    """

    target: ModelConfig
    target_name: str
    drafter: DrafterSpec
    drafter_name: str
    device: Device
    dtype: Any
    num_speculative_tokens: int
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    acceptance_rate: float = 0.7
    rules: tuple[int, ...] = ()
    rule_options: RuleOptions = NO_OPTIONS
    max_drafts_per_shard: int | None = None
    drafter_dtype: Any = None
    drafter_params: Any = None
    chooses_rows: bool = True
    trusted_kernels: tuple[tuple[str, str], ...] = ()
    kept: KeptShape | None = None
    learner_bytes: int = 0

    def __post_init__(self):
        if not 0 <= self.acceptance_rate <= 1:
            raise ValueError(f"acceptance_rate={self.acceptance_rate} must be from 0 to 1.")
        if not 0 <= self.num_speculative_tokens <= MAX_DEPTH:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be from 0 (no "
                f"speculation) to {MAX_DEPTH}."
            )
        for config in self.drafter.configs:
            if config.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"target and drafter have vocabularies of {self.target.vocab_size} and "
                    f"{config.vocab_size} tokens; expected equal sizes."
                )
        with lowered_for(self.device.traced_for):
            engine = with_page_size(
                self.engine, self.target, self.dtype, kv_shards=self.device.count
            )
        object.__setattr__(self, "engine", engine)

    def as_compiled(self) -> PlanRequest:
        """Returns the request whose steps are compiled: this one, or one for a stand-in.

        A CPU computes bfloat16 and float16 in float32, and its compiler would widen all weights
        at once, for a whole burst. Where it stands in for a GPU's, weights and pages are
        float32 from the start: activations then count twice, and weights are not copied.
        """
        if self.device.is_compiled_for:
            return self
        params = jax.tree.map(_widened, self.drafter_params)
        engine = dataclasses.replace(self.engine, kernels=())  # which no CPU could run
        wide = dict(dtype="float32", drafter_dtype="float32", drafter_params=params)
        return dataclasses.replace(self, engine=engine, **wide)

    def without_drafter(self) -> PlanRequest:
        """Returns the request of the same engine for plain decoding."""
        nothing = dict(drafter_dtype=None, drafter_params=None, max_drafts_per_shard=None)
        nothing |= dict(kept=None, learner_bytes=0)
        return dataclasses.replace(
            self, drafter=NoDrafter(), num_speculative_tokens=0, rules=(), **nothing
        )

    @property
    def max_context(self) -> int:
        most = self.target.max_position_embeddings
        return min(most, self.engine.max_context or most)

    @property
    def draft_config(self) -> ModelConfig | None:
        """The config of the draft model, if there is one."""
        return next(iter(self.drafter.configs), None)

    @property
    def most_drafted(self) -> int:
        return self.num_speculative_tokens if self.drafter.can_draft else 0

    @property
    def tree_slots(self) -> int:
        """Slots that a row's nodes take past its last token; 0 for chains."""
        return self.drafter.tree_slots(self.most_drafted)

    def decoder_config(self, num_layers: int, num_pages: int) -> DecoderConfig:
        """Returns the config of a decoder with the first layers of the target."""
        engine = self.engine
        slots = self.max_context + self.tree_slots
        dtype, figures = jnp.dtype(self.dtype), self.device.figures
        if engine.max_prefill_tokens is None and figures is not None:
            # A device that is not compiled for has the prompt buckets of its own figures.
            most = default_tokens(ridge_of(figures, dtype.itemsize))
            engine = dataclasses.replace(engine, max_prefill_tokens=most)
        return DecoderConfig(
            target=self.target.first_layers(num_layers),
            drafter=self.drafter,
            sizes=Sizes(
                rows=engine.max_rows,
                page_size=engine.chosen_page_size,
                num_pages=num_pages,
                pages_per_row=-(-slots // engine.chosen_page_size),
                burst_steps=engine.burst_steps,
                tree_slots=self.tree_slots,
                dtype=dtype,
            ),
            engine=engine,
            rules=tuple(map(Rule, self.rules)),
            rule_options=self.rule_options,
            max_drafts_per_shard=self.max_drafts_per_shard,
            mesh=self.device.mesh,
            kept=self.kept,
            trusted_kernels=self.trusted_kernels,
        )

    @property
    def limits_memory(self) -> int | None:
        """Bytes of one device that weights, state, pages and steps share; None if unknown."""
        if self.engine.memory_bytes is not None:
            return self.engine.memory_bytes
        figures = self.device.figures
        return None if figures is None else figures.memory_bytes


def with_split_drafter(request: PlanRequest, asked: int | None = None) -> PlanRequest:
    """Returns the request with its drafter split over chips, with a warning if not as asked.

    Args:
      asked: SpeculationConfig.draft_tensor_parallel_size; None: the number of chips with the
        shortest time of a draft token.

    Raises:
      ValueError: fewer than 1 chip.
    """
    if asked is not None and asked < 1:
        raise ValueError(
            f"a drafter cannot be split over {asked} chips; expected at least 1. Raise the "
            "drafter's tensor parallelism or leave it out."
        )
    figures = request.device.figures

    def seconds(split: DrafterSpec) -> float:
        assert figures is not None
        return draft_token_s(
            split,
            request.target,
            request.drafter_dtype or request.dtype,
            figures,
            rows=request.engine.max_rows,
            context=min(TABLE_CONTEXT, request.max_context),
            num_speculative_tokens=request.num_speculative_tokens,
        )

    drafter, note = split_drafter(
        request.drafter, asked, request.device.count, None if figures is None else seconds
    )
    if note:
        warnings.warn(note, stacklevel=of_the_caller())
    return dataclasses.replace(request, drafter=drafter)


def _widened(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a weight, in float32 where it is a float of fewer bits."""
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_narrow else leaf.dtype)
