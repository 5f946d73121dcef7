"""Chooses the next burst: its K, rows and steps, and reserves its pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decode.bucket import Bucket, standing_row_buckets
from specjax.decode.sizes import PromptShape
from specjax.engine.flight import Flight
from specjax.engine.run_state import RunState
from specjax.policy.interface import (
    LEAST_TIMED_STEPS,
    Decision,
    Load,
    SpeculationPolicy,
    check_decision,
)

ENDLESS = 10**6  # remaining steps assumed while requests wait
# Least tokens that a row is expected to gain still, even past its expected end.
LEAST_LEFT = 8
# Most steps of a burst with a row whose tokens are read as they come: a few tokens at once, and
# little waiting.
STREAMED_STEPS = 2
DROPPED = Decision(num_speculative_tokens=0, reason="dropped")


class BurstChoice:
    """Asks the policy, limits its decision to what is possible, and takes the pages."""

    def __init__(self, run: RunState, policy: SpeculationPolicy):
        self._run = run
        self.policy = policy

    def next_burst(
        self,
        rows: np.ndarray,
        max_burst_steps: int | None,
        *,
        beside: PromptShape | None = None,
    ) -> Flight | None:
        """Returns a burst of these rows, pages reserved; None while pages are short.

        Args:
          rows: i64[rows that decode], their indices; at least one.
          max_burst_steps: most steps; None: Sizes.burst_steps. With a row that is streamed at
            most STREAMED_STEPS.
          beside: the prompts in the same step, of which there is one.
        """
        decoder = self._run.decoder
        table = self._run.scheduler.table
        most_steps = decoder.sizes.burst_steps
        usual_steps = min(most_steps, max_burst_steps or most_steps)
        if table.is_streamed[rows].any():
            usual_steps = min(usual_steps, STREAMED_STEPS)
        tokens = table.least[rows]
        load = self._load(rows, tokens, usual_steps, beside)
        decision = self.policy.choose(load)
        check_decision(decision, self.policy, load)
        if decision.prepare is not None:
            decoder.prepare(self._run.params, self._run.device_state, decision.prepare, beside)
        decision = self._possible(decision, load, beside)
        num_steps = min(usual_steps, decision.num_steps or usual_steps, load.num_steps_left)
        flight = self.reserve(rows, num_steps, decision, beside)
        if flight is None:
            return None
        kept = np.isin(rows, flight.own)  # others were preempted
        caps = load.draft_caps[kept]
        flight.context_tokens = load.num_context_tokens - int(tokens[~kept].sum())
        # Rows that draft nothing in this burst need no drafter catch-up.
        flight.num_behind = int(load.num_behind[kept][caps > 0].max(initial=1))
        if flight.decision is decision:  # else pages allow no drafts
            flight.is_cut = flight.num_steps < num_steps
            flight.asked_depth = np.minimum(caps, decision.num_speculative_tokens)
            if decision.draft_caps is not None:
                own = np.asarray(decision.draft_caps)[kept]
                flight.asked_depth = np.minimum(flight.asked_depth, own)
        return flight

    def reserve(
        self,
        rows: np.ndarray,
        num_steps: int,
        decision: Decision,
        beside: PromptShape | None = None,
    ) -> Flight | None:
        """Takes the pages for a burst of at most num_steps; None if there are none now.

        If pages are short, fewer steps are planned; where few are left, sent bursts are read back
        first (None), as these may end rows. Last a row is preempted. A burst beside prompts, or of
        one row beside rows whose prompts are fed in turn with it, drops its drafts before that, and
        stays plain.
        """
        run, scheduler = self._run, self._run.scheduler
        asked_steps = num_steps
        while len(rows):
            width = 1 + decision.num_speculative_tokens
            # A burst may end with the first step in which a row ends.
            least = 1 if len(scheduler.waiting) else num_steps
            lacking = scheduler.reserve(rows, num_steps * width, least)
            if not np.any(lacking):
                return Flight(rows, decision, num_steps, least, prompts=beside)
            if run.flights and num_steps < 2 * LEAST_TIMED_STEPS:
                return None
            if num_steps > 1:
                num_steps //= 2
            elif decision.num_speculative_tokens and (beside is not None or len(rows) == 1):
                plain = Decision(num_speculative_tokens=0, reason="pages")
                # Beside prompts plain steps of all rows are compiled first.
                smaller = self._row_buckets if beside is None else ()
                fitting = scheduler.row_buckets(rows, smaller)
                decision = self._available(plain, fitting, beside)
                num_steps = asked_steps
            else:
                rows = self._preempt(rows, int(lacking.argmax()))
                num_steps = asked_steps
        return None

    def _preempt(self, rows: np.ndarray, shard: int) -> np.ndarray:
        """Preempts a shard's last row by priority and arrival; returns the others of `rows`."""
        scheduler = self._run.scheduler
        own = [row for row in scheduler.occupied if row.shard == shard]
        row = scheduler.last_in(own)
        scheduler.preempt(row)
        self._run.num_preemptions += 1
        return rows[rows != row.index]

    def _possible(self, decision: Decision, load: Load, beside: PromptShape | None) -> Decision:
        """Returns a decision, limited by the load and by dropped executables."""
        depth = load.limit(decision.num_speculative_tokens)
        if depth < decision.num_speculative_tokens:
            decision = Decision(num_speculative_tokens=depth, reason=load.limited_by)
        elif load.most_speculative_tokens == 0:
            decision = dataclasses.replace(decision, reason=load.limited_by, why="")
        return self._available(decision, load.row_buckets, beside)

    def _available(
        self, decision: Decision, row_buckets: Sequence[int], beside: PromptShape | None
    ) -> Decision:
        """Returns a decision with its row bucket; plain decoding if its buckets were dropped."""
        least = decision.row_bucket or 0
        for each in (decision, DROPPED):
            shape = each.num_speculative_tokens, each.max_drafts
            for rows in row_buckets:
                if rows < least:
                    continue
                if not self._run.faults.is_dropped(Bucket(rows, *shape), beside):
                    return dataclasses.replace(each, row_bucket=rows)
        raise AssertionError("plain decoding of all rows is never dropped")

    def _load(
        self, rows: np.ndarray, tokens: np.ndarray, usual_steps: int, beside: PromptShape | None
    ) -> Load:
        """Returns the policy's input before a burst of these rows.

        Args:
          tokens: i64[rows], the least that each has after the bursts in flight.
        """
        run, scheduler, decoder = self._run, self._run.scheduler, self._run.decoder
        most, limited_by = self._limit(rows)
        table = scheduler.table
        tokens_left = table.max_length[rows] - tokens
        is_refilled = len(scheduler.waiting) > 0
        step = lambda bucket: (run.params, run.device_state, bucket, beside)
        return Load(
            num_decoding_rows=len(rows),
            num_waiting=len(scheduler.waiting),
            most_speculative_tokens=most,
            limited_by=limited_by,
            row_buckets=scheduler.row_buckets(rows, self._row_buckets),
            requests=table.request_number[rows],
            draft_caps=table.draft_cap[rows],
            num_behind=self._num_behind(rows, tokens),
            num_context_tokens=int(tokens.sum()),
            num_steps_left=ENDLESS if is_refilled else int(tokens_left.max()),
            tokens_left=() if is_refilled else tokens_left,
            urgency=() if is_refilled else urgency(table.expected_end[rows], tokens),
            num_probe_steps=usual_steps,
            prompt_tokens=0 if beside is None else beside.num_tokens,
            compile_s=decoder.burst_compile_s,
            is_compiled=lambda bucket: decoder.is_compiled(*step(bucket)),
            is_coming=lambda bucket: decoder.is_coming(*step(bucket)),
            is_any_coming=decoder.is_any_coming,
            read_s=lambda bucket: decoder.read_s(*step(bucket)),
            is_dropped=lambda bucket: run.faults.is_dropped(bucket, beside),
        )

    def _num_behind(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of each row that the drafter has not seen, i64[rows]."""
        flights, scheduler = self._run.flights, self._run.scheduler
        # A drafter that cannot catch up is told of every token in the step that feeds it.
        if not (scheduler.needs_drafter and scheduler.catches_up):
            return np.ones_like(tokens)
        num_behind = tokens - scheduler.table.num_drafter_final[rows]
        if flights and flights[-1].depth:
            # A burst in flight lets the drafter catch up, but for rows that draft nothing in it.
            last = flights[-1]
            drafting = last.own[np.asarray(last.asked_depth) > 0]
            num_behind[np.isin(rows, drafting)] = 1
        return num_behind

    def _limit(self, rows: np.ndarray) -> tuple[int | None, str]:
        """Returns the largest K allowed now, None for no limit, and the reason of the limit."""
        if self._run.faults.is_drafter_off:
            return 0, "drafter off"
        if not np.any(self._run.scheduler.table.draft_cap[rows]):
            return 0, "user"
        closed_by = self._run.gate.closed_by(len(rows), self._weighed_tokens())
        return (0, closed_by) if closed_by else (None, "")

    def _weighed_tokens(self) -> int:
        """Returns the most tokens of all rows, after the work sent so far or in the worst case."""
        table = self._run.scheduler.table
        if self._run.decoder.engine_config.gate == "worst_case":
            return int(table.max_length.sum())
        return int(table.most.sum())

    @functools.cached_property
    def _row_buckets(self) -> Sequence[int]:
        """Row buckets below all rows that bursts may be compiled for, ascending."""
        decoder = self._run.decoder
        asked = decoder.engine_config.row_buckets
        if asked is not None:
            return asked
        if not getattr(self.policy, "chooses_rows", False):
            return ()
        return standing_row_buckets(decoder.sizes.rows, decoder.num_shards)


def urgency(expected_end: np.ndarray, tokens: np.ndarray) -> Any:
    """Returns how much a token gained by each row brings the end of the batch nearer, 0 to 1.

    It is the square of a row's expected rest over the longest rest; () if a length is unknown.
    """
    if not np.all(expected_end):
        return ()
    left = np.maximum(expected_end - tokens, LEAST_LEFT)
    return (left / left.max()) ** 2
