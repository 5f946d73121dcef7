"""Goodput: the K of the most expected tokens per second. No jax.

    rate(bucket) = (rows + expected accepted draft tokens) / seconds of its step

for every bucket that holds the rows: a number of rows, a K, and, where some rows are
likelier to have their drafts accepted than others, fewer slots than K for each row, which
go to the likeliest. Seconds come from StepCosts, acceptance from Survival. Both are
learned in service:

- Drafting has to earn its place. Where plain decoding or the best K was never measured,
  the likelier one of the two runs, plain decoding unless more is known, while the other
  is compiled beside it; a run that may be short waits for that halfway, where that is a small
  share of what is left, so that its second half measures both, and the next run knows.
- A process begins with what is compiled or kept on disk.
- Any other bucket is compiled, beside what runs, once what was lost without it, as far as
  is known, comes to what compiling it takes, or reading it where it is kept on disk (ski
  rental). The loss adds up over the runs of a pair (`ledger`).
- PROBE_SHARE of the time, and PLAIN_SHARE of drafting, go into learning again what plain
  decoding costs; ASK_SHARE of plain decoding into what is accepted now. HOPE_SHARE more, and
  GAIN_SHARE of what drafting saves, go into what little is known of, as long as it may well
  be better.
- Leaving K = 0 takes a margin, and must repay the drafter's catching up.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.policy.interface import Decision, Load, Outcome
from specjax.policy.ledger import Ledger
from specjax.policy.ranked_slots import RankedSlots
from specjax.policy.step_cost import LEAST_DOUBT, StepCosts
from specjax.policy.survival import Survival

MARGIN = 0.03  # by which drafting must be better than K = 0 to begin
STICKINESS = 0.01  # by which another bucket must be better than the one before
OPTIMISM = 0.05  # a bucket that was never measured is taken for so much faster
PROBE_SHARE = 0.004  # of all seconds, lost to learning
# More of them while a bucket may be better for all that is known; and the most that is
# saved up for it, in times of a burst of plain decoding, of PLAIN_PROBE_S at most.
HOPE_SHARE = 0.008
MOST_HOPE = 2.0
# Likewise, at least, to begin with: what is learned early serves longest.
FIRST_HOPE = 0.5
GAIN_SHARE = 0.05  # likewise, of what drafting saved against plain decoding
ENOUGH_MEASURED = 3  # measurements after which a bucket may run for more than a probe
# At K = 0 drafts are asked for as often as this, as long as asking, with the catching up
# that it takes, costs no more than such a share of the time.
ASK_EVERY_S, ASK_SHARE = 4.0, 0.015
# So many times as late they may cost such a share of LATE_S, whatever share of the time since
# the last that is: what catching up takes may be less than is thought. It is saved up anew by
# as much of all seconds.
ASK_LATE, LATE_SHARE, LATE_S = 4, 0.03, 30.0
LEAST_APART_S = 0.25  # of plain decoding between two that ask with nothing to hope for
PLAIN_SHARE = 0.005  # likewise, of drafting, to measure plain decoding again
# A burst that drafts takes no longer: what it drafts may be worth nothing by now.
MOST_DRAFTING_S = 0.25
# Of its seconds, what a probe is charged at least: what is thought may be wrong.
LEAST_LOST = 0.12
# Times what it was thought to lose, that a probe is charged at most: the machine may have
# been busy with something else.
MOST_CHARGED = 4.0
# Bursts apart, at most, of two of one bucket that are compared by their number of steps; and the
# share of a burst that its steps take at least.
BURSTS_NEAR, LEAST_OF_STEPS = 3, 0.5
PROBE_STEPS = 8  # of a burst that only measures
LEAST_STEPS = 2  # of any burst
# Seconds after which a burst that only measures ends, however few its steps; likewise one of
# plain decoding that measures it again; and from which on few steps are told well.
PROBE_S, PLAIN_PROBE_S, TIMED_S = 0.25, 1.0, 0.1
# Of a step, what catching up with one token costs, before it was measured.
CATCH_UP_SHARE = 0.01
LEAST_CATCH_UP = 0.25  # of that, that it is thought to cost at least
MOST_IDLE_S = 1.0  # before a burst that is still compared with the one before
USUAL_K = 3  # that is tried first where nothing is known
# Drafting runs before plain decoding was measured only where it is expected to be better by
# so much, and its acceptance is known from so many drafts.
SURE_GAIN, SURE_TRIALS = 0.15, 16.0
MOST_WAIT = 0.25  # of what is left of a run, that it waits for what is compiled
LEAST_SHARED = 4  # probes that a run must be long for, to wait for what is compiled
ENOUGH_STEPS = 10_000  # of an endless run, that repay any compiling
SMALL_CATCH_UP = 0.05  # of a burst: what is left tells what its steps cost
EXPLORED = 3  # times that plain decoding and a K are measured in turns: one may be disturbed


def ladder(most: int) -> tuple[int, ...]:
    """Returns the numbers that are tried up to `most`: 1, 2, 3, 4, 6, 8, 12, ..., and itself."""
    powers = [2**power for power in range(most.bit_length())]
    between = [3 * power for power in powers]
    return tuple(sorted({n for n in (*powers, *between, most) if 0 < n <= most}))


class _Candidate(NamedTuple):
    bucket: Bucket
    tokens: float  # expected per step, of all rows
    seconds: float
    rate: float  # tokens per second
    doubt: float  # by which its seconds may be less than is thought
    slots: RankedSlots

    def hoped_rate(self, more: float, least_s: Mapping[int, float]) -> float:
        """Returns the rate if it is as good as it may be in its seconds, as in `most_rate`, and in
        its tokens, `more` times as many: two errors that know nothing of each other."""
        faster = self.most_rate(least_s) / self.rate
        return self.rate * math.exp(math.hypot(math.log(faster), math.log(more)))

    def most_rate(self, least_s: Mapping[int, float]) -> float:
        """Returns the rate if a step is as fast as it may be, and no faster than least_s of its
        rows."""
        least = min(least_s.get(self.bucket.rows, 0.0), self.seconds)
        return self.rate * self.seconds / max(self.seconds * (1 - self.doubt), least)


@dataclasses.dataclass
class _Exploration:
    """What is measured beside what; `other` is None where nothing is, or no longer."""

    first: Bucket | None = None
    other: Bucket | None = None
    num_steps: int = 0  # left when it began
    # When its first burst was sent, by the policy's clock, and the steps left then.
    begun_at: float | None = None
    steps_then: int = 0
    turns: list[Bucket] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Charge:
    """What a probe took from a pot of the ledger before it ran, to be set right after it."""

    bucket: Bucket
    pot: str  # Ledger's attribute
    lost: float  # seconds, as was thought
    rate: float  # of what ran before, tokens per second
    spent: float = 0.0  # seconds beyond what its tokens would have taken at that rate

    def add(self, outcome: Outcome) -> None:
        assert outcome.seconds is not None
        self.spent += outcome.seconds - float(np.sum(outcome.num_committed)) / self.rate

    def too_little(self) -> float:
        """Returns the seconds by which too little was taken."""
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
    """Chooses the bucket of the most expected tokens per second.

    Args:
      max_speculative_tokens: the largest K.
      costs: what is known; it learns.
      depths: the values of K above 0 that may be compiled; None is `ladder`.
      ranks: whether slots may be handed to the likeliest rows: Bucket.max_drafts.
      knows_confidence: whether the drafter says how sure it is of each token: the device
        ranks by that then, and otherwise by what is known of the rows here.
      ledger: of earlier runs of the pair, which this one goes on with; None begins anew.
      survival: what is known of acceptance; it learns. None is nothing.
      clock: seconds; how long a run has taken.
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
        self.seconds_lost = 0.0  # to probes, as far as is known
        self._depths = ladder(max_speculative_tokens) if depths is None else depths
        self._ranks = ranks
        self._knows_confidence = knows_confidence
        self._clock = clock
        self._last: Bucket | None = None
        self.ledger = Ledger() if ledger is None else ledger
        self._exploration: _Exploration | None = None
        self._was_probe = False
        self._again: Bucket | None = None  # that a probe runs once more
        self._charge: _Charge | None = None
        # Of each bucket its last burst: how many came before it, its steps and its seconds.
        self._last_of: dict[Bucket, tuple[int, int, float]] = {}
        self._num_observed = 0
        self._burst_steps = 1  # that a burst may have
        self._buckets_of: dict[int, tuple[Bucket, ...]] = {}  # by rows
        self._rates: dict[Bucket, float] = {}  # of the candidates of the last choice
        self._missing: set[Bucket] = set()  # those of them that are not compiled

    def choose(self, load: Load) -> Decision:
        """Returns the best bucket of those that are compiled, and what to compile beside it."""
        self._burst_steps = max(load.num_probe_steps, 1)
        decision = self._explore(load)
        if decision is not None:
            return decision
        candidates = [c for c in self._candidates(load) if not load.is_dropped(c.bucket)]
        if not candidates:
            return self._plain(load, load.limited_by or "nothing measured yet")
        self._rates = {c.bucket: c.rate for c in candidates}
        self._missing = {b for b in self._rates if not load.is_compiled(b)}
        usable = [c for c in candidates if c.bucket not in self._missing]
        soonest = None
        if not usable or self._last is None:
            first, soonest = self._first(self._trusted(candidates), load)
            usable = [first]
        best = self._best(self._trusted(usable), load)
        allowed = [
            c
            for c in usable
            if c.bucket.num_speculative_tokens == load.limit(c.bucket.num_speculative_tokens)
        ]
        if not allowed:
            return self._plain(load, load.limited_by)
        if best not in allowed:
            best = self._best(allowed, load)
            return self._decide(load, best, load.limited_by)
        again, self._again = self._again, None
        if (other := next((c for c in allowed if c.bucket == again), None)) is not None:
            # The drafter has caught up: what this burst takes is its steps' alone.
            return self._measure(load, other, _num_steps(PROBE_STEPS, other.seconds))
        if self._was_probe:
            # What ran before runs again: whether the machine changed its speed in between
            # tells whether the probe tells anything.
            best = next((c for c in allowed if c.bucket == self._last), best)
            self._was_probe = False
            num_steps = _num_steps(PROBE_STEPS, best.seconds)
            return self._decide(load, best, "goodput", num_steps=num_steps)
        # What is better by now runs first.
        probe = self._probe(best, allowed, load) if best.bucket == self._last else None
        if probe is not None:
            return probe
        prepare = soonest or self._missed(best, candidates, load)
        return self._decide(load, best, "goodput", prepare=prepare)

    def observe(self, outcome: Outcome) -> None:
        """Learns what was accepted, what a step cost, and what is lost without other buckets."""
        bucket = outcome.bucket
        self.survival.forget_others(outcome.requests)
        self.ledger.note(bucket)
        if bucket.num_speculative_tokens and outcome.num_steps:
            self.survival.observe(
                outcome.requests,
                outcome.num_committed,
                outcome.num_accepted,
                outcome.draft_depth,
                outcome.proposed_depth,
                outcome.asked_depth,
            )
        if not outcome.seconds or not outcome.num_steps:
            self.costs.begin_run()  # what follows is no neighbour of what came before
            return
        if outcome.idle_s > MOST_IDLE_S:
            self.costs.begin_run()
            self._last_of.clear()
        self._settle(outcome)
        self._save_up(outcome)
        self._count_regret(outcome)
        self._observe_cost(outcome)

    # What there is to choose from

    def _candidates(self, load: Load, row_buckets: Sequence[int] | None = None) -> list[_Candidate]:
        """Returns what every bucket is expected to do; nothing where costs are not known."""
        slots = RankedSlots(
            self.survival,
            load.requests,
            np.asarray(load.draft_caps),
            self._depths,
            np.asarray(load.tokens_left),
            np.asarray(load.urgency),
        )
        candidates = []
        shapes = self._shapes(load) if row_buckets is None else self.buckets(row_buckets)
        buckets = list(shapes)
        for bucket, gained in zip(buckets, slots.all_expected(buckets)):
            tokens = load.num_decoding_rows + gained
            seconds, doubt = self.costs.estimate(bucket, _midway(load, tokens))
            if seconds is None:
                return []
            if not self.costs.count(bucket):
                seconds *= 1 - OPTIMISM
            seconds += self.costs.burst_s / max(load.num_probe_steps, 1)
            rate = slots.together(bucket) * tokens / seconds
            candidates.append(_Candidate(bucket, tokens, seconds, rate, doubt, slots))
        return candidates

    def _shapes(self, load: Load) -> Iterator[Bucket]:
        """Yields what to look at: all of the fewest rows, and of more what is compiled instead."""
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        fewest, *larger = rows or load.row_buckets
        yield from self.buckets([fewest])
        missing = {
            depth for depth in (0, *self._depths) if not load.is_compiled(Bucket(fewest, depth))
        }
        for bucket in self.buckets(larger):
            if bucket.num_speculative_tokens in missing and load.is_compiled(bucket):
                yield bucket

    def buckets(self, row_buckets: Iterable[int]) -> Iterator[Bucket]:
        """Yields all that may be compiled for some numbers of rows."""
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
        """Returns what runs where nothing ran yet, and what is compiled beside it, if anything.

        What is compiled or kept on disk runs, if anything is, and plain decoding otherwise, which
        compiles sooner: the run does not wait for what would end it first.
        """
        there = [c for c in candidates if load.is_there(c.bucket)]
        plain = [c for c in candidates if not c.bucket.num_speculative_tokens]
        soonest = self._soonest_done(candidates, load)
        first = self._soonest_done(there or plain or candidates, load)
        is_coming = soonest in there or load.is_coming(soonest.bucket)
        return first, None if is_coming or soonest is first else soonest.bucket

    def _soonest_done(self, candidates: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns what ends the run first where nothing can run yet; plain decoding if in doubt."""

        def seconds(c: _Candidate) -> float:
            tokens = min(load.num_steps_left, ENOUGH_STEPS) * load.num_decoding_rows
            return load.ready_s(c.bucket) + tokens / c.rate

        best = min(candidates, key=seconds)
        plain = [c for c in candidates if not c.bucket.num_speculative_tokens]
        close = [c for c in plain if seconds(c) <= (1 + MARGIN) * seconds(best)]
        return min(close or [best], key=seconds)

    def _trusted(self, candidates: Sequence[_Candidate]) -> Sequence[_Candidate]:
        """Returns what may be run for more than a probe.

        Of buckets for as many rows, plain decoding and those that were measured often enough
        that one burst that was disturbed does not matter, if there are any.
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
        """Returns the bucket that was missed for longer than it takes to have it, if any."""
        missed = [
            c
            for c in candidates
            if c.bucket in self.ledger.missed_s
            and (c.rate > best.rate or not self.costs.count(c.bucket))
            and not load.is_compiled(c.bucket)
        ]
        # Asks the file system: the best first, and no more than it takes.
        missed.sort(key=lambda c: c.rate, reverse=True)
        most = next((c for c in missed if self._repays(c.bucket, load)), None)
        if most is None or any(load.is_coming(c.bucket) for c in candidates):
            return None
        return most.bucket

    def _repays(self, bucket: Bucket, load: Load) -> bool:
        """Returns whether as much was lost without a bucket as it takes to have it."""
        read_s = load.read_s(bucket)
        needed_s = load.compile_s if read_s is None else read_s
        return self.ledger.lost_s(bucket, is_kept=read_s is not None) >= needed_s

    def _best(self, candidates: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns the candidate of the highest rate, loath to change and to leave K = 0."""
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
        return Decision(
            num_speculative_tokens=chosen.bucket.num_speculative_tokens,
            reason=reason,
            row_bucket=chosen.bucket.rows,
            max_drafts=chosen.bucket.max_drafts,
            draft_caps=draft_caps,
            predicted_step_s=chosen.seconds,
            predicted_tokens=chosen.tokens,
            **more,
        )

    # Before both were measured

    def _plain(self, load: Load, reason: str, **more: Any) -> Decision:
        """Returns plain decoding of the fewest rows that is compiled, or else of all rows."""
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        *smaller, most = rows or load.row_buckets
        # A bucket for all rows will do whoever comes.
        ready = (r for r in smaller if load.is_compiled(Bucket(r, 0)))
        return Decision(
            num_speculative_tokens=0,
            reason=reason,
            row_bucket=next(ready, most),
            **more,
        )

    def _explore(self, load: Load) -> Decision | None:
        """Returns what to run while plain decoding or the best K was never measured; None after.

        The first bursts of a policy decide: what is compiled beside them is run and measured
        in turns with what ran, as soon as it is there.
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
            found.turns += [found.other, found.first] * EXPLORED
        bucket = found.turns.pop(0)
        step_s = self.costs.seconds(bucket, _midway(load, load.num_decoding_rows)) or 0.0
        plain_s = self.costs.seconds(Bucket(rows, 0), _midway(load, load.num_decoding_rows)) or 0.0
        if not found.turns or (bucket == found.first and LEAST_STEPS * plain_s > PROBE_S):
            # Of steps that take so long, one that is disturbed is hardly noticed.
            self._exploration = _Exploration()
        reason = "probe" if bucket == found.other else "nothing measured yet"
        return _of_bucket(bucket, reason, num_steps=_num_steps(PROBE_STEPS, step_s))

    def _is_short_wait(self, found: _Exploration, load: Load) -> bool:
        """Returns whether what is compiled beside a run is there soon, beside what is left to
        run."""
        assert found.other is not None
        if found.begun_at is None:
            # The first burst may have been compiled before.
            found.begun_at, found.steps_then = self._clock(), load.num_steps_left
        passed_s = self._clock() - found.begun_at
        num_run = found.steps_then - load.num_steps_left
        if num_run <= 0:
            return False
        left_s = load.num_steps_left * passed_s / num_run
        return load.ready_s(found.other) - passed_s <= MOST_WAIT * left_s

    def _exploration_of(self, load: Load) -> _Exploration:
        """Returns what to measure beside what, if anything is unknown and may pay."""
        plain = self._plain(load, "")
        assert plain.row_bucket is not None
        rows = plain.row_bucket
        bucket = Bucket(rows, 0)
        drafting = [
            Bucket(rows, depth)
            for depth in self._depths
            if not load.is_dropped(Bucket(rows, depth)) and depth == load.limit(depth)
        ]
        count = self.costs.count
        is_known = count(bucket) and any(count(other) for other in drafting)
        if not drafting or load.is_dropped(bucket) or is_known:
            return _Exploration()
        candidates = {c.bucket: c for c in self._candidates(load, [rows])}
        if not candidates:
            usual = min(drafting, key=lambda b: abs(b.num_speculative_tokens - USUAL_K))
            return _Exploration(bucket, usual, load.num_steps_left)
        plain_rate = candidates[bucket].rate
        best = self._most_promising([candidates[b] for b in drafting], plain_rate, load)
        # No step that drafts is faster than a plain one of as many rows.
        known_s = {rows: candidates[bucket].seconds}
        if best.hoped_rate(self._optimism(best, load), known_s) <= plain_rate * (1 + MARGIN):
            return _Exploration()
        gain = best.rate / plain_rate - 1
        is_sure = gain >= SURE_GAIN and not self._knows_no_acceptance
        if is_sure and load.is_there(best.bucket):
            return _Exploration(best.bucket, bucket, load.num_steps_left)
        return _Exploration(bucket, best.bucket, load.num_steps_left)

    def _most_promising(
        self, drafting: Sequence[_Candidate], plain_rate: float, load: Load
    ) -> _Candidate:
        """Returns what drafting is to be measured first.

        Plain decoding runs where it turns out to be better, so it is the best mean, over what
        acceptance may be, of the better of the two. A K above USUAL_K waits until more is known.
        """
        usual = [c for c in drafting if c.bucket.num_speculative_tokens <= USUAL_K]
        if self._knows_no_acceptance:
            drafting = usual or [min(drafting, key=lambda c: c.bucket.num_speculative_tokens)]

        def mean_rate(c: _Candidate) -> float:
            rates = [c.rate * self._optimism(c, load, by) for by in (-1.0, 0.0, 1.0)]
            return sum(max(rate, plain_rate) for rate in rates) / len(rates)

        return max(drafting, key=lambda c: (mean_rate(c), c.rate))

    # Learning

    def _probe(
        self, best: _Candidate, allowed: Sequence[_Candidate], load: Load
    ) -> Decision | None:
        """Returns a burst that learns something again, if there are seconds for it."""
        if not load.num_probe_steps:
            return None
        is_plain = not best.bucket.num_speculative_tokens
        ready = [c for c in allowed if c.bucket not in self._missing and c is not best]
        drafting = [c for c in ready if c.bucket.num_speculative_tokens]
        plain = [c for c in ready if not c.bucket.num_speculative_tokens]
        # None that runs as many rows is faster than plain decoding.
        least_s = {c.bucket.rows: c.seconds for c in allowed if not c.bucket.num_speculative_tokens}
        hopeful = self._hopeful(best, drafting, load, least_s) if is_plain else None
        promising = self._promising(best, plain if is_plain else ready, least_s)
        # The cheapest K that learns what is accepted; or plain decoding, what it costs.
        routine = min(drafting if is_plain else plain, key=lambda c: c.seconds, default=None)
        other = hopeful or promising or routine
        if other is None:
            return None
        begins = is_plain and other.bucket.num_speculative_tokens > 0
        catch_up = self._catch_up(load, best.seconds) if begins else 0.0
        few = num_steps = _num_steps(PROBE_STEPS, other.seconds)
        if other is hopeful:
            # In fewer, catching up would hide what they cost.
            least = catch_up / (SMALL_CATCH_UP * other.seconds)
            most = _num_steps(load.num_probe_steps, other.seconds, PLAIN_PROBE_S)
            num_steps = max(num_steps, min(math.ceil(least) + 1, most))
        elif other is not promising and not is_plain:
            num_steps = _num_steps(load.num_probe_steps, other.seconds, PLAIN_PROBE_S)
        elif other is not promising:
            # It asks what is accepted, and many rows tell as much in fewer steps.
            num_steps = min(num_steps, math.ceil(PROBE_STEPS / load.num_decoding_rows))
            num_steps = max(num_steps, LEAST_STEPS)
        num_steps = min(num_steps, load.num_probe_steps)
        # Where catching up hides what its steps cost, the same ones run once more, at once.
        is_hidden = catch_up > SMALL_CATCH_UP * (catch_up + num_steps * other.seconds)
        again = few if is_hidden and not self._is_trusted(other) else 0
        lost = (num_steps + again) * other.seconds * (1 - other.rate / best.rate) + catch_up
        lost = max(lost, LEAST_LOST * (num_steps + again) * best.seconds)
        ledger = self.ledger
        is_due = begins and ledger.plain_s >= ASK_EVERY_S
        is_soon = begins and other is not hopeful and ledger.plain_s < LEAST_APART_S
        ask_s = ASK_SHARE * ledger.plain_s
        if ledger.plain_s >= ASK_LATE * ASK_EVERY_S:
            ask_s = max(ask_s, LATE_SHARE * LATE_S - ledger.late_s)
        share = 0.0 if is_plain else PLAIN_SHARE
        if is_due and lost <= ask_s:
            if lost > ASK_SHARE * ledger.plain_s:  # else it is its own share
                ledger.late_s += lost
        elif lost <= ledger.routine_s and not is_soon:
            ledger.routine_s -= lost
            self._charge = _Charge(other.bucket, "routine_s", lost, best.rate)
        elif other in plain and lost <= share * ledger.drafting_s:
            pass  # likewise
        elif (hopeful or promising) and lost <= ledger.hope_s:
            ledger.hope_s -= lost
            self._charge = _Charge(other.bucket, "hope_s", lost, best.rate)
        else:
            return None
        self.seconds_lost += lost
        self._again = other.bucket if again else None
        self._last = self._last or best.bucket
        return self._measure(load, other, num_steps)

    def _measure(self, load: Load, other: _Candidate, num_steps: int) -> Decision:
        """Returns a burst of a bucket that does not become the one that runs."""
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
        """Returns the best of what was hardly measured, and may be better than is thought."""
        # Plain decoding first: whether drafting pays at all hangs on what it costs.
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
        """Returns the cheapest of what may well be worth leaving K = 0 for, if anything is.

        Too little may be known of acceptance, and of what a step costs.
        """
        hoped = lambda c: c.hoped_rate(self._optimism(c, load), least_s)
        hopeful = [c for c in others if hoped(c) > best.rate * (1 + MARGIN)]
        return min(hopeful, key=lambda c: c.seconds, default=None)

    def _optimism(self, c: _Candidate, load: Load, deviations: float = 2.0) -> float:
        """Returns how many times more tokens a step may bring than is expected."""
        rows = load.num_decoding_rows
        more = self.survival.optimism(deviations)[c.bucket.num_speculative_tokens - 1]
        return (rows + (c.tokens - rows) * more) / c.tokens

    def _catch_up(self, load: Load, plain_s: float) -> float:
        """Returns the seconds that the drafter takes to see what it has not seen yet."""
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
            # No less than a part of the guess: what was learned may be far too low.
            least = LEAST_CATCH_UP * CATCH_UP_SHARE * usual_s * behind
            catch_up = max(self._catch_up_s(behind, usual_s), least)
            if catch_up > SMALL_CATCH_UP * seconds:
                # Learned apart, once the steps are known.
                expected = self.costs.seconds(bucket, context)
                if is_known and expected is not None:
                    extra = seconds - num_steps * expected
                    usual = catch_up / behind
                    self.costs.observe_catch_up(
                        behind, extra, steps_s=num_steps * expected, usual_s=usual
                    )
                return
            seconds -= catch_up
        self._compare_with_last(bucket, num_steps, seconds)
        seconds = max(seconds - self.costs.burst_s, LEAST_OF_STEPS * seconds)
        if is_known and outcome.is_short and seconds < TIMED_S:
            return  # sending it weighs more than in others
        self.costs.observe(bucket, context, seconds / num_steps)

    def _compare_with_last(self, bucket: Bucket, num_steps: int, seconds: float) -> None:
        """Learns what a burst takes beside its steps, from two of one bucket near each other."""
        self._num_observed += 1
        before, steps, took = self._last_of.get(bucket, (-BURSTS_NEAR, 0, 0.0))
        self._last_of[bucket] = self._num_observed, num_steps, seconds
        few, many = sorted([(steps, took), (num_steps, seconds)])
        is_near = self._num_observed - before <= BURSTS_NEAR
        if is_near and LEAST_STEPS < few[0] <= many[0] / 2:
            self.costs.observe_burst(few, many)

    def _settle(self, outcome: Outcome) -> None:
        """Charges a probe what it took: its bursts, and the one after it, which is short too."""
        charge = self._charge
        if charge is None:
            return
        charge.add(outcome)
        if outcome.bucket == charge.bucket:
            return  # it may run once more
        self._charge, ledger = None, self.ledger
        more = charge.too_little()
        self.seconds_lost += more
        left = getattr(ledger, charge.pot) - more
        setattr(ledger, charge.pot, left)

    def _save_up(self, outcome: Outcome) -> None:
        """Takes a share of a burst's seconds, and of what drafting saved, for learning."""
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
        """Adds up what the burst would have saved in each bucket that is not compiled."""
        assert outcome.seconds is not None
        own = self._rates.get(outcome.bucket)
        if own is None:
            return  # nothing was compared, or the rows have changed since
        for bucket, rate in self._rates.items():
            if rate > own * (1 + MARGIN) and bucket in self._missing:
                self.ledger.miss(bucket, (1 - own / rate) * outcome.seconds)

    @property
    def _knows_no_acceptance(self) -> bool:
        return self.survival.num_told < SURE_TRIALS


def _num_steps(most: int, step_s: float, most_s: float = PROBE_S) -> int:
    """Returns the steps of a burst that is to take no more than some seconds."""
    return most if most * step_s <= most_s else max(int(most_s / step_s), LEAST_STEPS)


def _midway(load: Load, tokens_per_step: float) -> float:
    """Returns the context tokens of all rows in the middle of a burst."""
    steps_left = load.num_steps_left * load.num_decoding_rows / tokens_per_step
    num_steps = min(load.num_probe_steps, steps_left)
    return load.num_context_tokens + num_steps * tokens_per_step / 2
