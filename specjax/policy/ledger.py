"""What a policy may spend on finding out, and what it missed, kept from run to run. No jax."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.decode.bucket import Bucket

MOST_S = 1e6  # cap of every figure
MOST_KEPT = 512  # buckets in a file
LIFE_KEPT = 0.25  # fraction of a longer life that a shorter one leaves


@dataclasses.dataclass
class Ledger:
    """Seconds that probes may lose, and seconds lost for lack of compiled buckets (regret).

    Runs may be short, so both carry over to the next run. A compiled executable stays on disk for
    later processes; each of them has to read it once.

    Attributes:
      budget_s: seconds that probes may lose; below 0 if overspent. None: nothing was measured yet.
      missed_s: regret by uncompiled bucket: seconds it would have saved against what ran.
      missed_before_s: the part of missed_s that earlier processes lost.
      ran: how many bursts of each bucket ran in this process.
      since_s: seconds since a burst drafted, and since one was plain.
      lived_s: seconds of all bursts of this process.
      life_s: those of the last process that ended, or a quarter of those of a longer one before
        it; MOST_S if there was none.
    """

    budget_s: float | None = None
    missed_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    ran: dict[Bucket, int] = dataclasses.field(default_factory=dict)
    since_s: tuple[float, float] = (0.0, 0.0)
    lived_s: float = 0.0
    life_s: float = MOST_S
    missed_before_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    # missed_s when it was last shared with other runs of this process.
    shared_s: dict[Bucket, float] = dataclasses.field(default_factory=dict, compare=False)

    def note(self, bucket: Bucket) -> None:
        """Records that a bucket ran: regret of other buckets is relative to it from now on.

        Buckets of as many rows were missed in the same bursts. Each keeps only the regret beyond
        that of this bucket, and so does its part of earlier processes.
        """
        self.ran[bucket] = self.ran.get(bucket, 0) + 1
        for missed_s in (self.missed_s, self.missed_before_s):
            own = missed_s.pop(bucket, 0.0)
            for other in [other for other in missed_s if other.rows == bucket.rows and own]:
                missed_s[other] -= own
                if missed_s[other] <= 0:
                    del missed_s[other]

    def miss(self, bucket: Bucket, seconds: float) -> None:
        """Adds seconds to the regret of a bucket that is not compiled."""
        self.missed_s[bucket] = min(self.missed_s.get(bucket, 0.0) + seconds, MOST_S)

    def pass_(self, seconds: float, *, is_drafting: bool) -> None:
        """Records the seconds of a burst."""
        self.lived_s = min(self.lived_s + seconds, MOST_S)
        drafting_s, plain_s = (min(since + seconds, MOST_S) for since in self.since_s)
        self.since_s = (0.0, plain_s) if is_drafting else (drafting_s, 0.0)

    @property
    def left_s(self) -> float:
        """Seconds of bursts that this process is expected to run still.

        As many as the last process ran, or as many as it ran itself.
        """
        return max(self.life_s - self.lived_s, self.lived_s)

    @property
    def _life_s(self) -> float:
        """What the next process takes for life_s."""
        if not self.lived_s:
            return self.life_s
        before = 0.0 if self.life_s == MOST_S else self.life_s
        return max(self.lived_s, LIFE_KEPT * before)

    def take(self, other: Ledger, since: Mapping[Bucket, float]) -> None:
        """Adds the regret that another ledger gained since the two were equal.

        Args:
          since: missed_s of both at that time.
        """
        for bucket, seconds in other.missed_s.items():
            more = seconds - since.get(bucket, 0.0)
            if more > 0:
                for missed_s in (self.missed_s, self.missed_before_s):
                    missed_s[bucket] = min(missed_s.get(bucket, 0.0) + more, MOST_S)

    def lost_s(self, bucket: Bucket, *, is_kept: bool) -> float:
        """Returns the regret of a bucket that counts towards compiling or reading it.

        Args:
          is_kept: whether it only has to be read from disk; then only this process's part counts.
        """
        lost = self.missed_s.get(bucket, 0.0)
        return lost - is_kept * self.missed_before_s.get(bucket, 0.0)

    def copy(self) -> Ledger:
        """Returns an independent copy."""
        names = ("missed_s", "missed_before_s", "shared_s", "ran")
        return dataclasses.replace(self, **{name: {**getattr(self, name)} for name in names})

    def to_record(self) -> dict[str, Any]:
        """Returns the figures that the next process starts with, for JSON."""
        missed = sorted(self.missed_s.items(), key=lambda found: -found[1])
        return {
            "missed": [[*bucket, seconds] for bucket, seconds in missed[:MOST_KEPT]],
            "budget_s": self.budget_s and max(self.budget_s, 0.0),
            "since_s": list(self.since_s),
            "life_s": self._life_s,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Ledger:
        """Returns the ledger of a `to_record` result.

        Raises:
          ValueError: a figure is missing or out of range.
        """
        try:
            missed = {_bucket_of(key): float(s) for *key, s in record["missed"]}
            drafting_s, plain_s = map(float, record["since_s"])
            budget_s, life_s = record["budget_s"], float(record["life_s"])
            budget_s = None if budget_s is None else float(budget_s)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{reprlib.repr(record)} is no ledger: {error!r}.") from None
        figures = (*missed.values(), drafting_s, plain_s, budget_s or 0.0, life_s)
        if not all(0 <= s < math.inf for s in figures) or len(missed) > MOST_KEPT:
            raise ValueError(f"{reprlib.repr(record)} is no ledger.")
        missed = {bucket: min(s, MOST_S) for bucket, s in missed.items()}
        return cls(
            budget_s=budget_s and min(budget_s, MOST_S),
            missed_s=missed,
            missed_before_s={**missed},
            since_s=(min(drafting_s, MOST_S), min(plain_s, MOST_S)),
            life_s=min(life_s, MOST_S),
        )


def _bucket_of(key: Sequence[Any]) -> Bucket:
    rows, depth, most = key
    return Bucket(int(rows), int(depth), None if most is None else int(most))
