"""Replays measured step costs to evaluate a policy without the noise of a clock.

Everything but the device is real: the policy sees loads and outcomes as in service, and
time advances by the table's cost of each step. Whether a draft token is accepted depends only
on the row and the token's place in the text, so that every policy has the same luck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.policy.interface import (
    Decision,
    Load,
    Outcome,
    SpeculationPolicy,
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows that decode together and are not refilled."""

    num_tokens: np.ndarray  # i64[rows], that each is to gain
    rates: np.ndarray  # f64[rows], how often a draft token stands, given those before it
    context: int  # tokens of each row at the start
    seed: int = 0

    @property
    def rows(self) -> int:
        return len(self.num_tokens)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the device.

    Args:
      step_s: seconds of a step of a bucket, given the context tokens of all rows.
      catch_up_s: seconds per token that the drafter has not seen, in the row with most of them.
    """

    step_s: Callable[[Bucket, float], float]
    catch_up_s: float
    row_buckets: tuple[int, ...]
    has: Callable[[Bucket], bool] = lambda bucket: True  # buckets that there are
    # Tokens of a row that were measured at most: a longer context is charged like that.
    longest_context: int = 10**9


class Compiler:
    """Compiles steps in the background of a replay, one after the other.

    It goes on from replay to replay, as calls of one process share their executables.

    Args:
      compile_s: seconds that a bucket takes.
      slows: how many times longer a burst takes during them; its seconds tell a policy nothing.
      read_s: seconds to read a bucket that an earlier process compiled.

    Attributes:
      at_s: seconds on its clock, which bursts and waits move.
      waited_s: seconds that a burst waited for its bucket.
      ready_at_s: when each bucket that began to be compiled or read is ready, in this order.
      num_compiled: buckets that were compiled, in all processes.
      most_at_once: how many compiled in the background at the same time, at most.
    """

    def __init__(self, compile_s: float, slows: float = 2.0, read_s: float = 0.3):
        self.compile_s, self.slows = compile_s, slows
        self._read_s, self._kept = read_s, set[Bucket]()
        self.at_s = self.waited_s = 0.0
        self.ready_at_s: dict[Bucket, float] = {}
        self.num_compiled = self.most_at_once = 0

    def is_compiled(self, bucket: Bucket) -> bool:
        return bucket in self.ready_at_s and self.at_s >= self.ready_at_s[bucket]

    def is_coming(self, bucket: Bucket) -> bool:
        return bucket in self.ready_at_s and not self.is_compiled(bucket)

    def is_any_coming(self) -> bool:
        return any(map(self.is_coming, self.ready_at_s))

    def read_s(self, bucket: Bucket) -> float | None:
        """Returns the seconds to read a bucket; None if it is not kept."""
        return self._read_s if bucket in self._kept else None

    def prepare(self, bucket: Bucket) -> None:
        """Begins to compile or read a bucket."""
        self._begin(bucket)
        self.most_at_once = max(self.most_at_once, sum(map(self.is_coming, self.ready_at_s)))

    def wait_for(self, bucket: Bucket) -> float:
        """Returns the seconds until a bucket can run, and lets them pass."""
        self._begin(bucket)
        waited = max(self.ready_at_s[bucket] - self.at_s, 0.0)
        self.at_s += waited
        self.waited_s += waited
        return waited

    def restart(self) -> float:
        """Begins another process, which has to read what is kept.

        Returns:
          The seconds that the one before takes to end: it finishes what it compiles.
        """
        ends = max(self.ready_at_s.values(), default=0.0)
        waited = max(ends - self.at_s, 0.0)
        self.at_s += waited
        self._kept |= {*self.ready_at_s}
        self.ready_at_s = {}
        return waited

    def _begin(self, bucket: Bucket) -> None:
        if bucket not in self.ready_at_s:
            is_kept = bucket in self._kept
            self.num_compiled += not is_kept
            self.ready_at_s[bucket] = self.at_s + (self._read_s if is_kept else self.compile_s)


class Clock:
    """By what factor the seconds that a policy sees of a burst are off; what is charged is not.

    Args:
      noise: standard deviation of the factor's logarithm.
      wander: standard deviation of a part that changes slowly, over some ten bursts.
      disturbed: share of the bursts that take 1.2 to 2.2 times as long besides.
    """

    def __init__(self, seed: int, noise: float, *, wander: float = 0.0, disturbed: float = 0.0):
        self._rng = np.random.default_rng(seed)
        self._noise, self._wander, self._disturbed = noise, wander, disturbed
        self._slow = 0.0

    def __call__(self) -> float:
        kept, rng = 0.9, self._rng
        self._slow *= kept
        self._slow += self._wander * float(rng.normal()) * (1 - kept**2) ** 0.5
        factor = float(np.exp(self._slow + rng.normal(0.0, self._noise)))
        if rng.uniform() < self._disturbed:
            factor *= float(rng.uniform(1.2, 2.2))
        return factor


@dataclasses.dataclass(frozen=True)
class Burst:
    """Record of one burst of a replay."""

    at_s: float  # when it began
    num_rows: int
    decision: Decision
    num_steps: int
    num_tokens: int
    seconds: float


class Replay:
    """Runs a workload under a policy.

    Args:
      clock: by what the seconds of the next burst are off, as the policy sees them.
      first_request: the number of the first row's request; a policy knows them apart by it.
      rate_at: how often drafts of all rows stand at a time in s, instead of the workload's.
      slow_at: how many times longer everything takes at a time in s.
      until_s: when it stops, done or not.
      compiler: what compiles the buckets; None: all are compiled.
    """

    def __init__(
        self,
        workload: Workload,
        costs: Costs,
        policy: SpeculationPolicy,
        *,
        burst_steps: int = 32,
        clock: Callable[[], float] = lambda: 1.0,
        first_request: int = 0,
        rate_at: Callable[[float], float] | None = None,
        slow_at: Callable[[float], float] = lambda now_s: 1.0,
        until_s: float = float("inf"),
        compiler: Compiler | None = None,
    ):
        self.workload, self.costs, self.policy = workload, costs, policy
        self.burst_steps = burst_steps
        self.bursts: list[Burst] = []
        rows, most = workload.rows, int(workload.num_tokens.max())
        rng = np.random.default_rng(workload.seed)
        # [rows, place in the text]: a draft of the token there stands where this is below
        # the rate.
        self._luck = rng.uniform(size=(rows, most + 64))
        self._rate_at, self._slow_at, self._until_s = rate_at, slow_at, until_s
        self._gained = np.zeros(rows, np.int64)
        self._drafter_gained = np.zeros(rows, np.int64)
        self._now_s = 0.0
        self._clock, self._first_request = clock, first_request
        self._compiler = compiler

    def run(self) -> Replay:
        """Runs until every row has its tokens."""
        while (left := self._left()).any() and self._now_s < self._until_s:
            self._burst(np.flatnonzero(left))
        return self

    @property
    def seconds(self) -> float:
        return self._now_s

    @property
    def num_tokens(self) -> int:
        return sum(burst.num_tokens for burst in self.bursts)

    def least_of(self, other: Replay, window_s: float) -> float:
        """Returns the least ratio of what both gained in equal windows of so many seconds."""
        ends = [
            np.cumsum([[b.seconds, b.num_tokens] for b in run.bursts], axis=0)
            for run in (self, other)
        ]
        last = min(own[-1, 0] for own in ends)
        starts = np.arange(0.0, last - window_s, window_s / 30)
        gains = []
        for own in ends:
            at = lambda when, own=own: np.interp(when, np.r_[0, own[:, 0]], np.r_[0, own[:, 1]])
            gains.append(at(starts + window_s) - at(starts))
        return float((gains[0] / gains[1]).min())

    def tokens_per_second(self, after_steps: int = 0) -> float:
        """Returns the tokens per second of what came after some steps."""
        steps = np.cumsum([burst.num_steps for burst in self.bursts])
        counted = [b for b, n in zip(self.bursts, steps) if n > after_steps]
        return sum(b.num_tokens for b in counted) / sum(b.seconds for b in counted)

    def _left(self) -> np.ndarray:
        return self.workload.num_tokens - self._gained

    def _burst(self, rows: np.ndarray) -> None:
        fitting = [b for b in self.costs.row_buckets if b >= len(rows)]
        behind = self._gained[rows] - self._drafter_gained[rows] + 1
        contexts = self.workload.context + self._gained[rows]
        contexts = np.minimum(contexts, self.costs.longest_context)
        load = Load(
            num_decoding_rows=len(rows),
            row_buckets=fitting,
            requests=self._first_request + rows,
            draft_caps=np.full(len(rows), 10**6),
            num_behind=behind,
            num_context_tokens=int(contexts.sum()),
            num_steps_left=int(self._left()[rows].max()),
            tokens_left=self._left()[rows],
            num_probe_steps=self.burst_steps,
            is_dropped=lambda bucket: not self.costs.has(bucket),
        )
        compiler = self._compiler
        if compiler is not None:
            load = dataclasses.replace(
                load,
                compile_s=compiler.compile_s,
                is_compiled=compiler.is_compiled,
                is_coming=compiler.is_coming,
                is_any_coming=compiler.is_any_coming,
                read_s=compiler.read_s,
            )
        decision = self.policy.choose(load)
        depth = decision.num_speculative_tokens
        bucket = Bucket(decision.row_bucket or fitting[0], depth, decision.max_drafts)
        waited = 0.0
        if compiler is not None:
            if decision.prepare is not None:
                compiler.prepare(decision.prepare)
            waited = compiler.wait_for(bucket)
        caps = np.full(len(rows), depth)
        if decision.draft_caps is not None:
            caps = np.minimum(caps, decision.draft_caps)
        before = self._gained.copy()
        most = min(decision.num_steps or self.burst_steps, load.num_steps_left)
        reports = self._steps(rows, caps, decision.max_drafts, most)
        num_steps = len(reports)
        committed, accepted, drafted, proposed = np.array(reports).swapaxes(0, 1)
        context = float(contexts.sum() + committed.sum() / 2)
        seconds = num_steps * self.costs.step_s(bucket, context)
        num_behind = int(behind.max())
        if depth:
            # All missing tokens but one, which every step of a chain feeds.
            seconds += self.costs.catch_up_s * (num_behind - 1)
            self._drafter_gained[rows] = self._gained[rows]
        seconds *= self._slow_at(self._now_s)
        seen = seconds * self._clock()
        if compiler is not None and compiler.is_any_coming():
            seen, seconds = None, seconds * compiler.slows
        self.policy.observe(
            Outcome(
                decision=decision,
                bucket=bucket,
                num_rows=len(rows),
                seconds=seen,
                num_context_tokens=context,
                num_behind=num_behind,
                requests=load.requests,
                asked_depth=caps,
                num_committed=committed,
                num_accepted=accepted,
                draft_depth=drafted,
                proposed_depth=proposed,
            )
        )
        gained = int((self._gained - before).sum())
        took = waited + seconds
        self.bursts.append(Burst(self._now_s, len(rows), decision, num_steps, gained, took))
        self._now_s += took
        if compiler is not None:
            compiler.at_s += seconds

    def _steps(
        self, rows: np.ndarray, caps: np.ndarray, max_drafts: int | None, most: int
    ) -> list[Any]:
        """Runs at most `most` steps; returns committed, accepted, drafted, proposed of each."""
        reports = []
        for _ in range(most):
            left = self._left()[rows]
            if not left.any():
                break
            proposed = np.clip(np.minimum(caps, left - 1), 0, None)
            drafted = proposed
            if max_drafts is not None:
                drafted = _cut(proposed, max_drafts)
            places = self._gained[rows][:, None] + np.arange(max(drafted.max(), 1))
            rates = self.workload.rates[rows]
            if self._rate_at is not None:
                rates = np.full(len(rows), self._rate_at(self._now_s))
            stands = self._luck[rows[:, None], places] < rates[:, None]
            stands &= np.arange(stands.shape[1]) < drafted[:, None]
            accepted = stands.cumprod(axis=1).sum(axis=1)
            committed = np.where(left > 0, np.minimum(accepted + 1, left), 0)
            self._gained[rows] += committed
            reports.append((committed, accepted, drafted, proposed))
        return reports


class Oracle:
    """Chooses the K of most tokens per second by the workload's true rates and costs.

    Real policies do not know these. It learns nothing, never probes, and looks one burst ahead;
    its replay's first request must be 0.
    """

    chooses_rows: ClassVar[bool] = True

    def __init__(self, workload: Workload, costs: Costs, depths: Sequence[int]):
        self.max_speculative_tokens = max(depths)
        self._workload, self._costs, self._depths = workload, costs, depths

    def choose(self, load: Load) -> Decision:
        rows = load.row_buckets[0]
        rates = self._workload.rates[load.requests]
        powers = rates[:, None] ** np.arange(1 + self.max_speculative_tokens)

        def tokens_per_second(depth: int) -> float:
            tokens = float(powers[:, : 1 + depth].sum())
            midway = load.num_context_tokens + tokens * load.num_probe_steps / 2
            return tokens / self._costs.step_s(Bucket(rows, depth), midway)

        best = max(self._depths, key=tokens_per_second)
        return Decision(num_speculative_tokens=best, reason="oracle", row_bucket=rows)

    def observe(self, outcome: Outcome) -> None:
        del outcome


def _cut(proposed: np.ndarray, max_drafts: int) -> np.ndarray:
    """Returns the draft tokens verified of each row: first tokens of all rows, then second ones."""
    depth = int(proposed.max(initial=0))
    stands = np.arange(depth)[:, None] < proposed[None, :]  # [depth, rows]
    kept = (stands.cumsum().reshape(stands.shape) <= max_drafts) & stands
    return kept.sum(axis=0)
