"""Which K: how many tokens to draft in the next burst. Host side, no jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from specjax.batch_size_table import Entry, look_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a policy sees before a burst."""

    num_decoding_rows: int  # rows that decode; prefills do not count
    num_waiting: int


class SpeculationPolicy(Protocol):
    """Chooses K before each burst and learns from what came of it."""

    max_speculative_tokens: int

    def choose(self, load: Load) -> int:
        """Returns K, from 0 (plain decoding) to max_speculative_tokens."""
        ...

    def observe(
        self,
        num_speculative_tokens: int,
        num_steps: int,
        num_committed: int,
        seconds: float,
    ) -> None:
        """Takes in what a burst did."""
        ...


class _LearnsNothing:
    def observe(
        self,
        num_speculative_tokens: int,
        num_steps: int,
        num_committed: int,
        seconds: float,
    ) -> None:
        del num_speculative_tokens, num_steps, num_committed, seconds


@dataclasses.dataclass
class Fixed(_LearnsNothing):
    """The same K always."""

    max_speculative_tokens: int

    def choose(self, load: Load) -> int:
        del load
        return self.max_speculative_tokens


@dataclasses.dataclass
class Table(_LearnsNothing):
    """K by the number of rows that decode.

    After a change K stays for dwell_s: a load that flickers at a threshold changes it
    once in that time, not with every burst. Each change may mean another executable.
    """

    table: tuple[Entry, ...]
    max_speculative_tokens: int  # a larger K of the table becomes this
    dwell_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    _chosen: int | None = None
    _changed_at: float = 0.0

    def choose(self, load: Load) -> int:
        wanted = look_up(self.table, max(load.num_decoding_rows, 1))
        wanted = min(wanted, self.max_speculative_tokens)
        now = self.clock()
        if self._chosen is None:
            self._chosen = wanted
        elif wanted != self._chosen and now - self._changed_at >= self.dwell_s:
            self._chosen, self._changed_at = wanted, now
        return self._chosen
