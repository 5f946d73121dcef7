"""What a process keeps of a pair's speed between calls, and writes for later processes."""

from __future__ import annotations

import atexit
import json
import math
import threading
import time
import warnings
from typing import Any

from specjax.decode.bucket import Bucket
from specjax.decode.decoder import Decoder
from specjax.policy import cost_files
from specjax.policy.cost_files import Known
from specjax.policy.goodput import Goodput
from specjax.policy.step_cost import StepCosts

# What was learned of speed is written as often as this at most, and when a process ends.
SAVE_EVERY_S = 10.0


class Shelf:
    """What this process knows of one pair's speed.

    Args:
      key: cost_files.key_of; its file, if there is one, is read when something is first asked.
    """

    def __init__(self, key: dict[str, Any]):
        # No decoder: that would keep its executables for as long as the process runs.
        self._key = key
        self._lock = threading.RLock()
        self._known: Known | None = None  # before the first run
        self._kinds: set[str] = set()  # of sampling, that this process learned of
        self._in_file: dict[str, dict[Bucket, float]] = {}  # missed_s, by kind
        self._is_unsaved = False
        self._saved_at = -math.inf  # time.monotonic()

    def known(self) -> Known:
        """Returns a copy of what this process and earlier ones learned."""
        with self._lock:
            if self._known is None:
                self._known = Known(StepCosts())
                cost_files.read(self._key, self._known)
                self._note_file()
            # A copy: another thread may run the same pair.
            known = self._known.copy()
            for ledger in known.ledgers.values():
                ledger.shared_s = {**ledger.missed_s}
            return known

    def keep(self, policy: Goodput, kind: str) -> None:
        """Keeps what a run learned, for the next in this process and for later ones.

        Another run of the same pair may have been kept since this one began: what that one
        knows and this one does not stays.

        Args:
          kind: of sampling; what is known of acceptance, and the ledger, are by it.
        """
        if not policy.costs.measured:
            return
        with self._lock:
            ledger = policy.ledger
            if self._known is not None and kind in self._known.ledgers:
                ledger.take(self._known.ledgers[kind], ledger.shared_s)
            ledger.shared_s = {**ledger.missed_s}
            # Copies: the run may go on, and learn.
            known = Known(policy.costs.copy(), ledgers={kind: ledger.copy()})
            if policy.survival.num_told:
                known.acceptance[kind] = policy.survival.to_record()
            if self._known is not None:
                known.take(self._known, {kind})
            self._known, self._is_unsaved = known, True
            self._kinds.add(kind)
            # Calls may be short, and writing takes some 10 ms.
            if time.monotonic() - self._saved_at > SAVE_EVERY_S:
                self.save()

    def save(self) -> None:
        """Writes what the file lacks, if anything, beside what other processes wrote there."""
        with self._lock:
            if not self._is_unsaved or self._known is None:
                return
            self._is_unsaved, self._saved_at = False, time.monotonic()
            path = cost_files.path_of(self._key)
            if path is None:
                return
            beside = Known(StepCosts())
            if cost_files.read(self._key, beside):
                for kind in self._kinds & beside.ledgers.keys():
                    since = self._in_file.get(kind, {})
                    self._known.ledgers[kind].take(beside.ledgers[kind], since)
                self._known.take(beside, self._kinds)
            if cost_files.write(self._key, path, self._known) is not None:
                self._note_file()

    def _note_file(self) -> None:
        """Remembers what the file says was lost, to know what other processes add to it."""
        assert self._known is not None
        ledgers = self._known.ledgers
        self._in_file = {kind: {**ledger.missed_s} for kind, ledger in ledgers.items()}


_SHELVES: dict[str, Shelf] = {}


def shelf_of(decoder: Decoder) -> Shelf:
    """Returns the shelf of a decoder's pair, one for all that share cost_files.key_of."""
    key = cost_files.key_of(decoder)
    return _SHELVES.setdefault(json.dumps(key, sort_keys=True), Shelf(key))


@atexit.register
def save_all() -> None:
    """Writes what the files of all shelves lack; one that cannot is named, and stops no other."""
    for shelf in [*_SHELVES.values()]:
        try:
            shelf.save()
        except Exception as error:
            warnings.warn(f"what was learned of speed is not kept: {error!r}", stacklevel=1)


def forget_speed() -> None:
    """Forgets what this process learned of speed; files stay."""
    _SHELVES.clear()
