"""What steps copy of the pool of pages while they run. No jax.

A step that writes pages where it reads them needs nothing more in a larger pool. One that
does not holds copies of whole arrays of pages, as the XLA form of attention does on TPU.
Steps of one kind do alike, those of another kind may not: a plain burst passes the
drafter's pages through, a prefill reads few pages. So each kind is compiled for two pools.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from specjax.planning.workspace_fit import BURST, BucketMemory, StepShape

PLAIN, SPECULATING = "plain burst", "speculating burst"

# Of an array of pages: less is not a copy of it.
SMALL = 0.05


def step_kind(bucket: StepShape) -> str:
    """Returns which steps it copies alike with."""
    if bucket.kind != BURST:
        return bucket.kind
    return SPECULATING if bucket.num_speculative_tokens else PLAIN


def seen_per_page(few: BucketMemory, many: BucketMemory, more_pages: int) -> float:
    """Returns by how much a step's scratch grows with each page of the pool, in bytes."""
    return max(many.scratch_bytes - few.scratch_bytes, 0) / more_pages


def whole_arrays(seen: float, array_bytes: float) -> float:
    """Returns the bytes per page that a large pool will have copied.

    Arrays are copied whole. In a small pool other arrays may outweigh a copy, which then
    seems a part of one: it is counted whole.

    Args:
      seen: bytes per page.
      array_bytes: of a page in one array: of one layer, keys or values.
    """
    return array_bytes * max(math.ceil(seen / array_bytes - SMALL), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolCopies:
    """Bytes per page that steps copy on one chip, by `step_kind`.

    Attributes:
      seen: growth with the pool as compiled, of the layers that were compiled.
      compiled: the same in whole arrays.
      of_all: for all layers of the target.
      page_bytes: of a page in all layers of target and drafter.
    """

    seen: Mapping[str, float]
    compiled: Mapping[str, float]
    of_all: Mapping[str, float]
    page_bytes: float

    @property
    def most_per_page(self) -> float:
        """Bytes per page that the dearest kind of step copies."""
        return max(self.of_all.values(), default=0.0)

    @property
    def ratio(self) -> float:
        """The same over the bytes of the page: 0 where pools are updated in place."""
        return self.most_per_page / self.page_bytes

    def without(self, memory: BucketMemory, num_pages: int) -> BucketMemory:
        """Returns a compiled step less its copies of a pool.

        What a step takes is the larger of several needs, of which some grow with the
        pool: what is left, plus the copies of a larger pool, is never too little.
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
    """Returns the copies of all layers from those that a few were seen to make.

    A plain burst copies the target's pages alone, so many more with each layer; what
    another step copies beyond that are the drafter's, where it has any. Where plain bursts
    copy nothing, every layer is taken to be copied as those that were compiled.

    Args:
      seen: bytes per page by `step_kind`, plain bursts among them.
      layer_bytes, drafter_bytes: of a page, in one layer of the target and in all of the
        drafter.
      added_by_layer: what a layer more adds to a plain burst's copies, in whole arrays;
        None is not known: every layer then copies as those that were compiled.
    """
    whole = {k: whole_arrays(bytes_, layer_bytes / 2) for k, bytes_ in seen.items()}
    if added_by_layer is None:
        added_by_layer = whole[PLAIN] / compiled_layers
    more = added_by_layer * (num_layers - compiled_layers)

    def of_all(copied: float) -> float:
        # Where plain bursts copy nothing, a copy is thought to be the target's first.
        of_target = whole[PLAIN] or layer_bytes * compiled_layers
        drafters = min(max(copied - of_target, 0.0), 2 * drafter_bytes)
        targets = copied - drafters
        if not whole[PLAIN]:
            return drafters + targets / compiled_layers * num_layers
        # A step that copies less of the target than a plain burst grows by so much less.
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
