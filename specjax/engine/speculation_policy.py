"""Which K: how many tokens to draft in the next burst. Host side, no jax."""

from __future__ import annotations

import dataclasses
from typing import Protocol


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


@dataclasses.dataclass
class Fixed:
    """The same K always."""

    max_speculative_tokens: int

    def choose(self, load: Load) -> int:
        del load
        return self.max_speculative_tokens

    def observe(
        self,
        num_speculative_tokens: int,
        num_steps: int,
        num_committed: int,
        seconds: float,
    ) -> None:
        del num_speculative_tokens, num_steps, num_committed, seconds
