"""Learned speed of a target and drafter, kept between calls and written for later processes."""

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

# Least seconds between two writes of a file; the last write is at the end of the process.
SAVE_EVERY_S = 10.0


class Shelf:
    """What this process knows of the speed of one target and drafter.

    Args:
      key: cost_files.key_of; its file, if there is one, is read by the first call of `known`.
    """

    def __init__(self, key: dict[str, Any]):
        # No decoder: that would keep its executables for as long as the process runs.
        self._key = key
        self._lock = threading.RLock()
        self._known: Known | None = None  # before the first run
        self._kinds: set[str] = set()  # kinds of sampling that this process learned about
        self._in_file: dict[str, dict[Bucket, float]] = {}  # missed_s in the file, by kind
        self._is_unsaved = False
        self._saved_at = -math.inf  # time.monotonic()

    def known(self) -> Known:
        """Returns a copy of everything learned by this process and earlier ones."""
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
        """Keeps what a run learned, for the next run and for later processes.

        Another run of the same pair may have been kept since this one began; what only that one
        knows stays.

        Args:
          kind: kind of sampling; acceptance and the ledger are kept by it.
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
        """Writes what was learned since the last write, merged with other processes' writes."""
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
                self._known.take(beside, self._kinds, is_newer=True)
            if cost_files.write(self._key, path, self._known) is not None:
                self._note_file()

    def _note_file(self) -> None:
        """Remembers the regret in the file, to tell later what other processes added to it."""
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
    """Saves every shelf; one that fails gives a warning and does not stop the others."""
    for shelf in [*_SHELVES.values()]:
        try:
            shelf.save()
        except Exception as error:
            warnings.warn(f"what was learned of speed is not kept: {error!r}", stacklevel=1)


def forget_speed() -> None:
    """Forgets what this process learned of speed; files stay."""
    _SHELVES.clear()
