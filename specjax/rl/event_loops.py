"""The event loops of asynchronous environments: they last as long as the process."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

# Seconds for which an event loop may be silent before it counts as blocked by a function.
HEARTBEAT_S = 0.25
# Seconds that tasks have at the end of the program to see that they are cancelled.
END_S = 1.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._unheard: threading.Event | None = None  # of the last heartbeat, while it is not heard
        # A daemon: a function that blocks it must not keep the program from ending.
        self._thread = threading.Thread(
            target=self._run, name="specjax-environment-loop", daemon=True
        )
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begins a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def is_alive(self) -> bool:
        """Returns whether no function blocks it; waits only if none did at the last time."""
        wait_s = 0.0
        if self._unheard is None:
            self._unheard, wait_s = threading.Event(), HEARTBEAT_S
            self._loop.call_soon_threadsafe(self._unheard.set)
        if not self._unheard.wait(wait_s):
            return False
        self._unheard = None
        return True

    def end(self) -> None:
        """Cancels its tasks and ends it; waits some seconds for that, unless it is blocked."""
        is_alive = self.is_alive()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if is_alive:
            self._thread.join(2 * END_S)

    def _run(self) -> None:
        loop = self._loop
        loop.run_forever()
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class EventLoops:
    """Runs coroutines in one event loop, and in others while a function blocks that one.

    What an environment keeps between calls (a lock, a client's connections) belongs to the loop
    that it was first used in, so the first loop is taken whenever it is not blocked.
    """

    def __init__(self):
        self._loops: list[LoopThread] = []
        self._lock = threading.Lock()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begins a coroutine, from any thread; cancelling the future cancels it."""
        with self._lock:
            loop = next((each for each in self._loops if each.is_alive()), None)
            if loop is None:
                loop = LoopThread()
                self._loops.append(loop)
            return loop.submit(work)

    def close(self) -> None:
        """Cancels what runs, and ends all loops."""
        while self._loops:
            self._loops.pop().end()


# Of the process. Loops have threads of their own, which are made when they are needed.
EVENT_LOOPS = EventLoops()
atexit.register(EVENT_LOOPS.close)
