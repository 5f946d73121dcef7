"""The interface of speculation policies, which choose K before each burst; and the simple ones.

Host side, no jax.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from specjax.config.batch_size_table import Entry, look_up
from specjax.config.checks import is_int
from specjax.decode.bucket import Bucket

LEAST_TIMED_STEPS = 4  # in bursts of fewer steps, sending and reading take too large a part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a policy sees before a burst.

    Arrays lead with [rows that decode]; rows that still read their prompt do not count.
    """

    num_decoding_rows: int
    num_waiting: int = 0
    # Largest K that any policy may choose now, and the reason of this limit.
    most_speculative_tokens: int | None = None
    limited_by: str = ""
    row_buckets: Sequence[int] = ()  # row buckets that hold these rows, ascending
    # i64, a number of each row's request, never used again; not the id that Engine.add returns.
    requests: Any = ()
    draft_caps: Any = ()  # i64, most tokens that each row may draft
    num_behind: Any = ()  # i64, tokens of each row that the drafter has not seen
    num_context_tokens: int = 0  # of all rows together
    num_steps_left: int = 1  # until no row is left, at one token per step
    # i64, most tokens that each row may gain; empty if rows that end are refilled.
    tokens_left: Any = ()
    # f64, how much a token of each row brings the end of the run nearer; empty if all are equal.
    urgency: Any = ()
    num_probe_steps: int = 0  # most steps of a burst
    # Token bucket of the prompts that are fed in the burst's only step; 0: none. Then the
    # functions below speak of steps with these prompts.
    prompt_tokens: int = 0
    compile_s: float = 0.0  # seconds to compile a bucket
    is_compiled: Callable[[Bucket], bool] = lambda bucket: True
    is_coming: Callable[[Bucket], bool] = lambda bucket: False  # compiled in the background now
    is_any_coming: Callable[[], bool] = lambda: False  # whether any step is, of any load
    # Seconds to read a bucket that is kept on disk; None for others.
    read_s: Callable[[Bucket], float | None] = lambda bucket: None
    is_dropped: Callable[[Bucket], bool] = lambda bucket: False  # did not fit into memory

    def ready_s(self, bucket: Bucket) -> float:
        """Returns the seconds until a bucket can run."""
        if self.is_compiled(bucket):
            return 0.0
        read_s = self.read_s(bucket)
        return self.compile_s if read_s is None else read_s

    def is_there(self, bucket: Bucket) -> bool:
        """Returns whether a bucket is compiled, or kept on disk."""
        return self.is_compiled(bucket) or self.read_s(bucket) is not None

    def limit(self, num_speculative_tokens: int) -> int:
        """Returns a K, lowered to the largest one allowed now."""
        most = self.most_speculative_tokens
        return num_speculative_tokens if most is None else min(num_speculative_tokens, most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a burst drafts, and why."""

    num_speculative_tokens: int  # K; 0 is plain decoding
    reason: str
    why: str = ""  # figures behind the reason, in words: those of what was not chosen
    row_bucket: int | None = None  # by default the smallest that holds the rows
    max_drafts: int | None = None  # as in Bucket
    # i64[rows that decode], most tokens that each drafts; by default its request's limit.
    draft_caps: Any = None
    predicted_step_s: float | None = None
    predicted_tokens: float | None = None  # per step, of all rows together
    num_steps: int | None = None  # most steps of the burst; by default the usual number
    # Bucket to compile in the background during this burst and those after it.
    prepare: Bucket | None = None


def check_decision(decision: Any, policy: SpeculationPolicy, load: Load) -> None:
    """Raises for a decision that no burst of a load can follow, as a user's policy may return.

    Raises:
      TypeError: it is no Decision, or what it prepares is no Bucket.
      ValueError: its K, steps, row bucket or caps are no whole numbers, or out of range.
    """
    whose = f"{type(policy).__name__}.choose returned"
    if not isinstance(decision, Decision):
        raise TypeError(
            f"{whose} {decision!r:.100}; expected a specjax.policy.interface.Decision, as "
            'Decision(num_speculative_tokens=2, reason="mine").'
        )
    most, rows = policy.max_speculative_tokens, max(load.row_buckets, default=math.inf)
    for name, least, largest, limit in (
        ("num_speculative_tokens", 0, most, f" to max_speculative_tokens={most}"),
        ("num_steps", 1, math.inf, ""),
        ("max_drafts", 1, math.inf, ""),
        ("row_bucket", 1, rows, f" to {rows}, the largest of load.row_buckets"),
    ):
        value = getattr(decision, name)
        if value is None and name != "num_speculative_tokens":
            continue
        if not is_int(value) or not least <= value <= largest:
            raise ValueError(
                f"{whose} {name}={value!r:.100}; expected a whole number from {least}{limit}."
            )
    caps, rows = decision.draft_caps, load.num_decoding_rows
    if caps is not None and not _is_of_rows(caps, rows):
        raise ValueError(
            f"{whose} draft_caps={caps!r:.100}; expected {rows} whole numbers from 0, one for each "
            "row."
        )
    if not isinstance(decision.prepare, Bucket | None):
        raise TypeError(f"{whose} prepare={decision.prepare!r:.100}; expected a Bucket or None.")


def _is_of_rows(caps: Any, count: int) -> bool:
    """Returns whether caps, an array or a list, are whole numbers from 0, one for each row."""
    if hasattr(caps, "dtype"):
        return caps.shape == (count,) and caps.dtype.kind in "iu" and not (caps < 0).any()
    is_list = isinstance(caps, list | tuple) and len(caps) == count
    return is_list and all(is_int(cap) and cap >= 0 for cap in caps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a burst did. Arrays are numpy's, of rows still running: `requests` and `asked_depth`
    [rows], others [steps that ran, rows]."""

    decision: Decision
    bucket: Bucket
    num_rows: int  # of the burst when it was sent
    # Device seconds, catch-up included; None if not measured, or with prompts in the same step.
    seconds: float | None
    mixed_s: float | None = None  # those of a step with prompts, if measured
    prompt_tokens: int = 0  # as in Load
    idle_s: float = 0.0  # since the last burst that was learned from
    num_context_tokens: float  # of all rows, midway
    num_behind: int  # maximum over rows: tokens that the drafter had to catch up with first
    growth: int = 0  # most tokens that each row had pages for
    is_cut: bool = False  # whether it had fewer steps than were asked for, for want of pages
    requests: Any  # i64[rows]
    asked_depth: Any  # i64[rows], tokens that each was asked to draft
    num_committed: Any
    num_accepted: Any
    draft_depth: Any  # tokens on the longest path that was verified
    proposed_depth: Any  # tokens that the drafter proposed, before some were left out

    @property
    def num_steps(self) -> int:
        return len(self.num_committed)


class SpeculationPolicy(Protocol):
    """Chooses K before each burst and learns from its outcome.

    Attributes:
      max_speculative_tokens: the largest K that it chooses; a row is admitted where pages allow
        a few steps of it.
      chooses_rows: whether it chooses the row bucket; otherwise the smallest of
        EngineConfig.row_buckets that holds the rows.
    """

    max_speculative_tokens: int
    chooses_rows: ClassVar[bool]

    def choose(self, load: Load) -> Decision:
        """Returns what to draft: a K from 0 (plain decoding) to what the load allows."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns from a burst."""
        ...


@runtime_checkable
class ExpectsAcceptance(Protocol):
    """A policy that can be told how often the drafts of a changed drafter will be accepted."""

    def expect_acceptance(self, survival: Sequence[float]) -> None:
        """Replaces what was learned of acceptance.

        Args:
          survival: for each draft token of a path, the probability that it and all before it are
            accepted.
        """
        ...


class _LearnsNothing:
    chooses_rows: ClassVar[bool] = False

    def observe(self, outcome: Outcome) -> None:
        del outcome


@dataclasses.dataclass
class Fixed(_LearnsNothing):
    """Always the same K, as far as the load allows."""

    max_speculative_tokens: int

    def choose(self, load: Load) -> Decision:
        return _decide(load, self.max_speculative_tokens, "fixed")


@dataclasses.dataclass
class Table(_LearnsNothing):
    """K by the number of rows that decode.

    After a change K stays for dwell_s: a load that flickers at a threshold changes it
    once in that time, not with every burst. Each change may need another executable.
    """

    table: tuple[Entry, ...]
    max_speculative_tokens: int  # a larger K of the table becomes this
    dwell_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    _chosen: int | None = None
    _changed_at: float = 0.0

    def choose(self, load: Load) -> Decision:
        wanted = look_up(self.table, max(load.num_decoding_rows, 1))
        wanted = min(wanted, self.max_speculative_tokens)
        now = self.clock()
        if self._chosen is None:
            self._chosen = wanted
        elif wanted != self._chosen and now - self._changed_at >= self.dwell_s:
            self._chosen, self._changed_at = wanted, now
        return _decide(load, self._chosen, "table")


def _decide(load: Load, wanted: int, reason: str) -> Decision:
    allowed = load.limit(wanted)
    why = reason if allowed == wanted else load.limited_by
    return Decision(num_speculative_tokens=allowed, reason=why)
