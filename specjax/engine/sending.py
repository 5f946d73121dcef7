"""Sends work to the device: prompts, bursts, or both in one step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.decode.sizes import PLACES
from specjax.decode.state import DecodeState
from specjax.engine.burst_choice import BurstChoice
from specjax.engine.faults import RECOVERABLE
from specjax.engine.flight import Flight
from specjax.engine.run_state import RunState
from specjax.engine.scheduler import PromptChunk
from specjax.engine.timing import Stopwatch
from specjax.runtime.progress import Report
from specjax.types import BurstPlan, StepInfo

# Prompt chunks for which rows that are ready but have not begun to decode wait: a batch that
# starts together then needs no mixed step.
PATIENCE = 8

# The state after the steps, their report, and how many ran.
Sent = tuple[DecodeState, StepInfo, Any]


class Sender:
    """Sends work, at most one burst or prompt chunk at a time."""

    def __init__(self, run: RunState, bursts: BurstChoice, on_progress: Report):
        self._run = run
        self._bursts = bursts
        self._on_progress = on_progress
        self._stopwatch = Stopwatch()

    def send(self, max_burst_steps: int | None) -> None:
        """Sends the next chunk of prompts, a burst, or both, if there is work."""
        run, scheduler = self._run, self._run.scheduler
        rows = scheduler.decoding
        if not scheduler.num_to_prefill:
            self._send_burst(rows, max_burst_steps)
            return
        shares = self._shares_with_prompts(rows)
        if shares and self._mixes:
            if self._send_beside_prompts(rows) or run.flights:
                return  # pages may be free once the bursts in flight are read
        elif shares and run.prompts.was_sent_last:
            run.prompts.was_sent_last = False  # take turns
            self._send_burst(rows, max_burst_steps)
            return
        if not scheduler.num_to_prefill:
            return
        run.prompts.was_sent_last = True
        self._prefill(self._next_chunk())

    def _shares_with_prompts(self, rows: np.ndarray) -> bool:
        """Returns whether rows decode while prompts are fed, rather than wait for them."""
        scheduler = self._run.scheduler
        has_begun = bool(scheduler.table.is_decoding[rows].any())
        is_long = scheduler.num_to_prefill > PATIENCE * scheduler.tokens_per_chunk
        return len(rows) > 0 and (has_begun or is_long)

    @property
    def _mixes(self) -> bool:
        """Whether prompts are fed in the same step as rows that decode."""
        config = self._run.decoder.engine_config
        mixes = config.mixed_prefill and self._run.faults.has_mixed
        return mixes and config.numerics != "invariant"

    def _send_beside_prompts(self, rows: np.ndarray) -> bool:
        """Sends a step of rows with prompts beside it; returns whether pages sufficed."""
        flight = self._bursts.beside_prompts(rows)
        if flight is None:
            return False
        # The row that was to be prefilled may just have been preempted.
        has_prompts = self._run.scheduler.num_to_prefill
        self._fly(flight, self._mixed if has_prompts else self._plain)
        return True

    def _send_burst(self, rows: np.ndarray, max_burst_steps: int | None) -> None:
        if not len(rows):
            return
        run = self._run
        run.notice_failed()
        flight = self._bursts.next_burst(rows, max_burst_steps)
        if flight is None:
            return
        burst = functools.partial(
            run.decoder.burst,
            run.params,
            num_speculative_tokens=flight.decision.num_speculative_tokens,
            max_drafts=flight.decision.max_drafts,
        )
        try:
            self._fly(flight, lambda plan: burst(run.device_state, plan))
        except RECOVERABLE as error:
            run.do_without(error)
            self._send_burst(flight.own, max_burst_steps)

    def _fly(
        self,
        flight: Flight,
        launch: Callable[[BurstPlan], Sent],
    ) -> None:
        """Sends steps for which pages were reserved."""
        run, scheduler = self._run, self._run.scheduler
        if flight.asked_depth is None:
            draft_cap = scheduler.table.draft_cap
            flight.asked_depth = np.minimum(draft_cap[flight.own], flight.depth)
        flight.rows = scheduler.at(flight.own)
        plan = self._plan(flight)
        compiled_before, start = run.decoder.compile_s, time.perf_counter()
        try:
            if flight.depth:
                run.tell_drafter()
            run.device_state, flight.report, flight.num_steps_run = launch(plan)
        except RECOVERABLE:
            scheduler.land(flight.own, flight.growth, flight.least)  # nothing was sent
            for row in flight.rows:
                scheduler.shrink(row)
            raise
        compiled_s = run.decoder.compile_s - compiled_before
        # compile_s may include another engine that shares the decoder: not later than now.
        flight.sent_at = min(start + compiled_s, time.perf_counter())
        flight.done_at = self._stopwatch.done_at(flight.num_steps_run)
        flight.prompts_done_at, run.prompts.done_at = run.prompts.done_at, None
        scheduler.table.is_decoding[flight.own] = True
        run.flights.append(flight)

    def _plan(self, flight: Flight) -> BurstPlan:
        """Returns the arrays of a burst; sets its bucket and its rows' places."""
        scheduler, own = self._run.scheduler, flight.own
        table, num_rows = scheduler.table, len(scheduler.rows)
        activate = np.zeros(num_rows, bool)
        activate[own] = ~table.is_decoding[own]
        draft_caps = np.zeros(num_rows, np.int32)
        draft_caps[own] = flight.asked_depth
        # A step beside prompts is compiled for all rows.
        bucket = flight.decision.row_bucket or num_rows
        row_ids, flight.places = scheduler.places(own, bucket)
        flight.bucket = Bucket(bucket, flight.depth, flight.decision.max_drafts)
        return BurstPlan(
            num_steps=np.int32(flight.num_steps),
            stop_when_finished=np.bool_(len(scheduler.waiting) > 0),
            activate=activate,
            keep=table.is_occupied.copy(),
            block_table=scheduler.table_now(),
            draft_caps=draft_caps,
            row_ids=row_ids,
        )

    def _prefill(self, chunk: PromptChunk) -> None:
        run = self._run
        prefill = lambda: run.decoder.prefill(
            run.params,
            run.device_state,
            run.scheduler.table_now(),
            chunk.row_ids,
            chunk.counts,
            max_tokens_per_row=chunk.width,
        )
        try:
            run.device_state, done = prefill()
        except RECOVERABLE as error:
            run.do_without(error)
            run.device_state, done = prefill()
        run.prompts.done_at = self._stopwatch.done_at(done)

    def _plain(self, plan: BurstPlan) -> Sent:
        run = self._run
        plain = lambda: run.decoder.burst(
            run.params, run.device_state, plan, num_speculative_tokens=0
        )
        try:
            return plain()
        except RECOVERABLE as error:
            run.do_without(error)
        return plain()

    def _mixed(self, plan: BurstPlan) -> Sent:
        run = self._run
        # One prompt at a time: padding would cost the rows that decode beside it.
        chunk = self._next_chunk(most_places=1)
        mixed = lambda: run.decoder.mixed(
            run.params,
            run.device_state,
            plan,
            chunk.row_ids,
            chunk.counts,
            max_tokens_per_row=chunk.width,
        )
        try:
            return mixed()
        except RECOVERABLE as error:
            run.do_without(error)
        # Mixed steps were dropped, or the drafter: two separate calls do the same work.
        self._prefill(chunk)
        return self._plain(plan)

    def _next_chunk(self, most_places: int = PLACES) -> PromptChunk:
        """Returns the next prompt tokens to send, and reports the progress of prompts."""
        run, scheduler = self._run, self._run.scheduler
        total = run.prompts.num_tokens
        self._on_progress("prefill", total - scheduler.num_to_prefill, total)
        chunk = scheduler.next_chunk(most_places)
        run.num_prefilled += int(chunk.counts.sum())
        if not scheduler.num_to_prefill:
            self._on_progress("prefill", total, total)
            run.prompts.num_tokens = 0
        return chunk
