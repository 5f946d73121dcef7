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
    return (
        write_slots(k_pages, k, slot_mapping),
        write_slots(v_pages, v, slot_mapping),
    )


def write_slots(
    pages: Array,  # as layout.init_pages makes them
    new: Array,  # dtype[num_tokens, kv_heads, head_dim]
    slot_mapping: Array,  # i32[num_tokens]
) -> Array:
    """Returns one array of pages with each token at its slot; slots that do not exist are
    dropped."""
    size = layout.page_size(pages)
    # Negative indices wrap before mode="drop" sees them.
    slots = jnp.where(slot_mapping < 0, layout.num_slots(pages), slot_mapping)
    page, offset = slots // size, slots % size
    return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")
