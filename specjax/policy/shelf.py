"""What a process keeps of a pair's speed between calls, and writes for later processes."""

from __future__ import annotations

import atexit
import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

from specjax.decode.decoder import Decoder
from specjax.policy import cost_files
from specjax.policy.goodput import Goodput
from specjax.policy.step_cost import StepCosts

# What was learned of speed is written as often as this at most, and when a process ends.
SAVE_EVERY_S = 2.0


class Shelf:
    """What this process knows of one pair's speed.

    Args:
      key: cost_files.key_of; its file, if there is one, is read when something is first asked.
    """

    def __init__(self, key: dict[str, Any]):
        # No decoder: that would keep its executables for as long as the process runs.
        self._key = key
        self._known: cost_files.Known | None = None  # before the first run
        self._unsaved: Callable[[], Any] | None = None  # writes what is not in the file yet
        self._saved_at = -math.inf  # time.monotonic()

    def known(self) -> cost_files.Known:
        """Returns a copy of what this process and earlier ones learned."""
        if self._known is None:
            kept = cost_files.Known(StepCosts())
            cost_files.read(self._key, kept)
            self._known = kept  # what it says of other kinds of sampling stays in the file
        # A copy: another thread may run the same pair.
        return self._known.copy()

    def keep(self, policy: Goodput, kind: str) -> None:
        """Keeps what a run learned, for the next in this process and for later ones.

        Args:
          kind: of sampling; what is known of acceptance, and the ledger, are by it.
        """
        if not policy.costs.measured:
            return
        before = self._known or cost_files.Known(StepCosts())
        acceptance = {**before.acceptance}
        if policy.survival.num_told:
            acceptance[kind] = policy.survival.to_record()
        # Copies: the run may go on, and learn.
        ledgers = {**before.ledgers, kind: policy.ledger.copy()}
        known = cost_files.Known(policy.costs.copy(), acceptance, ledgers)
        self._known = known
        # Calls may be short, and writing takes some 10 ms.
        path = cost_files.path_of(self._key)
        self._unsaved = functools.partial(cost_files.write, self._key, path, known)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Writes what the file lacks, if anything."""
        write, self._unsaved = self._unsaved, None
        if write is not None:
            write()
            self._saved_at = time.monotonic()


_SHELVES: dict[str, Shelf] = {}


def shelf_of(decoder: Decoder) -> Shelf:
    """Returns the shelf of a decoder's pair, one for all that share cost_files.key_of."""
    key = cost_files.key_of(decoder)
    return _SHELVES.setdefault(json.dumps(key, sort_keys=True), Shelf(key))


@atexit.register
def save_all() -> None:
    """Writes what the files of all shelves lack."""
    for shelf in [*_SHELVES.values()]:
        shelf.save()


def forget_speed() -> None:
    """Forgets what this process learned of speed; files stay."""
    _SHELVES.clear()
