"""Measures when the device finishes a burst, independently of the host's work."""

from __future__ import annotations

import dataclasses
import time
from concurrent import futures
from typing import Any

import jax


class Stopwatch:
    """Waits for results in a thread of its own.

    The host may compile, or run a user's code, while a burst runs and after it: the time at
    which it reads the result is no measure of when the result was ready.
    """

    def __init__(self):
        self._waiter = futures.ThreadPoolExecutor(1, thread_name_prefix="specjax-timing")

    def done_at(self, result: Any) -> futures.Future[float]:
        """Returns a future of the time.perf_counter() at which arrays are ready."""
        return self._waiter.submit(_wait, result)


def _wait(result: Any) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()


@dataclasses.dataclass
class DeviceClock:
    """When the device finished the bursts that were read back, in time.perf_counter()."""

    done_at: float = 0.0  # of the last burst
    told_at: float = 0.0  # of the last burst that the policy learned from
