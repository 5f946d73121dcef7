"""Seconds of a step from what it must read and compute, where nothing was measured. No jax.

The larger of bytes / bandwidth and operations / peak, for each forward: a lower bound.
Collectives, sampling and the time to launch are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class Peaks(Protocol):
    """Of one chip; `specjax.configs.devices.DeviceFigures` is one."""

    @property
    def bytes_per_s(self) -> float: ...

    @property
    def flops_per_s(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What one forward of a model does, on one chip.

    Attributes:
      weight_bytes: read once per forward, however many tokens it has.
      token_flops: operations per token in products with weights.
      context_bytes: keys and values read per token of context, once per row.
      context_flops: operations per token and token of its context.
      layer_windows: tokens that each layer sees back, None where all; () is all in every
        layer. Layers have equal parts of context_bytes and context_flops.
    """

    weight_bytes: float
    token_flops: float
    context_bytes: float
    context_flops: float
    layer_windows: tuple[int | None, ...] = ()

    def of(self, rows: int, tokens: int, context: int) -> Work:
        """Returns what `tokens` tokens of `rows` rows with `context` tokens each take."""
        seen = self.seen(context)
        return Work(
            self.weight_bytes + rows * seen * self.context_bytes,
            tokens * (self.token_flops + seen * self.context_flops),
        )

    def seen(self, context: int) -> float:
        """Returns the tokens of a row that a layer sees back, the mean of all layers."""
        if not self.layer_windows:
            return context
        clipped = [min(context, window or context) for window in self.layer_windows]
        return sum(clipped) / len(clipped)


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one chip."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, device: Peaks) -> float:
        """Returns the least that it takes, in s."""
        return max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s)


def verify_work(target: ModelWork, rows: int, k: int, context: int) -> Work:
    """Returns the work of verifying K drafts of each row, its root included."""
    return target.of(rows, rows * (1 + k), context)


def roofline_step_s(
    target: ModelWork,
    drafter: ModelWork | None,
    device: Peaks,
    *,
    rows: int,
    num_speculative_tokens: int,
    context: int,
) -> float:
    """Returns the least seconds of a step: K forwards of the drafter, one of the target.

    Args:
      drafter: None where drafting runs no model.
      context: tokens that each row has.
    """
    k = num_speculative_tokens
    draft_s = 0.0
    if drafter is not None:
        draft_s = k * drafter.of(rows, rows, context).seconds(device)
    return verify_work(target, rows, k, context).seconds(device) + draft_s


def compute_bound_tokens(
    target: ModelWork, device: Peaks, *, context: int = 0, tokens_per_row: int = 1
) -> float | None:
    """Returns the tokens of a forward from which on arithmetic takes longer than memory.

    Args:
      context: tokens that each row has; its keys and values are read too.
      tokens_per_row: K + 1.

    Returns:
      None where it never does: what a token adds takes longer to read than to compute.
    """
    # bytes / bandwidth = flops / peak, both linear in tokens.
    ridge = device.flops_per_s / device.bytes_per_s
    seen = target.seen(context)
    per_token = target.token_flops + seen * target.context_flops
    read = ridge * seen * target.context_bytes / tokens_per_row
    if per_token <= read:
        return None
    return ridge * target.weight_bytes / (per_token - read)


def expected_tokens(acceptance_rate: float, num_speculative_tokens: int) -> float:
    """Returns the tokens of a step per row where every draft stands with one probability."""
    return sum(acceptance_rate**i for i in range(num_speculative_tokens + 1))


def choose_num_speculative_tokens(step_s: Sequence[float], acceptance_rate: float) -> int:
    """Returns the K of most expected tokens per second; of equal ones the smallest.

    Args:
      step_s: seconds of a step at K = 0, 1, ...
    """
    gain = lambda k: expected_tokens(acceptance_rate, k) / step_s[k]
    return max(range(len(step_s)), key=lambda k: (gain(k), -k))
