"""The loop: admit -> send -> read back, one burst ahead of what was read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket, standing_row_buckets
from specjax.decode.decoder import OUT_OF_MEMORY, Decoder, TooLarge
from specjax.decode.score import Scores
from specjax.decode.sizes import PLACES
from specjax.decode.state import Admission, DecodeState, without_drafter
from specjax.drafters.base import DrafterError
from specjax.engine.faults import (
    RECOVERABLE,
    Faults,
    LostWeights,
    lost_weights,
    what_it_proposed,
)
from specjax.engine.metrics import BurstRecord
from specjax.engine.request import (
    SCORE_COLUMNS,
    Request,
    TokenLogProbs,
    TokenScores,
)
from specjax.engine.rows import Row
from specjax.engine.scheduler import PromptChunk, Scheduler
from specjax.engine.text_feed import MOST_PIECES, TextFeed
from specjax.engine.timing import Stopwatch
from specjax.policy.interface import (
    LEAST_TIMED_STEPS,
    Decision,
    Load,
    Outcome,
    SpeculationPolicy,
)
from specjax.runtime.jax_settings import check_not_traced, in_own_settings
from specjax.runtime.progress import Report
from specjax.sampling import RowSampling, empty_row_values
from specjax.types import DecoderParams, Plan, StepInfo

# Calls of prompt chunks that rows wait for, which could decode already but have not yet
# begun: a batch that starts together then needs no mixed step.
PATIENCE = 8
MOST_STALE = 64  # entries of ended requests among the deadlines, beyond as many as wait
MOST_RECORDS = 10_000  # of bursts that are remembered
ENDLESS = 10**6  # steps to come while requests wait
INTERRUPTED = "the engine was interrupted: {error!r}."  # Request.error
BESIDE_PROMPTS = Decision(num_speculative_tokens=0, reason="prompts")


@dataclasses.dataclass
class Flight:
    """A burst that was sent and not read back, or is about to be sent."""

    own: np.ndarray  # i64[rows], their indices, ascending
    decision: Decision
    num_steps: int  # at most
    least: int  # tokens that each row gains, unless it ends
    asked_depth: Any = None  # i64[rows], most tokens that each drafts
    num_behind: int = 0  # tokens that the drafter has to catch up with, of the row with most
    context_tokens: int = 0
    least_timed: int = 1  # steps of which the seconds are told by one burst
    is_learned_from: bool = True  # by the policy
    bucket: Bucket | None = None  # once it is sent
    rows: list[Row] = dataclasses.field(default_factory=list)  # likewise
    places: Any = ()  # i64[rows], in the report
    report: StepInfo | None = None
    num_steps_run: Any = None  # i32[], on the device
    sent_at: float = 0.0  # time.perf_counter()
    done_at: futures.Future[float] | None = None  # likewise
    # When the device was done with the prompts that were sent before, if any were.
    prompts_done_at: futures.Future[float] | None = None

    @property
    def depth(self) -> int:
        """K."""
        return self.decision.num_speculative_tokens

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
        speculation_max_rows: int | None = None,
        gate_tokens: int | None = None,
        most_tokens: int | None = None,
        fewer_pages: Callable[[Decoder], Decoder | None] = lambda decoder: None,
        drafter_name: str | None = None,
        on_progress: Report = lambda what, done, total: None,
    ):
        self.decoder = decoder
        # What this run goes on without.
        self.faults = Faults(drafter_name or type(decoder.drafter).__name__, decoder.sizes.rows)
        self.params = decoder.place_params(self._usable(params))
        self.policy = policy
        self.speculation_max_rows = speculation_max_rows
        # Most tokens of all rows together with which drafts are made; None: however many.
        self.gate_tokens = gate_tokens
        # Tokens of all rows together above which nobody else is let in; None: however many.
        self._most_tokens = most_tokens
        # A decoder like another, for a device with less memory than was thought.
        self._fewer_pages = fewer_pages
        # Seconds in `step`: compiling, and all else.
        self.compile_s = self.run_s = 0.0
        self.num_prefilled = 0  # prompt tokens that were fed, those that were found left out
        self.num_preemptions = 0
        # What the last bursts drafted, why, and what came of it.
        self.records: collections.deque[BurstRecord] = collections.deque(maxlen=MOST_RECORDS)
        self._stopwatch = Stopwatch()
        self._on_progress = on_progress
        self._begin()

    def _usable(self, params: DecoderParams) -> DecoderParams:
        """Returns weights to begin with; none of a drafter that has lost its own."""
        if lost := lost_weights(params, "target"):
            raise LostWeights(lost)
        if lost := lost_weights(params, "drafter"):
            self.faults.lose_drafter(lost, is_missed=False)
            return DecoderParams(params.target)
        return params

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that could never fit."""
        most = self.scheduler.most_tokens
        if request.max_length > most:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens and "
                f"max_tokens={request.params.max_tokens!r} need "
                f"{request.max_length} tokens of context, the pool holds {most} for one row; "
                f"lower max_tokens, "
                "shorten the prompt or raise num_pages."
            )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it could never fit.
        """
        self.check(request)
        if request.draft_cap:
            self.faults.miss_drafter()
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
        self._drop_deadlines()
        return True

    def take_params(self, params: DecoderParams, *, is_new: bool = True) -> None:
        """Goes on with other weights; nobody finds what earlier ones left in the pages.

        A drafter that was turned off has another chance. Only while nobody runs.

        Args:
          is_new: False for the very weights that the pages were filled with.
        """
        assert not self.scheduler.occupied, "rows hold keys and values of other weights"
        if is_new and self.faults.is_drafter_off:
            self.faults = Faults(self.faults.drafter, self.decoder.sizes.rows)
            self._restart()
        if self.faults.is_drafter_off:
            params = DecoderParams(params.target)
        self.params = self.decoder.place_params(params)
        if is_new:
            for pool in self.scheduler.pools:
                pool.forget()

    def abandon(self) -> None:
        """Drops whoever waits or runs, as an interruption may have left them."""
        self._abandon(RuntimeError("an earlier call was interrupted"))

    def forget(self) -> None:
        """Empties rows, pages and the drafter's state; keeps what was learned of speed."""
        if self.has_work:
            self.abandon()
        self.faults.is_drafter_off = False
        self._begin()

    def let_go(self) -> None:
        """Holds no weights until `take_params`."""
        self.params = DecoderParams(None)
        self.decoder.let_go()

    def pause(self) -> list[Request]:
        """Reads back what was sent, and lets everybody go with the tokens they have.

        Returns:
          The requests that have not ended; their full pages can be found by their tokens
          as long as nobody needs the room.
        """
        try:
            while self._flights:
                self._read([])
        except BaseException as error:
            self._abandon(error)
            raise
        running = [row.request for row in self.scheduler.occupied]
        for row in self.scheduler.occupied:
            if self._feed is not None:
                self._feed.note(row.request, is_over=True)
            self.scheduler.release(row)
        waiting = self.scheduler.waiting.all()
        for request in waiting:
            self.scheduler.waiting.remove(request)
        self._num_prompt_tokens = 0
        return [*running, *waiting]

    def score(self, history, num_tokens, sampling: RowSampling) -> Scores:
        """Returns how likely texts are; arguments as of Decoder.score. Rows that run are not
        touched."""
        self._ensure_state()
        try:
            self._state, scores = self.decoder.score(
                self.params, self._state, history, num_tokens, sampling
            )
        except BaseException:
            self._begin()  # the state went with the call
            raise
        return scores

    @property
    def has_work(self) -> bool:
        return bool(len(self.scheduler.waiting) or self.scheduler.occupied or self._flights)

    def run(self, *, max_burst_steps: int | None = None) -> Iterator[list[Request]]:
        """Runs until nothing is left; after each step yields the requests that moved."""
        while self.has_work:
            check_not_traced("decoding")
            yield self.step(max_burst_steps)

    @in_own_settings
    def step(self, max_burst_steps: int | None = None) -> list[Request]:
        """Admits, sends what there is to do, and reads back the burst before it.

        Returns:
          The requests that were advanced or ended.

        Raises:
          Exception: what could not be mended. Every request that waited or ran has ended
            with "error" then, and new ones may come.
        """
        # The decoder may serve other loops in turn, and outlive this one.
        report = self._on_progress
        self.decoder.on_compile = lambda what: report(f"compiling the {what}", 0, 0)
        decoder, start = self.decoder, time.perf_counter()
        compiled_before = decoder.compile_s
        moved: list[Request] = []
        try:
            self._ensure_state()
            moved += self._end_overdue()
            self._admit()
            num_before = len(self._flights)
            self._send(max_burst_steps)
            num_sent = len(self._flights) - num_before
            while len(self._flights) > num_sent:
                self._read(moved)
        except BaseException as error:
            goes_on = False
            try:
                goes_on = self._begin_again(error)
            finally:
                if not goes_on:
                    lost = lost_weights(self.params, "target")
                    if lost and isinstance(error, Exception):
                        error = LostWeights(lost)
                    self._abandon(error)
            if not goes_on:
                raise error
            moved += self._end_unfit()
        self._drop_deadlines()
        compiled = decoder.compile_s - compiled_before
        self.compile_s += compiled
        self.run_s += time.perf_counter() - start - compiled
        return list(dict.fromkeys(moved))

    def _begin(self) -> None:
        """Empties all rows and pages."""
        # There may be no room for the old state and the new one.
        self._state: Any = None
        self._flights: collections.deque[Flight] = collections.deque()
        self.scheduler = Scheduler(
            self.decoder.sizes,
            self.decoder.num_shards,
            prefill_tokens=self.decoder.engine_config.max_prefill_tokens,
            counts_worst_case=self.decoder.engine_config.gate == "worst_case",
            most_batch_tokens=self._most_tokens,
            shares_prefixes=self.decoder.engine_config.prefix_caching,
        )
        self._num_prompt_tokens = 0  # of those rows that are being prefilled
        self._done_at = 0.0  # time.perf_counter() when the last burst was
        self._told_at = 0.0  # likewise of the last one that the policy learned from
        # When the prompts that were sent since the last burst are fed.
        self._prompts_done_at: futures.Future[float] | None = None
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._feed: TextFeed | None = None
        if self.decoder.drafter.takes_text:
            self._feed = TextFeed(self.decoder.sizes.rows)
        self._was_prefill = False
        # Last, because the device may fail: the tables of the host are in order then.
        self._ensure_state()

    def _ensure_state(self) -> None:
        """Makes the device's state where there is none: at the start, or after an error took it."""
        if self._state is None:
            self._state = self._new_state()
            drafter = jax.tree.leaves(self._state.drafter)
            self.scheduler.needs_drafter = bool(drafter)

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
        if self._state is not None:
            self._state = without_drafter(self._state)
        self.scheduler.needs_drafter = False
        self.faults.turn_drafter_off(reason)

    def _do_without(self, error: Exception) -> None:
        """Drops what a step failed for that was not sent; raises where nothing is left."""
        is_of_drafter = isinstance(error, TooLarge) and error.key[0] == "remember"
        if isinstance(error, DrafterError) or is_of_drafter:
            self._turn_drafter_off(str(error))
        elif isinstance(error, TooLarge):
            self.faults.drop(error)

    def _begin_again(self, error: BaseException) -> bool:
        """After an error of the device, which took its state along.

        Where memory ran out there are fewer pages from now on; else the drafter may be why,
        and there is none: its weights may have been deleted. Requests go on from the tokens
        that were read, as after a preemption.

        Returns:
          False where neither helps, or the error is not the device's.
        """
        lost = lost_weights(self.params, "drafter")
        if lost and isinstance(error, Exception) and not self.faults.is_drafter_off:
            requests = self._everybody()
            is_missed = any(request.draft_cap for request in requests)
            self.faults.lose_drafter(lost, is_missed=is_missed)
            self.params = DecoderParams(self.params.target)
            self._restart()
            return True
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        if OUT_OF_MEMORY in str(error) and self._begin_with_fewer_pages():
            return True
        if not self.decoder.drafter.can_draft or self.faults.is_drafter_off:
            return False
        self._turn_drafter_off(f"a step failed on the device with {str(error)[:200]!r}")
        self._restart()
        return True

    def _begin_with_fewer_pages(self) -> bool:
        while (decoder := self._fewer_pages(self.decoder)) is not None:
            share = decoder.sizes.num_pages / self.decoder.sizes.num_pages
            self.decoder = decoder
            if self.gate_tokens is not None:
                self.gate_tokens = int(self.gate_tokens * share)
            if self._most_tokens is not None:
                self._most_tokens = int(self._most_tokens * share)
            try:
                self._restart()
            except jax.errors.JaxRuntimeError as error:
                if OUT_OF_MEMORY not in str(error):
                    raise
            else:
                return True
        return False

    def _restart(self) -> None:
        """Empties all rows and pages; whoever ran waits."""
        waiting, deadlines = self.scheduler.waiting, self._deadlines
        running = [row.request for row in self.scheduler.occupied]
        try:
            self._begin()
        finally:
            self.scheduler.waiting, self._deadlines = waiting, deadlines
            for request in running:
                if not request.is_finished:
                    request.num_preemptions += 1
                    waiting.push(request)

    def _end_unfit(self) -> list[Request]:
        """Ends the requests that wait and will never fit, where pages have become fewer."""
        ended = []
        for request in list(self.scheduler.waiting.all()):
            try:
                self.check(request)
            except ValueError as error:
                self.scheduler.waiting.remove(request)
                request.error = str(error)
                request.end("error")
                ended.append(request)
        return ended

    def _abandon(self, error: BaseException) -> None:
        """Ends every request after an exception, and starts afresh: the device's state is lost.

        Where the device cannot give a new one either, the next step asks for it again.
        """
        for request in self._everybody():
            if not request.is_finished:
                request.error = INTERRUPTED.format(error=error)
                request.end("error")
        # What follows must not hide the first error.
        with contextlib.suppress(Exception):
            self._begin()

    def _everybody(self) -> list[Request]:
        """Returns the requests that run or wait."""
        running = [row.request for row in self.scheduler.occupied]
        return [*running, *self.scheduler.waiting.all()]

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

    def _drop_deadlines(self) -> None:
        """Drops the deadlines of requests that ended in time, once nobody else has one."""
        if not len(self.scheduler.waiting) and not self.scheduler.occupied:
            self._deadlines.clear()

    def _admit(self) -> None:
        steps = self.decoder.sizes.burst_steps
        admitted = self.scheduler.admit(steps * (1 + self.policy.max_speculative_tokens))
        self._num_prompt_tokens += sum(row.num_to_prefill for row in admitted)
        for admission in make_admissions(self.decoder, admitted):
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        """Lets requests into rows; a drafter that raises as it hears of them is turned off."""
        assert self._state is not None
        try:
            self._state = self.decoder.admit(self._state, admission)
        except DrafterError as error:
            self._turn_drafter_off(str(error))
            self._state = self.decoder.admit(self._state, admission)

    def _send(self, max_burst_steps: int | None) -> None:
        """Sends the next chunk of prompts, a burst, or both, if there is anything to send."""
        scheduler, config = self.scheduler, self.decoder.engine_config
        rows = scheduler.decoding
        num_left = scheduler.num_to_prefill
        if not num_left:
            self._send_burst(rows, max_burst_steps)
            return
        has_begun = bool(scheduler.table.is_decoding[rows].any())
        is_long = num_left > PATIENCE * scheduler.tokens_per_chunk
        shares = len(rows) > 0 and (has_begun or is_long)
        mixes = config.mixed_prefill and self.faults.has_mixed
        if shares and mixes and config.numerics != "invariant":
            flight = self._reserve(rows, 1, BESIDE_PROMPTS)
            if flight is not None:
                flight.is_learned_from = False
                # Whoever was to be prefilled may just have been preempted.
                self._fly(flight, self._mixed if scheduler.num_to_prefill else self._plain)
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
            self.scheduler.table_now(),
            chunk.row_ids,
            chunk.counts,
            max_tokens_per_row=chunk.width,
        )
        try:
            self._state, done = prefill()
        except DrafterError as error:
            self._do_without(error)
            self._state, done = prefill()
        self._prompts_done_at = self._stopwatch.done_at(done)

    def _plain(self, plan: Plan):
        return self.decoder.burst(self.params, self._state, plan, num_speculative_tokens=0)

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

    def _send_burst(self, rows: np.ndarray, max_burst_steps: int | None) -> None:
        if not len(rows):
            return
        usual_steps = min(
            self.decoder.sizes.burst_steps,
            max_burst_steps or self.decoder.sizes.burst_steps,
        )
        self._notice_failed()
        load = self._load(rows, usual_steps)
        decision = self.policy.choose(load)
        if decision.prepare is not None:
            self.decoder.prepare(self.params, self._state, decision.prepare)
        depth = load.limit(decision.num_speculative_tokens)
        if depth < decision.num_speculative_tokens:
            decision = Decision(num_speculative_tokens=depth, reason=load.limited_by)
        decision = self._available(decision, load.row_buckets)
        num_steps = min(usual_steps, decision.num_steps or usual_steps, load.num_steps_left)
        flight = self._reserve(rows, num_steps, decision)
        if flight is None:
            return
        flight.least_timed = min(LEAST_TIMED_STEPS, usual_steps)
        flight.context_tokens = load.num_context_tokens
        # Who does not draft does not catch up.
        flight.num_behind = int(load.num_behind[load.draft_caps > 0].max(initial=1))
        if len(flight.own) == len(rows) and flight.decision is decision:
            # Otherwise a row was preempted, or pages allow no drafts: all of them may.
            depth = decision.num_speculative_tokens
            flight.asked_depth = np.minimum(load.draft_caps, depth)
            if decision.draft_caps is not None:
                flight.asked_depth = np.minimum(flight.asked_depth, decision.draft_caps)
        decision = flight.decision
        burst = functools.partial(
            self.decoder.burst,
            self.params,
            num_speculative_tokens=decision.num_speculative_tokens,
            max_drafts=decision.max_drafts,
        )
        try:
            self._fly(flight, lambda plan: burst(self._state, plan))
        except RECOVERABLE as error:
            self._do_without(error)
            self._send_burst(flight.own, max_burst_steps)

    def _notice_failed(self) -> None:
        """Goes on without what could not be compiled beside what ran."""
        try:
            self.decoder.raise_failed()
        except RECOVERABLE as error:
            self._do_without(error)

    def _available(self, decision: Decision, row_buckets: Sequence[int]) -> Decision:
        """Returns a decision with its row bucket, or what is left of it by what was dropped."""
        least = decision.row_bucket or 0
        for each in (decision, Decision(num_speculative_tokens=0, reason="dropped")):
            shape = each.num_speculative_tokens, each.max_drafts
            for rows in row_buckets:
                if rows >= least and not self.faults.is_dropped(Bucket(rows, *shape)):
                    return dataclasses.replace(each, row_bucket=rows)
        raise AssertionError("plain decoding of all rows is never dropped")

    def _load(self, rows: np.ndarray, usual_steps: int) -> Load:
        """Returns what the policy is to know before a burst of these rows."""
        scheduler, decoder = self.scheduler, self.decoder
        most, limited_by = self._limit(rows)
        table, tokens = scheduler.table, scheduler.table.least[rows]
        # A burst in flight that drafts catches up; one that does not falls behind.
        drafts_already = bool(self._flights and self._flights[-1].depth)
        behind = tokens - table.num_drafter_final[rows]
        if drafts_already or not scheduler.needs_drafter:
            behind = np.ones_like(tokens)
        tokens_left = table.max_length[rows] - tokens
        is_refilled = len(scheduler.waiting) > 0
        return Load(
            num_decoding_rows=len(rows),
            num_waiting=len(scheduler.waiting),
            most_speculative_tokens=most,
            limited_by=limited_by,
            row_buckets=scheduler.row_buckets(rows, self._row_buckets),
            requests=table.request_number[rows],
            draft_caps=table.draft_cap[rows],
            num_behind=behind,
            num_context_tokens=int(tokens.sum()),
            num_steps_left=ENDLESS if is_refilled else int(tokens_left.max()),
            tokens_left=() if is_refilled else tokens_left,
            urgency=() if is_refilled else _urgency(table.expected_end[rows], tokens),
            num_probe_steps=usual_steps,
            compile_s=decoder.burst_compile_s,
            is_compiled=decoder.is_compiled,
            is_coming=decoder.is_coming,
            read_s=lambda bucket: decoder.read_s(self.params, self._state, bucket),
            is_dropped=self.faults.is_dropped,
        )

    def _limit(self, rows: np.ndarray) -> tuple[int | None, str]:
        """Returns the most that may be drafted now, None where all may, and what says so."""
        if self.faults.is_drafter_off:
            return 0, "drafter off"
        if not np.any(self.scheduler.table.draft_cap[rows]):
            return 0, "user"
        most_rows = self.speculation_max_rows
        if most_rows is not None and len(rows) > most_rows:
            return 0, "rows"
        if self.gate_tokens is not None and self._weighed_tokens() > self.gate_tokens:
            return 0, "memory gate"
        return None, ""

    def _weighed_tokens(self) -> int:
        """Returns the tokens of all rows: that they can have after the work sent, or ever."""
        table = self.scheduler.table
        if self.decoder.engine_config.gate == "worst_case":
            return int(table.max_length.sum())
        return int(table.most.sum())

    @functools.cached_property
    def _row_buckets(self) -> Sequence[int]:
        """Numbers of rows that bursts may be compiled for, ascending, besides all of them."""
        asked = self.decoder.engine_config.row_buckets
        if asked is not None:
            return asked
        if not getattr(self.policy, "chooses_rows", False):
            return ()
        return standing_row_buckets(self.decoder.sizes.rows, self.decoder.num_shards)

    def _reserve(self, rows: np.ndarray, num_steps: int, decision: Decision) -> Flight | None:
        """Takes the pages for a burst of at most num_steps; None where there are none now.

        Where pages are short, what was sent is read back first, and then fewer steps are
        planned, then no drafts, and last a row is preempted.
        """
        scheduler = self.scheduler
        while len(rows):
            width = 1 + decision.num_speculative_tokens
            # A burst may end with the first step in which a row does.
            least = 1 if len(scheduler.waiting) else num_steps
            lacking = scheduler.reserve(rows, num_steps * width, least)
            if not np.any(lacking):
                return Flight(rows, decision, num_steps, least)
            if self._flights:
                return None
            if num_steps > 1:
                num_steps //= 2
                continue
            if decision.num_speculative_tokens:
                plain = Decision(num_speculative_tokens=0, reason="pages")
                fitting = scheduler.row_buckets(rows, self._row_buckets)
                decision = self._available(plain, fitting)
                continue
            shard = int(lacking.argmax())
            own = [row for row in scheduler.occupied if row.shard == shard]
            row = scheduler.last_in(own)
            scheduler.preempt(row)
            self.num_preemptions += 1
            rows = rows[rows != row.index]
        return None

    def _fly(
        self,
        flight: Flight,
        launch: Callable[[Plan], tuple[DecodeState, StepInfo, Any]],
    ) -> None:
        """Sends steps for which pages were reserved."""
        scheduler, decision = self.scheduler, flight.decision
        num_rows = len(scheduler.rows)
        table, own = scheduler.table, flight.own
        activate = np.zeros(num_rows, bool)
        activate[own] = ~table.is_decoding[own]
        if flight.asked_depth is None:
            flight.asked_depth = np.minimum(table.draft_cap[own], flight.depth)
        draft_caps = np.zeros(num_rows, np.int32)
        draft_caps[own] = flight.asked_depth
        flight.rows = scheduler.at(own)
        # A step beside prompts is compiled for all rows.
        bucket = decision.row_bucket or num_rows
        row_ids, flight.places = scheduler.places(own, bucket)
        flight.bucket = Bucket(bucket, flight.depth, decision.max_drafts)
        plan = Plan(
            num_steps=np.int32(flight.num_steps),
            stop_when_finished=np.bool_(len(scheduler.waiting) > 0),
            activate=activate,
            keep=table.is_occupied.copy(),
            block_table=scheduler.table_now(),
            draft_caps=draft_caps,
            row_ids=row_ids,
        )
        compiled_before, start = self.decoder.compile_s, time.perf_counter()
        try:
            if flight.depth:
                self._tell_drafter()
            self._state, flight.report, flight.num_steps_run = launch(plan)
        except RECOVERABLE:
            scheduler.land(own, flight.growth, flight.least)  # nothing was sent
            for row in flight.rows:
                scheduler.shrink(row)
            raise
        compiled_s = self.decoder.compile_s - compiled_before
        # Another engine may have compiled meanwhile with the same decoder.
        flight.sent_at = min(start + compiled_s, time.perf_counter())
        flight.done_at = self._stopwatch.done_at(flight.num_steps_run)
        flight.prompts_done_at, self._prompts_done_at = self._prompts_done_at, None
        table.is_decoding[own] = True
        self._flights.append(flight)

    def remember(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Tells a drafter that reads on in text what was answered to prompts elsewhere."""
        if self._feed is None:
            return
        try:
            for prompt, answer in zip(prompts, answers, strict=True):
                self._feed.cut(prompt, answer)
                if self._feed.num_waiting >= MOST_PIECES:
                    self._tell_drafter()
            self._tell_drafter()
        except RECOVERABLE as error:
            self._do_without(error)

    def _tell_drafter(self) -> None:
        """Gives a drafter that reads on in text what was written since it drafted last."""
        if self._feed is None or self.faults.is_drafter_off:
            return
        while (pieces := self._feed.next_pieces(self.scheduler.rows)) is not None:
            self._state = self.decoder.remember(self._state, pieces)

    def _read(self, moved: list[Request]) -> None:
        """Reads back the burst that was sent first; adds the requests it advanced to `moved`."""
        flight, scheduler = self._flights.popleft(), self.scheduler
        assert flight.report is not None
        assert flight.done_at is not None
        done_at = flight.done_at.result()
        num_steps = int(np.asarray(flight.num_steps_run))
        begun_at = max(flight.sent_at, self._done_at)
        if flight.prompts_done_at is not None:
            begun_at = max(begun_at, flight.prompts_done_at.result())
        self._done_at = done_at
        # Others were aborted or preempted since.
        rows = {
            place: row
            for place, row in zip(flight.places.tolist(), flight.rows, strict=True)
            if scheduler.rows[row.index] is row
        }
        own = np.array([row.index for row in rows.values()], np.int64)
        scheduler.land(own, flight.growth, flight.least)
        requests = {place: row.request for place, row in rows.items()}
        collect(flight.report, num_steps, requests)
        moved += requests.values()  # before what may fail: some have ended by now
        if num_steps:
            drafter_lengths = np.asarray(flight.report.drafter_lengths)[num_steps - 1]
            for place, row in rows.items():
                self._update(row, int(drafter_lengths[place]))
        self._observe(flight, rows, num_steps, begun_at)
        fault = np.max(np.asarray(flight.report.drafter_fault)[:num_steps], initial=0)
        if fault:
            self._turn_drafter_off(what_it_proposed(int(fault)))

    def _observe(
        self,
        flight: Flight,
        rows: dict[int, Row],
        num_steps: int,
        begun_at: float,
    ) -> None:
        """Tells the policy what a burst did, and writes it down.

        Args:
          rows: by their places; those that were still running.
          begun_at: time.perf_counter() when the device began; it was done at `_done_at`.
        """
        if not num_steps:
            return
        seconds = self._done_at - begun_at
        places = list(rows)
        figures = {
            name: np.asarray(getattr(flight.report, name))[:num_steps, places]
            for name in (
                "num_committed",
                "num_accepted",
                "draft_depth",
                "proposed_depth",
            )
        }
        num_tokens = int(figures["num_committed"].sum())
        assert flight.bucket is not None
        asked = np.zeros(flight.bucket.rows, np.int64)
        asked[flight.places] = flight.asked_depth
        if self.decoder.compiled_between(flight.sent_at, self._done_at):
            seconds_seen = None  # on the processors that compiled beside it
        else:
            seconds_seen = seconds if seconds > 0 else None
        if flight.is_learned_from:
            outcome = Outcome(
                decision=flight.decision,
                bucket=flight.bucket,
                num_rows=len(flight.rows),
                seconds=seconds_seen,
                idle_s=begun_at - self._told_at if self._told_at else 0.0,
                num_context_tokens=flight.context_tokens + num_tokens / 2,
                num_behind=flight.num_behind,
                is_short=num_steps < flight.least_timed,
                requests=np.array([r.request.number for r in rows.values()], np.int64),
                asked_depth=asked[places],
                **figures,
            )
            self.policy.observe(outcome)
            self._told_at = self._done_at
        self.records.append(_record(flight, num_steps, seconds, num_tokens))

    def _update(self, row: Row, drafter_length: int) -> None:
        """Takes over what its request has by now."""
        request, scheduler = row.request, self.scheduler
        num_known = len(row.token_ids) - len(request.prompt_token_ids)
        new = request.output_token_ids[num_known:]
        scheduler.take_tokens(row, new, drafter_length)
        if self._feed is not None and request.finish_reason != "error":
            self._feed.note(request)
        if request.is_finished:
            scheduler.release(row, forgets=request.finish_reason == "error")
        else:
            scheduler.shrink(row)


# Of a row that should have ended by now: how many tokens more are expected, at least.
LEAST_LEFT = 8


def _urgency(expected_end: np.ndarray, tokens: np.ndarray) -> Any:
    """Returns how much a token gained by each row brings the end of the batch nearer, 0 to 1.

    The square of its share of what the row with most has left; () where lengths are not known.
    """
    if not np.all(expected_end):
        return ()
    left = np.maximum(expected_end - tokens, LEAST_LEFT)
    return (left / left.max()) ** 2


def _record(flight: Flight, num_steps: int, seconds: float, num_tokens: int) -> BurstRecord:
    decision = flight.decision
    assert flight.bucket is not None
    return BurstRecord(
        num_speculative_tokens=flight.depth,
        reason=decision.reason,
        num_rows=len(flight.rows),
        row_bucket=flight.bucket.rows,
        max_drafts=decision.max_drafts,
        num_steps=num_steps,
        context_tokens=flight.context_tokens,
        predicted_step_s=decision.predicted_step_s,
        measured_step_s=seconds / num_steps,
        predicted_tokens=decision.predicted_tokens,
        measured_tokens=num_tokens / num_steps,
    )


def collect(report: StepInfo, num_steps: int, running: dict[int, Request]) -> None:
    """Hands each row's tokens of a burst to its request."""
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
    logprobs = type(report.logprobs)(*map(np.asarray, report.logprobs)) if is_described else None
    scores = None
    if any(request.keeps_scores for request in running.values()):
        assert logprobs is not None
        scores = _Scores(logprobs)
    for row, request in running.items():
        tokens = token_ids[row].tolist()
        for step, (count, accepted, drafted, depth, finish) in enumerate(figures[row].tolist()):
            if count == 0 and finish == 0:
                continue
            own = tokens[step][:count]
            described: Sequence[Any] = ()
            if scores is not None and request.keeps_scores:
                described = scores.of_step(step, row, count)
            elif request.params.logprobs is not None:
                described = [
                    _describe(logprobs, (step, row, place), token, request.params)
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
            request.take_step(own, accepted, drafted, finish, described, depth, surpluses)


class _Scores:
    """The log-probabilities of a burst as plain rows of numbers: see `TokenScores`."""

    def __init__(self, logprobs: Any):
        # [steps, rows, K + 1, 4]: slices are taken by step, not by token.
        columns = (getattr(logprobs, name) for name in SCORE_COLUMNS)
        self._columns = np.stack(list(columns), axis=-1)
        self._top_ids = logprobs.processed_top_ids
        self._top = logprobs.processed_top

    def of_step(self, step: int, row: int, count: int) -> list[TokenScores]:
        where = step, row, slice(count)
        parts = self._columns[where], self._top_ids[where], self._top[where]
        return [TokenScores(*each) for each in zip(*parts, strict=True)]


def _describe(
    logprobs, index: tuple[int, int, int], token_id: int, params: SamplingParams
) -> TokenLogProbs:
    num_top = params.logprobs
    top = lambda ids, values: tuple(
        zip(ids[index][:num_top].tolist(), values[index][:num_top].tolist())
    )
    return TokenLogProbs(
        token_id=token_id,
        processed=float(logprobs.processed[index]),
        raw=float(logprobs.raw[index]),
        top_processed=top(logprobs.processed_top_ids, logprobs.processed_top),
        top_raw=top(logprobs.raw_top_ids, logprobs.raw_top),
        tempered=float(logprobs.tempered[index]),
        entropy=float(logprobs.entropy[index]) if params.entropy else None,
    )


def make_admissions(decoder: Decoder, rows: Sequence[Row]) -> Iterator[Admission]:
    """Yields what lets requests into rows: PLACES of each shard at once, or one."""
    by_shard = [[row for row in rows if row.shard == shard] for shard in range(decoder.num_shards)]
    most = max(map(len, by_shard))
    places = 1 if most == 1 else min(PLACES, decoder.sizes.rows // decoder.num_shards)
    for first in range(0, most, places):
        yield make_admission(decoder, [own[first : first + places] for own in by_shard], places)


def make_admission(decoder: Decoder, by_shard: Sequence[Sequence[Row]], places: int) -> Admission:
    """Returns the arrays that let requests into rows, at most `places` of each shard."""
    sizes, num_shards = decoder.sizes, decoder.num_shards
    rows_per_shard = sizes.rows // num_shards
    count = num_shards * places
    history = np.zeros((count, sizes.max_length), np.int32)
    row_ids = np.full(count, rows_per_shard, np.int32)
    max_lengths, rules, lengths, drafter_lengths = np.zeros((4, count), np.int32)
    sampling: dict[str, Any] = empty_row_values(count, decoder.engine_config)
    for shard, own in enumerate(by_shard):
        for place, row in enumerate(own, start=shard * places):
            request = row.request
            row_ids[place] = row.index % rows_per_shard
            history[place, : len(row.token_ids)] = row.token_ids
            max_lengths[place] = request.max_length
            rules[place] = request.rule
            lengths[place] = row.num_prefilled
            drafter_lengths[place] = row.num_drafter_final
            for name, value in request.sampling_values.items():
                sampling[name][place] = value
    return Admission(
        row_ids=row_ids,
        history=history,
        sampling=RowSampling(**sampling),
        max_lengths=max_lengths,
        rules=rules,
        lengths=lengths,
        drafter_lengths=drafter_lengths,
    )
