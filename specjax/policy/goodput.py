"""Goodput: chooses the bucket with the most expected tokens per second. No jax.

    rate(bucket) = (rows + expected accepted draft tokens) / seconds of its step

A candidate is every bucket that holds the rows: a number of rows, a K and, where acceptance
differs between rows, fewer draft slots than rows * K, which go to the likeliest draft tokens.
Seconds come from StepCosts, acceptance from Survival. Both are learned in service, and both say
how sure they are: together, by the standard deviation of a rate beside that of plain decoding.

- The compiled bucket of the highest rate runs, of rates CAUTION deviations below the expected
  ones. Leaving K = 0 takes MARGIN and must repay the drafter's catch-up.
- A bucket that may be better, by HOPE deviations, is probed for a few steps: first the one whose
  probe tells most per second that it loses, once the budget covers them. BUDGET_SHARE of all
  seconds is saved up for probes. Plain decoding and drafts are timed again, by the same budget,
  ASK_EVERY_S after they last ran.
- A bucket is compiled or read from disk in the background once the regret of not having it reaches
  COMPILE_SHARE of the seconds that this takes (ski rental); SURE_SHARE is
  enough for one that is surely better and repays it within the process. Regret accumulates over the
  runs of a pair (`ledger`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.decode.executables import WARM_UP_CALLS
from specjax.policy.beside_prompts import BesidePrompts, Option
from specjax.policy.interface import Decision, Load, Outcome
from specjax.policy.ledger import Ledger
from specjax.policy.ranked_slots import RankedSlots
from specjax.policy.step_cost import NOISE_SD, Prediction, StepCosts
from specjax.policy.survival import Survival

# Relative gain in rate over K = 0 that drafting needs to begin, and over the last bucket that any
# other change needs.
MARGIN, STICKINESS = 0.03, 0.01
# Standard deviations: CAUTION below its expected rate a bucket must still be the best, to run;
# HOPE above it, to be probed.
CAUTION, HOPE = 0.3, 1.5
# What probes may lose: a fraction of all seconds and what a new pair begins with, in plain steps.
# MOST_STEPS, MOST_BUDGET_S: the most that is saved up, the larger of the two.
BUDGET_SHARE, FIRST_STEPS, MOST_STEPS, MOST_BUDGET_S = 0.02, 16, 96, 0.6
REPAID_IN_STEPS = 3000  # most steps in which what a probe may gain is to exceed what it loses
LEAST_LOST = 0.1  # least loss of a probe, as a fraction of its seconds
ASK_EVERY_S = 4.0  # after which drafts, or plain decoding, are timed again
PROBE_STEPS, LEAST_STEPS = 8, 2  # of a probe; of any burst
MOST_PROBE_S, MOST_DRAFTING_S = 0.25, 0.5  # longest probe; longest burst that drafts
USUAL_K = 3  # largest K tried first where nothing is known of acceptance
# Fraction of the seconds of compiling or reading that regret reaches first: about what the run
# beside it loses on two cores. SURE_SHARE: of a bucket better by SURE_GAIN. SURE_TRIALS: drafts
# after which acceptance is known.
COMPILE_SHARE, SURE_SHARE, SURE_GAIN, SURE_TRIALS = 0.5, 0.02, 0.15, 16.0
# Fraction of the rest of a run that it may wait for the first bucket that drafts, and the shortest
# run that does.
MOST_WAIT, LEAST_SHARED_STEPS = 0.25, 32
ENOUGH_STEPS = 10_000  # most remaining steps that count towards repaying anything
# Weight of the newest burst in the moving average of tokens that pages allow a burst. After one
# that pages did not cut, the average grows by a tenth of this.
GROWTH_SHARE = 0.1
BETWEEN = 2  # bursts that are read back between two probes
MOST_IDLE_S = 1.0  # longest pause between bursts that are compared


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
    seconds: float  # of a step, with its part of a burst's fixed time
    rate: float  # tokens per second
    slots: RankedSlots
    place: int  # among the candidates
    doubt: float  # standard deviation of log(rate) beside that of plain decoding

    @property
    def sure_rate(self) -> float:
        """The rate where it is CAUTION standard deviations below the expected one."""
        return self.rate * math.exp(-CAUTION * self.doubt)

    @property
    def is_plain(self) -> bool:
        return not self.bucket.num_speculative_tokens


class _Trial(NamedTuple):
    """A bucket that is compiled beside a run of a new pair, which may end before.

    A run with a known end waits for it halfway, where the wait is a small fraction of what is left:
    its second half measures both, and later processes know.
    """

    bucket: Bucket
    begun_at: float
    num_steps: int  # of the run

    def is_worth_waiting_for(self, load: Load, now_s: float) -> bool:
        passed_s, num_left = now_s - self.begun_at, load.num_steps_left
        num_run = self.num_steps - num_left
        if load.is_compiled(self.bucket) or load.is_dropped(self.bucket):
            return False
        if self.num_steps < LEAST_SHARED_STEPS or num_left > self.num_steps // 2:
            return False
        if self.bucket.rows not in load.row_buckets or not _is_allowed(self.bucket, load):
            return False
        return load.ready_s(self.bucket) - passed_s <= MOST_WAIT * num_left * passed_s / num_run


class Goodput:
    """Chooses the bucket with the most expected tokens per second.

    Args:
      max_speculative_tokens: the largest K.
      costs: step costs known so far; updated by `observe`.
      depths: the values of K above 0 that may be compiled; by default those of `ladder`.
      ranks: whether fewer slots than rows * K may go to the likeliest tokens: Bucket.max_drafts.
      knows_confidence: whether the drafter returns a confidence per token. The device ranks
        slots by it; without it the policy ranks them by the rows' acceptance rates.
      abstains: whether the drafter may propose nothing; a step in which it does so for all rows
        verifies no draft token, and its forward is as narrow as plain decoding's.
      ledger: budget and regret of earlier runs of the pair; by default empty.
      survival: acceptance known so far; updated by `observe`. By default empty.
      clock: returns seconds; times how long a run is.
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
        abstains: bool = False,
        ledger: Ledger | None = None,
        survival: Survival | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_speculative_tokens = max_speculative_tokens
        self.costs = costs or StepCosts()
        self.costs.begin_run()
        self.survival = survival or Survival(max_speculative_tokens)
        self.ledger = Ledger() if ledger is None else ledger
        self.seconds_lost = 0.0  # to probes, estimated
        self._depths = ladder(max_speculative_tokens) if depths is None else depths
        self._ranks = ranks
        self._knows_confidence = knows_confidence
        self._abstains = abstains
        self._beside = BesidePrompts()
        self._last: Bucket | None = None  # that ran and was no probe
        self._again: list[Bucket] = []  # probed in the next bursts too, from the end
        self._clock = clock
        self._trial: _Trial | None = None
        self._pending = 0  # bursts to be read back before the next probe
        self._charge_s = 0.0  # what a probe that was sent loses, as predicted
        self._late_s = 0.0  # seconds of catch-up, as predicted for the next burst
        self._growth = math.inf  # tokens per row, about, that pages allow a burst
        self._buckets_of: dict[int, tuple[Bucket, ...]] = {}  # by rows
        self._rates: dict[Bucket, float] = {}  # tokens per second of the last candidates
        self._missing: set[Bucket] = set()  # candidates that were allowed and not compiled

    def choose(self, load: Load) -> Decision:
        """Returns the best compiled bucket, and the bucket to compile in the background, if any."""
        if load.prompt_tokens:
            return self._choose_beside(load)
        every, predicted = self._candidates(load)
        if not every:
            return self._plain(load, "dropped")
        self._late_s = self._catch_up_s(load)
        candidates = [c for c in every if _is_allowed(c.bucket, load)]
        if not candidates:
            return self._plain(load, load.limited_by)
        self._rates = {c.bucket: c.rate for c in candidates}
        ready = [c for c in candidates if load.is_compiled(c.bucket)]
        self._missing = {c.bucket for c in candidates if not load.is_compiled(c.bucket)}
        soonest = None
        if not ready or (self._last is None and all(c.is_plain for c in ready)):
            first, soonest = self._first(candidates, load)
            if first not in ready:
                ready = [first]
            if soonest is None and (soonest := self._to_try(first, load)):
                self._trial = self._trial or _Trial(soonest, self._clock(), load.num_steps_left)
        if self._trial is not None and self._trial.is_worth_waiting_for(load, self._clock()):
            (trial,), _ = self._rated([self._trial.bucket], load)
            self._trial, self._again = None, [trial.bucket] * self._num_cold(trial)
            return self._probe(load, trial, LEAST_STEPS)
        best = self._best(ready, load)
        probe = self._next_probe(best, ready, load, predicted)
        if probe is not None:
            return probe
        prepare = soonest or self._missed(best, candidates, load)
        self._last = best.bucket
        is_limited = any(
            c.sure_rate > best.rate * (1 + MARGIN) for c in every if not _is_allowed(c.bucket, load)
        )
        reason = load.limited_by if is_limited else "goodput"
        return self._decide(load, best, reason, prepare=prepare, others=candidates)

    def expect_acceptance(self, survival: Sequence[float]) -> None:
        """Replaces what was learned of acceptance; see `ExpectsAcceptance`."""
        self.survival.expect(survival)

    def observe(self, outcome: Outcome) -> None:
        """Learns acceptance and step cost from a burst, and the regret of uncompiled buckets."""
        bucket, seconds = outcome.bucket, outcome.seconds
        self.survival.forget_others(outcome.requests)
        self._pending = max(self._pending - 1, 0)
        is_probe = outcome.decision.reason == "probe"
        if is_probe and self.ledger.budget_s is not None:
            self.ledger.budget_s -= self._charge_s
            self.seconds_lost += self._charge_s
            self._charge_s = 0.0
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
        if not seconds or not outcome.num_steps:
            return
        if outcome.idle_s > MOST_IDLE_S:
            self.costs.begin_run()
        self._save_up(outcome)
        own = math.inf if is_probe else self._rates.get(bucket, math.inf)
        for other in self._missing:
            if (rate := self._rates[other]) > own * (1 + MARGIN):
                self.ledger.miss(other, (1 - own / rate) * seconds)
        behind = outcome.num_behind - 1 if bucket.num_speculative_tokens else 0
        is_wide = 1.0
        if self._abstains and bucket.num_speculative_tokens:
            is_wide = np.asarray(outcome.draft_depth).any(axis=1).mean()
        self.costs.observe(
            bucket,
            outcome.num_context_tokens,
            seconds / outcome.num_steps,
            outcome.num_steps,
            max(behind, 0),
            float(is_wide),
        )

    # Beside prompts

    def _choose_beside(self, load: Load) -> Decision:
        """Returns the step to run with prompts beside it: drafting where bursts draft, and where
        what it adds to the step is worth it."""
        plain = self._plain(load, load.limited_by or "prompts")
        assert plain.row_bucket is not None
        candidates, _ = self._candidates(load)
        measured = [
            c for c in candidates if self.costs.count(c.bucket) and _is_allowed(c.bucket, load)
        ]
        best = max(measured, key=lambda c: c.rate, default=None)
        if best is None or best.is_plain:
            return plain
        bucket = Bucket(plain.row_bucket, 0)
        rows = float(load.num_decoding_rows)
        plain_s = self.costs.seconds(bucket, _midway(load, rows))
        assert plain_s is not None, "a bucket was measured"
        options = [Option(c.bucket, c.tokens, c.seconds) for c in measured if not c.is_plain]
        chosen, prepare = self._beside.choose(
            load, Option(bucket, rows, plain_s), options, best.rate
        )
        if chosen.bucket == bucket:
            return Decision(
                num_speculative_tokens=0,
                reason=plain.reason,
                row_bucket=plain.row_bucket,
                prepare=prepare,
            )
        own = next(c for c in measured if c.bucket == chosen.bucket)
        return self._of(own, "goodput", prepare=prepare)

    def _observe_beside(self, outcome: Outcome) -> None:
        """Learns the seconds of a step with prompts, unless drafter catch-up is part of them."""
        has_catch_up = outcome.bucket.num_speculative_tokens and outcome.num_behind > 1
        if outcome.mixed_s and not has_catch_up:
            self._beside.costs.observe(outcome.bucket, outcome.prompt_tokens, outcome.mixed_s)

    # Candidates

    def _candidates(self, load: Load) -> tuple[list[_Candidate], Prediction]:
        """Returns every bucket that may run or be compiled, with its expected rate; and all that
        is predicted of their seconds."""
        return self._rated([b for b in self._shapes(load) if not load.is_dropped(b)], load)

    def _rated(self, buckets: Sequence[Bucket], load: Load) -> tuple[list[_Candidate], Prediction]:
        slots = RankedSlots(
            self.survival,
            load.requests,
            np.asarray(load.draft_caps),
            self._depths,
            np.asarray(load.tokens_left),
            np.asarray(load.urgency),
        )
        tokens = [load.num_decoding_rows + gained for gained in slots.all_expected(buckets)]
        contexts = [_midway(load, each) for each in tokens]
        steps = [self._usual_steps(bucket, load) for bucket in buckets]
        shares = self._wide_shares(buckets, load)
        predicted = self.costs.predict(buckets, contexts, steps, wide_shares=shares)
        plain = next((at for at, b in enumerate(buckets) if not b.num_speculative_tokens), 0)
        doubts = predicted.deviations(plain).tolist() if buckets else []
        rows, less = load.num_decoding_rows, self.survival.optimism(-1.0).tolist()
        found = []
        for at, (bucket, own) in enumerate(zip(buckets, tokens)):
            seconds, doubt = float(predicted.seconds[at]), doubts[at]
            if depth := bucket.num_speculative_tokens:
                doubt = math.hypot(doubt, math.log((rows + (own - rows) * less[depth - 1]) / own))
            rate = slots.together(bucket) * own / seconds
            if bucket.max_drafts is not None:
                rate *= 1 - MARGIN  # the likeliest by estimates, some of which were lucky
            found.append(_Candidate(bucket, own, seconds, rate, slots, at, doubt))
        return found, predicted

    def _wide_shares(self, buckets: Sequence[Bucket], load: Load) -> list[float] | None:
        """Returns how many of each bucket's steps have a draft token; None: all are as wide."""
        if not self._abstains or load.prompt_tokens:
            return None
        num_asked = np.count_nonzero(np.asarray(load.draft_caps))
        none = (1 - self.survival.presence()[0]) ** num_asked
        return [1 - none if bucket.num_speculative_tokens else 1.0 for bucket in buckets]

    def _usual_steps(self, bucket: Bucket, load: Load) -> float:
        """Returns the steps of a burst that is no probe, which pages may cut short."""
        of_pages = self._growth / (1 + bucket.num_speculative_tokens)
        return max(min(load.num_probe_steps, of_pages), 1.0)

    def _shapes(self, load: Load) -> Iterator[Bucket]:
        """Yields every bucket of the smallest row bucket, and larger ones of its missing K.

        Those are compiled or, before the first burst, kept on disk. Where nothing is, plain
        decoding of the largest row bucket serves whoever comes.
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
        plain = [Bucket(each, 0) for each in rows or load.row_buckets]
        if larger and not any(map(is_there, plain)):
            yield plain[-1]

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

        A bucket that is compiled or kept on disk and was measured runs, otherwise plain decoding,
        which compiles sooner; of them the one with which the run ends first, waiting included.
        """
        tokens = min(load.num_steps_left, ENOUGH_STEPS) * load.num_decoding_rows
        seconds = {c.bucket: load.ready_s(c.bucket) + tokens / c.sure_rate for c in candidates}
        of = lambda c: seconds[c.bucket] / (1 + MARGIN * c.is_plain)
        is_known = any(bucket.num_speculative_tokens for bucket in self.costs.measured)
        known = [c for c in candidates if c.is_plain or is_known] or candidates
        there = [c for c in known if load.is_there(c.bucket)]
        soonest = min(known, key=of)
        first = min(there, key=of) if there else max(known, key=_plain_of_most_rows)
        is_coming = soonest in there or load.is_coming(soonest.bucket)
        return first, None if is_coming or soonest.is_plain else soonest.bucket

    def _to_try(self, first: _Candidate, load: Load) -> Bucket | None:
        """Returns what to compile beside plain decoding while nothing is known of acceptance."""
        rows = first.bucket.rows
        is_known = self.survival.num_told >= SURE_TRIALS or any(
            self.costs.count(b) for b in self.buckets([rows]) if b.num_speculative_tokens
        )
        if is_known or not first.is_plain or load.is_any_coming():
            return None
        buckets = [Bucket(rows, d) for d in self._depths if d <= max(USUAL_K, self._depths[0])]
        allowed = [b for b in buckets if _is_allowed(b, load) and not load.is_dropped(b)]
        if any(map(load.is_compiled, allowed)) or not allowed:
            return None
        kept = [b for b in allowed if load.is_there(b)]  # by a process too short to measure it
        return max(self._rated(kept or allowed, load)[0], key=lambda c: c.rate).bucket

    def _best(self, ready: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns the candidate of the highest rate that may run for long, with hysteresis."""
        best = max(ready, key=lambda c: c.sure_rate)
        plain = max((c for c in ready if c.is_plain), key=lambda c: c.rate, default=None)
        was_plain = self._last is None or not self._last.num_speculative_tokens
        if plain is not None and not best.is_plain and was_plain:
            gain = best.sure_rate / plain.rate - 1
            left_s = min(load.num_steps_left, ENOUGH_STEPS) * plain.seconds
            if gain < MARGIN or gain * left_s < self._late_s:
                return plain
        same = next((c for c in ready if c.bucket == self._last), None)
        if same is not None and best.sure_rate < same.sure_rate * (1 + STICKINESS):
            return same
        return best

    def _catch_up_s(self, load: Load) -> float:
        """Returns the seconds in which the drafter reads what it has not seen."""
        behind = np.asarray(load.num_behind)[np.asarray(load.draft_caps) > 0]
        num_behind = int(behind.max(initial=1)) - 1
        if num_behind <= 0:
            return 0.0
        bucket = Bucket(load.row_buckets[0], self._depths[0])
        burst = [bucket], [load.num_context_tokens], [1]
        late, usual = (self.costs.predict(*burst, each).seconds[0] for each in (num_behind, 0))
        return float(late - usual)

    # Finding out

    def _next_probe(
        self, best: _Candidate, ready: Sequence[_Candidate], load: Load, predicted: Prediction
    ) -> Decision | None:
        """Returns a burst that measures another bucket, if the budget covers what it loses."""
        if not load.num_probe_steps:
            return None
        by_bucket = {c.bucket: c for c in ready}
        while self._again:
            again = by_bucket.get(self._again.pop())
            if again is not None:
                return self._probe(load, again, LEAST_STEPS if self._again else PROBE_STEPS)
        budget_s = self.ledger.budget_s
        if self._pending or budget_s is None or budget_s <= 0:
            return None
        others = [c for c in ready if c is not best]
        of_seconds = predicted.deviations(best.place)
        hopeful = self._hopeful(best, others, load, of_seconds)
        since_s = self.ledger.since_s[not best.is_plain]
        asked = [c for c in others if c.is_plain != best.is_plain]
        found = max(hopeful, key=lambda each: each[0], default=None)
        if asked and since_s >= ASK_EVERY_S:
            # Whether drafts stand is told by the cheapest K; what plain decoding takes, by itself.
            other = min(asked, key=lambda c: c.seconds)
            lost = self._lost_s(other, best, load)
            if found is None or lost <= budget_s:
                found = 0.0, lost, other
        if found is None or found[1] > budget_s:
            return None  # it is saved up for
        _, self._charge_s, other = found
        self._again = [other.bucket] * self._num_cold(other)
        return self._probe(load, other, LEAST_STEPS if self._again else PROBE_STEPS)

    def _num_cold(self, candidate: _Candidate) -> int:
        """Returns how many of the next bursts of a bucket warm it up and are not timed."""
        return max(WARM_UP_CALLS - self.ledger.ran.get(candidate.bucket, 0), 0)

    def _hopeful(
        self,
        best: _Candidate,
        others: Sequence[_Candidate],
        load: Load,
        of_seconds: np.ndarray,
    ) -> list[tuple[float, float, _Candidate]]:
        """Returns candidates that may be better: the gain to be expected if they are kept where a
        probe finds them better, per second that it loses; those seconds; and the candidate.

        Source: knowledge gradient, Frazier, Powell, Dayanik (2008), section 3.

        Args:
          of_seconds: f64[candidates], deviations of the log seconds beside the best one's.
        """
        left_s = min(load.num_steps_left, ENOUGH_STEPS) * best.seconds
        left_s = min(max(left_s, self.ledger.left_s), REPAID_IN_STEPS * best.seconds)
        least = MARGIN if best.is_plain else STICKINESS
        found = []
        for candidate in others:
            sd = float(of_seconds[candidate.place])  # where both draft, acceptance changes both
            if best.is_plain or candidate.is_plain:
                sd = max(best.doubt, candidate.doubt)
            gain = math.log(candidate.rate / best.rate) - least
            if gain + HOPE * sd > 0:
                lost = self._lost_s(candidate, best, load)
                told = sd**2 / math.hypot(sd, NOISE_SD)  # by one more burst
                hoped = _mean_above_0(gain, told)
                if hoped * left_s >= lost:
                    found.append((hoped / lost, lost, candidate))
        return found

    def _lost_s(self, other: _Candidate, best: _Candidate, load: Load) -> float:
        """Returns the seconds that a probe brings the end less near than the best bucket would."""
        num_steps = _num_steps(PROBE_STEPS, other, load) + LEAST_STEPS * self._num_cold(other)
        took = num_steps * other.seconds + self._late_s * best.is_plain
        if best.is_plain and not other.is_plain and len(load.tokens_left):
            # Rows that drafted for a few steps keep what they are ahead; the last row counts.
            worth = other.slots.steps_saved(other.bucket, num_steps) * best.seconds
        else:
            worth = num_steps * other.seconds * other.rate / best.rate
        return max(took - worth, LEAST_LOST * took)

    def _probe(self, load: Load, other: _Candidate, most: int) -> Decision:
        self._pending = BETWEEN
        return self._decide(load, other, "probe", num_steps=_num_steps(most, other, load))

    def _save_up(self, outcome: Outcome) -> None:
        """Adds a fraction of a burst's seconds to the budget."""
        assert outcome.seconds is not None
        seconds, ledger, bucket = outcome.seconds, self.ledger, outcome.bucket
        ledger.pass_(seconds, is_drafting=bucket.num_speculative_tokens > 0)
        plain_s = self.costs.seconds(Bucket(bucket.rows, 0), outcome.num_context_tokens)
        plain_s = min(plain_s or math.inf, seconds / outcome.num_steps)
        budget_s = FIRST_STEPS * plain_s if ledger.budget_s is None else ledger.budget_s
        budget_s += BUDGET_SHARE * seconds
        ledger.budget_s = min(budget_s, max(MOST_STEPS * plain_s, MOST_BUDGET_S))

    # Compiling

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
            and not load.is_compiled(c.bucket)
        ]
        # `_repays` asks the file system: the best come first, and the search stops at a hit. It
        # stops at one on disk too, for which regret still grows: lesser ones are not compiled.
        missed.sort(key=lambda c: c.rate, reverse=True)
        found = None
        for candidate in missed:
            if self._repays(candidate, best, load):
                found = candidate.bucket
            if found is not None or load.is_there(candidate.bucket):
                break
        has_plain = any(c.is_plain and load.is_compiled(c.bucket) for c in candidates)
        if found is None and not best.is_plain and not has_plain:
            # Whether drafting is faster is told by plain decoding, now and then.
            plain = Bucket(best.bucket.rows, 0)
            is_due = not self.costs.count(plain) or self.ledger.since_s[1] >= ASK_EVERY_S
            found = plain if is_due and not load.is_dropped(plain) else None
        return found

    def _repays(self, candidate: _Candidate, best: _Candidate, load: Load) -> bool:
        """Returns whether the regret of a bucket reaches its share of the seconds of compiling or
        reading it. Of a bucket that is surely better, and repays them within this process, a
        smaller share."""
        bucket = candidate.bucket
        read_s = load.read_s(bucket)
        ready_s = load.compile_s if read_s is None else read_s
        cost_s = COMPILE_SHARE * ready_s
        left_s = min(load.num_steps_left, ENOUGH_STEPS) * best.seconds
        saved_s = (1 - best.rate / candidate.rate) * max(left_s, self.ledger.left_s)
        is_sure = candidate.sure_rate * (1 - SURE_GAIN) >= best.rate and saved_s >= cost_s
        # How long rows stay so few that a bucket of fewer holds them is never sure.
        if is_sure and bucket.rows == best.bucket.rows:
            cost_s = SURE_SHARE * ready_s
        return self.ledger.lost_s(bucket, is_kept=read_s is not None) >= cost_s

    # Decisions

    def _of(self, chosen: _Candidate, reason: str, **more: Any) -> Decision:
        bucket = chosen.bucket
        is_ranked = bucket.max_drafts is not None and not self._knows_confidence
        return Decision(
            num_speculative_tokens=bucket.num_speculative_tokens,
            reason=reason,
            row_bucket=bucket.rows,
            max_drafts=bucket.max_drafts,
            draft_caps=chosen.slots.likeliest(bucket) if is_ranked else None,
            predicted_tokens=chosen.tokens,
            **more,
        )

    def _decide(
        self,
        load: Load,
        chosen: _Candidate,
        reason: str,
        others: Sequence[_Candidate] = (),
        **more: Any,
    ) -> Decision:
        if not chosen.is_plain:
            most = max(int(MOST_DRAFTING_S / chosen.seconds), LEAST_STEPS)
            if self.survival.num_told < SURE_TRIALS:
                most = min(most, PROBE_STEPS)
            if most < load.num_probe_steps:
                more.setdefault("num_steps", most)
        other = max((c for c in others if not c.is_plain), key=lambda c: c.rate, default=None)
        if chosen.is_plain and other is not None:
            if other.rate > chosen.rate and reason == "goodput":
                is_known = self.costs.count(other.bucket) > 0
                reason = "unproven" if is_known else "nothing measured yet"
            more["why"] = (
                f"a step with K = {other.bucket.num_speculative_tokens} is expected to give "
                f"{other.tokens / chosen.tokens:.2f} times the tokens in "
                f"{other.seconds / chosen.seconds:.2f} times the time"
            )
        return self._of(chosen, reason, predicted_step_s=chosen.seconds, **more)

    def _plain(self, load: Load, reason: str) -> Decision:
        """Returns plain decoding in the smallest compiled row bucket, else in the largest."""
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        *smaller, most = rows or load.row_buckets
        # The largest row bucket also holds requests that are admitted later.
        ready = (r for r in smaller if load.is_compiled(Bucket(r, 0)))
        return Decision(num_speculative_tokens=0, reason=reason, row_bucket=next(ready, most))


def _mean_above_0(mean: float, deviation: float) -> float:
    """Returns the mean of a normal number where it is above 0, times how often it is."""
    if deviation <= 0:
        return max(mean, 0.0)
    off = mean / deviation
    above = (1 + math.erf(off / math.sqrt(2))) / 2
    return mean * above + deviation * math.exp(-(off**2) / 2) / math.sqrt(2 * math.pi)


def _num_steps(most: int, other: _Candidate, load: Load) -> int:
    """Returns the steps of a probe: as many as are short enough."""
    num_steps = max(min(most, load.num_probe_steps), 1)
    if num_steps * other.seconds <= MOST_PROBE_S:
        return num_steps
    return max(int(MOST_PROBE_S / other.seconds), LEAST_STEPS)


def _plain_of_most_rows(candidate: _Candidate) -> tuple[bool, int]:
    return candidate.is_plain, candidate.bucket.rows


def _is_allowed(bucket: Bucket, load: Load) -> bool:
    """Returns whether the load lets a bucket draft all of its tokens."""
    return bucket.num_speculative_tokens == load.limit(bucket.num_speculative_tokens)


def _growth_after(growth: float, outcome: Outcome) -> float:
    """Returns the tokens per row, about, that pages allow a burst, after one more.

    It changes slowly, so that K does not change from burst to burst.
    """
    if not outcome.is_cut:
        return max(growth * (1 + GROWTH_SHARE / 10), outcome.growth)
    if math.isinf(growth):
        return outcome.growth
    return growth + GROWTH_SHARE * (outcome.growth - growth)


def _midway(load: Load, tokens_per_step: float) -> float:
    """Returns the context tokens of all rows in the middle of the next burst."""
    steps_left = load.num_steps_left * load.num_decoding_rows / tokens_per_step
    num_steps = min(load.num_probe_steps, steps_left)
    return load.num_context_tokens + num_steps * tokens_per_step / 2
