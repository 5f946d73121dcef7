"""Locks of threads that share an engine: short access to its tables, and long steps in turn."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator


class Turns:
    """A lock for tables, and turns for steps, in the order of their requests.

    A step may take long, compiling included, and does not hold the tables meanwhile.

    Some work must not wait for a lock: the garbage collector may close a stream at any point,
    in a thread that holds the tables or is stepping. Such work is queued elsewhere. `tidy` does
    it at once or, if another thread holds the tables or steps, leaves it to that thread.

    Args:
      has_rest: returns whether such work is left.
      do_rest: does it; called with the tables held, while no thread is stepping.
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
        """Waits until no other thread steps.

        Args:
          unless: returns whether to give up the turn; called with the tables held, at first and
            after each step of another thread.

        Yields:
          Whether the turn came.

        Raises:
          RuntimeError: this thread is stepping already.
        """
        me = threading.get_ident()
        self.check_outside()
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

    def check_outside(self) -> None:
        """Raises RuntimeError if this thread is stepping."""
        if threading.get_ident() in self._line:
            raise RuntimeError(
                "the engine was asked to step or close from within a step, as by a progress "
                "function or a policy; do so when the step is over."
            )

    def tidy(self) -> None:
        """Does the queued work now, or leaves it to the thread that holds the lock; never waits."""
        # If one thread queues work while another releases the lock, at least one of them sees
        # both, and does the work.
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
