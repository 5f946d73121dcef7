"""The steps of one configuration, as functions that are not compiled yet."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.implementations import by_name, default_device, trusting
from specjax.decode import kept
from specjax.decode import state as decode_state
from specjax.decode.bucket import (
    ADMIT,
    BURST,
    MIXED,
    PREFILL,
    REMEMBER,
    SCORE,
    Bucket,
    StepKey,
)
from specjax.decode.burst import burst
from specjax.decode.compiler_options import burst_options
from specjax.decode.config import DecoderConfig
from specjax.decode.kept import KeptShape
from specjax.decode.mixed import mixed_step
from specjax.decode.prefill import prefill
from specjax.decode.score import score
from specjax.decode.sizes import PromptShape, PromptSizes
from specjax.decode.state import Admission, DecodeState, has_drafter, remember_text
from specjax.decode.step_spec import StepSpec
from specjax.drafters import none
from specjax.drafters.base import Drafter, DrafterContext, resolve_taps
from specjax.drafters.guard import DrafterError, guarded, is_own
from specjax.drafters.history import Pieces
from specjax.models import sharding
from specjax.paged import kv_cache
from specjax.sampling import EVERYTHING, RowSampling, Uses
from specjax.types import BY_LAW, BurstPlan, DecoderParams, HostArray

WHOLE = PartitionSpec()


class Step(NamedTuple):
    """A function (state, *arguments) -> (state, *results), whose state is donated.

    Attributes:
      in_specs, out_specs: how the arguments, and the results after the state, are split over a
        mesh.
    """

    key: StepKey
    run: Callable[..., tuple]
    in_specs: tuple
    out_specs: tuple = ()


class Steps:
    """init, admit, prefill, mixed, burst, remember and score for one target, drafter and sizes.

    Attributes:
      traces: how often each step was traced.
      uses: what rows may ask of bursts and mixed steps made from now on; None: everything.
      has_bursts: whether any of these was made.
    """

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.target = config.target
        self.drafter = config.drafter
        self.sizes = config.sizes
        self.engine_config = config.engine
        self.mesh = mesh = config.mesh
        self.num_shards = config.num_shards
        self.traces: collections.Counter[StepKey] = collections.Counter()
        self.uses: Uses | None = None
        self.has_bursts = False
        self._rows = self._report = WHOLE
        if mesh is not None:
            sharding.validate(self.target, mesh)
            self._rows = sharding.spec_of(("rows",), mesh)
            self._report = sharding.spec_of(("steps", "rows"), mesh)

    def admit_step(self, num_places: int) -> Step:
        """Returns `specjax.decode.state.admit`."""

        def run(state: DecodeState, admission: Admission) -> tuple:
            return (decode_state.admit(state, self._state_drafter(state), admission),)

        return Step(StepKey(ADMIT, count=num_places), run, (self._rows,))

    def prefill_step(self, params: DecoderParams, prompts: PromptShape) -> Step:
        """Returns `specjax.decode.prefill.prefill`; of the weights only names and shapes are read.

        Its second result is an i32[] to wait for until the device is done: the state itself may be
        donated to the next call before the caller waits for it.
        """

        def run(
            state: DecodeState,
            params: DecoderParams,
            block_table: HostArray,
            row_ids: HostArray,
            counts: HostArray,
        ) -> tuple:
            state = prefill(
                self._prompt_spec(state),
                params,
                state,
                block_table,
                row_ids,
                counts,
                num_tokens=prompts.num_tokens,
            )
            return state, jnp.int32(0)

        in_specs = self.param_specs(params), *[self._rows] * 3
        return Step(StepKey(PREFILL, prompts=prompts), run, in_specs, (WHOLE,))

    def burst_step(self, params: DecoderParams, bucket: Bucket) -> Step:
        """Returns `specjax.decode.burst.burst`."""

        def run(state: DecodeState, params: DecoderParams, plan: BurstPlan) -> tuple:
            # Inside the traced function: a drafter is built once per compilation, not per call.
            spec = self._bucket_spec(bucket, state)
            steps = self.sizes.burst_steps
            return burst(spec, steps, params, state, plan)

        in_specs = self.param_specs(params), self._plan_specs(bucket)
        return self._sampling_step(StepKey(BURST, bucket), run, in_specs)

    def mixed_step(self, params: DecoderParams, bucket: Bucket, prompts: PromptShape) -> Step:
        """Returns `specjax.decode.mixed.mixed_step`."""

        def run(
            state: DecodeState,
            params: DecoderParams,
            plan: BurstPlan,
            row_ids: HostArray,
            counts: HostArray,
        ) -> tuple:
            return mixed_step(
                self._bucket_spec(bucket, state),
                self._prompt_spec(state),
                params,
                state,
                plan,
                row_ids,
                counts,
                num_tokens=prompts.num_tokens,
            )

        in_specs = self.param_specs(params), self._plan_specs(bucket), self._rows, self._rows
        return self._sampling_step(StepKey(MIXED, bucket, prompts), run, in_specs)

    def _sampling_step(self, key: StepKey, run: Callable[..., tuple], in_specs: tuple) -> Step:
        """Returns a step that samples, and compiles only what rows may ask of it."""
        uses, self.has_bursts = self.uses or EVERYTHING, True

        def run_with_uses(state: DecodeState, *arguments: Any) -> tuple:
            state, *results = run(state.for_uses(uses), *arguments)
            return state.for_uses(EVERYTHING), *results

        return Step(key._replace(uses=uses), run_with_uses, in_specs, (self._report, WHOLE))

    def bucket_step(
        self, params: DecoderParams, bucket: Bucket, beside: PromptShape | None = None
    ) -> Step:
        """Returns a burst, or the mixed step with these prompts beside it."""
        if beside is None:
            return self.burst_step(params, bucket)
        return self.mixed_step(params, bucket, beside)

    def remember_step(self, num_pieces: int) -> Step:
        """Returns what passes pieces of text from the host to the drafter, which must take text."""

        def run(state: DecodeState, pieces: Pieces) -> tuple:
            return (remember_text(self._build_drafter(1), state, pieces),)

        specs = Pieces(
            token_ids=WHOLE,
            counts=WHOLE,
            groups=WHOLE,
            has_entered=self._rows,
            row_groups=self._rows,
        )
        return Step(StepKey(REMEMBER, count=num_pieces), run, (specs,))

    def score_step(self, params: DecoderParams, num_texts: int) -> Step:
        """Returns `specjax.decode.score.score`, which leaves the state as it is."""

        def run(state: DecodeState, params: DecoderParams, *texts) -> tuple:
            scores = score(
                self.step_spec(0),
                params.target,
                *texts,
                page_size=self.sizes.page_size,
                dtype=self.config.pages_dtype,
                kv_scales=state.cache.scales,
                num_tensor_shards=sharding.axis_size(self.mesh, sharding.TENSOR),
            )
            return state, scores

        in_specs = self.param_specs(params), *[self._rows] * 3
        return Step(StepKey(SCORE, count=num_texts), run, in_specs, (self._rows,))

    def lower(
        self, step: Step, state: DecodeState, *arguments: Any, name: str | None = None
    ) -> jax.stages.Lowered:
        """Returns a step lowered for arguments of which only shapes are read.

        Args:
          name: name in the store of executables; its first characters name the function.
        """
        # None is needed in this form once the drafter is off: plain decoding goes on.
        holds_drafter = has_drafter(state) and step.key.kind != SCORE
        may_blame_drafter = holds_drafter and not is_own(self.drafter)

        def traced(*inputs) -> tuple:
            self.traces[step.key] += 1
            try:
                return step.run(*inputs)
            except Exception as error:  # whatever the guard of its functions did not see
                if not may_blame_drafter or isinstance(error, DrafterError):
                    raise
                raise DrafterError(f"a step with it could not be traced: {error!r}") from error

        run = traced
        traced.__name__ = step.key.kind if name is None else f"{step.key.kind}_{name[:12]}"
        if self.mesh is not None:
            own = self.state_specs(state)
            run = jax.shard_map(
                traced,
                mesh=self.mesh,
                in_specs=(own, *step.in_specs),
                out_specs=(own, *step.out_specs),
                check_vma=False,  # the loop's carries are replicated or split by construction
            )
        named = by_name(dict(self.engine_config.kernels).items())
        with sharding.lowered(self.mesh), named, trusting(self.config.trusted_kernels):
            return jax.jit(run, donate_argnums=0).lower(state, *arguments)

    def compiler_options(self, kind: str) -> dict[str, Any] | None:
        """Returns XLA's options for steps of a kind."""
        return burst_options(self.device, self.mesh) if kind == BURST else None

    def inputs_of(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> tuple:
        """Returns what `bucket_step` takes: state, weights, and shapes of the other arguments."""
        inputs = state, params, self.plan_shapes(bucket)
        if beside is None:
            return inputs
        places = jax.ShapeDtypeStruct((beside.places * self.num_shards,), jnp.int32)
        return *inputs, places, places

    def plan_shapes(self, bucket: Bucket) -> BurstPlan:
        """Returns the shapes of a burst's plan."""
        sizes = self.sizes
        integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        flags = jax.ShapeDtypeStruct((sizes.rows,), jnp.bool_)
        return BurstPlan(
            num_steps=integers(),
            stop_when_finished=jax.ShapeDtypeStruct((), jnp.bool_),
            activate=flags,
            keep=flags,
            block_table=integers(sizes.rows, sizes.pages_per_row),
            draft_caps=integers(sizes.rows),
            row_ids=None if bucket.rows == sizes.rows else integers(bucket.rows),
        )

    def initial_state(self, has_drafter: bool) -> DecodeState:
        """Returns a state whose rows are all empty, without the drafter's part where it is off."""
        sizes = self.sizes
        rows = sizes.rows
        integers = lambda: jnp.zeros(rows, jnp.int32)
        cache = kv_cache.init(
            self.target,
            rows=rows,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            pages_per_row=sizes.pages_per_row,
            dtype=self.config.pages_dtype,
            kv_shards=sharding.axis_size(self.mesh, sharding.TENSOR),
        )
        drafter: Any = none.TurnedOff()
        if has_drafter:
            make = self._build_drafter(1).init
            drafter = make(rows, sizes.max_length, sizes.num_pages, sizes.page_size)
        windows: Any = ()
        if has_drafter and self.config.kept is not None:
            windows = kept.empty(
                self.config.kept,
                rows=rows,
                num_layers=len(self.kept_layers),
                hidden_size=self.target.hidden_size,
                dtype=sizes.dtype,
            )
        return DecodeState(
            cache=cache,
            drafter=drafter,
            drafter_lengths=integers(),
            history=jnp.zeros((rows, sizes.max_length), jnp.int32),
            sampling=RowSampling.empty(rows, self.engine_config),
            max_lengths=integers(),
            draft_caps=integers(),
            rules=integers(),
            is_active=jnp.zeros(rows, bool),
            kept=windows,
        )

    def _build_drafter(self, num_speculative_tokens: int, is_ranked: bool = False) -> Drafter:
        spec = self.drafter
        try:
            context = DrafterContext(
                # A drafter reads hidden states and embeddings in the dtype of the weights.
                target=dataclasses.replace(self.target, activation_dtype=None),
                num_speculative_tokens=num_speculative_tokens,
                dtype=self.sizes.dtype,
                tensor_axis=sharding.tensor_axis(self.mesh),
                draft_axis=sharding.tensor_axes(self.mesh, spec.num_shards),
                copies_axis=sharding.copies_axis(self.mesh),
                keeps_probs=any(rule in BY_LAW for rule in self.config.rules),
                says_confidence=is_ranked,
                taps=self.taps,
            )
            built = spec.build(context)
        except Exception as error:  # a spec may be third-party code, and raise anything
            raise DrafterError(f"its build raised {error!r}") from error
        drafter = guarded(built, spec, context)
        if spec.takes_text and drafter.remember is None:
            raise DrafterError("its spec says takes_text, and its build returned no remember")
        return drafter

    def _state_drafter(self, state: DecodeState) -> Drafter:
        """Returns the drafter whose state `state` holds; the empty one where it is turned off."""
        return self._build_drafter(1) if has_drafter(state) else none.drafter()

    def absorbs(self, state: DecodeState) -> bool:
        """Returns whether steps read the target's hidden states, at K = 0 too: the drafter absorbs
        them, or they are kept for it."""
        return self.reads_states and has_drafter(state)

    @property
    def reads_states(self) -> bool:
        return bool(self.drafter.taps) or self.config.kept is not None

    def _bucket_spec(self, bucket: Bucket, state: DecodeState) -> StepSpec:
        depth, most = bucket.num_speculative_tokens, bucket.max_drafts
        return self.step_spec(depth, most, absorbs=self.absorbs(state))

    def step_spec(
        self,
        num_speculative_tokens: int,
        max_drafts: int | None = None,
        *,
        absorbs: bool = False,
    ) -> StepSpec:
        """Returns the spec that a step of this K is compiled for; arguments as for `burst`.

        Args:
          absorbs: whether hidden states are absorbed or kept at K = 0 too.
        """
        most = self.config.max_drafts_per_shard
        if max_drafts is not None:
            most = max_drafts // self.num_shards
        drafter = none.drafter()
        is_built = num_speculative_tokens > 0 or absorbs
        if is_built:
            drafter = self._build_drafter(max(num_speculative_tokens, 1), most is not None)
        return StepSpec(
            decoder=self.config,
            drafter=drafter,
            num_speculative_tokens=num_speculative_tokens,
            max_drafts_per_shard=most,
            taps=self.taps if is_built else (),
            kept=self.kept_layers if is_built else (),
        )

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the drafter absorbs, from 0 to num_layers.

        Raises:
          ValueError: the target has no such layer.
        """
        return resolve_taps(self.drafter.taps, self.target.num_layers)

    @property
    def defers(self) -> bool:
        """Whether the drafter absorbs the tokens of plain steps when a row drafts, not before."""
        return bool(self.taps) and self._build_drafter(1).defer is not None

    @property
    def kept_shape(self) -> KeptShape | None:
        """The windows of hidden states that steps keep; None: they keep none."""
        return self.config.kept

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states are kept, each once, the normed output too."""
        if self.config.kept is None:
            return ()
        return tuple(dict.fromkeys((*self.taps, self.target.num_layers)))

    def _prompt_spec(self, state: DecodeState) -> StepSpec:
        """Returns the spec for feeding prompts, with the drafter unless it is turned off."""
        return self.step_spec(1 if has_drafter(state) else 0)

    @functools.cached_property
    def prompt_sizes(self) -> PromptSizes:
        """Token buckets of prompts, by EngineConfig.max_prefill_tokens or the device."""
        most = self.engine_config.max_prefill_tokens
        return PromptSizes.of(most, self.device, self.sizes.dtype)

    @property
    def device(self) -> Any:
        """The first device that steps are compiled for."""
        return default_device() if self.mesh is None else self.mesh.devices.flat[0]

    def state_specs(self, state: DecodeState) -> DecodeState:
        """Returns how each leaf of a state is split over the mesh."""
        assert self.mesh is not None
        shards = self.drafter.num_shards
        # A drafter that is not split by specjax may split its state as the target is split.
        own = shards if shards > 1 else None
        return sharding.state_specs(state, self.mesh, self.drafter_axes(state), own)

    def drafter_axes(self, state: DecodeState) -> Any:
        """Returns the axes of each leaf of the drafter's part of a state; `Drafter.state_axes`."""
        return self._state_drafter(state).state_axes(state.drafter)

    def _plan_specs(self, bucket: Bucket) -> BurstPlan:
        rows = self._rows
        return BurstPlan(
            num_steps=WHOLE,
            stop_when_finished=WHOLE,
            activate=rows,
            keep=rows,
            block_table=rows,
            draft_caps=rows,
            row_ids=None if bucket.rows == self.sizes.rows else rows,
        )

    def param_specs(self, params: DecoderParams) -> DecoderParams | None:
        if self.mesh is None:
            return None
        return sharding.weight_specs(params, self.mesh, self.config.target, self.drafter)
