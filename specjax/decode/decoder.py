"""The compiled functions of one configuration, compiled when first used and kept."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.bucket import BURST, MIXED, Bucket, StepKey
from specjax.decode.config import DecoderConfig
from specjax.decode.executables import Caller, Executables, burst_compile_s, read_s
from specjax.decode.kv_scales import kv_scales_of
from specjax.decode.made_weights import MadeWeights, made_weights
from specjax.decode.score import Scores
from specjax.decode.sizes import PromptShape
from specjax.decode.state import Admission, DecodeState
from specjax.decode.steps import Steps
from specjax.drafters.history import Pieces
from specjax.drafters.spec import NoDrafter
from specjax.models import sharding
from specjax.runtime.jax_settings import in_own_settings
from specjax.sampling import EVERYTHING, RowSampling, Uses, uses_of
from specjax.types import BurstPlan, DecoderParams, HostArray, StepInfo

MOST_DRAFTING = 16  # decoders with a drafter that a process keeps, and as many plain ones


class Decoder(Steps, Caller):
    """Runs the steps of one configuration.

    Every executable is compiled ahead of its first call, so that seconds of compilation are
    measured separately (`compile_s`), and traced once (`traces` counts traces).
    Weights are arguments of every call; the state is donated. Bursts of K = 0 run on `plain`,
    the decoder without a drafter, so that both share one executable. The exceptions are a drafter
    that absorbs hidden states and a decoder that keeps them: they are needed at K = 0 too, so its
    own decoder runs those bursts.

    A step is given by its bucket, and by the prompts `beside` its rows for a mixed step; None: a
    burst.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.executables = Executables(self)
        self._makers: dict[bool, Callable[[], DecodeState]] = {}

    def init(self, *, has_drafter: bool = True) -> DecodeState:
        """Returns a state whose rows are all empty.

        Args:
          has_drafter: False if the drafter is turned off.

        Raises:
          DrafterError: the drafter's own part raised.
        """
        if has_drafter not in self._makers:
            make = functools.partial(self.initial_state, has_drafter)
            shardings = None
            if self.mesh is not None:
                with sharding.lowered(self.mesh):
                    shapes = jax.eval_shape(make)
                specs = self.state_specs(shapes)
                shardings = sharding.shardings(specs, self.mesh)
            self._makers[has_drafter] = jax.jit(make, out_shardings=shardings)
        with sharding.lowered(self.mesh):
            return self._makers[has_drafter]()

    def place_params(self, params: DecoderParams) -> DecoderParams:
        """Puts weights onto the mesh: the target split, the drafter over its own num_shards.

        Arrays that are already placed so are not copied.

        Raises:
          ValueError: there is no mesh, and the weights lie over several devices.
        """
        if self.mesh is None:
            _check_one_device(params)
            return params
        return sharding.place(params, self.param_specs(params), self.mesh)

    @functools.cached_property
    def made_weights(self) -> MadeWeights | None:
        """What makes the drafter's weights from the target's; None: it has weights of its own."""
        if self.drafter.made_by is None:
            return None
        return made_weights(self.drafter, self.target, self.mesh)

    @in_own_settings
    def with_made_weights(self, params: DecoderParams) -> DecoderParams:
        """Returns placed weights with those that the drafter makes of the target's.

        They are made anew only where the target's arrays are others than the last time.
        """
        if self.made_weights is None:
            return params
        with sharding.lowered(self.mesh):
            return DecoderParams(params.target, self.made_weights(params.target))

    @in_own_settings
    def with_kv_scales(self, params: DecoderParams, state: DecodeState) -> DecodeState:
        """Returns a state whose int8 or fp8 pages have the scales of these weights.

        Call it only while the pages are empty.
        """
        dtype = self.config.pages_dtype
        with sharding.lowered(self.mesh):
            # A copy: steps donate the state.
            scales = jnp.array(kv_scales_of(params.target, self.target, dtype))
        if self.mesh is not None and state.cache.scales is not None:
            scales = jax.device_put(scales, state.cache.scales.sharding)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, scales=scales))

    def compile_for(self, uses: Uses) -> None:
        """Has bursts from now on serve rows that ask for `uses`, and for all that came before.

        What a first call asks for compiles in about half the time of everything. A later call that
        asks for more has everything compiled, so that nobody waits a third time.
        """
        known = uses if self.uses is None else self.uses
        if known | uses != known:
            known = EVERYTHING if self.has_bursts else known | uses
        self.uses = known
        if self.plain is not self:  # it serves no less than those whose K = 0 it runs
            self.plain.compile_for(known)

    def expect(self, values: Mapping[str, Any]) -> None:
        """Calls `compile_for` with what rows ask for; arguments as for `sampling.uses_of`."""
        if self.uses != EVERYTHING:
            self.compile_for(uses_of(values))

    def admit(self, state: DecodeState, admission: Admission) -> DecodeState:
        """Runs `specjax.decode.state.admit`, one executable per number of places. Donates the
        state."""
        self.expect(vars(admission.sampling))
        (state,) = self.executables(self, self.admit_step(len(admission.row_ids)), state, admission)
        return state

    def prefill(
        self,
        params: DecoderParams,
        state: DecodeState,
        block_table: HostArray,
        row_ids: HostArray,
        counts: HostArray,
        *,
        num_tokens: int,
    ) -> tuple[DecodeState, Array]:
        """Runs `specjax.decode.prefill.prefill`, one executable per number of places and tokens.

        Under a mesh each shard has its share of the places, with row ids of its own.
        Donates the state.

        Returns:
          The state, and an i32[] to wait for until the device is done.
        """
        step = self.prefill_step(params, self._prompts(row_ids, num_tokens))
        return self.executables(self, step, state, params, block_table, row_ids, counts)

    def burst(
        self,
        params: DecoderParams,
        state: DecodeState,
        plan: BurstPlan,
        *,
        num_speculative_tokens: int,
        max_drafts: int | None = None,
    ) -> tuple[DecodeState, StepInfo, Array]:
        """Runs `specjax.decode.burst.burst`, one executable per bucket. Donates the state.

        Args:
          max_drafts: most draft tokens verified per step over all rows and shards; None:
            DecoderConfig.max_drafts_per_shard on each shard.
        """
        bucket = self._bucket(plan, num_speculative_tokens, max_drafts)
        runs, params, own = self._at_home(params, state, bucket)
        own, report, num_run = runs.executables(
            self, runs.burst_step(params, bucket), own, params, plan
        )
        # A plain burst runs beside the drafter's state, which it does not touch.
        after = own if runs is self else dataclasses.replace(own, drafter=state.drafter)
        return after, report, num_run

    def mixed(
        self,
        params: DecoderParams,
        state: DecodeState,
        plan: BurstPlan,
        row_ids: HostArray,
        counts: HostArray,
        *,
        num_tokens: int,
        num_speculative_tokens: int = 0,
        max_drafts: int | None = None,
    ) -> tuple[DecodeState, StepInfo, Array]:
        """Runs `specjax.decode.mixed.mixed_step`, one executable per bucket and prompt shape.

        Donates the state.

        Args:
          row_ids, counts, num_tokens: as for `prefill`.
          num_speculative_tokens, max_drafts: as for `burst`.
        """
        bucket = self._bucket(plan, num_speculative_tokens, max_drafts)
        step = self.mixed_step(params, bucket, self._prompts(row_ids, num_tokens))
        return self.executables(self, step, state, params, plan, row_ids, counts)

    def remember(self, state: DecodeState, pieces: Pieces) -> DecodeState:
        """Passes pieces of text from the host to the drafter, one executable per number of pieces.

        The drafter must take text (`DrafterSpec.takes_text`). Donates the state.
        """
        (state,) = self.executables(self, self.remember_step(len(pieces.counts)), state, pieces)
        return state

    def score(
        self,
        params: DecoderParams,
        state: DecodeState,
        history: HostArray,
        num_tokens: HostArray,
        sampling: RowSampling,
    ) -> tuple[DecodeState, Scores]:
        """Runs `specjax.decode.score.score` on one text per row of the batch.

        Donates the state, and returns it unchanged.
        """
        step = self.score_step(params, len(history))
        return self.executables(self, step, state, params, history, num_tokens, sampling)

    def _bucket(self, plan: BurstPlan, depth: int, max_drafts: int | None) -> Bucket:
        rows = self.sizes.rows if plan.row_ids is None else len(plan.row_ids)
        return Bucket(rows, depth, max_drafts if depth else None)

    def _prompts(self, row_ids: HostArray, num_tokens: int) -> PromptShape:
        return PromptShape(len(row_ids) // self.num_shards, num_tokens)

    @functools.cached_property
    def plain(self) -> Decoder:
        """The decoder with the same configuration and no drafter."""
        if not self.drafter.can_draft:
            return self
        nothing = dict(drafter=NoDrafter(), max_drafts_per_shard=None, kept=None)
        plain = dataclasses.replace(self.config, **nothing)
        return shared_decoder(plain)

    def _home(
        self, state: DecodeState, bucket: Bucket, beside: PromptShape | None = None
    ) -> Decoder:
        """Returns the decoder that has a step's executable: this one or `plain`."""
        # Prompts are fed to the drafter too.
        is_own = beside is not None or bucket.num_speculative_tokens or self.absorbs(state)
        return self if is_own else self.plain

    def _at_home(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> tuple[Decoder, DecoderParams, DecodeState]:
        """Returns that decoder, and the weights and state that it takes."""
        home = self._home(state, bucket, beside)
        if home is self:
            return self, params, state
        return home, home._plain_params(params), dataclasses.replace(state, drafter=())

    def _plain_params(self, params: DecoderParams) -> DecoderParams:
        # The same object for the same weights, so that their shapes are read only once.
        signed = self.executables.signed
        if signed is not None and signed.target is params.target:
            return signed
        return DecoderParams(params.target)

    def _named(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None,
    ) -> tuple[Executables, tuple[StepKey, DecoderParams, Any]]:
        """Returns the executables that a step is one of, and what names it there."""
        home = self._home(state, bucket, beside)
        uses = home.uses or EVERYTHING
        key = StepKey(BURST if beside is None else MIXED, bucket, beside, uses=uses)
        if home is self:
            return self.executables, (key, params, state.drafter)
        return home.executables, (key, home._plain_params(params), ())

    def prepare(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> None:
        """Starts to compile a step in the background; a call that needs it waits.

        Nothing is donated, and only the shapes of the arguments are kept. Errors are raised
        by `raise_failed`.
        """
        home, params, state = self._at_home(params, state, bucket, beside)
        step = home.bucket_step(params, bucket, beside)
        home.executables.prepare(step, *home.inputs_of(params, state, bucket, beside))

    def raise_failed(self) -> None:
        """Raises the oldest error of `prepare` that was not raised yet, if there is one.

        Raises:
          DrafterError, TooLarge: as `burst`.
        """
        for each in self._both:
            each.background.raise_failed()

    def is_compiled(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> bool:
        """Returns whether a step can run without waiting for its compilation."""
        executables, name = self._named(params, state, bucket, beside)
        return executables.has(*name)

    def is_coming(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> bool:
        """Returns whether a step is being compiled in the background."""
        executables, name = self._named(params, state, bucket, beside)
        return executables.is_coming(*name)

    def is_any_coming(self) -> bool:
        """Returns whether any step is being compiled in the background."""
        return any(each.background.is_busy for each in self._both)

    def read_s(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> float | None:
        """Returns estimated seconds to read a step from the store on disk, None if not stored."""
        executables, name = self._named(params, state, bucket, beside)

        def inputs() -> tuple:
            home, own_params, own_state = self._at_home(params, state, bucket, beside)
            return home.inputs_of(own_params, own_state, bucket, beside)

        num_bytes = executables.stored_bytes(*name, inputs)
        return None if num_bytes is None else read_s(num_bytes, *self._both)

    def compiled_between(self, start: float, end: float) -> bool:
        """Returns whether compilation ran in a span of time, on a CPU; elsewhere False.

        On a CPU it slows down decoding, as both use the same cores.

        Args:
          start, end: values of time.perf_counter().
        """
        if jax.default_backend() != "cpu":
            return False
        return any(each.background.ran_between(start, end) for each in self._both)

    @property
    def burst_compile_s(self) -> float:
        """Mean seconds to compile a burst, or what is usual before the first."""
        return burst_compile_s(*self._both)

    @property
    def all_traces(self) -> collections.Counter[StepKey]:
        """How often each function was traced, including those of `plain`."""
        return self.traces if self.plain is self else self.traces + self.plain.traces

    @functools.cached_property
    def _both(self) -> tuple[Executables, ...]:
        """The executables of this decoder, and those of `plain` if it is another."""
        return tuple(dict.fromkeys((self.executables, self.plain.executables)))

    def let_go(self, params: DecoderParams | None = None) -> None:
        """Drops references to all weights but `params`, so that their owner can free the memory."""
        self.executables.let_go(params)
        if self.plain is not self:
            self.plain.let_go()

    def compiled_burst(self, num_speculative_tokens: int) -> Any:
        """Returns the executable of a burst of all rows that has run, for its memory_analysis() and
        text."""
        decoder = self if num_speculative_tokens or self.reads_states else self.plain
        bucket = Bucket(self.sizes.rows, num_speculative_tokens)
        key = StepKey(BURST, bucket, uses=decoder.uses or EVERYTHING)
        return decoder.executables.run_of(key)


def _check_one_device(params: DecoderParams) -> None:
    """Raises ValueError for weights over several devices."""
    for whose, weights in (("the target", params.target), ("the drafter", params.drafter)):
        for leaf in jax.tree.leaves(weights):
            count = len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1
            if count > 1:
                raise ValueError(
                    f"weights of {whose} lie over {count} devices, and no mesh was given; pass "
                    'mesh= with axes "data" and "tensor", or put them on one device.'
                )


@functools.lru_cache(maxsize=2 * MOST_DRAFTING)
def shared_decoder(config: DecoderConfig) -> Decoder:
    """Returns the decoder of a configuration; equal configurations share it and its executables."""
    return Decoder(config)
