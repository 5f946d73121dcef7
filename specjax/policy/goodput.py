"""Goodput: chooses the bucket with the most expected tokens per second. No jax.

    rate(bucket) = (rows + expected accepted draft tokens) / seconds of its step

A candidate is every bucket that holds the rows: a number of rows, a K and, where acceptance
differs between rows, fewer draft slots than rows * K, which go to the likeliest draft tokens.
Seconds come from StepCosts, acceptance from Survival. Both are learned in service:

- Drafting has to earn its place. While plain decoding or the best K was never measured, one
  of the two runs (plain decoding, unless drafting is known to be better) and the other is
  compiled in the background. A run that may be short waits for the compilation at its half,
  if the wait is a small fraction of what is left: its second half then measures both.
- A process begins with a bucket that is compiled or kept on disk.
- Any other bucket is compiled in the background once the regret of not having it reaches the
  seconds that compiling it takes from the run, or those of reading it from disk (ski rental).
  Regret accumulates over the runs of a pair of target and drafter (`ledger`). A fraction of it
  is enough for a bucket that is SURE_GAIN better by known acceptance.
- Probes have budgets. PROBE_SHARE of all seconds and PLAIN_SHARE of drafting seconds pay for
  measuring plain decoding again, ASK_SHARE of plain decoding for measuring acceptance again.
  HOPE_SHARE more, and GAIN_SHARE of the seconds that drafting saves, pay for buckets that were
  measured too little to rule out.
- Leaving K = 0 takes a margin, and must repay the drafter's catch-up.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.policy.beside_prompts import BesidePrompts, Option
from specjax.policy.interface import LEAST_TIMED_STEPS, Decision, Load, Outcome
from specjax.policy.ledger import Ledger
from specjax.policy.ranked_slots import RankedSlots
from specjax.policy.step_cost import LEAST_DOUBT, StepCosts
from specjax.policy.survival import Survival

# Relative gain in rate over K = 0 that drafting needs to begin; candidates that promise rates
# less far apart promise the same.
MARGIN = 0.03
STICKINESS = 0.01  # relative gain in rate that a change of bucket needs
OPTIMISM = 0.05  # fraction taken off the predicted seconds of an unmeasured bucket
PROBE_SHARE = 0.004  # fraction of all seconds that routine probes may lose
# Extra probe budget, a fraction of all seconds, for buckets that were measured too little to
# rule out.
HOPE_SHARE = 0.008
# Cap of either probe budget, in bursts of plain decoding, each of PLAIN_PROBE_S at most.
MOST_HOPE = 2.0
# Least extra budget of a new pair, in bursts: what is learned early serves longest.
FIRST_HOPE = 0.5
GAIN_SHARE = 0.05  # fraction of the seconds saved by drafting that joins the extra budget
# Weight of the newest burst in the moving average of steps that pages allow. After a burst that
# pages did not cut, the average grows by a tenth of this.
GROWTH_SHARE = 0.1
ENOUGH_MEASURED = 3  # measurements after which a bucket may run for more than a probe
# Seconds of plain decoding after which a probe that drafts is due, and the fraction of plain
# decoding that it may lose, drafter catch-up included.
ASK_EVERY_S, ASK_SHARE = 4.0, 0.015
# After ASK_LATE * ASK_EVERY_S of plain decoding such a probe may lose LATE_SHARE * LATE_S
# seconds instead: catch-up may cost less than predicted. LATE_SHARE of all seconds refills
# this budget.
ASK_LATE, LATE_SHARE, LATE_S = 4, 0.03, 30.0
LEAST_APART_S = 0.25  # plain decoding between routine probes that draft
PLAIN_SHARE = 0.005  # fraction of drafting seconds that a probe of plain decoding may lose
# Longest burst that drafts: acceptance may fall while it runs.
MOST_DRAFTING_S = 0.5
# Least charge for a probe, as a fraction of the seconds that its steps would take in the best
# bucket: the prediction may be wrong.
LEAST_LOST = 0.12
# Largest charge for a probe, in multiples of its predicted loss: the machine may have been
# busy with something else.
MOST_CHARGED = 4.0
# Most bursts between two of one bucket whose number of steps and seconds are compared.
# LEAST_OF_STEPS: the smallest fraction of a burst's seconds that counts as its steps.
BURSTS_NEAR, LEAST_OF_STEPS = 3, 0.5
PROBE_STEPS = 8  # of a probe
LEAST_STEPS = 2  # of any burst
# PROBE_S: longest probe. PLAIN_PROBE_S: longest probe of plain decoding, or of a bucket that
# may be worth leaving K = 0 for. TIMED_S: seconds from which a burst of few steps is timed well.
PROBE_S, PLAIN_PROBE_S, TIMED_S = 0.25, 1.0, 0.1
# Predicted drafter catch-up per token before it was measured, as a fraction of a step.
CATCH_UP_SHARE = 0.01
LEAST_CATCH_UP = 0.25  # least catch-up that is deducted, as a fraction of that prediction
MOST_IDLE_S = 1.0  # longest idle time between two bursts that are compared
USUAL_K = 3  # first K tried where nothing is known
# Relative gain, and number of drafts that tell the acceptance rate, with which drafting may run
# before plain decoding was measured.
SURE_GAIN, SURE_TRIALS = 0.15, 16.0
# Fraction of the seconds of a compilation in the background that regret must reach: what the run
# beside it loses, as measured on two cores, and less for a bucket that is surely better.
COMPILE_SHARE, SURE_SHARE = 0.5, 0.02
MOST_WAIT = 0.25  # fraction of the rest of a run that it may wait for a compilation
LEAST_SHARED = 4  # shortest run that waits for a compilation, in probes of PROBE_STEPS
ENOUGH_STEPS = 10_000  # most remaining steps that count towards repaying a compilation
SMALL_CATCH_UP = 0.05  # fraction of a burst below which catch-up does not hide its steps' cost
EXPLORED = 3  # alternating measurements of plain decoding and a K: one may be disturbed


def ladder(most: int) -> tuple[int, ...]:
    """Returns the values of K to try up to `most`: 1, 2, 3, 5, 7, 11, 15, ..., and `most`.

    With its root a chain is then 2, 3, 4, 6, 8, 12, 16, ... tokens: powers of two, which products
    are often padded to, and halfway between.
    """
    powers = [2**power for power in range(1, most.bit_length() + 1)]
    between = [3 * power // 2 for power in powers]
    return tuple(sorted({n - 1 for n in (*powers, *between, most + 1) if 1 < n <= most + 1}))


class _Candidate(NamedTuple):
    bucket: Bucket
    tokens: float  # expected per step, of all rows
    seconds: float
    rate: float  # tokens per second
    doubt: float  # fraction by which its seconds may be less than predicted
    slots: RankedSlots

    def hoped_rate(self, more: float, least_s: Mapping[int, float]) -> float:
        """Returns an optimistic rate: fewer seconds as in `most_rate` and `more` times the tokens.

        The two errors are independent, so their logarithms add in quadrature."""
        faster = self.most_rate(least_s) / self.rate
        return self.rate * math.exp(math.hypot(math.log(faster), math.log(more)))

    def most_rate(self, least_s: Mapping[int, float]) -> float:
        """Returns the rate if a step takes as little as `doubt` allows, and no less than
        least_s[rows]."""
        least = min(least_s.get(self.bucket.rows, 0.0), self.seconds)
        return self.rate * self.seconds / max(self.seconds * (1 - self.doubt), least)


@dataclasses.dataclass
class _Exploration:
    """Two buckets that are measured in turns; `other` is None before and after that."""

    first: Bucket | None = None
    other: Bucket | None = None
    num_steps: int = 0  # steps left in the run when it began
    is_second_look: bool = False  # at `other` alone, which was measured once
    # Time of its first burst by the policy's clock, and the steps left at that time.
    begun_at: float | None = None
    steps_then: int = 0
    turns: list[Bucket] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Charge:
    """Predicted loss of a probe, charged to a budget before it runs and corrected after it."""

    bucket: Bucket
    pot: str  # the Ledger attribute that holds the budget
    lost: float  # predicted loss, seconds
    rate: float  # tokens per second of the bucket that ran before
    share: float = 1.0  # of its tokens that bring the end of the run nearer
    spent: float = 0.0  # measured loss: seconds beyond those of its tokens at that rate
    has_run: bool = False
    num_before: int = 0  # outcomes of bursts that were sent before it

    def add(self, outcome: Outcome) -> None:
        assert outcome.seconds is not None
        tokens = float(np.sum(outcome.num_committed))
        if outcome.bucket == self.bucket:
            tokens *= self.share
        self.spent += outcome.seconds - tokens / self.rate

    def too_little(self) -> float:
        """Returns the seconds still to be charged, up to MOST_CHARGED times the prediction."""
        return min(max(self.spent - self.lost, 0.0), (MOST_CHARGED - 1) * self.lost)


def _of_bucket(bucket: Bucket, reason: str, **more: Any) -> Decision:
    return Decision(
        num_speculative_tokens=bucket.num_speculative_tokens,
        reason=reason,
        row_bucket=bucket.rows,
        max_drafts=bucket.max_drafts,
        **more,
    )


class Goodput:
    """Chooses the bucket with the most expected tokens per second.

    Args:
      max_speculative_tokens: the largest K.
      costs: step costs known so far; updated by `observe`.
      depths: the values of K above 0 that may be compiled; by default those of `ladder`.
      ranks: whether fewer slots than rows * K may go to the likeliest tokens: Bucket.max_drafts.
      knows_confidence: whether the drafter returns a confidence per token. The device ranks
        slots by it; without it the policy ranks them by the rows' acceptance rates.
      ledger: budgets and regret of earlier runs of the pair; by default empty.
      survival: acceptance known so far; updated by `observe`. By default empty.
      clock: returns seconds; times the run.
    """

    chooses_rows: ClassVar[bool] = True

    def __init__(
        self,
        max_speculative_tokens: int,
        costs: StepCosts | None = None,
        *,
        depths: Sequence[int] | None = None,
        ranks: bool = True,
        knows_confidence: bool = False,
        ledger: Ledger | None = None,
        survival: Survival | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_speculative_tokens = max_speculative_tokens
        self.costs = costs or StepCosts()
        self.costs.begin_run()
        self.survival = survival or Survival(max_speculative_tokens)
        self.seconds_lost = 0.0  # to probes, estimated
        self._depths = ladder(max_speculative_tokens) if depths is None else depths
        self._ranks = ranks
        self._knows_confidence = knows_confidence
        self._clock = clock
        self._last: Bucket | None = None
        self._beside = BesidePrompts()
        self.ledger = Ledger() if ledger is None else ledger
        self._exploration: _Exploration | None = None
        self._was_probe = False
        self._again: Bucket | None = None  # probed once more in the next burst
        self._charge: _Charge | None = None
        # The last burst of each bucket: its number, steps and seconds.
        self._last_of: dict[Bucket, tuple[int, int, float]] = {}
        self._num_observed = 0
        self._burst_steps = 1  # most steps of a burst
        self._growth = math.inf  # tokens per row, about, that pages allow a burst
        self._buckets_of: dict[int, tuple[Bucket, ...]] = {}  # by rows
        self._rates: dict[Bucket, float] = {}  # tokens per second of the last candidates
        self._compared: _Candidate | None = None  # the fastest of them that drafts
        self._missing: set[Bucket] = set()  # candidates that are not compiled
        self._regretted: set[Bucket] = set()  # those of them that might have run

    def choose(self, load: Load) -> Decision:
        """Returns the best compiled bucket, and the bucket to compile in the background, if any."""
        if load.prompt_tokens:
            return self._choose_beside(load)
        self._burst_steps = max(load.num_probe_steps, 1)
        decision = self._explore(load)
        if decision is not None:
            return decision
        candidates = [c for c in self._candidates(load) if not load.is_dropped(c.bucket)]
        if not candidates:
            return self._plain(load, load.limited_by or "nothing measured yet")
        self._rates = {c.bucket: c.rate for c in candidates}
        self._compared = max(
            candidates, key=lambda c: (c.bucket.num_speculative_tokens > 0, c.rate)
        )
        self._missing = {b for b in self._rates if not load.is_compiled(b)}
        usable = [c for c in candidates if c.bucket not in self._missing]
        self._regretted = {b for b in self._missing if _is_allowed(b, load)}
        soonest = None
        if not usable or self._last is None:
            first, soonest = self._first(self._trusted(candidates), load)
            usable = [first]
        best = self._best(self._trusted(usable), load)
        allowed = [c for c in usable if _is_allowed(c.bucket, load)]
        if not allowed:
            return self._plain(load, load.limited_by)
        if best not in allowed:
            best = self._best(allowed, load)
            return self._decide(load, best, load.limited_by)
        again, self._again = self._again, None
        if (other := next((c for c in allowed if c.bucket == again), None)) is not None:
            # The drafter has caught up: this burst's seconds are those of its steps alone.
            return self._measure(load, other, _num_steps(PROBE_STEPS, other.seconds))
        if self._was_probe:
            # The bucket before the probe runs again: it shows whether the machine's speed
            # changed meanwhile, which would spoil the measurement.
            best = next((c for c in allowed if c.bucket == self._last), best)
            self._was_probe = False
            num_steps = _num_steps(PROBE_STEPS, best.seconds)
            return self._decide(load, best, "goodput", num_steps=num_steps)
        # A change to a better bucket comes before probes.
        probe = self._probe(best, allowed, load) if best.bucket == self._last else None
        if probe is not None:
            return probe
        prepare = soonest or self._missed(best, candidates, load)
        return self._decide(load, best, "goodput", prepare=prepare)

    def expect_acceptance(self, survival: Sequence[float]) -> None:
        """Replaces what was learned of acceptance; see `ExpectsAcceptance`."""
        self.survival.expect(survival)

    def observe(self, outcome: Outcome) -> None:
        """Learns acceptance and step cost from a burst, and the regret of uncompiled buckets."""
        bucket = outcome.bucket
        self.survival.forget_others(outcome.requests)
        if not outcome.prompt_tokens:
            self.ledger.note(bucket)
            self._growth = _growth_after(self._growth, outcome)
        if bucket.num_speculative_tokens and outcome.num_steps:
            self.survival.observe(
                outcome.requests,
                outcome.num_committed,
                outcome.num_accepted,
                outcome.draft_depth,
                outcome.proposed_depth,
                outcome.asked_depth,
            )
        if outcome.prompt_tokens:
            self._observe_beside(outcome)
            return  # it tells nothing of the seconds of bursts
        if not outcome.seconds or not outcome.num_steps:
            self.costs.begin_run()  # the next burst is not compared with earlier ones
            return
        if outcome.idle_s > MOST_IDLE_S:
            self.costs.begin_run()
            self._last_of.clear()
        self._settle(outcome)
        self._save_up(outcome)
        self._count_regret(outcome)
        self._observe_cost(outcome)

    # Beside prompts

    def _choose_beside(self, load: Load) -> Decision:
        """Returns the step to run with prompts beside it: drafting where bursts draft, and where
        what it adds to the step is worth it."""
        plain = self._plain(load, load.limited_by or "prompts")
        assert plain.row_bucket is not None
        # Bursts are compared at their usual length.
        usual = dataclasses.replace(load, num_probe_steps=self._burst_steps)
        candidates = [
            c
            for c in self._candidates(usual)
            if not load.is_dropped(c.bucket)
            and c.bucket.num_speculative_tokens == load.limit(c.bucket.num_speculative_tokens)
        ]
        measured = [c for c in candidates if self.costs.count(c.bucket)]
        best = max(measured, key=lambda c: c.rate, default=None)
        if best is None or not best.bucket.num_speculative_tokens:
            return plain
        rows, bucket = load.num_decoding_rows, Bucket(plain.row_bucket, 0)
        plain_s = self.costs.seconds(bucket, _midway(usual, rows))
        assert plain_s is not None, "a bucket was measured"
        options = [Option(c.bucket, c.tokens, c.seconds) for c in measured]
        drafting = [o for o in options if o.bucket.num_speculative_tokens]
        chosen, prepare = self._beside.choose(
            load, Option(bucket, float(rows), plain_s), drafting, best.rate
        )
        if chosen.bucket == bucket:
            return dataclasses.replace(plain, prepare=prepare)
        slots = next(c.slots for c in measured if c.bucket == chosen.bucket)
        is_capped = chosen.bucket.max_drafts is not None and not self._knows_confidence
        return _of_bucket(
            chosen.bucket,
            "goodput",
            draft_caps=slots.likeliest(chosen.bucket) if is_capped else None,
            predicted_tokens=chosen.tokens,
            prepare=prepare,
        )

    def _observe_beside(self, outcome: Outcome) -> None:
        """Learns the seconds of a step with prompts, unless drafter catch-up is part of them."""
        has_catch_up = outcome.bucket.num_speculative_tokens and outcome.num_behind > 1
        if outcome.mixed_s and not has_catch_up:
            self._beside.costs.observe(outcome.bucket, outcome.prompt_tokens, outcome.mixed_s)

    # Candidates

    def _candidates(self, load: Load, row_buckets: Sequence[int] | None = None) -> list[_Candidate]:
        """Returns every bucket with its expected tokens and seconds; [] if no costs are known."""
        slots = RankedSlots(
            self.survival,
            load.requests,
            np.asarray(load.draft_caps),
            self._depths,
            np.asarray(load.tokens_left),
            np.asarray(load.urgency),
        )
        candidates = []
        about = _midway(load, load.num_decoding_rows)
        shapes = self._shapes(load) if row_buckets is None else self.buckets(row_buckets)
        buckets = list(shapes)
        for bucket, gained in zip(buckets, slots.all_expected(buckets)):
            tokens = load.num_decoding_rows + gained
            seconds, doubt = self.costs.estimate(bucket, _midway(load, tokens), about)
            if seconds is None:
                return []
            if not self.costs.count(bucket):
                seconds *= 1 - OPTIMISM
            seconds += self.costs.burst_s / _usual_steps(bucket, seconds, load, self._growth)
            rate = slots.together(bucket) * tokens / seconds
            candidates.append(_Candidate(bucket, tokens, seconds, rate, doubt, slots))
        return candidates

    def _shapes(self, load: Load) -> Iterator[Bucket]:
        """Yields every bucket of the smallest row bucket, and larger ones of its missing K.

        Those are compiled or, before the first burst, kept on disk.
        """
        begins = self._last is None and not load.prompt_tokens
        is_there = load.is_there if begins else load.is_compiled
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        fewest, *larger = rows or load.row_buckets
        yield from self.buckets([fewest])
        missing = {
            depth for depth in (0, *self._depths) if not load.is_compiled(Bucket(fewest, depth))
        }
        for bucket in self.buckets(larger):
            if bucket.num_speculative_tokens in missing and is_there(bucket):
                yield bucket

    def buckets(self, row_buckets: Iterable[int]) -> Iterator[Bucket]:
        """Yields all buckets that may be compiled for the given row buckets."""
        for rows in row_buckets:
            if rows not in self._buckets_of:
                self._buckets_of[rows] = tuple(self._all_buckets(rows))
            yield from self._buckets_of[rows]

    def _all_buckets(self, rows: int) -> Iterator[Bucket]:
        yield Bucket(rows, 0)
        for depth in self._depths:
            yield Bucket(rows, depth)
            if not self._ranks or rows == 1:
                continue
            for mean in self._depths:
                if mean < depth:
                    yield Bucket(rows, depth, rows * mean)

    def _first(
        self, candidates: Sequence[_Candidate], load: Load
    ) -> tuple[_Candidate, Bucket | None]:
        """Returns the first bucket to run, and the one to compile in the background, if any.

        A bucket that is compiled or kept on disk runs, otherwise plain decoding, which compiles
        sooner. The run does not wait for the bucket that would end it first.
        """
        there = [c for c in candidates if load.is_there(c.bucket)]
        plain = [c for c in candidates if not c.bucket.num_speculative_tokens]
        soonest = self._soonest_done(candidates, load)
        first = self._soonest_done(there or plain or candidates, load)
        is_coming = soonest in there or load.is_coming(soonest.bucket)
        return first, None if is_coming or soonest is first else soonest.bucket

    def _soonest_done(self, candidates: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns the candidate with which the run ends first, waiting for it included.

        Plain decoding wins where it is within MARGIN.
        """

        tokens = min(load.num_steps_left, ENOUGH_STEPS) * load.num_decoding_rows
        seconds = {c.bucket: load.ready_s(c.bucket) + tokens / c.rate for c in candidates}
        of = lambda c: seconds[c.bucket]
        best = min(candidates, key=of)
        plain = [c for c in candidates if not c.bucket.num_speculative_tokens]
        close = [c for c in plain if of(c) <= (1 + MARGIN) * of(best)]
        return min(close or [best], key=of)

    def _trusted(self, candidates: Sequence[_Candidate]) -> Sequence[_Candidate]:
        """Returns the candidates that may run for more than a probe.

        For each number of rows: plain decoding and the buckets that were measured so often that
        one disturbed burst does not matter; all of them where none was measured that often.
        """
        rows = {c.bucket.rows for c in candidates if self._is_trusted(c)}
        return [
            c
            for c in candidates
            if self._is_trusted(c)
            or c.bucket.rows not in rows
            or not c.bucket.num_speculative_tokens
        ]

    def _is_trusted(self, candidate: _Candidate) -> bool:
        return self.costs.count(candidate.bucket) >= ENOUGH_MEASURED

    def _missed(
        self, best: _Candidate, candidates: Sequence[_Candidate], load: Load
    ) -> Bucket | None:
        """Returns the best bucket whose regret repays compiling or reading it, if any."""
        if load.is_any_coming():
            return None  # two at once would slow the run twice
        missed = [
            c
            for c in candidates
            if c.bucket in self.ledger.missed_s
            and c.rate > best.rate
            and _is_allowed(c.bucket, load)
            and not load.is_compiled(c.bucket)
        ]
        # `_repays` asks the file system: the best come first, and the search stops at a hit.
        missed.sort(key=lambda c: c.rate, reverse=True)
        repaid = (c for c in missed if self._repays(c.bucket, load, self._is_sure(c, best, load)))
        most = next(repaid, None)
        if most is None:
            return None
        return most.bucket

    def _is_sure(self, candidate: _Candidate, best: _Candidate, load: Load) -> bool:
        """Returns whether a candidate is much better than the best that runs, by what is known.

        Of its seconds half of what is doubted is added, and of its tokens a deviation taken off.
        A bucket of fewer rows is never sure: when the rows that are over leave it, no more is
        known of how long it will run than of how fast. Nor is any bucket that this process, by
        how long the last one decoded, ends too soon to be repaid for.
        """
        is_known = not self._knows_no_acceptance and self._is_trusted(best)
        if not is_known or candidate.bucket.rows != best.bucket.rows:
            return False
        rate = candidate.rate * (1 - candidate.doubt / 2)
        if not self.costs.count(candidate.bucket):
            rate *= 1 - OPTIMISM
        if candidate.bucket.num_speculative_tokens:
            rate *= self._optimism(load, -1.0)(candidate)
        if rate < best.rate * (1 + SURE_GAIN):
            return False
        left_s = min(load.num_steps_left, ENOUGH_STEPS) * best.seconds
        saved_s = (1 - best.rate / rate) * max(left_s, self.ledger.left_s)
        return saved_s >= COMPILE_SHARE * load.compile_s

    def _repays(self, bucket: Bucket, load: Load, is_sure: bool) -> bool:
        """Returns whether the regret of a bucket reaches its share of the seconds of compiling, or
        those of reading it."""
        read_s = load.read_s(bucket)
        share = SURE_SHARE if is_sure else COMPILE_SHARE
        needed_s = share * load.compile_s if read_s is None else read_s
        lost_s = self.ledger.lost_s(bucket, is_kept=read_s is not None)
        if lost_s < needed_s or read_s is not None:
            return lost_s >= needed_s
        # Of others that are on disk and did not run yet, the bucket saves only what is beyond them.
        saved_s = (
            self.ledger.lost_s(other, is_kept=False)
            for other in self.ledger.missed_s
            if other.rows == bucket.rows and load.read_s(other) is not None
        )
        return lost_s - max(saved_s, default=0.0) >= needed_s

    def _best(self, candidates: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns the candidate of the highest rate, with hysteresis against changes.

        Leaving K = 0 takes MARGIN and must repay the catch-up; other changes take STICKINESS.
        """
        plain = [c for c in candidates if not c.bucket.num_speculative_tokens]
        best = max(candidates, key=lambda c: c.rate)
        best_plain = max(plain, key=lambda c: c.rate, default=None)
        was_plain = self._last is not None and not self._last.num_speculative_tokens
        if best_plain is not None and best.bucket.num_speculative_tokens and was_plain:
            gain = best.rate / best_plain.rate - 1
            left_s = load.num_steps_left * best_plain.seconds
            repaid = gain * left_s >= self._catch_up(load, best_plain.seconds)
            if gain < MARGIN or not repaid:
                return best_plain
        same = next((c for c in candidates if c.bucket == self._last), None)
        if same is not None and best.rate < same.rate * (1 + STICKINESS):
            return same
        return best

    def _decide(self, load: Load, chosen: _Candidate, reason: str, **more: Any) -> Decision:
        self._last = chosen.bucket
        draft_caps = None
        if chosen.bucket.num_speculative_tokens:
            most = max(int(MOST_DRAFTING_S / chosen.seconds), LEAST_STEPS)
            if self._knows_no_acceptance:
                most = min(most, _num_steps(PROBE_STEPS, chosen.seconds))
            if most < load.num_probe_steps:
                more.setdefault("num_steps", most)
        if chosen.bucket.max_drafts is not None and not self._knows_confidence:
            draft_caps = chosen.slots.likeliest(chosen.bucket)
        other, why = self._compared, ""
        is_plain = not chosen.bucket.num_speculative_tokens
        if reason == "goodput" and is_plain and other and other.bucket.num_speculative_tokens:
            reason = "unproven" if other.rate > chosen.rate else reason
            why = (
                f"a step with K = {other.bucket.num_speculative_tokens} is expected to give "
                f"{other.tokens / chosen.tokens:.2f} times the tokens in "
                f"{other.seconds / chosen.seconds:.2f} times the time"
            )
        return Decision(
            num_speculative_tokens=chosen.bucket.num_speculative_tokens,
            reason=reason,
            row_bucket=chosen.bucket.rows,
            max_drafts=chosen.bucket.max_drafts,
            draft_caps=draft_caps,
            predicted_step_s=chosen.seconds,
            predicted_tokens=chosen.tokens,
            why=why,
            **more,
        )

    # Before plain decoding and a K were measured

    def _plain(self, load: Load, reason: str, **more: Any) -> Decision:
        """Returns plain decoding in the smallest compiled row bucket, else in the largest."""
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        *smaller, most = rows or load.row_buckets
        # The largest row bucket also holds requests that are admitted later.
        ready = (r for r in smaller if load.is_compiled(Bucket(r, 0)))
        return Decision(
            num_speculative_tokens=0,
            reason=reason,
            row_bucket=next(ready, most),
            **more,
        )

    def _explore(self, load: Load) -> Decision | None:
        """Returns a burst while plain decoding or the best K was never measured; None after.

        The policy's first bursts run one of the two and compile the other in the background. Once
        that is compiled, the two run and are measured in turns.
        """
        if not load.limit(self.max_speculative_tokens):
            return None
        if self._exploration is None:
            self._exploration = self._exploration_of(load)
        found = self._exploration
        if found.other is None or found.first is None:
            return None
        rows = found.first.rows
        depth = max(b.num_speculative_tokens for b in (found.first, found.other))
        is_over = rows not in load.row_buckets or load.is_dropped(found.other)
        if is_over or load.limit(depth) < depth:
            self._exploration = _Exploration()
            return None
        if not found.turns:
            is_late = load.num_steps_left <= found.num_steps // 2
            waits = is_late and found.num_steps >= LEAST_SHARED * PROBE_STEPS
            waits = self._is_short_wait(found, load) and waits
            if not load.is_compiled(found.other) and not waits:
                return _of_bucket(found.first, "nothing measured yet", prepare=found.other)
            if found.is_second_look:
                found.turns.append(found.other)
            else:
                found.turns += [found.other, found.first] * EXPLORED
        bucket = found.turns.pop(0)
        step_s = self.costs.seconds(bucket, _midway(load, load.num_decoding_rows)) or 0.0
        plain_s = self.costs.seconds(Bucket(rows, 0), _midway(load, load.num_decoding_rows)) or 0.0
        is_long = bucket == found.first and _is_long(plain_s)
        if not found.turns or is_long:
            self._exploration = _Exploration()
        reason = "probe" if bucket == found.other else "nothing measured yet"
        most = LEAST_TIMED_STEPS if found.is_second_look else PROBE_STEPS
        return _of_bucket(bucket, reason, num_steps=_num_steps(most, step_s))

    def _is_short_wait(self, found: _Exploration, load: Load) -> bool:
        """Returns whether the wait for the other bucket is a small fraction of the rest of the
        run."""
        assert found.other is not None
        if found.begun_at is None:
            # Timed from here: the first burst may have waited for its own compilation.
            found.begun_at, found.steps_then = self._clock(), load.num_steps_left
        passed_s = self._clock() - found.begun_at
        num_run = found.steps_then - load.num_steps_left
        if num_run <= 0:
            return False
        left_s = load.num_steps_left * passed_s / num_run
        return load.ready_s(found.other) - passed_s <= MOST_WAIT * left_s

    def _exploration_of(self, load: Load) -> _Exploration:
        """Returns the two buckets to measure in turns, if one is unmeasured and drafting may
        pay."""
        plain = self._plain(load, "")
        assert plain.row_bucket is not None
        rows = plain.row_bucket
        bucket = Bucket(rows, 0)
        drafting = [
            Bucket(rows, depth)
            for depth in self._depths
            if not load.is_dropped(Bucket(rows, depth)) and depth == load.limit(depth)
        ]
        if not drafting or load.is_dropped(bucket):
            return _Exploration()
        count = self.costs.count
        if count(bucket) and any(map(count, drafting)):
            # The only measurement may be disturbed, as the first run of a new executable is.
            once = max(drafting, key=count)
            plain_s = self.costs.seconds(bucket, _midway(load, load.num_decoding_rows)) or 0.0
            if sum(map(count, drafting)) > 1 or _is_long(plain_s):
                return _Exploration()
            return _Exploration(bucket, once, load.num_steps_left, is_second_look=True)
        candidates = {c.bucket: c for c in self._candidates(load, [rows])}
        if not candidates:
            usual = min(drafting, key=lambda b: abs(b.num_speculative_tokens - USUAL_K))
            return _Exploration(bucket, usual, load.num_steps_left)
        plain_rate = candidates[bucket].rate
        # No step that drafts is faster than a plain one of as many rows.
        known_s = {rows: candidates[bucket].seconds}
        more = self._optimism(load)
        may_pay = [
            c
            for c in map(candidates.__getitem__, drafting)
            if c.hoped_rate(more(c), known_s) > plain_rate * (1 + MARGIN)
        ]
        if not may_pay:
            return _Exploration()
        best = self._most_promising(may_pay, plain_rate, load)
        gain = best.rate / plain_rate - 1
        is_sure = gain >= SURE_GAIN and not self._knows_no_acceptance
        if is_sure and load.is_there(best.bucket):
            return _Exploration(best.bucket, bucket, load.num_steps_left)
        return _Exploration(bucket, best.bucket, load.num_steps_left)

    def _most_promising(
        self, drafting: Sequence[_Candidate], plain_rate: float, load: Load
    ) -> _Candidate:
        """Returns the drafting candidate to measure first.

        Plain decoding runs if it turns out to be better. So each candidate is rated by the mean,
        over plausible acceptance rates, of the larger of its rate and the plain one. Of those
        within MARGIN of the best the smallest K is measured: predictions of larger ones err more.
        A K above USUAL_K waits until more is known of acceptance.
        """
        usual = [c for c in drafting if c.bucket.num_speculative_tokens <= USUAL_K]
        if self._knows_no_acceptance:
            drafting = usual or [min(drafting, key=lambda c: c.bucket.num_speculative_tokens)]

        plausible = [self._optimism(load, by) for by in (-1.0, 0.0, 1.0)]

        def mean_rate(c: _Candidate) -> float:
            rates = [c.rate * more(c) for more in plausible]
            return sum(max(rate, plain_rate) for rate in rates) / len(rates)

        rates = [mean_rate(c) for c in drafting]
        least = max(rates) / (1 + MARGIN)
        close = [c for c, rate in zip(drafting, rates, strict=True) if rate >= least]
        return min(close, key=lambda c: c.bucket.num_speculative_tokens)

    # Learning

    def _probe(
        self, best: _Candidate, allowed: Sequence[_Candidate], load: Load
    ) -> Decision | None:
        """Returns a burst that probes another bucket, if a budget allows it."""
        if not load.num_probe_steps or self._charge is not None:
            return None  # the probe before it is not read back yet
        is_plain = not best.bucket.num_speculative_tokens
        ready = [c for c in allowed if c.bucket not in self._missing and c is not best]
        drafting = [c for c in ready if c.bucket.num_speculative_tokens]
        plain = [c for c in ready if not c.bucket.num_speculative_tokens]
        # No step is faster than plain decoding of as many rows.
        least_s = {c.bucket.rows: c.seconds for c in allowed if not c.bucket.num_speculative_tokens}
        hopeful = self._hopeful(best, drafting, load, least_s) if is_plain else None
        promising = self._promising(best, plain if is_plain else ready, least_s)
        # At K = 0 the cheapest K measures acceptance; while drafting, plain decoding is timed.
        routine = min(drafting if is_plain else plain, key=lambda c: c.seconds, default=None)
        other = hopeful or promising or routine
        if other is None:
            return None
        begins = is_plain and other.bucket.num_speculative_tokens > 0
        catch_up = self._catch_up(load, best.seconds) if begins else 0.0
        few = num_steps = _num_steps(PROBE_STEPS, other.seconds)
        if other is hopeful:
            # In fewer steps, catch-up would hide their cost.
            least = catch_up / (SMALL_CATCH_UP * other.seconds)
            most = _num_steps(load.num_probe_steps, other.seconds, PLAIN_PROBE_S)
            num_steps = max(num_steps, min(math.ceil(least) + 1, most))
        elif other is not promising and not is_plain:
            num_steps = _num_steps(load.num_probe_steps, other.seconds, PLAIN_PROBE_S)
        elif other is not promising:
            # It measures acceptance: many rows tell as much in fewer steps.
            num_steps = min(num_steps, math.ceil(PROBE_STEPS / load.num_decoding_rows))
            num_steps = max(num_steps, LEAST_STEPS)
        num_steps = min(num_steps, load.num_probe_steps)
        # Where catch-up hides the steps' cost, the bucket runs once more right after.
        is_hidden = catch_up > SMALL_CATCH_UP * (catch_up + num_steps * other.seconds)
        again = few if is_hidden and not self._is_trusted(other) else 0
        num_all = num_steps + again
        worth_s = self._worth_s(other, num_all, best, load)
        share = worth_s * best.rate / (num_all * other.tokens)
        lost = num_all * other.seconds - worth_s + catch_up
        lost = max(lost, LEAST_LOST * num_all * best.seconds)
        # It cuts a burst short, and so does the short one after it.
        lost += 2 * self.costs.burst_s
        ledger = self.ledger
        is_due = begins and ledger.plain_s >= ASK_EVERY_S
        is_soon = begins and other is not hopeful and ledger.plain_s < LEAST_APART_S
        ask_s = ASK_SHARE * ledger.plain_s
        if ledger.plain_s >= ASK_LATE * ASK_EVERY_S:
            ask_s = max(ask_s, LATE_SHARE * LATE_S - ledger.late_s)
        if is_due and lost <= ask_s:
            if lost > ASK_SHARE * ledger.plain_s:  # else ASK_SHARE covers it
                ledger.late_s += lost
        elif lost <= ledger.routine_s and not is_soon:
            ledger.routine_s -= lost
            self._charge = _Charge(other.bucket, "routine_s", lost, best.rate, share)
        elif other in plain and not is_plain and lost <= PLAIN_SHARE * ledger.drafting_s:
            pass  # PLAIN_SHARE covers it: drafting_s restarts at 0
        elif (hopeful or promising) and lost <= ledger.hope_s:
            ledger.hope_s -= lost
            self._charge = _Charge(other.bucket, "hope_s", lost, best.rate, share)
        else:
            return None
        self.seconds_lost += lost
        self._again = other.bucket if again else None
        self._last = self._last or best.bucket
        return self._measure(load, other, num_steps)

    def _worth_s(self, other: _Candidate, num_steps: int, best: _Candidate, load: Load) -> float:
        """Returns the seconds in which `best` brings the end as near as some steps of `other`.

        As a rule by tokens, fewer of which count where rows end apart.

        In plain decoding, rows that drafted for a few steps keep what they are ahead. If none
        comes after them, the end is nearer by what the last row gained.
        """
        is_plain = not best.bucket.num_speculative_tokens
        if is_plain and other.bucket.num_speculative_tokens and len(load.tokens_left):
            return other.slots.steps_saved(other.bucket, num_steps) * best.seconds
        return num_steps * other.seconds * other.rate / best.rate

    def _measure(self, load: Load, other: _Candidate, num_steps: int) -> Decision:
        """Returns a probe: a burst of a bucket that does not become the current one."""
        last, self._was_probe = self._last, True
        decision = self._decide(load, other, "probe", num_steps=num_steps)
        self._last = last
        return decision

    def _promising(
        self,
        best: _Candidate,
        others: Sequence[_Candidate],
        least_s: Mapping[int, float],
    ) -> _Candidate | None:
        """Returns the best candidate that was measured little and may be better than predicted."""
        # Plain decoding first: whether drafting pays at all depends on its cost.
        is_plain = lambda c: not c.bucket.num_speculative_tokens
        promising = [
            c
            for c in others
            if (c.doubt > LEAST_DOUBT or not self._is_trusted(c))
            and c.most_rate(least_s) > best.rate * (1 - is_plain(c) * c.doubt)
        ]
        first = lambda c: (is_plain(c), c.most_rate(least_s))
        return max(promising, key=first, default=None)

    def _hopeful(
        self,
        best: _Candidate,
        others: Sequence[_Candidate],
        load: Load,
        least_s: Mapping[int, float],
    ) -> _Candidate | None:
        """Returns the cheapest candidate that may be worth leaving K = 0 for, if any.

        Uncertain acceptance and uncertain step costs both count in its favour.
        """
        more = self._optimism(load)
        hoped = lambda c: c.hoped_rate(more(c), least_s)
        hopeful = [c for c in others if hoped(c) > best.rate * (1 + MARGIN)]
        return min(hopeful, key=lambda c: c.seconds, default=None)

    def _optimism(self, load: Load, deviations: float = 2.0) -> Callable[[_Candidate], float]:
        """Returns the factor, by candidate, by which a step's tokens may exceed those expected."""
        rows = load.num_decoding_rows
        more = self.survival.optimism(deviations).tolist()
        of_depth = lambda c: more[c.bucket.num_speculative_tokens - 1]
        return lambda c: (rows + (c.tokens - rows) * of_depth(c)) / c.tokens

    def _catch_up(self, load: Load, plain_s: float) -> float:
        """Returns the seconds of drafter catch-up: feeding it the tokens it has not seen."""
        behind = np.asarray(load.num_behind)[np.asarray(load.draft_caps) > 0]
        return self._catch_up_s(int(behind.max(initial=1)) - 1, plain_s)

    def _catch_up_s(self, num_tokens: int, step_s: float) -> float:
        per_token = self.costs.catch_up_s
        if per_token is None:
            per_token = CATCH_UP_SHARE * step_s
        return per_token * max(num_tokens, 0)

    def _observe_cost(self, outcome: Outcome) -> None:
        bucket, num_steps = outcome.bucket, outcome.num_steps
        assert outcome.seconds is not None
        seconds, context = outcome.seconds, outcome.num_context_tokens
        is_known = self.costs.count(bucket) > 0
        behind = outcome.num_behind - 1 if bucket.num_speculative_tokens else 0
        if behind > 0:
            plain_s = self.costs.seconds(Bucket(bucket.rows, 0), context)
            usual_s = plain_s or seconds / num_steps
            # No less than a fraction of the guess: the learned value may be far too low.
            least = LEAST_CATCH_UP * CATCH_UP_SHARE * usual_s * behind
            catch_up = max(self._catch_up_s(behind, usual_s), least)
            if catch_up > SMALL_CATCH_UP * seconds:
                # Catch-up is learned separately, once the steps' cost is known.
                expected = self.costs.seconds(bucket, context)
                if is_known and expected is not None:
                    extra = seconds - self.costs.burst_s - num_steps * expected
                    usual = catch_up / behind
                    self.costs.observe_catch_up(
                        behind, extra, steps_s=num_steps * expected, usual_s=usual
                    )
                return
            seconds -= catch_up
        self._compare_with_last(bucket, num_steps, seconds)
        seconds = max(seconds - self.costs.burst_s, LEAST_OF_STEPS * seconds)
        if is_known and outcome.is_short and seconds < TIMED_S:
            return  # sending the burst is too large a part of its seconds
        self.costs.observe(bucket, context, seconds / num_steps)

    def _compare_with_last(self, bucket: Bucket, num_steps: int, seconds: float) -> None:
        """Learns the fixed seconds of a burst from two bursts of one bucket close together."""
        self._num_observed += 1
        before, steps, took = self._last_of.get(bucket, (-BURSTS_NEAR, 0, 0.0))
        self._last_of[bucket] = self._num_observed, num_steps, seconds
        few, many = sorted([(steps, took), (num_steps, seconds)])
        is_near = self._num_observed - before <= BURSTS_NEAR
        if is_near and LEAST_STEPS < few[0] <= many[0] / 2:
            self.costs.observe_burst(few, many)

    def _settle(self, outcome: Outcome) -> None:
        """Charges a probe its measured loss: its bursts, and the short one right after it."""
        charge = self._charge
        if charge is None:
            return
        if outcome.bucket == charge.bucket:
            charge.has_run = True
            charge.add(outcome)
            return  # it may run once more
        if not charge.has_run:
            # Bursts are read back after the next one is sent.
            charge.num_before += 1
            if charge.num_before > BURSTS_NEAR:
                self._charge = None  # it never ran
            return
        charge.add(outcome)
        self._charge, ledger = None, self.ledger
        more = charge.too_little()
        self.seconds_lost += more
        left = getattr(ledger, charge.pot) - more
        setattr(ledger, charge.pot, left)

    def _save_up(self, outcome: Outcome) -> None:
        """Adds fractions of a burst's seconds, and of those drafting saved, to probe budgets."""
        assert outcome.seconds is not None
        seconds, ledger, bucket = outcome.seconds, self.ledger, outcome.bucket
        ledger.late_s = max(ledger.late_s - LATE_SHARE * seconds, 0.0)
        ledger.spend(seconds, is_drafting=bucket.num_speculative_tokens > 0)
        step_s = seconds / outcome.num_steps
        plain_s = self.costs.seconds(Bucket(bucket.rows, 0), outcome.num_context_tokens)
        burst_s = min(self._burst_steps * min(step_s, plain_s or step_s), PLAIN_PROBE_S)
        routine = ledger.routine_s + PROBE_SHARE * seconds
        ledger.routine_s = min(routine, MOST_HOPE * burst_s)
        hope = ledger.hope_s + HOPE_SHARE * seconds
        own, plain = map(self._rates.get, (bucket, Bucket(bucket.rows, 0)))
        if own and plain and own > plain:
            hope += GAIN_SHARE * seconds * (own / plain - 1)
        measured = self.costs.measured
        count = self.costs.count
        is_new = len(measured) <= 2
        if is_new and min(map(count, measured), default=0) < ENOUGH_MEASURED:
            hope = max(hope, FIRST_HOPE * burst_s)
        ledger.hope_s = min(hope, MOST_HOPE * burst_s)

    def _count_regret(self, outcome: Outcome) -> None:
        """Adds the seconds that each uncompiled bucket would have saved to its regret."""
        assert outcome.seconds is not None
        own = self._rates.get(outcome.bucket)
        if own is None:
            return  # no candidates were compared, or the rows have changed since
        for bucket, rate in self._rates.items():
            if rate > own * (1 + MARGIN) and bucket in self._regretted:
                self.ledger.miss(bucket, (1 - own / rate) * outcome.seconds)

    @property
    def _knows_no_acceptance(self) -> bool:
        return self.survival.num_told < SURE_TRIALS


def _is_allowed(bucket: Bucket, load: Load) -> bool:
    """Returns whether the load lets a bucket draft all of its tokens."""
    return bucket.num_speculative_tokens == load.limit(bucket.num_speculative_tokens)


def _num_steps(most: int, step_s: float, most_s: float = PROBE_S) -> int:
    """Returns `most` steps, or the fewer (LEAST_STEPS at least) that fit into `most_s`."""
    return most if most * step_s <= most_s else max(int(most_s / step_s), LEAST_STEPS)


def _is_long(plain_s: float) -> bool:
    """Returns whether plain steps take so long that a disturbance hardly shows in a burst."""
    return LEAST_STEPS * plain_s > PROBE_S


def _growth_after(growth: float, outcome: Outcome) -> float:
    """Returns the tokens per row, about, that pages allow a burst, after one more.

    It changes slowly, so that K does not change from burst to burst.
    """
    if not outcome.is_cut:
        return max(growth * (1 + GROWTH_SHARE / 10), outcome.growth)
    if math.isinf(growth):
        return outcome.growth
    return growth + GROWTH_SHARE * (outcome.growth - growth)


def _usual_steps(bucket: Bucket, step_s: float, load: Load, growth: float = math.inf) -> int:
    """Returns the steps of a burst that is no probe; growth as of `_growth_after`."""
    width = 1 + bucket.num_speculative_tokens
    steps = int(max(min(load.num_probe_steps, growth / width), 1))
    if not bucket.num_speculative_tokens:
        return steps
    return min(steps, max(int(MOST_DRAFTING_S / step_s), LEAST_STEPS))


def _midway(load: Load, tokens_per_step: float) -> float:
    """Returns the context tokens of all rows in the middle of the next burst."""
    steps_left = load.num_steps_left * load.num_decoding_rows / tokens_per_step
    num_steps = min(load.num_probe_steps, steps_left)
    return load.num_context_tokens + num_steps * tokens_per_step / 2
