"""Writing keys and values, defined: one token after the other."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout


def write_kv_reference(
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    k: Array,  # dtype[num_tokens, kv_heads, head_dim]
    v: Array,
    slot_mapping: Array,  # i32[num_tokens]
) -> tuple[Array, Array]:
    """See `write_kv`."""
    size = layout.page_size(k_pages)

    def write(pages: Array, new: Array) -> Array:
        def write_token(token: Array, pages: Array) -> Array:
            slot = slot_mapping[token]
            page, offset = slot // size, slot % size
            is_kept = (slot >= 0) & (slot < layout.num_slots(pages))
            page = jnp.clip(page, 0, layout.num_pages(pages) - 1)
            kept = jnp.where(is_kept, new[token].astype(pages.dtype), pages[page, :, offset])
            return pages.at[page, :, offset].set(kept)

        return lax.fori_loop(0, slot_mapping.shape[0], write_token, pages)

    return write(k_pages, k), write(v_pages, v)
