"""Plans memory: the number of pages, the weight limit of a batch, and the speculation gate.

All bytes are of one chip; every chip of a mesh holds and does the same amount.

    free         bytes left after target and drafter are loaded
    weight       n1 x tokens of the batch: its pages, and its share of what steps take
    weight limit (1 - batch_safety_margin) x free: the most a batch may weigh
    gate         speculation_weight_fraction x weight limit: the most it may weigh to speculate;
                 the same fraction of the pool, if that is less and cannot hold all full rows

docs/decisions/0004-recommended-margin.md derives the formulas. No jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from pallas_kernels.implementations import Taken
from specjax.config.gate import SpeculationGate, gate_tokens
from specjax.decode.bucket import BURST, PREFILL
from specjax.planning.workspace_fit import (
    BucketMemory,
    combined_bytes,
    fewest_nonnegative,
)

# Prefill bytes count as proportional to tokens up to the bend, where they exceed the line by
# more than this fraction.
BEND_TOLERANCE = 0.02
# Percentage points of margin for unmodelled memory: fragmentation, other programs.
SAFETY_POINTS = 5
MOST_MARGIN = 95


@dataclasses.dataclass(frozen=True)
class PrefillCoefficients:
    """Bytes of a prefill as a function of its tokens, pages and workspace together.

    `linear` x tokens up to `bend` tokens; from there on the larger of it and
    quadratic[0] x tokens + quadratic[1] x tokens squared.
    """

    linear: float
    quadratic: tuple[float, float] = (0.0, 0.0)
    bend: int | None = None
    error: float = 0.0  # largest relative error over the samples

    def __call__(self, tokens: float) -> float:
        first, second = self.quadratic
        return max(self.linear * tokens, first * tokens + second * tokens * tokens)


def fit_prefill(tokens: Sequence[int], bytes_used: Sequence[float]) -> PrefillCoefficients:
    """Returns the coefficients of prefills of one number of rows.

    The line passes through the origin and the samples up to the bend, the largest size
    whose bytes are not above it by more than 2 %.

    Args:
      tokens: at least one, all above 0.
      bytes_used: of each, above 0.

    Raises:
      ValueError: no samples, or some not above 0.
    """
    size, used = np.asarray(tokens, float), np.asarray(bytes_used, float)
    if not len(size) or size.min() <= 0 or used.min() <= 0:
        raise ValueError("fitting prefills takes samples whose tokens and bytes are above 0.")
    order = np.argsort(size)
    size, used = size[order], used[order]
    straight = _straight_samples(size, used)
    linear = float(fewest_nonnegative(size[:straight, None], used[:straight])[0])
    bend, quadratic = None, (0.0, 0.0)
    if straight < len(size):
        bend = int(size[straight - 1])
        above = np.stack([size, size * size], axis=1)[straight - 1 :]
        found = fewest_nonnegative(above, used[straight - 1 :])
        quadratic = float(found[0]), float(found[1])
    fitted = PrefillCoefficients(linear, quadratic, bend)
    errors = [abs(fitted(t) / b - 1) for t, b in zip(size, used)]
    return dataclasses.replace(fitted, error=float(max(errors)))


def _straight_samples(size: np.ndarray, used: np.ndarray) -> int:
    """Returns the number of first samples that a line through the origin fits."""
    for count in range(len(size), 1, -1):
        line = fewest_nonnegative(size[:count, None], used[:count])[0]
        if used[count - 1] <= (1 + BEND_TOLERANCE) * line * size[count - 1]:
            return count
    return 1


def bytes_per_token(few: BucketMemory, many: BucketMemory, *, more_tokens: int) -> float:
    """Returns the bytes that a token of context takes, from one step compiled for two pools.

    Args:
      more_tokens: by how many the second pool is larger.

    Raises:
      ValueError: the second pool is not larger.
    """
    more_bytes = many.argument_bytes - few.argument_bytes
    if more_tokens <= 0 or more_bytes <= 0:
        raise ValueError(
            f"{more_tokens=} take {more_bytes=}; give the step of the smaller pool first."
        )
    return more_bytes / more_tokens


def larger_of(compiled: float, measured: float | None) -> float:
    """Returns the larger of the bytes by XLA and those measured on a device, if any."""
    return compiled if measured is None else max(compiled, measured)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Inputs of a memory plan: bytes of one chip, and the user's settings."""

    free_bytes: int  # after target and drafter are loaded
    page_size: int  # tokens
    rows: int
    max_context: int  # tokens that a row can have
    batch_safety_margin: float = 20.0  # percent of the free bytes
    speculation_weight_fraction: float = 0.75  # of the weight limit
    num_pages: int | None = None  # the user's number of pages, which overrides the plan's
    tree_slots: int = 0  # slots that a row needs past its last token, for nodes of a tree

    @property
    def pages_per_row(self) -> int:
        return -(-(self.max_context + self.tree_slots) // self.page_size)

    @property
    def waste_per_row(self) -> int:
        """Most slots of its pages that a row leaves empty: in the last page, and a tree's."""
        return self.page_size - 1 + self.tree_slots

    def __post_init__(self):
        if self.free_bytes <= 0:
            raise ValueError(
                f"free_bytes={self.free_bytes}: target and drafter leave no memory for "
                "pages; use a smaller dtype or drafter, more chips, or raise memory_bytes."
            )
        if not 0 <= self.batch_safety_margin < 100:
            raise ValueError(
                f"batch_safety_margin={self.batch_safety_margin} must be a percentage "
                "from 0 to below 100."
            )
        if not 0 < self.speculation_weight_fraction <= 1:
            raise ValueError(
                f"speculation_weight_fraction={self.speculation_weight_fraction} must be "
                "above 0 and at most 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A memory plan: bytes of one chip, tokens and pages of a shard's pool."""

    bytes_per_token: float
    copied_per_token: float  # bytes per token of the pool that steps take if they copy it
    next_token_input: float  # n0: bytes that a token of context takes in its page
    next_token: float  # n1: n0 plus a token's share of the largest decoding step
    prefill: PrefillCoefficients
    free_bytes: int
    weight_limit: int  # bytes
    num_pages: int
    page_size: int
    tree_slots: int  # slots that a row needs past its last token
    gate_tokens: int  # most tokens of a batch that speculates
    workspace_bytes: int  # of the largest step, copies of the pool left out, and the code of all
    batch_safety_margin: float
    recommended_batch_safety_margin: int
    warnings: tuple[str, ...] = ()
    # The implementation of each op in the steps that were compiled.
    kernels: tuple[Taken, ...] = ()
    # Bytes of the hidden states that are kept for a drafter that learns, which are not free, and
    # of its weights in float32, its optimiser's state and a step of learning.
    kept_bytes: int = 0
    learner_bytes: int = 0
    # Bytes that steps took on the device; None if it does not report them, or not yet.
    measured_workspace: int | None = None

    @property
    def most_tokens(self) -> int:
        """Most tokens of a batch within the weight limit and the pool.

        Rows that leave parts of their pages empty lower it: see `rows_of_context`.
        """
        by_weight = math.floor(self.weight_limit / self.next_token * (1 + 1e-12))
        return min(by_weight, self.num_pages * self.page_size)

    def planned_workspace(self, num_pages: int) -> float:
        """Returns the bytes that steps may take beside so many pages, copies of them included."""
        return self.workspace_bytes + self.copied_per_token * self.page_size * num_pages

    def weight(self, tokens: int) -> float:
        """Returns the weight in bytes of a batch of so many tokens."""
        return self.next_token * tokens

    def may_speculate(self, tokens: int) -> bool:
        """Returns whether a batch of so many tokens is light enough to speculate."""
        return not SpeculationGate(max_tokens=self.gate_tokens).closed_by(1, tokens)

    def rows_of_context(self, context: int, most_rows: int) -> int:
        """Returns how many rows of `context` tokens fit into the weight limit and the pool.

        In the pool rows take whole pages, with slots for a tree.
        """
        pages = -(-(context + self.tree_slots) // self.page_size)
        return min(self.most_tokens // context, self.num_pages // pages, most_rows)


def next_token_coefficient(
    limits: MemoryLimits,
    bytes_per_token: float,
    bursts: Sequence[BucketMemory],
    measured_workspace: float | None = None,
) -> float:
    """Returns n1, bytes per token of a batch: its page and its share of a decoding step.

    A burst's workspace is divided by the most tokens that it can meet: those of its full rows,
    or those whose pages fit beside it. The burst with the largest share counts.
    """
    most = max(memory.workspace_bytes for memory in bursts)
    dearest = 0.0
    for memory in bursts:
        workspace: float = memory.workspace_bytes
        if workspace == most:
            workspace = larger_of(workspace, measured_workspace)
        beside = (limits.free_bytes - workspace) / max(bytes_per_token, 1.0)
        full = memory.bucket.rows * limits.max_context
        dearest = max(dearest, workspace / max(min(full, beside), 1.0))
    return bytes_per_token + dearest


def recommended_margin(
    *,
    bytes_per_token: float,
    next_token: float,
    prefill: PrefillCoefficients,
    prefill_workspace: float,
    limits: MemoryLimits,
    num_pages: int,
) -> int:
    """Returns the least margin, in percent of the free bytes, at which the weight limit holds.

    A batch of the weight limit must find pages though every row leaves part of its last one
    empty, and room for a tree, and the largest prefill must find its workspace beside the
    pool:

        margin >= 1 - n1 x (tokens of the pool - rows x waste_per_row) / free,
                                               unless the pool holds all that rows can
        margin >= 1 - (1 - pool / free) / (1 - c / a1)      where the pool leaves too little

    and 5 points on top. docs/decisions/0004-recommended-margin.md has the derivation.

    Args:
      prefill_workspace: bytes of the largest prefill beside its pages.
    """
    free, least = limits.free_bytes, 0.0
    if num_pages < limits.rows * limits.pages_per_row:
        usable = num_pages * limits.page_size - limits.rows * limits.waste_per_row
        least = 1 - next_token * usable / free
    left = free - num_pages * limits.page_size * bytes_per_token
    pages_of_prefill = bytes_per_token / prefill.linear
    # At a ratio of 1 prefills take only their pages: any margin will do.
    if prefill_workspace > left and pages_of_prefill < 1:
        least = max(least, 1 - left / free / (1 - pages_of_prefill))
    # Rounding errors must not add a percent.
    percent = SAFETY_POINTS + math.ceil(100 * max(least, 0.0) - 1e-9)
    return min(percent, MOST_MARGIN)


def plan_memory(
    limits: MemoryLimits,
    bytes_per_token: float,
    buckets: Sequence[BucketMemory],
    *,
    copied_per_token: float = 0.0,
    measured_workspace: float | None = None,
) -> MemoryPlan:
    """Returns pages, weight limit and gate.

    Args:
      bytes_per_token: of target and drafter together, on this chip.
      copied_per_token: bytes per token of the pool that a step takes if it copies the pool.
      buckets: every step that may run, compiled or predicted; at least one is a burst.
      measured_workspace: bytes that steps took on the device, if measured.

    Raises:
      ValueError: no bursts, or steps leave no room for a single page.
    """
    bursts = [memory for memory in buckets if memory.bucket.kind == BURST]
    if not bursts:
        raise ValueError("there is no decoding step among the buckets; compile one.")
    warnings: list[str] = []
    held, bytes_per_token = bytes_per_token, bytes_per_token + copied_per_token
    workspace = round(larger_of(combined_bytes(buckets), measured_workspace))
    n1 = next_token_coefficient(limits, bytes_per_token, bursts, measured_workspace)
    num_pages = _num_pages(limits, bytes_per_token, n1, workspace, warnings)
    prefills = [memory for memory in buckets if memory.bucket.kind == PREFILL]
    prefill = _prefill_coefficients(bytes_per_token, prefills)
    recommended = recommended_margin(
        bytes_per_token=bytes_per_token,
        next_token=n1,
        prefill=prefill,
        prefill_workspace=combined_bytes(prefills),
        limits=limits,
        num_pages=num_pages,
    )
    margin = limits.batch_safety_margin
    if margin < recommended:
        warnings.append(
            f"batch_safety_margin={margin:g} is below the {recommended} percent that "
            "page ends and the largest prefill ask for; raise it."
        )
    weight_limit = math.floor((1 - margin / 100) * limits.free_bytes)
    has_all = num_pages >= limits.rows * limits.pages_per_row
    pool_tokens = None if has_all else num_pages * limits.page_size
    fraction = limits.speculation_weight_fraction
    return MemoryPlan(
        bytes_per_token=held,
        copied_per_token=copied_per_token,
        next_token_input=held,
        next_token=n1,
        prefill=prefill,
        free_bytes=limits.free_bytes,
        weight_limit=weight_limit,
        num_pages=num_pages,
        page_size=limits.page_size,
        tree_slots=limits.tree_slots,
        gate_tokens=gate_tokens(fraction, weight_limit / n1, pool_tokens),
        workspace_bytes=workspace,
        batch_safety_margin=margin,
        recommended_batch_safety_margin=recommended,
        warnings=tuple(warnings),
    )


def pages_ratio(compiled: float, counted: float, warnings: list[str]) -> float:
    """Returns the bytes of pages as compiled over those counted, at least 1.

    A smaller ratio is impossible and adds a warning.
    """
    ratio = compiled / counted
    if ratio < 1 - 1e-6:
        warnings.append(
            f"a page seems to take {compiled:.1f} bytes by the steps compiled for two pools, "
            f"below the {counted:.1f} of its keys and values; those count."
        )
    return max(ratio, 1.0)


def _num_pages(
    limits: MemoryLimits,
    bytes_per_token: float,
    next_token: float,
    workspace: float,
    warnings: list[str],
) -> int:
    """Returns the number of pages: the least of what n1 allows, what leaves every step its
    workspace, and what full rows hold."""
    room = limits.free_bytes - workspace
    page_bytes = bytes_per_token * limits.page_size
    # The factor absorbs rounding errors: a page that fits exactly counts.
    by_weight = limits.free_bytes / next_token * (1 + 1e-12)
    fitting = int(min(by_weight, room / bytes_per_token) / limits.page_size)
    if limits.num_pages is not None:
        if limits.num_pages > fitting:
            warnings.append(
                f"num_pages={limits.num_pages} is more than the {max(fitting, 0)} that fit "
                f"beside the steps in {limits.free_bytes} free bytes; lower it."
            )
        return limits.num_pages
    if fitting < 1:
        raise ValueError(
            f"{limits.free_bytes} bytes are free and steps take {workspace:.0f}, which "
            f"leaves no room for a page of {page_bytes:.0f}; lower max_rows, "
            "num_speculative_tokens or logit_bytes, or raise memory_bytes."
        )
    return min(fitting, limits.rows * limits.pages_per_row)


def _prefill_coefficients(
    bytes_per_token: float, prefills: Sequence[BucketMemory]
) -> PrefillCoefficients:
    """Returns the coefficients of compiled prefills; without any, those of pages alone."""
    if not prefills:
        return PrefillCoefficients(bytes_per_token)
    tokens = [memory.bucket.tokens for memory in prefills]
    used = [m.workspace_bytes + bytes_per_token * m.bucket.tokens for m in prefills]
    return fit_prefill(tokens, used)
