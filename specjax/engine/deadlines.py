"""A heap of the requests that have a deadline, the earliest first."""

from __future__ import annotations

import heapq
import time

from specjax.engine.request import Request

MOST_STALE = 64  # stale entries tolerated beyond twice the waiting requests


class Deadlines:
    """A heap of requests by deadline; finished requests may stay in it for a while."""

    def __init__(self):
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request, num_waiting: int) -> None:
        """Adds a queued request if it has a deadline.

        Args:
          num_waiting: number of requests in the queue, which bounds the stale entries.
        """
        if request.deadline is None or request.arrival is None:
            return
        if len(self._heap) > 2 * num_waiting + MOST_STALE:
            left = (entry for entry in self._heap if not entry[2].is_finished)
            self._heap = sorted(left, key=lambda entry: entry[:2])
        heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def pop_overdue(self) -> Request | None:
        """Removes and returns a request whose deadline has passed, if there is one."""
        if self._heap and self._heap[0][0] <= time.perf_counter():
            return heapq.heappop(self._heap)[-1]
        return None

    def clear(self) -> None:
        """Drops all entries."""
        self._heap.clear()
