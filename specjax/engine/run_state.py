"""The state of a loop while requests run, shared by its parts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from concurrent import futures
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from specjax.config.gate import SpeculationGate
from specjax.decode.bucket import PREFILL, REMEMBER
from specjax.decode.decoder import Decoder
from specjax.decode.executables import OUT_OF_MEMORY, TooLarge
from specjax.decode.kept import Kept, pointed
from specjax.decode.state import DecodeState, without_drafter
from specjax.drafters.guard import DrafterError
from specjax.engine.deadlines import Deadlines
from specjax.engine.faults import RECOVERABLE, Faults, LostWeights, lost_weights
from specjax.engine.flight import Flight
from specjax.engine.request import Request
from specjax.engine.rows import Row
from specjax.engine.scheduler import Scheduler
from specjax.engine.text_feed import TextFeed
from specjax.engine.timing import DeviceClock
from specjax.engine.windows import KeptText, Windows
from specjax.types import DecoderParams


@dataclasses.dataclass
class PromptProgress:
    """Progress of prefills."""

    num_tokens: int = 0  # prompt tokens of the rows that are being prefilled
    was_sent_last: bool = False  # prompts take turns with bursts
    # Time at which the prompts sent since the last burst are fed.
    done_at: futures.Future[float] | None = None


class RunState:
    """Decoder, weights, device state, rows and pages, and the work in flight.

    `begin` empties it, except for decoder, weights, faults and counters.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        *,
        gate: SpeculationGate,
        most_tokens: int | None,
        drafter_name: str | None,
        drafter_fault: str | None = None,
    ):
        self.use(decoder)
        # Parts that failed and are no longer used.
        self.faults = Faults(drafter_name or type(decoder.drafter).__name__, decoder.sizes.rows)
        if drafter_fault is not None:
            self.faults.turn_drafter_off(drafter_fault)
        self.device_state: Any = None
        self.params = decoder.place_params(self._usable(params))
        if not self.faults.is_drafter_off:
            self.params = self.with_made_weights(self.params)
        self.gate = gate
        # Tokens of all rows together above which no other request is admitted; None: no limit.
        self.most_tokens = most_tokens
        self.params_version = 0  # of `params`
        self.num_prefilled = 0  # prompt tokens fed, without those found in the prefix cache
        self.num_preemptions = 0
        self.windows: Windows | None = None  # of hidden states that are kept for a drafter
        self._num_kept_before = 0
        self._text_numbers = itertools.count()
        self.begin()

    def placed(self, params: DecoderParams) -> DecoderParams:
        """Returns weights where steps take them: over the mesh, or on the device of those in use.

        Arrays that lie there are not copied.

        Raises:
          ValueError: the weights lie over several devices, and there is no mesh.
        """
        params = self.decoder.place_params(params)
        # Between rollouts there are none in use: then the rows say where.
        weights, state = map(jax.tree.leaves, (self.params.target, self.device_state))
        used = [x for x in weights if isinstance(x, jax.Array)]
        used = used or [x for x in state if isinstance(x, jax.Array) and x.committed]
        if self.decoder.mesh is not None or not used:
            return params
        (device,) = used[0].sharding.device_set
        here = SingleDeviceSharding(device, memory_kind=used[0].sharding.memory_kind)

        def bring(leaf: Any) -> Any:
            is_elsewhere = isinstance(leaf, jax.Array) and not (
                leaf.sharding.is_equivalent_to(here, leaf.ndim)
            )
            return jax.device_put(leaf, here) if is_elsewhere else leaf

        return jax.tree.map(bring, params)

    def with_made_weights(self, params: DecoderParams) -> DecoderParams:
        """Returns placed weights with those that a drafter makes of the target's.

        Where they do not fit in memory, the drafter is turned off.
        """
        if not self.makes_drafter or params.target is None:
            return params
        try:
            return self.decoder.with_made_weights(params)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            self.turn_drafter_off(
                "the weights that it makes from the target's do not fit in memory"
            )
            return DecoderParams(params.target)

    @property
    def makes_drafter(self) -> bool:
        """Whether the drafter's weights are made from the target's."""
        return self.decoder.drafter.made_by is not None

    @property
    def is_quantized(self) -> bool:
        """Whether pages are int8 or fp8, and their scales follow from the weights."""
        return self.decoder.engine_config.kv_cache_dtype is not None

    def renew_weights(self, *, recomputes: bool) -> None:
        """Drops keys and values of earlier weights, except for those of rows that are fed whole.

        Args:
          recomputes: whether the next step drops these as well.
        """
        self.scheduler.renew_weights()
        if self.windows is not None:
            self.windows.forget()
        self.prompts.num_tokens = 0
        self.has_scales = False
        # All pages share one set of scales, those of the newest weights.
        recomputes |= self.is_quantized
        self.recomputes = bool(self.scheduler.occupied) and (self.recomputes or recomputes)

    def use(self, decoder: Decoder) -> None:
        """Runs on a decoder from now on. It lets go of all weights when this run is gone:
        decoders are kept for later runs."""
        self.decoder = decoder
        weakref.finalize(self, decoder.let_go).atexit = False

    def _usable(self, params: DecoderParams) -> DecoderParams:
        """Returns the weights to begin with, without those of a drafter that is off or lost some.

        Raises:
          LostWeights: weights of the target were deleted.
        """
        if lost := lost_weights(params, "target"):
            raise LostWeights(lost)
        if self.faults.is_drafter_off:
            return DecoderParams(params.target)
        if lost := lost_weights(params, "drafter"):
            self.faults.lose_drafter(lost, is_missed=False)
            return DecoderParams(params.target)
        return params

    def begin(self) -> None:
        """Empties all rows and pages."""
        # Dropped first: there may be no room for both the old state and the new one.
        self.device_state = None
        self.recomputes = False  # whether the next step empties all rows and feeds them again
        self.has_scales = False  # whether scales are set from the weights, for int8 and fp8 pages
        self.flights: collections.deque[Flight] = collections.deque()
        engine_config = self.decoder.engine_config
        self.scheduler = Scheduler(
            self.decoder.sizes,
            self.decoder.num_shards,
            prompt_sizes=self.decoder.prompt_sizes,
            counts_worst_case=engine_config.gate == "worst_case",
            most_batch_tokens=self.most_tokens,
            shares_prefixes=engine_config.prefix_caching,
        )
        self.prompts = PromptProgress()
        self.clock = DeviceClock()
        self.deadlines = Deadlines()
        self.feed: TextFeed | None = None
        if self.decoder.drafter.takes_text:
            self.feed = TextFeed(self.decoder.sizes.rows)
        self._num_kept_before = self.num_kept
        self.windows, shape = None, self.decoder.kept_shape
        if shape is not None:
            self.windows = Windows(*shape, self.decoder.num_shards, self._text_numbers)
        # Last, because the device may fail: the host's tables must be valid then.
        self.ensure_state()

    def ensure_state(self) -> None:
        """Makes the device's state if there is none, and sets its scales if they are missing."""
        if self.device_state is None:
            self.device_state, catches_up = self._new_state()
            self.has_scales = False
            has_state = bool(jax.tree.leaves(self.device_state.drafter))
            absorbs = has_state and bool(self.decoder.drafter.taps)
            self.scheduler.needs_drafter = has_state
            self.scheduler.feeds_shared_again = absorbs
            self.scheduler.catches_up = catches_up or not absorbs
        if self.is_quantized and not self.has_scales and self.params.target is not None:
            self.device_state = self.decoder.with_kv_scales(self.params, self.device_state)
            self.has_scales = True

    @property
    def num_kept(self) -> int:
        """Tokens of outputs whose hidden states were kept so far."""
        return self._num_kept_before + (0 if self.windows is None else self.windows.num_kept)

    @property
    def kept_texts(self) -> list[KeptText]:
        """The texts whose hidden states windows hold, the oldest first."""
        return [] if self.windows is None else self.windows.texts

    @property
    def has_windows(self) -> bool:
        """Whether hidden states are kept now."""
        state = self.device_state
        return self.windows is not None and state is not None and isinstance(state.kept, Kept)

    def collect_windows(self) -> None:
        """Turns windows that are full, or whose row has gone, into texts."""
        if self.windows is not None:
            self.windows.collect(self.scheduler)

    def point_windows(self) -> None:
        """Points rows at windows, for the work that is sent next."""
        if self.windows is None or not self.has_windows:
            return
        self.windows.collect(self.scheduler)
        pointed_at = self.windows.assign(self.scheduler)
        if pointed_at is not None:
            kept = pointed(self.device_state.kept, *pointed_at)
            self.device_state = dataclasses.replace(self.device_state, kept=kept)

    def take_drafter(self, params: DecoderParams) -> None:
        """Gives the steps that are sent from now on other weights of the drafter.

        Args:
          params: with the target's weights in use.
        """
        self.params = DecoderParams(self.params.target, self.placed(params).drafter)
        self.decoder.let_go()  # of the earlier weights

    def _new_state(self) -> tuple[DecodeState, bool]:
        """Returns an empty state, and whether its drafter can catch up with what it absorbs."""
        if self.faults.is_drafter_off:
            return self.decoder.init(has_drafter=False), True
        try:
            return self.decoder.init(), self.decoder.defers
        except DrafterError as error:
            self.params = DecoderParams(self.params.target)
            self.faults.turn_drafter_off(str(error))
            return self.decoder.init(has_drafter=False), True

    @property
    def requests(self) -> list[Request]:
        """Running requests, then waiting ones."""
        running = [row.request for row in self.scheduler.occupied]
        return [*running, *self.scheduler.waiting.all()]

    def row_of(self, request: Request) -> Row | None:
        """Returns the row of a running request; None for any other."""
        rows = self.scheduler.occupied
        return next((row for row in rows if row.request is request), None)

    def turn_drafter_off(self, reason: str) -> None:
        """Turns the drafter off, and drops its weights and pages."""
        if self.faults.is_drafter_off:
            return
        self.params = DecoderParams(self.params.target)
        if self.device_state is not None:
            self.device_state = without_drafter(self.device_state)
            self.scheduler.needs_drafter = self.scheduler.feeds_shared_again = False
            self.scheduler.catches_up = True
        self.faults.turn_drafter_off(reason)

    def do_without(self, error: Exception) -> None:
        """Turns off the drafter, or drops the executable, for which sending a step failed.

        Raises:
          TooLarge: no other executable can do its work.
        """
        if isinstance(error, DrafterError) or self._is_of_drafter(error):
            self.turn_drafter_off(str(error))
        elif isinstance(error, TooLarge):
            self.faults.drop(error)

    def _is_of_drafter(self, error: Exception) -> bool:
        """Returns whether a needed step did not fit, and might fit without the drafter."""
        if not isinstance(error, TooLarge):
            return False
        # A drafter that absorbs hidden states also runs in prefills and plain steps.
        absorbs = self.decoder.drafter.taps and not self.faults.is_drafter_off
        needed = error.key.is_plain_burst or error.key.kind == PREFILL
        return error.key.kind == REMEMBER or bool(absorbs and needed)

    def notice_failed(self) -> None:
        """Drops executables whose compilation in the background failed."""
        try:
            self.decoder.raise_failed()
        except RECOVERABLE as error:
            self.do_without(error)

    def tell_drafter(self) -> None:
        """Gives a drafter that matches text the tokens written since it last drafted."""
        if self.feed is None or self.faults.is_drafter_off:
            return
        while (pieces := self.feed.next_pieces(self.scheduler.rows)) is not None:
            self.device_state = self.decoder.remember(self.device_state, pieces)
