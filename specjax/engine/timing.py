"""When the device was done with a burst, whatever the host did meanwhile."""

from __future__ import annotations

import dataclasses
import time
from concurrent import futures
from typing import Any

import jax


class Stopwatch:
    """Waits for results beside the loop that sends the work.

    The host may compile, or do a user's own work, while a burst runs and after it is done:
    when the host reads the result says little about when it was there.
    """

    def __init__(self):
        self._waiter = futures.ThreadPoolExecutor(1, thread_name_prefix="specjax-timing")

    def done_at(self, result: Any) -> futures.Future[float]:
        """Returns when arrays will be there, as time.perf_counter() says."""
        return self._waiter.submit(_wait, result)


def _wait(result: Any) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()


@dataclasses.dataclass
class DeviceClock:
    """When the device was done with the bursts that were read back, as time.perf_counter() says."""

    done_at: float = 0.0  # with the last one
    told_at: float = 0.0  # with the last one that the policy learned from
