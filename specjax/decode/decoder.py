"""The compiled functions of one configuration, compiled when first used and kept."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels.implementations import by_name, default_device, trusting
from specjax.decode import executable_store, kept
from specjax.decode import state as decode_state
from specjax.decode.background import Background
from specjax.decode.bucket import Bucket
from specjax.decode.burst import burst
from specjax.decode.compiler_options import burst_options
from specjax.decode.compiling import tell
from specjax.decode.config import DecoderConfig
from specjax.decode.kept import KeptShape
from specjax.decode.kv_scales import kv_scales_of
from specjax.decode.made_weights import MadeWeights, made_weights
from specjax.decode.mixed import mixed_step
from specjax.decode.prefill import prefill
from specjax.decode.score import Scores, score
from specjax.decode.sizes import PromptShape, PromptSizes
from specjax.decode.state import Admission, DecodeState, has_drafter, remember_text
from specjax.decode.step_spec import StepSpec
from specjax.drafters import none
from specjax.drafters.base import Drafter, DrafterContext, resolve_taps
from specjax.drafters.guard import DrafterError, guarded, is_own
from specjax.drafters.history import Pieces
from specjax.drafters.spec import NoDrafter
from specjax.models import families, sharding
from specjax.models.views import is_view, matrices_of
from specjax.paged import kv_cache
from specjax.runtime.jax_settings import in_own_settings
from specjax.sampling import RowSampling
from specjax.types import BY_LAW, BurstPlan, DecoderParams, HostArray, StepInfo

WHOLE = PartitionSpec()
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # in the text of XLA's errors
MOST_DRAFTING = 16  # decoders with a drafter that a process keeps, and as many plain ones
# Assumed seconds to compile a burst before one was measured; as measured for some models on a CPU.
USUAL_COMPILE_S = 5.0
# Assumed seconds to read a byte of an executable from disk, and the bytes this guess counts as.
USUAL_READ_S, USUAL_READ_BYTES = 1.5e-7, 10**5
# The first calls of an executable in a process take longer than later ones, up to seven times as
# long on two x86-64 cores with jax 0.10.2: memory is touched and code is loaded for the first time,
# and the host prepares what it will keep.
WARM_UP_CALLS = 2


class TooLarge(Exception):
    """An executable could not be compiled for lack of memory.

    Attributes:
      key: the executable: ("burst", K), ("burst", K, row bucket), ("prefill", places, tokens),
        ("mixed", places, tokens, K), ("mixed", places, tokens, K, row bucket), ...
    """

    def __init__(self, key: tuple, error: Exception):
        super().__init__(f"{' '.join(map(str, key))} does not fit in memory: {error}")
        self.key = key


class Signature(NamedTuple):
    """Shapes and dtypes of weights, and the structure of the drafter's state.

    Opaque: `Decoder.signature` makes one, `is_compiled` and `is_coming` read it.
    """

    drafting: tuple  # of bursts that draft
    plain: tuple  # of bursts of K = 0
    is_plain_own: bool  # whether bursts of K = 0 are this decoder's own, not those of `plain`


class Decoder:
    """init, admit, prefill, mixed and burst for one target, drafter and set of sizes.

    Every executable is compiled ahead of its first call, so that seconds of compilation are
    measured separately (`compile_s`), and traced once (`traces` counts traces).
    Weights are arguments of every call; the state is donated. Bursts of K = 0 run on `plain`,
    the decoder without a drafter, so that both share one executable. The exceptions are a drafter
    that absorbs hidden states and a decoder that keeps them: they are needed at K = 0 too, so its
    own decoder runs those bursts.
    """

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.target = config.target
        self.drafter = config.drafter
        self.sizes = config.sizes
        self.engine_config = config.engine
        self.mesh = mesh = config.mesh
        self.keeps_probs = any(rule in BY_LAW for rule in config.rules)
        self.num_shards = config.num_shards
        self.traces: collections.Counter[tuple] = collections.Counter()
        self.compile_s = 0.0
        self._compile_s: dict[tuple, float] = {}  # of executables that were not in the store
        self._executables: dict[tuple, Callable] = {}
        # Calls that were among the first of their executable: see WARM_UP_CALLS.
        self.num_warm_ups = 0
        self._num_calls: collections.Counter[tuple] = collections.Counter()
        self._background = Background()
        self._kept: dict[tuple, int | None] = {}  # size in bytes of each burst in the store
        self._read = np.zeros(2)  # total bytes read from the store, and seconds that took
        self._makers: dict[bool, Callable[[], DecodeState]] = {}
        self._weights_signature: tuple = ()
        self._signed: DecoderParams | None = None
        self._rows = self._report = WHOLE
        if mesh is not None:
            sharding.validate(self.target, mesh)
            self._rows = sharding.spec_of(("rows",), mesh)
            self._report = sharding.spec_of(("steps", "rows"), mesh)

    def init(self, *, has_drafter: bool = True) -> DecodeState:
        """Returns a state whose rows are all empty.

        Args:
          has_drafter: False if the drafter is turned off.

        Raises:
          DrafterError: the drafter's own part raised.
        """
        if has_drafter not in self._makers:
            make = functools.partial(self._initial_state, has_drafter)
            shardings = None
            if self.mesh is not None:
                with sharding.lowered(self.mesh):
                    shapes = jax.eval_shape(make)
                specs = self._state_specs(shapes)
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
        return sharding.place(params, self._param_specs(params), self.mesh)

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

    def admit(self, state: DecodeState, admission: Admission) -> DecodeState:
        """Runs `specjax.decode.state.admit`, one executable per number of places. Donates the
        state."""

        def run(state: DecodeState, admission: Admission) -> tuple:
            return (decode_state.admit(state, self._state_drafter(state), admission),)

        key = ("admit", len(admission.row_ids))
        (state,) = self._call(key, run, state, admission, in_specs=(self._rows,), out_specs=())
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
          The state, and an i32[] to wait for until the device is done: the state itself may
          be donated to the next call before the caller waits for it.
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
                num_tokens=num_tokens,
            )
            return state, jnp.int32(0)

        key = ("prefill", len(row_ids), num_tokens)
        arguments = params, block_table, row_ids, counts
        in_specs = (self._param_specs(params), *[self._rows] * 3)
        return self._call(key, run, state, *arguments, in_specs=in_specs, out_specs=(WHOLE,))

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
        if not num_speculative_tokens and self._plain_of(state) is not self:
            return self._plain_burst(params, state, plan)
        rows = self.sizes.rows if plan.row_ids is None else len(plan.row_ids)
        bucket = Bucket(rows, num_speculative_tokens, max_drafts)
        return self._call(
            self._burst_key(bucket),
            self._burst_function(bucket, absorbs=self._absorbs(state)),
            state,
            params,
            plan,
            **self._burst_specs(params, plan),
        )

    def _burst_function(self, bucket: Bucket, *, absorbs: bool) -> Callable:
        def run(state: DecodeState, params: DecoderParams, plan: BurstPlan) -> tuple:
            # Inside the traced function: a drafter is built once per compilation, not per call.
            depth, most = bucket.num_speculative_tokens, bucket.max_drafts
            spec = self.step_spec(depth, most, absorbs=absorbs)
            steps = self.sizes.burst_steps
            return burst(spec, steps, params, state, plan, any_shard=self._any_shard)

        return run

    def _burst_specs(self, params: DecoderParams, plan: BurstPlan) -> dict[str, Any]:
        specs = self._plan_specs
        if plan.row_ids is not None:
            specs = dataclasses.replace(specs, row_ids=self._rows)
        return {
            "in_specs": (self._param_specs(params), specs),
            "out_specs": (self._report, WHOLE),
        }

    @functools.cached_property
    def plain(self) -> Decoder:
        """The decoder with the same configuration and no drafter."""
        if not self.drafter.can_draft:
            return self
        nothing = dict(drafter=NoDrafter(), max_drafts_per_shard=None, kept=None)
        plain = dataclasses.replace(self.config, **nothing)
        return shared_decoder(plain)

    def _absorbs(self, state: DecodeState) -> bool:
        """Returns whether steps read the target's hidden states, at K = 0 too: the drafter absorbs
        them, or they are kept for it."""
        return self._reads_states and has_drafter(state)

    @property
    def _reads_states(self) -> bool:
        return bool(self.drafter.taps) or self.config.kept is not None

    def _plain_of(self, state: DecodeState) -> Decoder:
        """Returns the decoder that runs bursts of K = 0."""
        return self if self._absorbs(state) else self.plain

    def _plain_burst(
        self, params: DecoderParams, state: DecodeState, plan: BurstPlan
    ) -> tuple[DecodeState, StepInfo, Array]:
        """Runs a burst of K = 0 beside the drafter's state, which it does not touch."""
        plain = self.plain
        before, warm_ups = plain.compile_s, plain.num_warm_ups
        drafter, state = state.drafter, dataclasses.replace(state, drafter=())
        try:
            state, report, num_run = plain.burst(
                self._plain_params(params), state, plan, num_speculative_tokens=0
            )
        finally:
            self.compile_s += plain.compile_s - before
            self.num_warm_ups += plain.num_warm_ups - warm_ups
        return dataclasses.replace(state, drafter=drafter), report, num_run

    def _plain_params(self, params: DecoderParams) -> DecoderParams:
        # The same object for the same weights, so that their shapes are read only once.
        signed = self.plain._signed
        if signed is not None and signed.target is params.target:
            return signed
        return DecoderParams(params.target)

    def prepare(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> None:
        """Starts to compile a burst in the background; a `burst` call that needs it waits.

        Nothing is donated, and only the shapes of the arguments are kept. Errors are raised
        by `raise_failed`.

        Args:
          beside: the prompts beside it, for a step of `mixed`; None: a burst.
        """
        decoder, params, state = self._of_bucket(params, state, bucket, beside)
        decoder._prepare(params, state, bucket, beside)

    def _of_bucket(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None = None,
    ) -> tuple[Decoder, DecoderParams, DecodeState]:
        """Returns the decoder that compiles a bucket, and the weights and state it compiles for."""
        # Prompts are fed to the drafter too.
        if beside or bucket.num_speculative_tokens or self._plain_of(state) is self:
            return self, params, state
        bare = dataclasses.replace(state, drafter=())
        return self.plain, self._plain_params(params), bare

    def _prepare(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None,
    ) -> None:
        key = self._step_key(bucket, beside), self._variant_of(params, state)
        if key in self._executables or self._background.has(key):
            return
        inputs = jax.tree.map(_shape_of, self._step_inputs(params, state, bucket, beside))
        if beside is None:
            specs = self._burst_specs(params, inputs[2])
            function = self._burst_function(bucket, absorbs=self._absorbs(state))
        else:
            specs = self._mixed_specs(params, inputs[2])
            function = self._mixed_function(bucket, beside, state)

        @in_own_settings  # jax settings are per thread, and this runs in another one
        def make(goes_on: Callable[[], bool]) -> None:
            self._make(key, function, *inputs, goes_on=goes_on, **specs)

        self._background.start(key, make)

    def _step_inputs(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        beside: PromptShape | None,
    ) -> tuple:
        """Returns state, weights, and the shapes of the other arguments of a step."""
        inputs = state, params, self._plan_shapes(bucket)
        if beside is None:
            return inputs
        places = jax.ShapeDtypeStruct((beside.places * self.num_shards,), jnp.int32)
        return *inputs, places, places

    def _plan_shapes(self, bucket: Bucket) -> BurstPlan:
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

    def raise_failed(self) -> None:
        """Raises the oldest error of `prepare` that was not raised yet, if there is one.

        Raises:
          DrafterError, TooLarge: as `burst`.
        """
        for decoder in (self, self.plain):
            decoder._background.raise_failed()

    @property
    def all_traces(self) -> collections.Counter[tuple]:
        """How often each function was traced, including those of `plain`."""
        return self.traces if self.plain is self else self.traces + self.plain.traces

    def signature(self, params: DecoderParams, state: DecodeState) -> Signature:
        """Returns the properties of weights and state that executables are compiled for."""
        own = self._variant_of(params, state)
        plain, params, state = self._of_bucket(params, state, Bucket(self.sizes.rows, 0))
        if plain is self:
            return Signature(own, own, is_plain_own=True)
        return Signature(own, plain._variant_of(params, state), is_plain_own=False)

    def is_coming(
        self, bucket: Bucket, signature: Signature, beside: PromptShape | None = None
    ) -> bool:
        """Returns whether a step is being compiled in the background; arguments as `prepare`."""
        decoder, key = self._key_of(bucket, signature, beside)
        return decoder._background.has(key)

    def is_any_coming(self) -> bool:
        """Returns whether any step is being compiled in the background."""
        return self._background.is_busy or self.plain._background.is_busy

    def is_compiled(
        self, bucket: Bucket, signature: Signature, beside: PromptShape | None = None
    ) -> bool:
        """Returns whether a step can run without waiting for its compilation; arguments as
        `prepare`."""
        decoder, key = self._key_of(bucket, signature, beside)
        return key in decoder._executables

    def _key_of(
        self, bucket: Bucket, signature: Signature, beside: PromptShape | None
    ) -> tuple[Decoder, tuple]:
        """Returns the decoder that holds a step's executable, and the executable's key there."""
        if beside or bucket.num_speculative_tokens or signature.is_plain_own:
            return self, (self._step_key(bucket, beside), signature.drafting)
        return self.plain, (self.plain._step_key(bucket, None), signature.plain)

    def read_s(
        self,
        params: DecoderParams,
        state: DecodeState,
        bucket: Bucket,
        signature: Signature,
        beside: PromptShape | None = None,
    ) -> float | None:
        """Returns estimated seconds to read a burst from the store on disk, None if not stored.

        The estimate is its size in bytes times the mean seconds per byte of earlier reads, which
        exist by then: prefill runs before bursts.

        Args:
          signature: that of the weights and state.
        """
        decoder, key = self._key_of(bucket, signature, beside)
        if key not in decoder._kept:
            _, params, state = self._of_bucket(params, state, bucket, beside)
            inputs = decoder._step_inputs(params, state, bucket, beside)
            name = decoder._store_name(key[0], inputs)
            # Looked up once, as this runs before each burst; `_make` finds files written later.
            decoder._kept[key] = executable_store.size(name)
        num_bytes = decoder._kept[key]
        if num_bytes is None:
            return None
        usual = USUAL_READ_BYTES * np.array([1.0, USUAL_READ_S])
        read_bytes, seconds = self._read + self.plain._read + usual
        return num_bytes * float(seconds / read_bytes)

    def compiled_between(self, start: float, end: float) -> bool:
        """Returns whether compilation ran in a span of time, on a CPU; elsewhere False.

        On a CPU it slows down decoding, as both use the same cores.

        Args:
          start, end: values of time.perf_counter().
        """
        if jax.default_backend() != "cpu":
            return False
        return any(decoder._background.ran_between(start, end) for decoder in (self, self.plain))

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
        rows = self.sizes.rows if plan.row_ids is None else len(plan.row_ids)
        bucket = Bucket(rows, num_speculative_tokens, max_drafts)
        beside = PromptShape(len(row_ids) // self.num_shards, num_tokens)
        return self._call(
            self._step_key(bucket, beside),
            self._mixed_function(bucket, beside, state),
            state,
            params,
            plan,
            row_ids,
            counts,
            **self._mixed_specs(params, plan),
        )

    def _mixed_function(self, bucket: Bucket, beside: PromptShape, state: DecodeState) -> Callable:
        """Returns the traced function of a mixed step; only the state's structure is read."""
        absorbs, has_drafts = self._absorbs(state), has_drafter(state)

        def run(
            state: DecodeState,
            params: DecoderParams,
            plan: BurstPlan,
            row_ids: HostArray,
            counts: HostArray,
        ) -> tuple:
            depth, most = bucket.num_speculative_tokens, bucket.max_drafts
            return mixed_step(
                self.step_spec(depth, most, absorbs=absorbs),
                self.step_spec(1 if has_drafts else 0),
                params,
                state,
                plan,
                row_ids,
                counts,
                num_tokens=beside.num_tokens,
            )

        return run

    def _mixed_specs(self, params: DecoderParams, plan: BurstPlan) -> dict[str, Any]:
        burst_specs = self._burst_specs(params, plan)
        return burst_specs | {"in_specs": (*burst_specs["in_specs"], self._rows, self._rows)}

    def remember(self, state: DecodeState, pieces: Pieces) -> DecodeState:
        """Passes pieces of text from the host to the drafter, one executable per number of pieces.

        The drafter must take text (`DrafterSpec.takes_text`). Donates the state.
        """

        def run(state: DecodeState, pieces: Pieces) -> tuple:
            return (remember_text(self._build_drafter(1), state, pieces),)

        key = ("remember", len(pieces.counts))
        specs = Pieces(
            token_ids=WHOLE,
            counts=WHOLE,
            groups=WHOLE,
            has_entered=self._rows,
            row_groups=self._rows,
        )
        (state,) = self._call(key, run, state, pieces, in_specs=(specs,), out_specs=())
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

        in_specs = (self._param_specs(params), *[self._rows] * 3)
        return self._call(
            ("score", len(history)),
            run,
            state,
            params,
            history,
            num_tokens,
            sampling,
            in_specs=in_specs,
            out_specs=(self._rows,),
        )

    def let_go(self, params: DecoderParams | None = None) -> None:
        """Drops references to all weights but `params`, so that their owner can free the memory."""
        if self._signed is not params:
            self._signed = None
        if self.plain is not self:
            self.plain.let_go()

    @property
    def burst_compile_s(self) -> float:
        """Mean seconds to compile a burst; USUAL_COMPILE_S before the first."""
        compiled = self._compile_s | self.plain._compile_s
        bursts = [s for key, s in compiled.items() if key[0] == "burst"]
        return sum(bursts) / len(bursts) if bursts else USUAL_COMPILE_S

    def _step_key(self, bucket: Bucket, beside: PromptShape | None) -> tuple:
        """Returns the name of a burst, or of a mixed step with prompts beside it."""
        if beside is None:
            return self._burst_key(bucket)
        _, *sizes = self._burst_key(bucket)
        return "mixed", beside.places * self.num_shards, beside.num_tokens, *sizes

    def _burst_key(self, bucket: Bucket) -> tuple:
        key: tuple = "burst", bucket.num_speculative_tokens
        if bucket.max_drafts is not None:
            return *key, bucket.rows, bucket.max_drafts
        return key if bucket.rows == self.sizes.rows else (*key, bucket.rows)

    def compiled_burst(self, num_speculative_tokens: int) -> Any:
        """Returns the executable of a burst that has run, for its memory_analysis() and text."""
        key = ("burst", num_speculative_tokens)
        decoder = self if num_speculative_tokens or self._reads_states else self.plain
        return next(run for (name, _), run in decoder._executables.items() if name == key)

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

    def _initial_state(self, has_drafter: bool) -> DecodeState:
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
                keeps_probs=self.keeps_probs,
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

    def _state_specs(self, state: DecodeState) -> DecodeState:
        """Returns how each leaf of a state is split over the mesh."""
        assert self.mesh is not None
        shards = self.drafter.num_shards
        # A drafter that is not split by specjax may split its state as the target is split.
        own = shards if shards > 1 else None
        return sharding.state_specs(state, self.mesh, self.drafter_axes(state), own)

    def drafter_axes(self, state: DecodeState) -> Any:
        """Returns the axes of each leaf of the drafter's part of a state; `Drafter.state_axes`."""
        return self._state_drafter(state).state_axes(state.drafter)

    @property
    def _plan_specs(self) -> BurstPlan:
        rows = self._rows
        return BurstPlan(
            num_steps=WHOLE,
            stop_when_finished=WHOLE,
            activate=rows,
            keep=rows,
            block_table=rows,
            draft_caps=rows,
        )

    def _any_shard(self, flag: Array) -> Array:
        if self.num_shards == 1:
            return flag
        return jax.lax.pmax(flag.astype(jnp.int32), sharding.DATA) > 0

    def _param_specs(self, params: DecoderParams) -> DecoderParams | None:
        if self.mesh is None:
            return None
        return sharding.weight_specs(params, self.mesh, self.config.target, self.drafter)

    @in_own_settings
    def _call(
        self,
        key: tuple,
        function: Callable,
        state: DecodeState,
        *arguments,
        in_specs: Any,
        out_specs: Any,
    ) -> Any:
        """Runs function(state, *arguments) -> (state, ...), compiled on first use of `key`.

        Args:
          in_specs, out_specs: how the arguments, and the results after the state, are split
            over a mesh; specs of the state itself are added.

        Raises:
          TooLarge: compilation ran out of memory. It and DrafterError leave the state
            as it was.
        """
        params = next((a for a in arguments if isinstance(a, DecoderParams)), None)
        variant = self._variant_of(params, state)
        compiled_key = (key, variant)
        if compiled_key not in self._executables:
            tell(key[0])
            start = time.perf_counter()
            try:
                self._background.wait(compiled_key)
                if compiled_key not in self._executables:
                    self._make(
                        compiled_key,
                        function,
                        state,
                        *arguments,
                        in_specs=in_specs,
                        out_specs=out_specs,
                    )
            finally:
                self.compile_s += time.perf_counter() - start
        self._num_calls[compiled_key] += 1
        self.num_warm_ups += self._num_calls[compiled_key] <= WARM_UP_CALLS
        return self._executables[compiled_key](state, *arguments)

    def _make(
        self,
        compiled_key: tuple,
        function: Callable,
        *inputs: Any,
        in_specs: Any,
        out_specs: Any,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reads an executable from the store, or compiles and stores it.

        Args:
          inputs: state and arguments; only shapes are read.
          goes_on: called after tracing; returns whether the executable is still needed.

        Raises:
          TooLarge: compilation ran out of memory.
        """
        key, _ = compiled_key
        start = time.perf_counter()
        name = self._store_name(key, inputs)
        run = executable_store.load(name, inputs)
        if run is None:
            try:
                lowered = self._lower(
                    key,
                    function,
                    *inputs,
                    in_specs=in_specs,
                    out_specs=out_specs,
                    name=name,
                )
                if not goes_on():
                    return
                options = self._compiler_options(key)
                run, is_new = executable_store.compile_new(name, lowered, options)
            except Exception as error:  # XLA's, of a class that differs by version
                if OUT_OF_MEMORY in str(error):
                    raise TooLarge(key, error) from error
                raise
            finally:
                self._compile_s[key] = time.perf_counter() - start
            if is_new:
                executable_store.save(name, run)
        else:
            num_bytes = executable_store.size(name) or 0
            self._read += num_bytes, time.perf_counter() - start
        self._executables[compiled_key] = run

    def _compiler_options(self, key: tuple) -> dict[str, Any] | None:
        return burst_options(self.device, self.mesh) if key[0] == "burst" else None

    def _store_name(self, key: tuple, inputs: Any) -> str | None:
        """Returns the name of an executable in the store; None where it is not stored.

        With a mesh, or with code from outside specjax (a drafter, or a registered model family),
        only jax's own cache is used.
        """
        has_own_code = is_own(self.drafter)
        has_own_code &= all(map(families.is_own, (self.target, *self.drafter.configs)))
        if self.mesh is not None or not has_own_code:
            return None
        return executable_store.name_of(repr((key, self.config)), inputs)

    def _variant_of(self, params: DecoderParams | None, state: DecodeState) -> tuple:
        return self._signature_of(params), jax.tree.structure(state.drafter)

    def _lower(
        self,
        key: tuple,
        function: Callable,
        state: DecodeState,
        *arguments,
        in_specs: Any,
        out_specs: Any,
        name: str | None = None,
    ) -> jax.stages.Lowered:
        """Returns the lowered function for `_call`; only shapes of state and arguments are read.

        Args:
          name: name in the store of executables; its first characters name the function.
        """

        # None is needed in this form once the drafter is off: plain decoding goes on.
        holds_drafter = has_drafter(state) and key[0] != "score"
        may_blame_drafter = holds_drafter and not is_own(self.drafter)

        def traced(*inputs) -> tuple:
            self.traces[key] += 1
            try:
                return function(*inputs)
            except Exception as error:  # whatever the guard of its functions did not see
                if not may_blame_drafter or isinstance(error, DrafterError):
                    raise
                raise DrafterError(f"a step with it could not be traced: {error!r}") from error

        run = traced
        traced.__name__ = key[0] if name is None else f"{key[0]}_{name[:12]}"
        if self.mesh is not None:
            own = self._state_specs(state)
            run = jax.shard_map(
                traced,
                mesh=self.mesh,
                in_specs=(own, *in_specs),
                out_specs=(own, *out_specs),
                check_vma=False,  # the loop's carries are replicated or split by construction
            )
        named = by_name(dict(self.engine_config.kernels).items())
        with sharding.lowered(self.mesh), named, trusting(self.config.trusted_kernels):
            return jax.jit(run, donate_argnums=0).lower(state, *arguments)

    def _signature_of(self, params: DecoderParams | None) -> tuple:
        """Returns shapes and dtypes of the weights, which are part of an executable's key."""
        if params is not None and params is not self._signed:
            own = lambda x: (x.heads_axis, x.array.shape) if is_view(x) else x.shape
            matrices = [(own(x), x.dtype) for x in matrices_of(params)]
            self._weights_signature = (*matrices, *self._other_device_of(params))
            self._signed = params
        return () if params is None else self._weights_signature

    def _other_device_of(self, params: DecoderParams) -> tuple[int, ...]:
        """Returns the number of the device that weights lie on, if it is not the usual one."""
        if self.mesh is not None:
            return ()
        leaves = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
        devices = set().union(*(x.sharding.device_set for x in leaves if x.committed))
        return tuple(sorted(each.id for each in devices - {self.device}))


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and placement of an array, to compile for without holding it."""
    is_placed = getattr(leaf, "committed", False)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding if is_placed else None
    )


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
