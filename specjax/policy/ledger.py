"""What choosing K has lost and may spend; outlives the run that wrote it. No jax."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.decode.bucket import Bucket

MOST_S = 1e6  # of what means anything


@dataclasses.dataclass
class Ledger:
    """The seconds that were lost without buckets, and those that learning may take.

    Runs may be short: what one of them saves up, or loses without an executable, the next
    one goes on with. An executable that is compiled is there for all processes to come;
    each of them reads it anew.

    Attributes:
      missed_s: by bucket that was not compiled, lost without it since another was first run.
      missed_before_s: likewise, what of that earlier processes lost.
      ran: buckets that ever ran.
      routine_s: that may be spent on measuring again what was measured long ago.
      hope_s: likewise on what may be better than is known.
      plain_s: of plain decoding, since something was drafted.
      drafting_s: of drafting, since plain decoding ran.
    """

    missed_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    ran: set[Bucket] = dataclasses.field(default_factory=set)
    routine_s: float = 0.0
    hope_s: float = 0.0
    plain_s: float = 0.0
    drafting_s: float = 0.0
    missed_before_s: dict[Bucket, float] = dataclasses.field(default_factory=dict)

    def note(self, bucket: Bucket) -> None:
        """Takes in that a bucket ran: what was lost before was lost to another plan."""
        if bucket not in self.ran:
            self.ran.add(bucket)
            self.missed_s.clear()
            self.missed_before_s.clear()

    def miss(self, bucket: Bucket, seconds: float) -> None:
        """Takes in that so many seconds were lost without a bucket, which is not compiled."""
        self.ran.discard(bucket)  # by an earlier run, which kept no executable
        self.missed_s[bucket] = self.missed_s.get(bucket, 0.0) + seconds

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
            ran={*self.ran},
        )

    def to_record(self) -> dict[str, Any]:
        """Returns what the next process goes on with, for JSON."""
        return {
            "missed": [[*bucket, seconds] for bucket, seconds in self.missed_s.items()],
            "ran": [list(bucket) for bucket in sorted(self.ran, key=str)],
            "routine_s": self.routine_s,
            "hope_s": self.hope_s,
            "plain_s": self.plain_s,
            "drafting_s": self.drafting_s,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Ledger:
        """Returns what `to_record` said.

        Raises:
          ValueError: figures that mean nothing.
        """
        try:
            missed = {_bucket_of(key): float(s) for *key, s in record["missed"]}
            ran = {_bucket_of(key) for key in record["ran"]}
            names = ("routine_s", "hope_s", "plain_s", "drafting_s")
            pots = {name: float(record[name]) for name in names}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{reprlib.repr(record)} is no ledger: {error!r}.") from None
        if not all(0 <= s < MOST_S for s in (*missed.values(), *pots.values())):
            raise ValueError(f"{reprlib.repr(record)} is no ledger.")
        return cls(missed, ran, **pots, missed_before_s={**missed})


def _bucket_of(key: Sequence[Any]) -> Bucket:
    rows, depth, most = key
    return Bucket(int(rows), int(depth), None if most is None else int(most))
