"""Seconds of a step before any was measured: by bytes, operations and launches. No jax.

    forward(tokens) = (weights + keys and values) / bandwidth * factor(tokens) + launches * launch
    step(rows, K)   = target forward of rows * (1 + K) tokens + K drafter forwards of rows tokens

on a CPU, whose factor says how much longer a product with so many tokens takes than with one;
elsewhere the roofline, max(bytes / bandwidth, operations / peak), takes the first summand's
place. What is predicted only decides what runs first, and what is not worth compiling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.planning.roofline import ModelWork, Peaks

# Operations that XLA launches one by one, counted in compiled steps of Llama shapes.
LAUNCHES_PER_STEP, LAUNCHES_PER_LAYER = 150, 40
LAUNCHES_PER_DRAFT = 40  # of drawing a token, or looking for a match
LAUNCH_S = 2e-6  # of an accelerator


@dataclasses.dataclass(frozen=True)
class ProcessorSpeed:
    """What a CPU was measured to do.

    Attributes:
      bytes_per_s: of weights in products with one token.
      factors: (tokens, seconds of a product with so many over seconds with one), ascending.
      launch_s: seconds that one small operation takes.
    """

    bytes_per_s: float
    factors: tuple[tuple[int, float], ...]
    launch_s: float

    def factor(self, tokens: int) -> float:
        """Returns how much longer than one token so many take; beyond what was measured a line."""
        counts, factors = np.array(self.factors).T
        if tokens > counts[-1]:
            return float(factors[-1] * tokens / counts[-1])
        return float(np.interp(tokens, counts, factors))

    def forward_s(self, work: ModelWork, rows: int, tokens: int, context: int) -> float:
        """Returns the seconds of one forward without its launches."""
        seen = rows * work.seen(context) * work.context_bytes
        weights = work.weight_bytes * self.factor(tokens)
        return (weights + seen) / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The same by the figures of its maker."""

    peaks: Peaks
    launch_s: float = LAUNCH_S

    def forward_s(self, work: ModelWork, rows: int, tokens: int, context: int) -> float:
        """Returns the least seconds of one forward without its launches."""
        return work.of(rows, tokens, context).seconds(self.peaks)


def step_prior(
    device: ProcessorSpeed | Accelerator,
    target: tuple[ModelWork, int],
    drafters: Sequence[tuple[ModelWork, int]],
) -> Callable[[Bucket, float], float]:
    """Returns a function that predicts the seconds of a bucket's step at a context.

    Args:
      target, drafters: the work of each model, and how many layers it has.
    """

    def forward_s(model: tuple[ModelWork, int], rows: int, tokens: int, context: int) -> float:
        work, layers = model
        launches = layers * LAUNCHES_PER_LAYER * device.launch_s
        return device.forward_s(work, rows, tokens, context) + launches

    def seconds(bucket: Bucket, context_tokens: float) -> float:
        rows, depth = bucket.rows, bucket.num_speculative_tokens
        context = int(context_tokens / rows)
        total = LAUNCHES_PER_STEP * device.launch_s
        total += forward_s(target, rows, rows + bucket.num_slots, context)
        total += depth * LAUNCHES_PER_DRAFT * device.launch_s
        for drafter in drafters:
            total += depth * forward_s(drafter, rows, rows, context)
        return total

    return seconds
