"""The queue of requests: what comes first, whatever was taken out of its middle."""

import numpy as np
from test_loop import make_request

from specjax.engine.waiting import MOST_STALE, WaitingQueue


def test_a_queue_that_many_left_keeps_its_order():
    """Requests that leave from the middle are stale until there are too many of them."""
    rng = np.random.default_rng(0)
    priorities = rng.integers(0, 5, 3 * MOST_STALE).tolist()
    requests = [make_request(i, [i], 1, priority=p) for i, p in enumerate(priorities)]
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    left = [requests[i] for i in rng.permutation(len(requests)).tolist()]
    for _ in range(len(requests) - 20):
        assert queue.remove(gone := left.pop())
        assert not queue.remove(gone)
        assert len(queue.all()) == len(queue) == len(left)
    in_order = sorted(left, key=lambda request: (request.priority, request.arrival))
    for request in in_order:
        assert queue.first() is request
        assert queue.remove(request)
    assert queue.first() is None
