"""Reads back bursts: tokens go to requests, figures to the policy, pages to the pool."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config.sampling import SamplingParams
from specjax.engine.faults import what_it_proposed
from specjax.engine.flight import Flight, record_of
from specjax.engine.metrics import BurstRecord, which_k
from specjax.engine.request import (
    SCORE_COLUMNS,
    Request,
    TokenLogProbs,
    TokenScores,
)
from specjax.engine.rows import Row
from specjax.engine.run_state import RunState
from specjax.policy.interface import Outcome, SpeculationPolicy
from specjax.runtime.progress import LOGGER
from specjax.types import StepInfo

MOST_RECORDS = 10_000  # bursts that are remembered
# StepInfo's fields that a policy learns from.
LEARNED = ("num_committed", "num_accepted", "draft_depth", "proposed_depth")


class Reader:
    """Reads back bursts in the order in which they were sent.

    Attributes:
      records: the last bursts: K, the reason, predicted and measured figures.
    """

    def __init__(self, run: RunState, policy: SpeculationPolicy):
        self._run = run
        self._policy = policy
        self.records: collections.deque[BurstRecord] = collections.deque(maxlen=MOST_RECORDS)

    def read(self, moved: list[Request]) -> None:
        """Reads back the burst that was sent first; adds the requests it advanced to `moved`."""
        run, scheduler = self._run, self._run.scheduler
        flight = run.flights.popleft()
        assert flight.report is not None
        assert flight.done_at is not None
        done_at = flight.done_at.result()
        num_steps = int(np.asarray(flight.num_steps_run))
        begun_at = max(flight.sent_at, run.clock.done_at)
        if flight.prompts_done_at is not None:
            begun_at = max(begun_at, flight.prompts_done_at.result())
        run.clock.done_at = done_at
        # Rows that were not aborted or preempted since.
        rows = {
            place: row
            for place, row in zip(flight.places.tolist(), flight.rows, strict=True)
            if scheduler.rows[row.index] is row
        }
        own = np.array([row.index for row in rows.values()], np.int64)
        scheduler.land(own, flight.growth, flight.least)
        requests = {place: row.request for place, row in rows.items()}
        collect(flight.report, num_steps, requests, flight.params_version)
        moved += requests.values()  # before code that may raise: some have ended by now
        if num_steps:
            drafter_lengths = np.asarray(flight.report.drafter_lengths)[num_steps - 1]
            for place, row in rows.items():
                self._update(row, int(drafter_lengths[place]))
        self._observe(flight, rows, num_steps, begun_at)
        # A request that ended by an error, as one that forbids every token, says nothing of drafts.
        sound = [at for at, row in rows.items() if row.request.finish_reason != "error"]
        fault = np.max(np.asarray(flight.report.drafter_fault)[:num_steps, sound], initial=0)
        if fault:
            run.turn_drafter_off(what_it_proposed(int(fault)))

    def _update(self, row: Row, drafter_length: int) -> None:
        """Updates a row with the new tokens of its request; releases it if that has ended."""
        request, run = row.request, self._run
        num_known = len(row.token_ids) - len(request.prompt_token_ids)
        new = request.output_token_ids[num_known:]
        run.scheduler.take_tokens(row, new, drafter_length)
        if run.feed is not None and request.finish_reason != "error":
            run.feed.note(request)
        if request.is_finished:
            run.scheduler.release(row, forgets=request.finish_reason == "error")
        else:
            run.scheduler.shrink(row)

    def _observe(
        self, flight: Flight, rows: dict[int, Row], num_steps: int, begun_at: float
    ) -> None:
        """Passes a burst's outcome to the policy, and records it.

        Args:
          rows: rows that were still running, by their places.
          begun_at: time.perf_counter() when the device began; it was done at `clock.done_at`.
        """
        if not num_steps:
            return
        clock = self._run.clock
        seconds = clock.done_at - begun_at
        figures = {
            name: np.asarray(getattr(flight.report, name))[:num_steps, list(rows)]
            for name in LEARNED
        }
        if flight.is_learned_from:
            self._policy.observe(self._outcome(flight, rows, figures, seconds, begun_at))
            if flight.prompts is None:
                clock.told_at = clock.done_at
        num_tokens = int(figures["num_committed"].sum())
        record = record_of(flight, num_steps, seconds, num_tokens)
        before = self.records[-1].num_speculative_tokens if self.records else None
        if record.num_speculative_tokens != before and self._policy.max_speculative_tokens:
            LOGGER.info("%d rows: %s", record.num_rows, which_k([record]))
        self.records.append(record)

    def _outcome(
        self,
        flight: Flight,
        rows: dict[int, Row],
        figures: dict[str, np.ndarray],
        seconds: float,
        begun_at: float,
    ) -> Outcome:
        """Returns the outcome of a burst for the policy; `figures` are those of LEARNED."""
        clock, num_committed = self._run.clock, figures["num_committed"]
        assert flight.bucket is not None
        asked = np.zeros(flight.bucket.rows, np.int64)
        asked[flight.places] = flight.asked_depth
        # A compilation at the same time may have slowed the burst.
        is_slowed = flight.is_warm_up or self._run.decoder.compiled_between(
            flight.sent_at, clock.done_at
        )
        measured_s = seconds if seconds > 0 and not is_slowed else None
        has_prompts = flight.prompts is not None
        return Outcome(
            decision=flight.decision,
            bucket=flight.bucket,
            num_rows=len(flight.rows),
            seconds=None if has_prompts else measured_s,
            mixed_s=measured_s if has_prompts else None,
            prompt_tokens=0 if flight.prompts is None else flight.prompts.num_tokens,
            idle_s=begun_at - clock.told_at if clock.told_at else 0.0,
            num_context_tokens=flight.context_tokens + int(num_committed.sum()) / 2,
            num_behind=flight.num_behind,
            growth=flight.growth,
            is_cut=flight.is_cut,
            requests=np.array([r.request.number for r in rows.values()], np.int64),
            asked_depth=asked[list(rows)],
            **figures,
        )


def collect(
    report: StepInfo, num_steps: int, running: dict[int, Request], params_version: int
) -> None:
    """Hands each row's tokens of a burst to its request."""
    names = ("num_committed", "num_accepted", "num_drafted", "draft_depth", "finish")
    # [rows, steps, names]: converting one row at a time to plain numbers is fastest.
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
            request.take_step(
                own, accepted, drafted, finish, described, depth, surpluses, params_version
            )


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
    logprobs: Any, index: tuple[int, int, int], token_id: int, params: SamplingParams
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
