"""Writing keys and values on a TPU."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_updates


def write_kv_mosaic_tpu(
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim]
    v_pages: Array,
    k: Array,  # dtype[num_tokens, kv_heads, head_dim]
    v: Array,
    slot_mapping: Array,  # i32[num_tokens]
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:
    """See `write_kv`.

    Raises:
      NotImplementedError: a size that no tile fits.
    """
    page_updates.check_pages(k_pages)
    new = jnp.stack([k, v]).astype(k_pages.dtype)
    k_pages, v_pages = page_updates.write_tokens(
        [k_pages, v_pages], new, slot_mapping, name="write_kv", interpret=interpret
    )
    return k_pages, v_pages
