"""The loop: admit -> send -> read back, one burst ahead of what was read."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.decoder import Decoder, TooLarge
from specjax.decode.state import Admission, DecodeState, without_drafter
from specjax.drafters.base import DrafterError
from specjax.drafters.spec import NoDrafter
from specjax.engine.faults import RECOVERABLE, Faults, what_it_proposed
from specjax.engine.request import Request, TokenLogProbs
from specjax.engine.scheduler import PLACES, PromptChunk, Row, Scheduler
from specjax.engine.speculation_policy import Load, SpeculationPolicy
from specjax.progress import Report
from specjax.sampling import RowSampling, empty_row_values
from specjax.types import DecoderParams, Plan, StepInfo

# Calls of prompt chunks that rows wait for, which could decode already but have not yet
# begun: a batch that starts together then needs no mixed step.
PATIENCE = 8
MOST_STALE = 64  # entries of ended requests among the deadlines, beyond as many as wait


@dataclasses.dataclass
class Flight:
    """A burst that was sent and not read back, or is about to be sent."""

    rows: list[Row]
    depth: int  # K
    num_steps: int  # at most
    least: int  # tokens that each row gains, unless it ends
    places: list[int] = dataclasses.field(
        default_factory=list
    )  # of rows, in the report
    report: StepInfo | None = None
    num_steps_run: Any = None  # i32[], on the device
    sent_at: float = 0.0  # time.perf_counter()

    @property
    def growth(self) -> int:
        """Tokens that each row gains at most."""
        return self.num_steps * (1 + self.depth)


class Loop:
    """Runs requests on the rows of one decoder.

    While the device runs a burst the next one is planned and sent; then the first is
    read back. Rows that ended meanwhile do nothing in the second.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        policy: SpeculationPolicy,
        *,
        drafter_name: str | None = None,
        on_progress: Report = lambda what, done, total: None,
    ):
        self.decoder = decoder
        self.params = decoder.place_params(params)
        self.policy = policy
        self.run_s = 0.0  # seconds in `step`, compiling left out
        self.num_prefilled = (
            0  # prompt tokens that were fed, those that were found left out
        )
        self.num_preemptions = 0
        # What this run goes on without.
        self.faults = Faults(drafter_name or type(decoder.drafter).__name__)
        self._on_progress = on_progress
        # Advanced or ended by the step that raised the last exception.
        self.abandoned: list[Request] = []
        self._begin()

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that could never fit."""
        most = self.scheduler.most_tokens
        if request.max_length > most:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens and max_tokens={request.params.max_tokens!r} need "
                f"{request.max_length} tokens of context, the pool holds {most} for one row; lower max_tokens, "
                "shorten the prompt or raise num_pages."
            )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it could never fit.
        """
        self.check(request)
        self.scheduler.waiting.push(request)
        if request.deadline is not None and request.arrival is not None:
            if len(self._deadlines) > 2 * len(self.scheduler.waiting) + MOST_STALE:
                left = (entry for entry in self._deadlines if not entry[2].is_finished)
                self._deadlines = sorted(left, key=lambda entry: entry[:2])
            entry = request.deadline, request.arrival, request
            heapq.heappush(self._deadlines, entry)

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """Ends a request with the tokens it has; its pages are free at once.

        Returns:
          Whether it was still waiting or running.
        """
        if request.is_finished:
            return False
        row = self._row_of(request)
        if row is not None:
            self.scheduler.release(row)
        elif not self.scheduler.waiting.remove(request):
            return False
        request.end(reason)
        return True

    @property
    def has_work(self) -> bool:
        return bool(
            len(self.scheduler.waiting) or self.scheduler.occupied or self._flights
        )

    def run(self, *, max_burst_steps: int | None = None) -> Iterator[list[Request]]:
        """Runs until nothing is left; after each step yields the requests that moved."""
        while self.has_work:
            yield self.step(max_burst_steps)

    def step(self, max_burst_steps: int | None = None) -> list[Request]:
        """Admits, sends what there is to do, and reads back the burst before it.

        Returns:
          The requests that were advanced or ended.
        """
        # The decoder may serve other loops in turn, and outlive this one.
        report = self._on_progress
        self.decoder.on_compile = lambda what: report(f"compiling the {what}", 0, 0)
        compiled_before, start = self.decoder.compile_s, time.perf_counter()
        moved: list[Request] = []
        try:
            moved += self._end_overdue()
            self._admit()
            num_before = len(self._flights)
            self._send(max_burst_steps)
            num_sent = len(self._flights) - num_before
            while len(self._flights) > num_sent:
                moved += self._read()
        except BaseException as error:
            if not self._begin_again_without_drafter(error):
                self._abandon(error, moved)
                raise
        compiled = self.decoder.compile_s - compiled_before
        self.run_s += time.perf_counter() - start - compiled
        return list(dict.fromkeys(moved))

    def _begin(self) -> None:
        """Empties all rows and pages."""
        self._state = self._new_state()
        self.scheduler = Scheduler(
            self.decoder.sizes,
            self.decoder.num_shards,
            shares_prefixes=self.decoder.engine_config.prefix_caching,
            needs_drafter=bool(jax.tree.leaves(self._state.drafter)),
        )
        self._flights: collections.deque[Flight] = collections.deque()
        self._num_prompt_tokens = 0  # of those rows that are being prefilled
        self._read_at = 0.0  # time.perf_counter()
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._was_prefill = False

    def _new_state(self) -> DecodeState:
        if self.faults.is_drafter_off:
            return self.decoder.init(has_drafter=False)
        try:
            return self.decoder.init()
        except DrafterError as error:
            self.params = DecoderParams(self.params.target)
            self.faults.turn_drafter_off(str(error))
            return self.decoder.init(has_drafter=False)

    def _turn_drafter_off(self, reason: str) -> None:
        """Goes on without the drafter, whose weights and pages this run no longer needs."""
        if self.faults.is_drafter_off:
            return
        self.params = DecoderParams(self.params.target)
        self._state = without_drafter(self._state)
        self.scheduler.needs_drafter = False
        self.faults.turn_drafter_off(reason)

    def _do_without(self, error: Exception) -> None:
        """Drops what a step failed for that was not sent; raises where nothing is left."""
        if isinstance(error, DrafterError):
            self._turn_drafter_off(str(error))
        elif isinstance(error, TooLarge):
            self.faults.drop(error)

    def _begin_again_without_drafter(self, error: BaseException) -> bool:
        """After an error of the device, which took its state along: the drafter may be why.

        All requests go on from the tokens that were read, as after a preemption.

        Returns:
          False where there is no drafter, or the error is not the device's.
        """
        is_device = isinstance(error, jax.errors.JaxRuntimeError)
        has_none = isinstance(self.decoder.drafter, NoDrafter)
        if not is_device or has_none or self.faults.is_drafter_off:
            return False
        waiting, deadlines = self.scheduler.waiting, self._deadlines
        running = [row.request for row in self.scheduler.occupied]
        self._turn_drafter_off(f"a step failed on the device with {str(error)[:200]!r}")
        self._begin()
        self.scheduler.waiting, self._deadlines = waiting, deadlines
        for request in running:
            waiting.push(request)
        return True

    def _abandon(self, error: BaseException, moved: list[Request]) -> None:
        """Ends every request after an exception, and starts afresh: the device's state is lost."""
        running = [row.request for row in self.scheduler.occupied]
        everybody = [*moved, *running, *self.scheduler.waiting.all()]
        self.abandoned = list(dict.fromkeys(everybody))
        for request in self.abandoned:
            if not request.is_finished:
                request.error = f"the engine was interrupted: {error!r}."
                request.end("error")
        self._begin()

    def _row_of(self, request: Request) -> Row | None:
        rows = self.scheduler.occupied
        return next((row for row in rows if row.request is request), None)

    def _end_overdue(self) -> list[Request]:
        """Ends the requests whose time is over."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            request = heapq.heappop(self._deadlines)[-1]
            if self.abort(request, "deadline"):
                ended.append(request)
        return ended

    def _admit(self) -> None:
        steps = self.decoder.sizes.burst_steps
        admitted = self.scheduler.admit(
            steps * (1 + self.policy.max_speculative_tokens)
        )
        self._num_prompt_tokens += sum(row.num_to_prefill for row in admitted)
        for admission in make_admissions(self.decoder, admitted):
            self._state = self.decoder.admit(self._state, admission)

    def _send(self, max_burst_steps: int | None) -> None:
        """Sends the next chunk of prompts, a burst, or both, if there is anything to send."""
        scheduler, config = self.scheduler, self.decoder.engine_config
        rows = scheduler.decoding
        num_left = scheduler.num_to_prefill
        if not num_left:
            self._send_burst(rows, max_burst_steps)
            return
        has_begun = any(row.is_decoding for row in rows)
        is_long = num_left > PATIENCE * scheduler.tokens_per_chunk
        shares = bool(rows) and (has_begun or is_long)
        mixes = config.mixed_prefill and self.faults.has_mixed
        if shares and mixes and config.numerics != "invariant":
            flight = self._reserve(rows, 1, 1)
            if flight is not None:
                # Whoever was to be prefilled may just have been preempted.
                self._fly(
                    flight, self._mixed if scheduler.num_to_prefill else self._plain
                )
            if flight is not None or self._flights:
                return  # there may be room once they are read
        elif shares and self._was_prefill:
            self._was_prefill = False  # take turns
            self._send_burst(rows, max_burst_steps)
            return
        if not scheduler.num_to_prefill:
            return
        self._was_prefill = True
        self._prefill(self._next_chunk())

    def _prefill(self, chunk: PromptChunk) -> None:
        prefill = lambda: self.decoder.prefill(
            self.params,
            self._state,
            self.scheduler.block_table.copy(),
            chunk.row_ids,
            chunk.counts,
            max_tokens_per_row=chunk.width,
        )
        try:
            self._state = prefill()
        except DrafterError as error:
            self._do_without(error)
            self._state = prefill()

    def _plain(self, plan: Plan):
        return self.decoder.burst(
            self.params, self._state, plan, num_speculative_tokens=0
        )

    def _next_chunk(self, most_places: int = PLACES) -> PromptChunk:
        """Returns the next prompt tokens to send, and says how far prompts are."""
        total, scheduler = self._num_prompt_tokens, self.scheduler
        self._on_progress("prefill", total - scheduler.num_to_prefill, total)
        chunk = scheduler.next_chunk(most_places)
        self.num_prefilled += int(chunk.counts.sum())
        if not scheduler.num_to_prefill:
            self._on_progress("prefill", total, total)
            self._num_prompt_tokens = 0
        return chunk

    def _mixed(self, plan: Plan):
        # One prompt at a time: padding would cost the rows that decode beside it.
        chunk = self._next_chunk(most_places=1)
        mixed = lambda: self.decoder.mixed(
            self.params,
            self._state,
            plan,
            chunk.row_ids,
            chunk.counts,
            max_tokens_per_row=chunk.width,
        )
        try:
            return mixed()
        except RECOVERABLE as error:
            self._do_without(error)
        # The rest of the two: calls of their own also do without the drafter.
        self._prefill(chunk)
        return self._plain(plan)

    def _send_burst(self, rows: list[Row], max_burst_steps: int | None) -> None:
        if not rows:
            return
        load = Load(
            num_decoding_rows=len(rows), num_waiting=len(self.scheduler.waiting)
        )
        depth = self.faults.depth(self.policy.choose(load))
        if depth > 0 and not any(row.request.draft_cap for row in rows):
            depth = 0  # nobody wants drafts: plain decoding's own executable
        limit = self.decoder.sizes.burst_steps
        left = max(row.num_left for row in rows)
        num_steps = min(limit, max_burst_steps or limit, left)
        flight = self._reserve(rows, num_steps, 1 + depth)
        if flight is None:
            return
        burst = functools.partial(
            self.decoder.burst, self.params, num_speculative_tokens=depth
        )
        buckets = self.decoder.engine_config.row_buckets
        buckets = self.faults.row_buckets(depth, buckets)
        try:
            self._fly(flight, lambda plan: burst(self._state, plan), buckets)
        except RECOVERABLE as error:
            self._do_without(error)
            self._send_burst(rows, max_burst_steps)

    def _reserve(self, rows: list[Row], num_steps: int, width: int) -> Flight | None:
        """Takes the pages for steps of at most `width` tokens per row; None where there are none now.

        Where pages are short, what was sent is read back first, and then fewer steps are
        planned, and last a row is preempted; it is taken out of `rows`.
        """
        scheduler = self.scheduler
        while rows:
            # A burst may end with the first step in which a row does.
            least = 1 if len(scheduler.waiting) else num_steps
            lacking = scheduler.reserve(rows, num_steps * width, least)
            if not lacking:
                return Flight(rows, width - 1, num_steps, least)
            if self._flights:
                return None
            if num_steps > 1:
                num_steps //= 2
                continue
            shard = next(shard for shard, count in enumerate(lacking) if count)
            own = [row for row in scheduler.occupied if row.shard == shard]
            row = scheduler.last_in(own)
            scheduler.preempt(row)
            self.num_preemptions += 1
            if row in rows:
                rows.remove(row)
        return None

    def _fly(
        self,
        flight: Flight,
        launch: Callable[[Plan], tuple[DecodeState, StepInfo, Any]],
        buckets: Sequence[int] = (),
    ) -> None:
        """Sends steps for which pages were reserved.

        Args:
          buckets: numbers of rows for which `launch` may be compiled, beside all.
        """
        scheduler = self.scheduler
        activate, keep = np.zeros((2, len(scheduler.rows)), bool)
        activate[[row.index for row in flight.rows if not row.is_decoding]] = True
        row_ids, flight.places = scheduler.bucket(flight.rows, buckets)
        keep[[row.index for row in scheduler.occupied]] = True
        plan = Plan(
            num_steps=np.int32(flight.num_steps),
            stop_when_finished=np.bool_(len(scheduler.waiting) > 0),
            activate=activate,
            keep=keep,
            block_table=scheduler.block_table.copy(),
            row_ids=row_ids,
        )
        compiled_before, start = self.decoder.compile_s, time.perf_counter()
        try:
            self._state, flight.report, flight.num_steps_run = launch(plan)
        except RECOVERABLE:
            self._land(flight)  # nothing was sent
            for row in flight.rows:
                scheduler.shrink(row)
            raise
        flight.sent_at = start + self.decoder.compile_s - compiled_before
        for row in flight.rows:
            row.is_decoding = True
        self._flights.append(flight)

    def _land(self, flight: Flight) -> None:
        """Forgets what rows could gain by a burst."""
        for row in flight.rows:
            row.flying_most -= flight.growth
            row.flying_least -= flight.least

    def _read(self) -> list[Request]:
        """Reads back the burst that was sent first; returns the requests it advanced."""
        flight, scheduler = self._flights.popleft(), self.scheduler
        assert flight.report is not None
        num_steps = int(np.asarray(flight.num_steps_run))
        read_at = time.perf_counter()
        seconds = read_at - max(flight.sent_at, self._read_at)
        self._read_at = read_at
        self._land(flight)
        # Others were aborted or preempted since.
        rows = {
            place: row
            for place, row in zip(flight.places, flight.rows, strict=True)
            if scheduler.rows[row.index] is row
        }
        requests = {place: row.request for place, row in rows.items()}
        num_committed = collect(flight.report, num_steps, requests)
        if num_steps:
            drafter_lengths = np.asarray(flight.report.drafter_lengths)[num_steps - 1]
            for place, row in rows.items():
                self._update(row, int(drafter_lengths[place]))
        self.policy.observe(flight.depth, num_steps, num_committed, seconds)
        fault = np.max(np.asarray(flight.report.drafter_fault)[:num_steps], initial=0)
        if fault:
            self._turn_drafter_off(what_it_proposed(int(fault)))
        return list(requests.values())

    def _update(self, row: Row, drafter_length: int) -> None:
        """Takes over what its request has by now."""
        request, scheduler = row.request, self.scheduler
        num_known = len(row.token_ids) - len(request.prompt_token_ids)
        new = request.output_token_ids[num_known:]
        scheduler.take_tokens(row, new, drafter_length)
        if request.is_finished:
            scheduler.release(row, forgets=request.finish_reason == "error")
        else:
            scheduler.shrink(row)


def collect(report: StepInfo, num_steps: int, running: dict[int, Request]) -> int:
    """Hands each row's tokens of a burst to its request; returns how many were committed."""
    names = ("num_committed", "num_accepted", "num_drafted", "draft_depth", "finish")
    # [rows, steps, names]: plain numbers are read faster one row at a time.
    figures = np.stack(
        [np.asarray(getattr(report, name))[:num_steps] for name in names], axis=-1
    ).swapaxes(0, 1)
    token_ids = np.asarray(report.token_ids)[:num_steps].swapaxes(0, 1)
    is_described = any(
        request.params.logprobs is not None or request.params.self_check
        for request in running.values()
    )
    logprobs = (
        type(report.logprobs)(*map(np.asarray, report.logprobs))
        if is_described
        else None
    )
    for row, request in running.items():
        tokens = token_ids[row].tolist()
        for step, (count, accepted, drafted, depth, finish) in enumerate(
            figures[row].tolist()
        ):
            if count == 0 and finish == 0:
                continue
            own = tokens[step][:count]
            wanted = request.params.logprobs
            described = []
            if wanted is not None:
                described = [
                    _describe(logprobs, (step, row, place), token, wanted)
                    for place, token in enumerate(own)
                ]
            surpluses = []
            if request.params.self_check:
                assert logprobs is not None
                surplus, variance = (
                    values[step, row, :count].tolist()
                    for values in (logprobs.surplus, logprobs.variance)
                )
                surpluses = list(zip(surplus, variance))
            request.take_step(
                own, accepted, drafted, finish, described, depth, surpluses
            )
    return int(figures[..., 0].sum())


def _describe(
    logprobs, index: tuple[int, int, int], token_id: int, num_top: int
) -> TokenLogProbs:
    top = lambda ids, values: tuple(
        zip(ids[index][:num_top].tolist(), values[index][:num_top].tolist())
    )
    return TokenLogProbs(
        token_id=token_id,
        processed=float(logprobs.processed[index]),
        raw=float(logprobs.raw[index]),
        top_processed=top(logprobs.processed_top_ids, logprobs.processed_top),
        top_raw=top(logprobs.raw_top_ids, logprobs.raw_top),
    )


def make_admissions(decoder: Decoder, rows: Sequence[Row]) -> Iterator[Admission]:
    """Yields what lets requests into rows: PLACES of each shard at once, or one."""
    by_shard = [
        [row for row in rows if row.shard == shard]
        for shard in range(decoder.num_shards)
    ]
    most = max(map(len, by_shard))
    places = 1 if most == 1 else min(PLACES, decoder.sizes.rows // decoder.num_shards)
    for first in range(0, most, places):
        yield make_admission(
            decoder, [own[first : first + places] for own in by_shard], places
        )


def make_admission(
    decoder: Decoder, by_shard: Sequence[Sequence[Row]], places: int
) -> Admission:
    """Returns the arrays that let requests into rows, at most `places` of each shard."""
    sizes, num_shards = decoder.sizes, decoder.num_shards
    rows_per_shard = sizes.rows // num_shards
    count = num_shards * places
    history = np.zeros((count, sizes.max_length), np.int32)
    row_ids = np.full(count, rows_per_shard, np.int32)
    max_lengths, draft_caps, rules, lengths = np.zeros((4, count), np.int32)
    sampling: dict[str, Any] = empty_row_values(count, decoder.engine_config)
    for shard, own in enumerate(by_shard):
        for place, row in enumerate(own, start=shard * places):
            request = row.request
            row_ids[place] = row.index % rows_per_shard
            history[place, : len(row.token_ids)] = row.token_ids
            max_lengths[place] = request.max_length
            draft_caps[place] = request.draft_cap
            rules[place] = request.rule
            lengths[place] = row.num_prefilled
            for name, value in request.sampling_values.items():
                sampling[name][place] = value
    return Admission(
        row_ids=row_ids,
        history=history,
        sampling=RowSampling(**sampling),
        max_lengths=max_lengths,
        draft_caps=draft_caps,
        rules=rules,
        lengths=lengths,
    )
