"""Progress of long work, on stderr."""

from __future__ import annotations

from tqdm import tqdm

# Work that is over sooner shows nothing.
QUIET_S = 1.0


class Progress:
    """One bar at a time, shown once the work has lasted QUIET_S seconds."""

    def __init__(self, *, enabled: bool):
        self._enabled = enabled
        self._bar: tqdm | None = None
        self._what = ""

    def report(self, what: str, done: int, total: int) -> None:
        """Says that `done` of `total` units of `what` are done."""
        if not self._enabled:
            return
        if what != self._what or self._bar is None:
            self.close()
            self._what = what
            self._bar = tqdm(
                total=total, desc=what, delay=QUIET_S, leave=False, mininterval=0.2
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
