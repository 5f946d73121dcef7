"""Threads that share an engine: short looks at its tables, and long steps, one at a time."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator


class Turns:
    """A lock for tables, and turns for steps, in the order in which they were asked for.

    A step may take long, compiling included, and does not hold the tables meanwhile.

    Some work comes from where nothing may be waited for: the garbage collector closes a
    stream in the middle of anything, in a thread that may hold the tables or be stepping.
    Such work is written down elsewhere, and `tidy` has it done, at once or by whoever
    holds the tables or steps, once these are let go.

    Args:
      has_rest: whether such work is left.
      do_rest: does it; called with the tables held, and while nobody steps.
    """

    def __init__(self, has_rest: Callable[[], bool], do_rest: Callable[[], None]):
        self._has_rest, self._do_rest = has_rest, do_rest
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._holder: int | None = None  # the thread that holds the tables
        self._line: collections.deque[int] = collections.deque()  # the first one steps

    @contextlib.contextmanager
    def tables(self) -> Iterator[None]:
        """Holds the tables; for a short time.

        Raises:
          RuntimeError: this thread holds them already, and would wait for itself.
        """
        me = threading.get_ident()
        if self._holder == me:
            raise RuntimeError(
                "the engine was called while it was busy in the same thread, as by a signal "
                "handler; call it from elsewhere."
            )
        try:
            with self._lock:
                self._holder = me
                try:
                    yield
                finally:
                    self._holder = None
        finally:
            self.tidy()

    @contextlib.contextmanager
    def turn(self, unless: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Waits until nobody else steps.

        Args:
          unless: gives up the turn; asked with the tables held, whenever somebody has stepped.

        Yields:
          Whether the turn came.

        Raises:
          RuntimeError: this thread is stepping already.
        """
        me = threading.get_ident()
        if me in self._line:
            raise RuntimeError(
                "the engine was asked to step or close from within a step, as by a progress "
                "function or a policy; do so when the step is over."
            )
        try:
            with self.tables():
                self._line.append(me)
                has_come = self._wait(me, unless)
            yield has_come
        finally:
            with self.tables():
                if me in self._line:
                    self._line.remove(me)
                self._changed.notify_all()

    def tidy(self) -> None:
        """Has the rest done now, or by whoever holds the tables or steps; waits for nobody."""
        # Of two threads of which one writes work down and the other lets go, either sees
        # what the other has done, and does the work.
        while self._has_rest() and not self._line and self._lock.acquire(blocking=False):
            try:
                self._holder = threading.get_ident()
                if not self._line:
                    self._do_rest()
            finally:
                self._holder = None
                self._lock.release()

    def _wait(self, me: int, unless: Callable[[], bool]) -> bool:
        while not (gives_up := unless()) and self._line[0] != me:
            self._holder = None
            try:
                self._changed.wait()
            finally:
                self._holder = me
        return not gives_up
