"""Sends work to the device: prompts, bursts, or both in one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.decode.sizes import PLACES, PromptShape
from specjax.decode.state import DecodeState
from specjax.engine.burst_choice import BurstChoice
from specjax.engine.faults import RECOVERABLE
from specjax.engine.flight import Flight
from specjax.engine.run_state import RunState
from specjax.engine.scheduler import PromptChunk
from specjax.engine.timing import Stopwatch
from specjax.runtime.progress import Report
from specjax.types import BurstPlan, StepInfo

# Prompt tokens for which rows that are ready but have not begun to decode wait, in calls of the
# largest bucket for each of PLACES rows: a batch that starts together then needs no mixed step.
PATIENCE = 2

# The state after the steps, their report, and how many ran.
Sent = tuple[DecodeState, StepInfo, Any]
Result = TypeVar("Result")


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
            if self._send_beside_prompts(rows, scheduler.next_prompts()) or run.flights:
                return  # pages may be free once the bursts in flight are read
        elif shares and run.prompts.was_sent_last:
            run.prompts.was_sent_last = False  # take turns
            self._send_burst(rows, max_burst_steps)
            return
        if not scheduler.num_to_prefill:
            return
        run.prompts.was_sent_last = True
        self._prefill(self._next_chunk(scheduler.next_prompts()))

    def _shares_with_prompts(self, rows: np.ndarray) -> bool:
        """Returns whether rows decode while prompts are fed, rather than wait for them."""
        scheduler = self._run.scheduler
        has_begun = bool(scheduler.table.is_decoding[rows].any())
        most = PATIENCE * min(PLACES, scheduler.rows_per_shard) * scheduler.prompt_sizes.most_tokens
        is_long = scheduler.num_to_prefill > most
        return len(rows) > 0 and (has_begun or is_long)

    @property
    def _mixes(self) -> bool:
        """Whether prompts are fed in the same step as rows that decode."""
        config = self._run.decoder.engine_config
        mixes = config.mixed_prefill and self._run.faults.has_mixed
        return mixes and config.numerics != "invariant"

    def _send_beside_prompts(self, rows: np.ndarray, prompts: PromptShape) -> bool:
        """Sends a step of rows with prompts beside it; returns whether pages sufficed."""
        run = self._run
        run.notice_failed()
        flight = self._bursts.next_burst(rows, 1, beside=prompts)
        if flight is None:
            return False
        if run.scheduler.num_to_prefill:
            self._fly(flight, lambda plan: self._mixed(flight, prompts, plan))
        else:  # the rows that were to be fed have just been preempted
            self._fly(flight, lambda plan: self._plain(flight, plan))
        return True

    def _send_burst(self, rows: np.ndarray, max_burst_steps: int | None) -> None:
        if not len(rows):
            return
        run = self._run
        run.notice_failed()
        flight = self._bursts.next_burst(rows, max_burst_steps)
        if flight is None:
            return
        try:
            self._fly(flight, lambda plan: self._burst(flight, plan))
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
        flight.rows, flight.params_version = scheduler.at(flight.own), run.params_version
        plan = self._plan(flight)
        compiled_before, start = run.decoder.compile_s, time.perf_counter()
        warm_ups = run.decoder.num_warm_ups
        try:
            run.device_state, flight.report, flight.num_steps_run = launch(plan)
        except RECOVERABLE:
            scheduler.land(flight.own, flight.growth, flight.least)  # nothing was sent
            for row in flight.rows:
                scheduler.shrink(row)
            raise
        flight.is_warm_up = run.decoder.num_warm_ups > warm_ups
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
            num_tokens=chunk.num_tokens,
        )
        run.device_state, done = self._twice_at_most(prefill)
        run.prompts.done_at = self._stopwatch.done_at(done)

    def _burst(self, flight: Flight, plan: BurstPlan) -> Sent:
        run = self._run
        if flight.depth:
            run.tell_drafter()
        return run.decoder.burst(
            run.params,
            run.device_state,
            plan,
            num_speculative_tokens=flight.depth,
            max_drafts=flight.decision.max_drafts,
        )

    def _plain(self, flight: Flight, plan: BurstPlan) -> Sent:
        """Runs a flight's rows plainly, whatever it was to be."""
        run = self._run
        flight.is_learned_from = False
        return self._twice_at_most(
            lambda: run.decoder.burst(run.params, run.device_state, plan, num_speculative_tokens=0)
        )

    def _twice_at_most(self, send: Callable[[], Result]) -> Result:
        """Sends a step; if it fails, once more, without what made it fail."""
        try:
            return send()
        except RECOVERABLE as error:
            self._run.do_without(error)
        return send()

    def _mixed(self, flight: Flight, prompts: PromptShape, plan: BurstPlan) -> Sent:
        run = self._run
        chunk = self._next_chunk(prompts)
        try:
            if flight.depth:
                run.tell_drafter()
            return run.decoder.mixed(
                run.params,
                run.device_state,
                plan,
                chunk.row_ids,
                chunk.counts,
                num_tokens=chunk.num_tokens,
                num_speculative_tokens=flight.depth,
                max_drafts=flight.decision.max_drafts,
            )
        except RECOVERABLE as error:
            run.do_without(error)
        # This mixed step was dropped, or the drafter: two separate calls do the same work.
        self._prefill(chunk)
        return self._plain(flight, plan)

    def _next_chunk(self, prompts: PromptShape) -> PromptChunk:
        """Returns the next prompt tokens to send, and reports the progress of prompts."""
        run, scheduler = self._run, self._run.scheduler
        total = run.prompts.num_tokens
        self._on_progress("prefill", total - scheduler.num_to_prefill, total)
        chunk = scheduler.next_chunk(prompts)
        run.num_prefilled += int(chunk.counts.sum())
        if not scheduler.num_to_prefill:
            self._on_progress("prefill", total, total)
            run.prompts.num_tokens = 0
        return chunk
