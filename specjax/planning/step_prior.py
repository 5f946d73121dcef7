"""Predicts the seconds of a step from bytes, operations and launches. No jax.

    forward(tokens) = (weights + keys and values) / bandwidth * factor(tokens) + launches * launch
    step(rows, K)   = target forward of rows * (1 + K) tokens + K drafter forwards of rows tokens

on a CPU, where factor(tokens) is the time of a product with these tokens over that with one; they
are padded to a number that was measured (`models.layers.product_width`).
Elsewhere the roofline, max(bytes / bandwidth, operations / peak), replaces the first summand.
The prediction only decides which bucket runs first, and which are not worth compiling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from specjax.decode.bucket import Bucket
from specjax.planning.roofline import ModelWork, Peaks

# Operations that XLA launches one by one, counted in compiled steps of Llama shapes.
LAUNCHES_PER_STEP, LAUNCHES_PER_LAYER = 150, 40
LAUNCHES_PER_DRAFT = 40  # to sample a draft token, or to look up a match
LAUNCH_S = 2e-6  # seconds per launch on an accelerator


@dataclasses.dataclass(frozen=True)
class ProcessorSpeed:
    """Measured speed of a CPU.

    Attributes:
      bytes_per_s: bytes of weights read per second in products with one token.
      factors: (tokens, seconds of a product with so many over seconds with one), ascending: the
        numbers that tokens are padded to.
      launch_s: seconds that one small operation takes.
    """

    bytes_per_s: float
    factors: tuple[tuple[int, float], ...]
    launch_s: float

    def factor(self, tokens: int) -> float:
        """Returns the time of some tokens over that of one, past the last in proportion."""
        most, last = self.factors[-1]
        fits = (factor for count, factor in self.factors if count >= tokens)
        return next(fits, last * tokens / most)

    def forward_s(self, work: ModelWork, rows: int, tokens: int, context: int) -> float:
        """Returns the seconds of one forward without its launches."""
        seen = rows * work.seen(context) * work.context_bytes
        weights = work.weight_bytes * self.factor(tokens)
        return (weights + seen) / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Speed of an accelerator by its maker's peak figures."""

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
      target, drafters: the work and number of layers of each model.
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
            work, _ = drafter
            tokens = rows * work.forward_tokens(depth)
            total += work.num_forwards(depth) * forward_s(drafter, rows, tokens, context)
        return total

    return seconds
