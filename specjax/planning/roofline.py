"""Seconds of a step from what it must read and compute, where nothing was measured.

The larger of bytes / bandwidth and operations / peak, for each forward: a lower bound.
Collectives, sampling and the time to launch are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax.paged.work import ModelWork as ModelWork
from specjax.paged.work import Peaks as Peaks
from specjax.paged.work import Work as Work


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
