"""What a loop holds while requests run, shared by its parts."""

from __future__ import annotations

import collections
import dataclasses
from concurrent import futures
from typing import Any

import jax

from specjax.config.gate import SpeculationGate
from specjax.decode.decoder import Decoder, TooLarge
from specjax.decode.state import DecodeState, without_drafter
from specjax.drafters.base import DrafterError
from specjax.engine.deadlines import Deadlines
from specjax.engine.faults import RECOVERABLE, Faults, LostWeights, lost_weights
from specjax.engine.flight import Flight
from specjax.engine.request import Request
from specjax.engine.rows import Row
from specjax.engine.scheduler import Scheduler
from specjax.engine.text_feed import TextFeed
from specjax.engine.timing import DeviceClock
from specjax.types import DecoderParams


@dataclasses.dataclass
class PromptProgress:
    """How far prompts are."""

    num_tokens: int = 0  # of the rows that are being prefilled
    was_sent_last: bool = False  # prompts take turns with bursts
    # When the prompts that were sent since the last burst are fed.
    done_at: futures.Future[float] | None = None


class RunState:
    """Decoder, weights, the state on the device, rows and pages, and the work that was sent.

    `begin` empties it. Decoder, weights, faults and counters outlive that.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        *,
        gate: SpeculationGate,
        most_tokens: int | None,
        drafter_name: str | None,
    ):
        self.decoder = decoder
        # What this run goes on without.
        self.faults = Faults(drafter_name or type(decoder.drafter).__name__, decoder.sizes.rows)
        self.params = decoder.place_params(self._usable(params))
        self.gate = gate
        # Tokens of all rows together above which no other request is let in; None: any number.
        self.most_tokens = most_tokens
        self.num_prefilled = 0  # prompt tokens that were fed, not those found in pages
        self.num_preemptions = 0
        self.begin()

    def _usable(self, params: DecoderParams) -> DecoderParams:
        """Returns weights to begin with; none of a drafter that has lost its own."""
        if lost := lost_weights(params, "target"):
            raise LostWeights(lost)
        if lost := lost_weights(params, "drafter"):
            self.faults.lose_drafter(lost, is_missed=False)
            return DecoderParams(params.target)
        return params

    def begin(self) -> None:
        """Empties all rows and pages."""
        # There may be no room for the old state and the new one.
        self.device_state: Any = None
        self.has_scales = False  # of the weights; asked of int8 and fp8 pages alone
        self.flights: collections.deque[Flight] = collections.deque()
        engine_config = self.decoder.engine_config
        self.scheduler = Scheduler(
            self.decoder.sizes,
            self.decoder.num_shards,
            prefill_tokens=engine_config.max_prefill_tokens,
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
        # Last, because the device may fail: the tables of the host are in order then.
        self.ensure_state()

    def ensure_state(self) -> None:
        """Makes the device's state where there is none: at the start, or after an error took it."""
        if self.device_state is None:
            self.device_state, self.has_scales = self._new_state(), False
            drafter = jax.tree.leaves(self.device_state.drafter)
            self.scheduler.needs_drafter = bool(drafter)
            self.scheduler.feeds_shared_again = bool(drafter and self.decoder.drafter.taps)
        is_quantized = self.device_state.cache.scales is not None
        if is_quantized and not self.has_scales and self.params.target is not None:
            state, self.device_state = self.device_state, None  # which the call donates
            self.device_state = self.decoder.set_kv_scales(self.params, state)
            self.has_scales = True

    def _new_state(self) -> DecodeState:
        if self.faults.is_drafter_off:
            return self.decoder.init(has_drafter=False)
        try:
            return self.decoder.init()
        except DrafterError as error:
            self.params = DecoderParams(self.params.target)
            self.faults.turn_drafter_off(str(error))
            return self.decoder.init(has_drafter=False)

    @property
    def requests(self) -> list[Request]:
        """Those that run, then those that wait."""
        running = [row.request for row in self.scheduler.occupied]
        return [*running, *self.scheduler.waiting.all()]

    def row_of(self, request: Request) -> Row | None:
        """Returns the row that a request runs in, if it does."""
        rows = self.scheduler.occupied
        return next((row for row in rows if row.request is request), None)

    def turn_drafter_off(self, reason: str) -> None:
        """Goes on without the drafter, whose weights and pages this run no longer needs."""
        if self.faults.is_drafter_off:
            return
        self.params = DecoderParams(self.params.target)
        if self.device_state is not None:
            self.device_state = without_drafter(self.device_state)
        self.scheduler.needs_drafter = self.scheduler.feeds_shared_again = False
        self.faults.turn_drafter_off(reason)

    def do_without(self, error: Exception) -> None:
        """Drops what a step failed for that was not sent; raises where nothing is left."""
        if isinstance(error, DrafterError) or self._is_of_drafter(error):
            self.turn_drafter_off(str(error))
        elif isinstance(error, TooLarge):
            self.faults.drop(error)

    def _is_of_drafter(self, error: Exception) -> bool:
        """Returns whether a step fits without the drafter, perhaps, and is needed."""
        if not isinstance(error, TooLarge):
            return False
        # What a drafter absorbs it makes something of, beside prompts and plain steps too.
        absorbs = self.decoder.drafter.taps and not self.faults.is_drafter_off
        needed = error.key[:2] == ("burst", 0) or error.key[0] == "prefill"
        return error.key[0] == "remember" or bool(absorbs and needed)

    def notice_failed(self) -> None:
        """Goes on without what could not be compiled beside what ran."""
        try:
            self.decoder.raise_failed()
        except RECOVERABLE as error:
            self.do_without(error)

    def tell_drafter(self) -> None:
        """Gives a drafter that reads on in text what was written since it drafted last."""
        if self.feed is None or self.faults.is_drafter_off:
            return
        while (pieces := self.feed.next_pieces(self.scheduler.rows)) is not None:
            self.device_state = self.decoder.remember(self.device_state, pieces)
