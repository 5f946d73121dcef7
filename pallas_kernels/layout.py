"""The shape of a page, in one place: callers make and measure pages here.

Keys and values of a layer are two arrays, dtype[num_pages, kv_heads, page_size,
head_dim]. docs/decisions/0001-cache-layout.md says why.
"""

import jax.numpy as jnp
from jax import Array

NO_PAGE = -1  # in a block table: no page stands here
KV_HEADS_AXIS = 1  # of a page array; tensor parallelism splits it


def init_pages(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Returns the zeroed key and value pages of one layer."""
    shape = page_shape(num_pages, page_size, kv_heads, head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def page_shape(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Returns the shape of the key pages of one layer; the value pages have the same."""
    return num_pages, kv_heads, page_size, head_dim


def num_pages(pages: Array) -> int:
    """Returns how many pages the array holds."""
    return pages.shape[0]


def page_size(pages: Array) -> int:
    """Returns how many tokens a page holds."""
    return pages.shape[2]


def kv_heads(pages: Array) -> int:
    """Returns how many key and value heads a page holds."""
    return pages.shape[KV_HEADS_AXIS]


def head_dim(pages: Array) -> int:
    """Returns the size of a head."""
    return pages.shape[3]


def num_slots(pages: Array) -> int:
    """Returns num_pages * page_size, which as a slot means dropped."""
    return num_pages(pages) * page_size(pages)


def read_slots(pages: Array, slots: Array) -> Array:
    """Returns the keys or values at `slots`, dtype[*slots.shape, kv_heads, head_dim].

    A slot of `num_slots` or more reads zeros.
    """
    page, offset = slots // page_size(pages), slots % page_size(pages)
    return pages.at[page, :, offset].get(mode="fill", fill_value=0)


def validate_page_arrays(k_pages: Array, v_pages: Array) -> None:
    """Raises ValueError unless both are page arrays of one shape and dtype."""
    if k_pages.ndim != 4:
        raise ValueError(
            f"{k_pages.shape=} must be [num_pages, kv_heads, page_size, head_dim]; "
            "make pages with init_pages."
        )
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"{k_pages.shape=} {k_pages.dtype=} and {v_pages.shape=} {v_pages.dtype=} "
            "must agree."
        )


def validate_queries(q: Array, k_pages: Array) -> None:
    """Raises ValueError unless q is float[num_tokens, heads, head_dim] for these pages."""
    if q.ndim != 3 or q.shape[2] != head_dim(k_pages):
        raise ValueError(
            f"{q.shape=} must be [num_tokens, heads, head_dim={head_dim(k_pages)}]."
        )
    if q.shape[1] % kv_heads(k_pages):
        raise ValueError(
            f"{q.shape[1]=} heads must be a multiple of {kv_heads(k_pages)=}."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{q.dtype=} must be a float.")


def validate_int32(**arrays: Array) -> None:
    """Raises ValueError unless all are int32; callers name them."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, must be int32.")
