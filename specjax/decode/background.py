"""Work beside what runs: executables that are compiled while others decode."""

from __future__ import annotations

import atexit
import collections
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent import futures

MOST_SPANS = 256

Make = Callable[[Callable[[], bool]], None]


class Background:
    """Threads that each make one thing, known by its key.

    A process that ends waits for those under way, which give up where they can.
    """

    def __init__(self):
        self._coming: dict[Hashable, futures.Future[None]] = {}
        self._failed: list[BaseException] = []
        # When work began and was done; nobody asks for what lies so many pieces of work back.
        self._spans: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_SPANS)
        self._is_ending = False
        _ALL.add(self)

    def start(self, key: Hashable, make: Make) -> None:
        """Begins make(goes_on); goes_on() turns false when the process ends."""
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
        """Returns whether something is under way."""
        return key in self._coming

    def wait(self, key: Hashable) -> None:
        """Waits for what is under way, if it is; its error is left to `raise_failed`."""
        if (coming := self._coming.get(key)) is not None:
            coming.result()

    def raise_failed(self) -> None:
        """Raises the first error of those that nobody was told of yet."""
        if self._failed:
            raise self._failed.pop(0)

    def ran_between(self, start: float, end: float) -> bool:
        """Returns whether anything was under way at some time, as time.perf_counter() says."""
        if any(done.begun_at < end for done in [*self._coming.values()]):  # type: ignore[attr-defined]
            return True
        return any(begun < end and start < done for begun, done in tuple(self._spans))

    def end(self) -> None:
        """Waits for all that is under way."""
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


@atexit.register
def _end_all() -> None:
    # A thread inside the compiler while the interpreter is taken down may crash it.
    for background in [*_ALL]:
        background.end()
