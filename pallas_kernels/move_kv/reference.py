"""Moving keys and values, defined: all are read, then written one after the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout


def move_kv_reference(
    pages: Any,  # pytree of arrays as layout.init_pages makes them
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
) -> Any:
    """See `move_kv`."""

    def move(pages: Array) -> Array:
        before, size = pages, layout.page_size(pages)
        num_slots = layout.num_slots(pages)

        def move_one(index: Array, pages: Array) -> Array:
            source, target = source_slots[index], target_slots[index]
            exists = (target >= 0) & (target < num_slots)
            source, target = (jnp.clip(slot, 0, num_slots - 1) for slot in (source, target))
            moved = before[source // size, :, source % size]
            old = pages[target // size, :, target % size]
            kept = jnp.where(exists, moved, old)
            return pages.at[target // size, :, target % size].set(kept)

        return lax.fori_loop(0, source_slots.shape[0], move_one, pages)

    return jax.tree.map(move, pages)
