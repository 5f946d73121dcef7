"""The executables of steps: compiled at their first call or beside others, or read from disk."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.decode import executable_store
from specjax.decode.background import Background
from specjax.decode.bucket import BURST, StepKey
from specjax.decode.compiling import tell
from specjax.decode.state import DecodeState
from specjax.decode.steps import Step, Steps
from specjax.drafters.guard import is_own
from specjax.models import families
from specjax.models.views import is_view, matrices_of
from specjax.runtime.jax_settings import in_own_settings
from specjax.sampling import EVERYTHING
from specjax.types import DecoderParams

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # in the text of XLA's errors
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
      key: of the step.
      why: what the compiler said.
    """

    def __init__(self, key: StepKey, error: Exception):
        super().__init__(f"{key} does not fit in memory: {error}")
        self.key, self.why = key, str(error)


class Caller:
    """Whoever runs executables, which others may run too.

    Attributes:
      compile_s: seconds for which its calls waited until their executables were compiled or read.
      num_warm_ups: its calls that were among the first of their executable: see WARM_UP_CALLS.
    """

    compile_s = 0.0
    num_warm_ups = 0


class Executables:
    """The executables of some steps, one for each step and form of weights and drafter's state.

    Attributes:
      runs: the executables, by key, form of the weights and structure of the drafter's state.
      background: what is being compiled beside the caller.
    """

    def __init__(self, steps: Steps):
        self._steps = steps
        self.runs: dict[tuple, Callable] = {}
        self.background = Background()
        self._compile_s: dict[StepKey, float] = {}  # of executables that were not in the store
        self._num_calls: collections.Counter[tuple] = collections.Counter()
        self._stored: dict[tuple, int | None] = {}  # size in bytes of each burst in the store
        self._read = np.zeros(2)  # total bytes read from the store, and seconds that took
        # The weights that ran last, and their signature: one value, as threads read it.
        self._signed: tuple[DecoderParams | None, tuple] = None, ()

    @in_own_settings
    def __call__(self, caller: Caller, step: Step, state: DecodeState, *arguments: Any) -> Any:
        """Runs a step for a caller, compiled on its first use. Donates the state.

        Raises:
          TooLarge: compilation ran out of memory. It and DrafterError leave the state
            as it was.
        """
        params = next((a for a in arguments if isinstance(a, DecoderParams)), None)
        name = self._name(step.key, params, state.drafter)
        if name not in self.runs:
            tell(step.key.kind)
            start = time.perf_counter()
            try:
                self.background.wait(name)
                if name not in self.runs:
                    self._make(name, step, state, *arguments)
            finally:
                caller.compile_s += time.perf_counter() - start
        self._num_calls[name] += 1
        caller.num_warm_ups += self._num_calls[name] <= WARM_UP_CALLS
        return self.runs[name](state, *arguments)

    def prepare(self, step: Step, state: DecodeState, params: DecoderParams, *others: Any) -> None:
        """Starts to compile a step in the background, unless that is done; a call waits for it.

        Only the shapes of the arguments are kept.
        """
        name = self._name(step.key, params, state.drafter)
        if name in self.runs or self.background.has(name):
            return
        inputs = jax.tree.map(_shape_of, (state, params, *others))

        @in_own_settings  # jax settings are per thread, and this runs in another one
        def make(goes_on: Callable[[], bool]) -> None:
            self._make(name, step, *inputs, goes_on=goes_on)

        self.background.start(name, make)

    def has(self, key: StepKey, params: DecoderParams, drafter_state: Any) -> bool:
        """Returns whether a step can run without waiting for its compilation."""
        return self._name(key, params, drafter_state) in self.runs

    def is_coming(self, key: StepKey, params: DecoderParams, drafter_state: Any) -> bool:
        """Returns whether a step is being compiled in the background."""
        return self.background.has(self._name(key, params, drafter_state))

    def stored_bytes(
        self,
        key: StepKey,
        params: DecoderParams,
        drafter_state: Any,
        inputs: Callable[[], tuple],
    ) -> int | None:
        """Returns the size of a step's executable on disk, None if there is none.

        Args:
          inputs: returns the step's arguments.
        """
        name = self._name(key, params, drafter_state)
        if name not in self._stored:
            # Looked up once, as this runs before each burst; `_make` finds files written later.
            self._stored[name] = executable_store.size(self._file(key, inputs()))
        return self._stored[name]

    def run_of(self, key: StepKey) -> Any:
        """Returns an executable that has run, for its memory_analysis() and text."""
        return next(run for (own, *_), run in self.runs.items() if own == key)

    def let_go(self, params: DecoderParams | None = None) -> None:
        """Drops references to all weights but `params`, so that their owner can free the memory."""
        if self.signed is not params:
            self._signed = None, ()

    @property
    def signed(self) -> DecoderParams | None:
        """The weights that ran last, unless they were let go."""
        return self._signed[0]

    def _make(
        self,
        name: tuple,
        step: Step,
        *inputs: Any,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reads an executable from the store, or compiles and stores it.

        Args:
          inputs: state and arguments; only shapes are read.
          goes_on: called after tracing; returns whether the executable is still needed.

        Raises:
          TooLarge: compilation ran out of memory.
        """
        start = time.perf_counter()
        file = self._file(step.key, inputs)
        run = executable_store.load(file, inputs)
        if run is None:
            try:
                lowered = self._steps.lower(step, *inputs, name=file)
                if not goes_on():
                    return
                options = self._steps.compiler_options(step.key.kind)
                run, is_new = executable_store.compile_new(file, lowered, options)
            except Exception as error:  # XLA's, of a class that differs by version
                if OUT_OF_MEMORY in str(error):
                    raise TooLarge(step.key, error) from error
                raise
            finally:
                self._compile_s[step.key] = time.perf_counter() - start
            if is_new:
                executable_store.save(file, run)
        else:
            num_bytes = executable_store.size(file) or 0
            self._read += num_bytes, time.perf_counter() - start
        self.runs[name] = run

    def _file(self, key: StepKey, inputs: Any) -> str | None:
        """Returns the name of an executable in the store; None where it is not stored.

        An executable in the store that serves everything does for one that need not.

        With a mesh, or with code from outside specjax (a drafter, or a registered model family),
        only jax's own cache is used.
        """
        steps = self._steps
        has_own_code = is_own(steps.drafter)
        has_own_code &= all(map(families.is_own, (steps.target, *steps.drafter.configs)))
        if steps.mesh is not None or not has_own_code:
            return None
        keys = key, key._replace(uses=EVERYTHING)
        names = [executable_store.name_of(repr((each, steps.config)), inputs) for each in keys]
        return next((name for name in names if executable_store.size(name) is not None), names[0])

    def _name(self, key: StepKey, params: DecoderParams | None, drafter_state: Any) -> tuple:
        return key, self._signature_of(params), jax.tree.structure(drafter_state)

    def _signature_of(self, params: DecoderParams | None) -> tuple:
        """Returns shapes and dtypes of the weights, which are part of an executable's name."""
        if params is None:
            return ()
        signed, signature = self._signed
        if signed is not params:
            own = lambda x: (x.heads_axis, x.array.shape) if is_view(x) else x.shape
            matrices = [(own(x), x.dtype) for x in matrices_of(params)]
            signature = (*matrices, *self._other_device_of(params))
            self._signed = params, signature
        return signature

    def _other_device_of(self, params: DecoderParams) -> tuple[int, ...]:
        """Returns the number of the device that weights lie on, if it is not the usual one."""
        if self._steps.mesh is not None:
            return ()
        leaves = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
        devices = set().union(*(x.sharding.device_set for x in leaves if x.committed))
        return tuple(sorted(each.id for each in devices - {self._steps.device}))


def burst_compile_s(*executables: Executables) -> float:
    """Returns the mean seconds to compile a burst; USUAL_COMPILE_S before the first."""
    # Copies: threads that compile add to them.
    compiled = [pair for each in executables for pair in each._compile_s.copy().items()]
    seconds = [s for key, s in compiled if key.kind == BURST]
    return sum(seconds) / len(seconds) if seconds else USUAL_COMPILE_S


def read_s(num_bytes: int, *executables: Executables) -> float:
    """Returns estimated seconds to read so many bytes of an executable from disk.

    That is by the mean seconds per byte of earlier reads, which exist by then: prefill runs before
    bursts.
    """
    usual = USUAL_READ_BYTES * np.array([1.0, USUAL_READ_S])
    read_bytes, seconds = sum((each._read for each in executables), usual)
    return num_bytes * float(seconds / read_bytes)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and placement of an array, to compile for without holding it."""
    is_placed = getattr(leaf, "committed", False)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding if is_placed else None
    )
