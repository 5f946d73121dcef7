"""What choosing K has lost and may spend; outlives the run that wrote it. No jax."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.decode.bucket import Bucket

MOST_S = 1e6  # that any figure counts
MOST_KEPT = 512  # buckets in a file


@dataclasses.dataclass
class Ledger:
    """The seconds that were lost without buckets, and those that learning may take.

    Runs may be short: what one of them saves up, or loses without an executable, the next
    one goes on with. An executable that is compiled is there for all processes to come;
    each of them reads it anew.

    Attributes:
      missed_s: by bucket that was not compiled, lost without it, beside what ran.
      missed_before_s: likewise, what of that earlier processes lost.
      ran: buckets that ran in this process.
      routine_s: that may be spent on measuring again what was measured long ago; below 0 where
        more was spent.
      hope_s: likewise on what may be better than is known.
      plain_s: of plain decoding, since something was drafted.
      drafting_s: of drafting, since plain decoding ran.
      late_s: that asking for drafts took beyond its share and is not saved up again.
    """

    missed_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    ran: set[Bucket] = dataclasses.field(default_factory=set)
    routine_s: float = 0.0
    hope_s: float = 0.0
    plain_s: float = 0.0
    drafting_s: float = 0.0
    late_s: float = 0.0
    missed_before_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    # missed_s, when other runs of this process last knew it.
    shared_s: dict[Bucket, float] = dataclasses.field(default_factory=dict, compare=False)

    def note(self, bucket: Bucket) -> None:
        """Takes in that a bucket ran: what is lost without others is lost beside it from now on.

        Others of its rows were lost over the same bursts: what they would have saved beyond it
        still stands against them, in whichever process that was.
        """
        self.ran.add(bucket)
        for missed_s in (self.missed_s, self.missed_before_s):
            own = missed_s.pop(bucket, 0.0)
            for other in [other for other in missed_s if other.rows == bucket.rows]:
                missed_s[other] -= own
                if missed_s[other] <= 0:
                    del missed_s[other]

    def miss(self, bucket: Bucket, seconds: float) -> None:
        """Takes in that so many seconds were lost without a bucket, which is not compiled."""
        self.missed_s[bucket] = min(self.missed_s.get(bucket, 0.0) + seconds, MOST_S)

    def spend(self, seconds: float, *, is_drafting: bool) -> None:
        """Takes in that drafting, or plain decoding, ran for so many seconds."""
        if is_drafting:
            self.plain_s, self.drafting_s = 0.0, min(self.drafting_s + seconds, MOST_S)
        else:
            self.plain_s, self.drafting_s = min(self.plain_s + seconds, MOST_S), 0.0

    def take(self, other: Ledger, since: Mapping[Bucket, float]) -> None:
        """Takes over what another has lost without buckets since the two were the same.

        Args:
          since: missed_s of both then.
        """
        for bucket, seconds in other.missed_s.items():
            more = seconds - since.get(bucket, 0.0)
            if more > 0:
                for missed_s in (self.missed_s, self.missed_before_s):
                    missed_s[bucket] = min(missed_s.get(bucket, 0.0) + more, MOST_S)

    def lost_s(self, bucket: Bucket, *, is_kept: bool) -> float:
        """Returns the seconds that stand against having a bucket.

        Args:
          is_kept: whether it only has to be read, for this process alone.
        """
        lost = self.missed_s.get(bucket, 0.0)
        return lost - is_kept * self.missed_before_s.get(bucket, 0.0)

    def copy(self) -> Ledger:
        """Returns one that is written apart from this."""
        return dataclasses.replace(
            self,
            missed_s={**self.missed_s},
            missed_before_s={**self.missed_before_s},
            shared_s={**self.shared_s},
            ran={*self.ran},
        )

    def to_record(self) -> dict[str, Any]:
        """Returns what the next process goes on with, for JSON."""
        missed = sorted(self.missed_s.items(), key=lambda found: -found[1])
        return {
            "missed": [[*bucket, seconds] for bucket, seconds in missed[:MOST_KEPT]],
            "routine_s": max(self.routine_s, 0.0),
            "hope_s": max(self.hope_s, 0.0),
            "plain_s": self.plain_s,
            "drafting_s": self.drafting_s,
            "late_s": self.late_s,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Ledger:
        """Returns what `to_record` said.

        Raises:
          ValueError: figures that mean nothing.
        """
        try:
            missed = {_bucket_of(key): float(s) for *key, s in record["missed"]}
            names = ("routine_s", "hope_s", "plain_s", "drafting_s")
            pots = {name: float(record[name]) for name in names}
            pots["late_s"] = float(record.get("late_s", 0.0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{reprlib.repr(record)} is no ledger: {error!r}.") from None
        figures = (*missed.values(), *pots.values())
        if not all(0 <= s < math.inf for s in figures) or len(missed) > MOST_KEPT:
            raise ValueError(f"{reprlib.repr(record)} is no ledger.")
        missed = {bucket: min(s, MOST_S) for bucket, s in missed.items()}
        pots = {name: min(s, MOST_S) for name, s in pots.items()}
        return dataclasses.replace(cls(missed, missed_before_s={**missed}), **pots)


def _bucket_of(key: Sequence[Any]) -> Bucket:
    rows, depth, most = key
    return Bucket(int(rows), int(depth), None if most is None else int(most))
