"""Predicts the seconds of a step from the bytes it reads and the operations it computes.

Each forward takes the larger of bytes / bandwidth and operations / peak: a lower bound.
Collectives, sampling and the time to launch are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax.paged.work import ModelWork as ModelWork
from specjax.paged.work import Peaks as Peaks
from specjax.paged.work import Work as Work


def verify_work(target: ModelWork, rows: int, k: int, context: int) -> Work:
    """Returns the work of verifying K draft tokens per row, the root included."""
    return target.of(rows, rows * (1 + k), context)


def roofline_step_s(
    target: ModelWork,
    drafters: Sequence[ModelWork],
    device: Peaks,
    *,
    rows: int,
    num_speculative_tokens: int,
    context: int,
) -> float:
    """Returns the least seconds of a step: the forwards of each drafter, one of the target.

    Args:
      drafters: work of each model that drafting runs, one after the other.
      context: tokens that each row has.
    """
    k = num_speculative_tokens
    draft_s = sum(
        drafter.num_forwards(k) * drafter.of_forward(rows, context, k).seconds(device)
        for drafter in drafters
    )
    return verify_work(target, rows, k, context).seconds(device) + draft_s


def compute_bound_tokens(
    target: ModelWork, device: Peaks, *, context: int = 0, tokens_per_row: int = 1
) -> float | None:
    """Returns the tokens of a forward from which on arithmetic takes longer than memory.

    Args:
      context: tokens that each row has; its keys and values are read too.
      tokens_per_row: K + 1.

    Returns:
      None if it never does: the keys and values of a token take longer to read than to compute.
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
    """Returns the expected tokens per step and row at one acceptance rate for all positions."""
    return sum(acceptance_rate**i for i in range(num_speculative_tokens + 1))


def choose_num_speculative_tokens(step_s: Sequence[float], acceptance_rate: float) -> int:
    """Returns the K with the most expected tokens per second; the smallest of equal ones.

    Args:
      step_s: seconds of a step at K = 0, 1, ...
    """
    gain = lambda k: expected_tokens(acceptance_rate, k) / step_s[k]
    return max(range(len(step_s)), key=lambda k: (gain(k), -k))
