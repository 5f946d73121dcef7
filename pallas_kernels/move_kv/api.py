"""Moving keys and values: the public function, its checks, its implementations."""

import functools
from typing import TypeVar

import jax
from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import call_best, named_for, needs_platform
from pallas_kernels.move_kv.mosaic_tpu import move_kv_mosaic_tpu
from pallas_kernels.move_kv.reference import move_kv_reference
from pallas_kernels.move_kv.xla import move_kv_xla

Pages = TypeVar("Pages")


def move_kv(
    pages: Pages,  # pytree of dtype[num_pages, kv_heads, page_size, head_dim]
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
    *,
    implementation: str | None = None,
) -> Pages:
    """Returns the pages with the key and value of each source slot at its target slot.

    All sources are read before any target is written, so that the accepted path of
    a tree may move over nodes that are themselves about to move. It reads and writes
    n * kv_heads * head_dim numbers of each array (on a TPU their whole pages), whatever
    the pool's size, and updates in place like `write_kv`.

    Args:
      pages: keys and values of all layers, from layout.init_pages, in any structure; all
        arrays have the same number of slots.
      source_slots: a slot that does not exist gives arbitrary values.
      target_slots: without duplicates; `num_slots`, and any other slot that does not exist,
        is dropped.
      implementation: "mosaic_tpu", "xla" or "reference"; None picks the best for this case.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the implementation asked for does not cover the case.
    """
    arrays = jax.tree.leaves(pages)
    for array in arrays:
        layout.validate_page_arrays(array, array)
    if len({layout.num_slots(array) for array in arrays}) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise ValueError(f"arrays of pages must have equal slots, have {shapes}.")
    if source_slots.ndim != 1 or source_slots.shape != target_slots.shape:
        raise ValueError(
            f"{source_slots.shape=} and {target_slots.shape=} must be one equal length."
        )
    layout.validate_int32(source_slots=source_slots, target_slots=target_slots)
    arguments = (pages, source_slots, target_slots)
    mosaic_tpu = functools.partial(move_kv_mosaic_tpu, *arguments)
    implementation = named_for("move_kv", implementation)
    implementations = {
        "mosaic_tpu": needs_platform("tpu", mosaic_tpu),
        "xla": functools.partial(move_kv_xla, *arguments),
        "reference": functools.partial(move_kv_reference, *arguments),
    }
    return call_best("move_kv", implementations, implementation)
