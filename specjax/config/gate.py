"""Decides which batches speculate."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationGate:
    """The largest batch that speculates.

    Attributes:
      max_rows: most rows that decode; by default unlimited.
      max_tokens: most tokens of all rows together; by default unlimited.
    """

    max_rows: int | None = None
    max_tokens: int | None = None

    def closed_by(self, num_rows: int, num_tokens: int) -> str:
        """Returns the limit that a batch exceeds: "rows", "memory gate", or "" if it speculates."""
        if self.max_rows is not None and num_rows > self.max_rows:
            return "rows"
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            return "memory gate"
        return ""

    def of_share(self, share: float) -> SpeculationGate:
        """Returns the gate for a pool with a fraction, 0 to 1, of the pages."""
        if self.max_tokens is None:
            return self
        return dataclasses.replace(self, max_tokens=int(self.max_tokens * share))


def gate_tokens(fraction: float, weight_limit_tokens: float, pool_tokens: int | None) -> int:
    """Returns the most tokens of a batch that speculates.

    Args:
      fraction: EngineConfig.speculation_weight_fraction.
      weight_limit_tokens: tokens of a batch at the weight limit.
      pool_tokens: tokens that the pages hold; None if they hold every row at full length.
    """
    # Pages can run out before the weight limit: large prefills, or a small num_pages.
    most = weight_limit_tokens if pool_tokens is None else min(weight_limit_tokens, pool_tokens)
    return math.floor(fraction * most * (1 + 1e-12))
