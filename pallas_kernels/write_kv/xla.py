"""Writing keys and values for any device."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout


def write_kv_xla(
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    k: Array,  # dtype[num_tokens, kv_heads, head_dim]
    v: Array,
    slot_mapping: Array,  # i32[num_tokens]
) -> tuple[Array, Array]:
    """See `write_kv`."""
    size = layout.page_size(k_pages)
    # Negative indices wrap before mode="drop" sees them.
    slots = jnp.where(slot_mapping < 0, layout.num_slots(k_pages), slot_mapping)
    page, offset = slots // size, slots % size

    def write(pages: Array, new: Array) -> Array:
        return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")

    return write(k_pages, k), write(v_pages, v)
