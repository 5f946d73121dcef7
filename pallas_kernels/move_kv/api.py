"""Moving keys and values: the public function, its checks, its implementations."""

import functools

from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import call_best
from pallas_kernels.move_kv.reference import move_kv_reference
from pallas_kernels.move_kv.xla import move_kv_xla


def move_kv(
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim]
    v_pages: Array,  # likewise
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Returns the pages with the key and value of each source slot at its target slot.

    All sources are read before any target is written, so that the accepted path of
    a tree may move over nodes that are themselves about to move. It reads and writes
    2 * n * kv_heads * head_dim numbers, whatever the pool's size, in place as
    `write_kv` is.

    Args:
      source_slots: a slot that does not exist gives zeros or anything.
      target_slots: no slot twice; `num_slots`, and any other that does not exist, is
        dropped.
      implementation: "xla" or "reference"; None picks the best for this case.

    Raises:
      ValueError: shapes or dtypes disagree.
    """
    layout.validate_page_arrays(k_pages, v_pages)
    if source_slots.ndim != 1 or source_slots.shape != target_slots.shape:
        raise ValueError(
            f"{source_slots.shape=} and {target_slots.shape=} must be one equal length."
        )
    layout.validate_int32(source_slots=source_slots, target_slots=target_slots)
    arguments = (k_pages, v_pages, source_slots, target_slots)
    implementations = {
        "xla": functools.partial(move_kv_xla, *arguments),
        "reference": functools.partial(move_kv_reference, *arguments),
    }
    return call_best(implementations, implementation)
