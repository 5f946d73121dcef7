"""Bytes of the page pool that steps copy while they run. No jax.

A step that updates pages in place needs no more memory in a larger pool. Another step holds
copies of whole arrays of pages, as the XLA implementation of attention does on TPU. Steps of one
kind copy alike, those of another kind may not: a plain burst passes the drafter's pages
through, a prefill reads few pages. So each kind is compiled for two pools.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from specjax.decode.bucket import BURST
from specjax.planning.workspace_fit import BucketMemory, StepShape

PLAIN, SPECULATING = "plain burst", "speculating burst"

# Growth below this fraction of an array of pages is not a copy of it.
SMALL = 0.05


def step_kind(bucket: StepShape) -> str:
    """Returns the group of steps that copy pages in the same way."""
    if bucket.kind != BURST:
        return bucket.kind
    return SPECULATING if bucket.num_speculative_tokens else PLAIN


def seen_per_page(few: BucketMemory, many: BucketMemory, more_pages: int) -> float:
    """Returns the growth of a step's scratch per page of the pool, in bytes."""
    return max(many.scratch_bytes - few.scratch_bytes, 0) / more_pages


def whole_arrays(seen: float, array_bytes: float) -> float:
    """Returns the bytes per page that a step copies in a large pool.

    Arrays are copied whole. In a small pool other arrays may hide part of a copy, so a
    fraction of an array is rounded up.

    Args:
      seen: measured growth, bytes per page.
      array_bytes: bytes of a page in one array: the keys or values of one layer.
    """
    return array_bytes * max(math.ceil(seen / array_bytes - SMALL), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolCopies:
    """Bytes per page that steps copy on one chip, by `step_kind`.

    Attributes:
      seen: growth with the pool, measured with the compiled layers.
      compiled: `seen` rounded up to whole arrays.
      of_all: `compiled` extrapolated to all layers of the target.
      page_bytes: bytes of a page in all layers of target and drafter.
    """

    seen: Mapping[str, float]
    compiled: Mapping[str, float]
    of_all: Mapping[str, float]
    page_bytes: float

    @property
    def most_per_page(self) -> float:
        """Bytes per page copied by the kind of step that copies most."""
        return max(self.of_all.values(), default=0.0)

    @property
    def ratio(self) -> float:
        """`most_per_page` over the bytes of a page: 0 if pools are updated in place."""
        return self.most_per_page / self.page_bytes

    def without(self, memory: BucketMemory, num_pages: int) -> BucketMemory:
        """Returns a compiled step without its copies of a pool.

        A step's bytes are the maximum of several needs, some of which grow with the pool: the
        rest plus the copies of a larger pool is an upper bound.
        """
        copies = self.compiled.get(step_kind(memory.bucket), 0.0) * num_pages
        temp = max(memory.temp_bytes - round(copies), 0)
        return dataclasses.replace(memory, temp_bytes=temp)


def pool_copies(
    seen: Mapping[str, float],
    *,
    layer_bytes: float,
    drafter_bytes: float,
    compiled_layers: int,
    num_layers: int,
    added_by_layer: float | None = None,
) -> PoolCopies:
    """Returns the copies of all layers, extrapolated from those of a few layers.

    A plain burst copies the target's pages alone, in proportion to its layers. Pages that
    another step copies beyond those are the drafter's, if it has any. If plain bursts copy
    nothing, every layer is assumed to be copied as the compiled ones are.

    Args:
      seen: bytes per page by `step_kind`, plain bursts among them.
      layer_bytes, drafter_bytes: bytes of a page in one layer of the target, and in the whole
        drafter.
      added_by_layer: bytes per page that one more layer adds to a plain burst's copies, in whole
        arrays; by default the mean of the compiled layers.
    """
    whole = {k: whole_arrays(bytes_, layer_bytes / 2) for k, bytes_ in seen.items()}
    if added_by_layer is None:
        added_by_layer = whole[PLAIN] / compiled_layers
    more = added_by_layer * (num_layers - compiled_layers)

    def of_all(copied: float) -> float:
        # If plain bursts copy nothing, copies are attributed to the target first.
        of_target = whole[PLAIN] or layer_bytes * compiled_layers
        drafters = min(max(copied - of_target, 0.0), 2 * drafter_bytes)
        targets = copied - drafters
        if not whole[PLAIN]:
            return drafters + targets / compiled_layers * num_layers
        # A step that copies less of the target than a plain burst grows in proportion.
        return targets + drafters + more * targets / whole[PLAIN]

    return PoolCopies(
        seen=dict(seen),
        compiled=whole,
        of_all={kind: of_all(copied) for kind, copied in whole.items()},
        page_bytes=layer_bytes * num_layers + drafter_bytes,
    )


def kinds_to_compile_twice(samples: list[BucketMemory]) -> list[BucketMemory]:
    """Returns the largest sample of each kind of step other than a plain burst, bursts first."""
    largest: dict[str, BucketMemory] = {}
    for sample in sorted(samples, key=lambda s: s.bucket.tokens):
        largest[step_kind(sample.bucket)] = sample
    found = [sample for kind, sample in largest.items() if kind != PLAIN]
    return sorted(found, key=lambda s: s.bucket.kind != BURST)
