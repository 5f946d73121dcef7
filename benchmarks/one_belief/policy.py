"""A policy of one belief of seconds and one budget: a candidate for specjax.policy.goodput.

    rate(bucket) = (rows + expected accepted draft tokens) / seconds of its step

A candidate is every bucket that holds the rows: a number of rows, a K and, where acceptance
differs between rows, fewer draft slots than rows * K, which go to the likeliest draft tokens.
Seconds come from Seconds, acceptance from Survival. Both are learned in service, and both say
how sure they are.

- The best bucket that was measured runs. Leaving K = 0 takes MARGIN and repays the catch-up.
- A bucket that may be better, by HOPE standard deviations of its rate, is probed for a few steps
  once the budget covers what they lose. BUDGET_SHARE of all seconds is saved up for probes, and
  GAIN_SHARE of what drafting saves. Plain decoding and drafts are timed again, by the same
  budget, ASK_EVERY_S after they last ran.
- A bucket is compiled in the background once the regret of not having it reaches COMPILE_SHARE of
  the seconds that compiling takes, or those of reading it from disk (ski rental). Regret
  accumulates over the runs of a pair of target and drafter (`ledger`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.one_belief.seconds import Seconds
from specjax.decode.bucket import Bucket
from specjax.decode.decoder import WARM_UP_CALLS
from specjax.policy.goodput import Goodput, ladder
from specjax.policy.interface import Decision, Load, Outcome
from specjax.policy.ledger import Ledger
from specjax.policy.ranked_slots import RankedSlots
from specjax.policy.survival import Survival

# Relative gain in rate over K = 0 that drafting needs to begin, and over the last bucket that any
# other change needs.
MARGIN, STICKINESS = 0.03, 0.01
HOPE = 2.0  # standard deviations by which a probe's rate is hoped to exceed the expected one
# What probes may lose: a fraction of all seconds, one of the seconds that drafting saves, what a
# new pair begins with and the most that is saved up, both in plain steps.
BUDGET_SHARE, GAIN_SHARE, FIRST_STEPS, MOST_STEPS = 0.007, 0.02, 16, 96
LEAST_LOST = 0.1  # least loss of a probe, as a fraction of its seconds
ASK_EVERY_S = 4.0
ENOUGH_MEASURED = 2  # measurements after which a bucket may run for more than a probe
PROBE_STEPS, LEAST_STEPS = 8, 2  # of a probe; of any burst
MOST_PROBE_S, MOST_DRAFTING_S = 0.25, 0.5  # longest probe; longest burst that drafts
USUAL_K = 3  # largest K tried first where nothing is known of acceptance
# Fraction of a compilation's seconds that regret reaches first: about what the run beside it loses
# on two cores. SURE_SHARE: of a bucket better by SURE_GAIN, as SURE_TRIALS drafts and more tell.
COMPILE_SHARE, SURE_SHARE, SURE_GAIN, SURE_TRIALS = 0.5, 0.02, 0.15, 16.0
ENOUGH_STEPS = 10_000  # most remaining steps that count towards repaying anything
MOST_IDLE_S = 1.0  # longest pause between bursts that are compared


class _Candidate(NamedTuple):
    bucket: Bucket
    tokens: float  # expected per step, of all rows
    seconds: float  # of a step, with its part of a burst's fixed time
    rate: float  # tokens per second
    slots: RankedSlots

    @property
    def is_plain(self) -> bool:
        return not self.bucket.num_speculative_tokens


class OneBelief:
    """Chooses the bucket with the most expected tokens per second.

    Args:
      max_speculative_tokens: the largest K.
      costs: step costs known so far; updated by `observe`.
      depths: the values of K above 0 that may be compiled; by default those of `ladder`.
      ranks: whether fewer slots than rows * K may go to the likeliest tokens: Bucket.max_drafts.
      knows_confidence: whether the drafter returns a confidence per token. The device ranks
        slots by it; without it the policy ranks them by the rows' acceptance rates.
      ledger: budget and regret of earlier runs of the pair; by default empty.
      survival: acceptance known so far; updated by `observe`. By default empty.
    """

    chooses_rows: ClassVar[bool] = True

    def __init__(
        self,
        max_speculative_tokens: int,
        costs: Seconds | None = None,
        *,
        depths: Sequence[int] | None = None,
        ranks: bool = True,
        knows_confidence: bool = False,
        ledger: Ledger | None = None,
        survival: Survival | None = None,
    ):
        self.max_speculative_tokens = max_speculative_tokens
        self.costs = costs or Seconds()
        self.costs.begin_run()
        self.survival = survival or Survival(max_speculative_tokens)
        self.ledger = Ledger() if ledger is None else ledger
        self.seconds_lost = 0.0  # to probes, estimated
        self._depths = ladder(max_speculative_tokens) if depths is None else depths
        self._knows_confidence = knows_confidence
        self._num_ran: dict[Bucket, int] = {}
        self._budget_s: float | None = None  # seconds that probes may lose
        self._since_s = 0.0, 0.0  # since a burst drafted, and since one was plain
        self._last: Bucket | None = None  # that ran and was no probe
        self._again: list[Bucket] = []  # probed in the next bursts too, from the end
        self._pending: Bucket | None = None  # probe that was not read back
        self._shapes_of = Goodput(max_speculative_tokens, depths=self._depths, ranks=ranks).buckets
        self._rates: dict[Bucket, float] = {}  # tokens per second of the last candidates
        self._missing: set[Bucket] = set()  # candidates that were allowed and not compiled

    def choose(self, load: Load) -> Decision:
        """Returns the best compiled bucket, and the bucket to compile in the background, if any."""
        if not load.limit(self.max_speculative_tokens):
            return self._plain(load, load.limited_by)
        candidates = self._candidates(load)
        self._rates = {c.bucket: c.rate for c in candidates}
        ready = [c for c in candidates if load.is_compiled(c.bucket)]
        self._missing = {c.bucket for c in candidates if not load.is_compiled(c.bucket)}
        soonest = None
        if not ready or (self._last is None and all(c.is_plain for c in ready)):
            first, soonest = self._first(candidates, load)
            if first not in ready:
                ready = [first]
            soonest = soonest or self._to_try(candidates, first, load)
        best = self._best(ready, load)
        probe = self._next_probe(best, ready, load)
        if probe is not None:
            return probe
        prepare = soonest or self._missed(best, candidates, load)
        self._last = best.bucket
        return self._decide(load, best, "goodput", prepare=prepare, others=candidates)

    def observe(self, outcome: Outcome) -> None:
        """Learns acceptance and step cost from a burst, and the regret of uncompiled buckets."""
        bucket, seconds = outcome.bucket, outcome.seconds
        self.survival.forget_others(outcome.requests)
        if bucket == self._pending:
            self._pending = None
        self._num_ran[bucket] = self._num_ran.get(bucket, 0) + 1
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
        if not seconds or not outcome.num_steps:
            return
        if outcome.idle_s > MOST_IDLE_S:
            self.costs.begin_run()
        self._save_up(outcome)
        own = self._rates.get(bucket, math.inf)
        for other in self._missing:
            if (rate := self._rates[other]) > own * (1 + MARGIN):
                self.ledger.miss(other, (1 - own / rate) * seconds)
        if self.costs.count(bucket) and outcome.is_short and seconds < 0.1:
            return  # sending the burst is too large a part of its seconds
        behind = outcome.num_behind - 1 if bucket.num_speculative_tokens else 0
        self.costs.observe(
            bucket,
            outcome.num_context_tokens,
            seconds / outcome.num_steps,
            outcome.num_steps,
            max(behind, 0),
        )

    # Candidates

    def _candidates(self, load: Load) -> list[_Candidate]:
        """Returns every bucket that may run or be compiled, with its expected rate."""
        slots = RankedSlots(
            self.survival,
            load.requests,
            np.asarray(load.draft_caps),
            self._depths,
            np.asarray(load.tokens_left),
            np.asarray(load.urgency),
        )
        buckets = [
            bucket
            for bucket in self._shapes(load)
            if not load.is_dropped(bucket)
            and bucket.num_speculative_tokens == load.limit(bucket.num_speculative_tokens)
        ]
        tokens = [load.num_decoding_rows + gained for gained in slots.all_expected(buckets)]
        contexts = [_midway(load, each) for each in tokens]
        steps = [max(load.num_probe_steps, 1)] * len(buckets)
        logs, _ = self.costs.estimates(buckets, contexts, steps)
        return [
            _Candidate(bucket, own, seconds, slots.together(bucket) * own / seconds, slots)
            for bucket, own, seconds in zip(buckets, tokens, np.exp(logs).tolist())
        ]

    def _shapes(self, load: Load) -> Iterator[Bucket]:
        """Yields every bucket of the smallest row bucket, and larger ones of its missing K.

        Those are compiled or, before the first burst, kept on disk.
        """
        begins = self._last is None and not load.prompt_tokens
        is_there = load.is_there if begins else load.is_compiled
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        fewest, *larger = rows or load.row_buckets
        yield from self._shapes_of([fewest])
        missing = {
            depth for depth in (0, *self._depths) if not load.is_compiled(Bucket(fewest, depth))
        }
        for bucket in self._shapes_of(larger):
            if bucket.num_speculative_tokens in missing and is_there(bucket):
                yield bucket

    def _first(
        self, candidates: Sequence[_Candidate], load: Load
    ) -> tuple[_Candidate, Bucket | None]:
        """Returns the first bucket to run, and the one to compile in the background, if any.

        A bucket that is compiled or kept on disk and was measured runs, otherwise plain decoding,
        which compiles sooner; of them the one with which the run ends first, waiting included.
        """
        tokens = min(load.num_steps_left, ENOUGH_STEPS) * load.num_decoding_rows
        seconds = {c.bucket: load.ready_s(c.bucket) + tokens / c.rate for c in candidates}
        of = lambda c: seconds[c.bucket] / (1 + MARGIN * c.is_plain)
        known = [c for c in candidates if c.is_plain or self._is_trusted(c)]
        there = [c for c in known if load.is_there(c.bucket)]
        soonest = min(known, key=of)
        # All rows fit into the largest of those that are plain: it serves whoever comes.
        plain = [c for c in known if c.is_plain]
        first = min(there or plain, key=of)
        is_coming = soonest in there or load.is_coming(soonest.bucket)
        return first, None if is_coming or soonest is first else soonest.bucket

    def _to_try(
        self, candidates: Sequence[_Candidate], first: _Candidate, load: Load
    ) -> Bucket | None:
        """Returns what to compile beside the first bucket of a pair that never drafted."""
        rows = first.bucket.rows
        if load.is_any_coming() or any(
            self.costs.count(b) for b in self._shapes_of([rows]) if b.num_speculative_tokens
        ):
            return None
        slots = first.slots
        depths = [d for d in self._depths if d == load.limit(d) and d <= USUAL_K] or [
            min(self._depths)
        ]
        buckets = [Bucket(rows, d) for d in depths if not load.is_dropped(Bucket(rows, d))]
        buckets = [b for b in buckets if not load.is_there(b)]
        if not first.is_plain or not buckets:
            return None
        tokens = [load.num_decoding_rows + g for g in slots.all_expected(buckets)]
        best = max(zip(tokens, buckets))
        return best[1]

    def _is_trusted(self, candidate: _Candidate) -> bool:
        return self.costs.count(candidate.bucket) >= ENOUGH_MEASURED

    def _best(self, ready: Sequence[_Candidate], load: Load) -> _Candidate:
        """Returns the candidate of the highest rate that may run for long, with hysteresis."""
        trusted = [c for c in ready if c.is_plain or self._is_trusted(c)] or list(ready)
        best = max(trusted, key=lambda c: c.rate)
        plain = max((c for c in trusted if c.is_plain), key=lambda c: c.rate, default=None)
        was_plain = self._last is not None and not self._last.num_speculative_tokens
        if plain is not None and not best.is_plain and was_plain:
            gain = best.rate / plain.rate - 1
            left_s = min(load.num_steps_left, ENOUGH_STEPS) * plain.seconds
            if gain < MARGIN or gain * left_s < self._catch_up_s(best, load):
                return plain
        same = next((c for c in trusted if c.bucket == self._last), None)
        if same is not None and best.rate < same.rate * (1 + STICKINESS):
            return same
        return best

    def _catch_up_s(self, candidate: _Candidate, load: Load) -> float:
        """Returns the seconds in which the drafter reads what it has not seen."""
        behind = np.asarray(load.num_behind)[np.asarray(load.draft_caps) > 0]
        num_behind = int(behind.max(initial=1)) - 1
        if candidate.is_plain or num_behind <= 0:
            return 0.0
        context = _midway(load, candidate.tokens)
        args = [candidate.bucket], [context], [1]
        (late,), _ = self.costs.estimates(*args, num_behind=num_behind)
        (usual,), _ = self.costs.estimates(*args)
        return math.exp(late) - math.exp(usual)

    # Finding out

    def _next_probe(
        self, best: _Candidate, ready: Sequence[_Candidate], load: Load
    ) -> Decision | None:
        """Returns a burst that measures another bucket, if the budget covers what it loses."""
        if not load.num_probe_steps:
            return None
        by_bucket = {c.bucket: c for c in ready}
        while self._again:
            again = by_bucket.get(self._again.pop())
            if again is not None:
                return self._probe(load, again, LEAST_STEPS if self._again else PROBE_STEPS)
        budget_s = self._budget_s
        if self._pending is not None or budget_s is None or budget_s <= 0:
            return None
        others = [c for c in ready if c is not best]
        hopeful = self._hopeful(best, others, load)
        since_s = self._since_s[not best.is_plain]
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
        _, lost, other = found
        self._budget_s = budget_s - lost
        self.seconds_lost += lost
        self._again = [other.bucket] * self._num_cold(other)
        return self._probe(load, other, LEAST_STEPS if self._again else PROBE_STEPS)

    def _num_cold(self, candidate: _Candidate) -> int:
        """Returns how many of the next bursts of a bucket warm it up and are not timed."""
        return max(WARM_UP_CALLS - self._num_ran.get(candidate.bucket, 0), 0)

    def _hopeful(
        self, best: _Candidate, others: Sequence[_Candidate], load: Load
    ) -> list[tuple[float, float, _Candidate]]:
        """Returns candidates that may be better: the gain to be expected if only better ones are
        kept, per second that a probe loses; those seconds; and the candidate."""
        if not others:
            return []
        every = [best, *others]
        _, of_seconds = self.costs.estimates(
            [c.bucket for c in every],
            [_midway(load, c.tokens) for c in every],
            [max(load.num_probe_steps, 1)] * len(every),
            reference=0,
        )
        rows, more = load.num_decoding_rows, self.survival.optimism(1.0)
        least = MARGIN if best.is_plain else STICKINESS
        found = []
        for candidate, sd in zip(others, of_seconds[1:].tolist()):
            tokens = candidate.tokens
            if not candidate.is_plain:
                factor = more[candidate.bucket.num_speculative_tokens - 1]
                # Where the best drafts as well, the two share most of what is not known.
                of_tokens = math.log((rows + (tokens - rows) * factor) / tokens)
                sd = math.hypot(sd, of_tokens if best.is_plain else of_tokens / 2)
            gain = math.log(candidate.rate / best.rate) - least
            if gain + HOPE * sd > 0:
                lost = self._lost_s(candidate, best, load)
                found.append((_mean_above_0(gain, sd) / lost, lost, candidate))
        return found

    def _lost_s(self, other: _Candidate, best: _Candidate, load: Load) -> float:
        """Returns the seconds that a probe brings the end less near than the best bucket would."""
        num_steps = min(PROBE_STEPS, max(load.num_probe_steps, 1))
        num_steps += LEAST_STEPS * self._num_cold(other)
        took = num_steps * other.seconds + self._catch_up_s(other, load) * best.is_plain
        if best.is_plain and not other.is_plain and len(load.tokens_left):
            # Rows that drafted for a few steps keep what they are ahead; the last row counts.
            worth = other.slots.steps_saved(other.bucket, num_steps) * best.seconds
        else:
            worth = num_steps * other.seconds * other.rate / best.rate
        return max(took - worth, LEAST_LOST * took)

    def _probe(self, load: Load, other: _Candidate, most: int) -> Decision:
        num_steps = min(most, load.num_probe_steps)
        if num_steps * other.seconds > MOST_PROBE_S:
            num_steps = max(int(MOST_PROBE_S / other.seconds), LEAST_STEPS)
        self._pending = other.bucket
        return self._decide(load, other, "probe", num_steps=num_steps)

    def _save_up(self, outcome: Outcome) -> None:
        """Adds fractions of a burst's seconds, and of those drafting saved, to the budget."""
        assert outcome.seconds is not None
        seconds, ledger, bucket = outcome.seconds, self.ledger, outcome.bucket
        ledger.spend(seconds, is_drafting=bucket.num_speculative_tokens > 0)
        drafting_s, plain_s = (since + seconds for since in self._since_s)
        self._since_s = (0.0, plain_s) if bucket.num_speculative_tokens else (drafting_s, 0.0)
        plain_s = self.costs.seconds(Bucket(bucket.rows, 0), outcome.num_context_tokens)
        plain_s = min(plain_s or math.inf, seconds / outcome.num_steps)
        budget_s = FIRST_STEPS * plain_s if self._budget_s is None else self._budget_s
        budget_s += BUDGET_SHARE * seconds
        own, plain = map(self._rates.get, (bucket, Bucket(bucket.rows, 0)))
        if own and plain and own > plain:
            budget_s += GAIN_SHARE * seconds * (own / plain - 1)
        self._budget_s = min(budget_s, MOST_STEPS * plain_s)

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
        # `_repays` asks the file system: the best come first, and the search stops at a hit.
        missed.sort(key=lambda c: c.rate, reverse=True)
        return next((c.bucket for c in missed if self._repays(c, best, load)), None)

    def _repays(self, candidate: _Candidate, best: _Candidate, load: Load) -> bool:
        """Returns whether the regret of a bucket reaches its share of the seconds of compiling it,
        or those of reading it, and what is left of this process may repay them."""
        bucket = candidate.bucket
        read_s = load.read_s(bucket)
        cost_s = COMPILE_SHARE * load.compile_s if read_s is None else read_s
        left_s = min(load.num_steps_left, ENOUGH_STEPS) * best.seconds
        gain = 1 - best.rate / candidate.rate
        if gain * max(left_s, self.ledger.left_s) < cost_s:
            return False
        is_sure = self.survival.num_told >= SURE_TRIALS and gain >= SURE_GAIN
        is_sure = is_sure and bucket.rows == best.bucket.rows and self._is_trusted(best)
        if is_sure and read_s is None:
            cost_s = SURE_SHARE * load.compile_s
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
        return self._of(
            chosen,
            reason,
            predicted_step_s=chosen.seconds,
            why=_why_not(chosen, others),
            **more,
        )

    def _plain(self, load: Load, reason: str) -> Decision:
        """Returns plain decoding in the smallest compiled row bucket, else in the largest."""
        rows = [r for r in load.row_buckets if not load.is_dropped(Bucket(r, 0))]
        *smaller, most = rows or load.row_buckets
        # The largest row bucket also holds requests that are admitted later.
        ready = (r for r in smaller if load.is_compiled(Bucket(r, 0)))
        return Decision(num_speculative_tokens=0, reason=reason, row_bucket=next(ready, most))


def _why_not(chosen: _Candidate, others: Sequence[_Candidate]) -> str:
    """Returns what the fastest step that drafts would gain, where plain decoding was chosen."""
    drafting = [c for c in others if not c.is_plain]
    if not chosen.is_plain or not drafting:
        return ""
    other = max(drafting, key=lambda c: c.rate)
    return (
        f"a step with K = {other.bucket.num_speculative_tokens} is expected to give "
        f"{other.tokens / chosen.tokens:.2f} times the tokens in "
        f"{other.seconds / chosen.seconds:.2f} times the time"
    )


def _mean_above_0(mean: float, deviation: float) -> float:
    """Returns the mean of a normal number where it is above 0, times how often it is."""
    if deviation <= 0:
        return max(mean, 0.0)
    off = mean / deviation
    above = (1 + math.erf(off / math.sqrt(2))) / 2
    return mean * above + deviation * math.exp(-(off**2) / 2) / math.sqrt(2 * math.pi)


def _midway(load: Load, tokens_per_step: float) -> float:
    """Returns the context tokens of all rows in the middle of the next burst."""
    steps_left = load.num_steps_left * load.num_decoding_rows / tokens_per_step
    num_steps = min(load.num_probe_steps, steps_left)
    return load.num_context_tokens + num_steps * tokens_per_step / 2
