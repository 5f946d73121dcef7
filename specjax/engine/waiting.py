"""The queue of requests that wait for a row, by priority, then by arrival."""

from __future__ import annotations

import heapq

from specjax.engine.request import Request

# Stale entries tolerated beyond twice the waiting requests before the heap is rebuilt.
MOST_STALE = 64


class WaitingQueue:
    """Requests in the order in which they are admitted; every operation takes O(log n).

    The lowest `priority` comes first; equal priorities are ordered by arrival. A preempted
    request keeps its arrival, and so precedes requests that arrived later.
    """

    def __init__(self):
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[int] = set()  # arrivals; other heap entries are stale
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Queues a request, the first time at the end of its priority."""
        if request.arrival is None:
            request.arrival = self._num_arrived
            self._num_arrived += 1
        self._waiting.add(request.arrival)
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def first(self) -> Request | None:
        """Returns the next request, which stays in the queue; None if it is empty."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> bool:
        """Removes a request from any place in the queue; returns whether it was there."""
        if request.arrival not in self._waiting:
            return False
        self._waiting.remove(request.arrival)
        self.first()  # drops stale heads: an admitted request may be pushed a second time
        if len(self._heap) > 2 * len(self._waiting) + MOST_STALE:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
        return True

    def all(self) -> list[Request]:
        """Returns all waiting requests, in no order."""
        return [entry[2] for entry in self._heap if entry[1] in self._waiting]
