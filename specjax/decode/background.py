"""Background threads: executables are compiled while other executables decode."""

from __future__ import annotations

import atexit
import collections
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent import futures

MOST_SPANS = 256

Make = Callable[[Callable[[], bool]], None]


class Background:
    """Threads that each make one object, identified by its key.

    At exit the process waits for running threads, which stop early where they can.
    """

    def __init__(self):
        self._coming: dict[Hashable, futures.Future[None]] = {}
        self._failed: list[BaseException] = []
        # Start and end of each finished piece of work; older ones are not queried any more.
        self._spans: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_SPANS)
        self._is_ending = False
        _ALL.add(self)

    def start(self, key: Hashable, make: Make) -> None:
        """Starts make(goes_on) in a thread; goes_on() turns false when the process ends."""
        done: futures.Future[None] = futures.Future()
        done.begun_at = time.perf_counter()  # type: ignore[attr-defined]
        self._coming[key] = done
        thread = threading.Thread(
            target=self._run,
            args=(key, make, done),
            name="specjax-compiling",
            daemon=True,
        )
        thread.start()

    def has(self, key: Hashable) -> bool:
        """Returns whether the work for this key is running."""
        return key in self._coming

    @property
    def is_busy(self) -> bool:
        """Whether work for any key is running."""
        return bool(self._coming)

    def wait(self, key: Hashable) -> None:
        """Waits for the work for this key, if it is running; `raise_failed` raises its error."""
        if (coming := self._coming.get(key)) is not None:
            coming.result()

    def raise_failed(self) -> None:
        """Raises the oldest error that was not raised yet, if there is one."""
        if self._failed:
            raise self._failed.pop(0)

    def ran_between(self, start: float, end: float) -> bool:
        """Returns whether any work ran between two values of time.perf_counter()."""
        if any(done.begun_at < end for done in [*self._coming.values()]):  # type: ignore[attr-defined]
            return True
        return any(begun < end and start < done for begun, done in tuple(self._spans))

    def end(self) -> None:
        """Waits for all running work, and asks it to stop early."""
        self._is_ending = True
        for coming in [*self._coming.values()]:
            coming.result()

    def _run(self, key: Hashable, make: Make, done: futures.Future[None]) -> None:
        begun_at = time.perf_counter()
        try:
            make(lambda: not self._is_ending)
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._spans.append((begun_at, time.perf_counter()))
            del self._coming[key]
            done.set_result(None)


_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


def wait_for_all() -> None:
    """Waits for all work that runs in this process now."""
    for background in [*_ALL]:
        for coming in [*background._coming.values()]:
            coming.result()


@atexit.register
def _end_all() -> None:
    # A thread that is compiling while the interpreter shuts down may crash the process.
    if any(background.is_busy for background in [*_ALL]) and sys.stderr and sys.stderr.isatty():
        print("specjax: a step is being compiled; the program ends after it.", file=sys.stderr)
    for background in [*_ALL]:
        background.end()
