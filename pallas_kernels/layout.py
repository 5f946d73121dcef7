"""The layout of pages: creates pages and reads their sizes.

Keys and values of a layer are two arrays, dtype[num_pages, kv_heads, page_size,
head_dim]. docs/decisions/0001-cache-layout.md gives the reasons.

On a TPU heads whose size is no multiple of 128 are stored in lanes: several heads side by
side that fill a line of 128, or one head padded with zeros. Attention over such a line is
that of one head whose queries are zero in the places of other heads.
"""

import jax
import jax.numpy as jnp
from jax import Array

NO_PAGE = -1  # in a block table: no page
KV_HEADS_AXIS = 1  # of a page array; tensor parallelism splits it
LANES = 128  # of a TPU's tiles

# Dtypes of quantised pages, whose numbers are multiplied by a scale per key head, and the
# largest number of each.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def init_pages(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    *,
    in_lanes: bool = False,
) -> tuple[Array, Array]:
    """Returns the zeroed key and value pages of one layer; see `page_shape`."""
    shape = page_shape(num_pages, page_size, kv_heads, head_dim, in_lanes=in_lanes)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def page_shape(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    in_lanes: bool = False,
) -> tuple[int, int, int, int]:
    """Returns the shape of the key pages of one layer; the value pages have the same.

    Args:
      in_lanes: whether heads lie in whole lanes of a TPU. Where a mesh splits heads, ask
        with those of a shard.
    """
    if not in_lanes:
        return num_pages, kv_heads, page_size, head_dim
    count = heads_per_line(kv_heads, head_dim)
    width = -(-count * head_dim // LANES) * LANES
    return num_pages, kv_heads // count, page_size, width


def heads_per_line(kv_heads: int, head_dim: int) -> int:
    """Returns the number of key heads per line: 2 of size 64, 4 of 32, 1 of 80."""
    count = LANES // head_dim if head_dim < LANES and LANES % head_dim == 0 else 1
    while kv_heads % count:
        count -= 1
    return count


def to_lines(new: Array, pages: Array) -> Array:
    """Converts keys or values [num_tokens, kv_heads, head_dim] to the layout in lanes.

    Returns dtype[num_tokens, lines, width], a reshape if lines are full.
    """
    lines, width = kv_heads(pages), head_dim(pages)
    new = new.reshape(new.shape[0], lines, -1)
    return jnp.pad(new, ((0, 0), (0, 0), (0, width - new.shape[2])))


def in_lines(q: Array, num_kv_heads: int, k_pages: Array, v_pages: Array) -> Array:
    """Checks the arguments of attention over pages in lanes, and returns `queries_in_lines`.

    Raises:
      ValueError: shapes disagree.
    """
    validate_page_arrays(k_pages, v_pages)
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [num_tokens, heads, head_dim].")
    validate_lines(num_kv_heads, q.shape[2], k_pages)
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]=} heads must be a multiple of {num_kv_heads=}.")
    return queries_in_lines(q, num_kv_heads, k_pages)


def queries_in_lines(q: Array, num_kv_heads: int, pages: Array) -> Array:
    """Converts q [num_tokens, heads, head_dim] to [num_tokens, heads, width], zero in the places
    of other heads."""
    num_tokens, heads, size = q.shape
    lines = kv_heads(pages)
    count, width = num_kv_heads // lines, head_dim(pages)
    if (count, width) == (1, size):
        return q
    q = q.reshape(num_tokens, lines, count, heads // num_kv_heads, 1, size)
    is_own = jnp.eye(count, dtype=bool)[:, None, :, None]
    q = jnp.where(is_own, q, 0).reshape(num_tokens, heads, count * size)
    return jnp.pad(q, ((0, 0), (0, 0), (0, width - count * size)))


def from_lines(out: Array, num_kv_heads: int, size: int, pages: Array) -> Array:
    """Undoes `queries_in_lines` for attention's result: [num_tokens, heads, head_dim]."""
    num_tokens, heads, width = out.shape
    lines = kv_heads(pages)
    count = num_kv_heads // lines
    if (count, width) == (1, size):
        return out
    out = out[..., : count * size].reshape(
        num_tokens, lines, count, heads // num_kv_heads, count, size
    )
    own = [out[:, :, place, :, place] for place in range(count)]
    return jnp.stack(own, axis=2).reshape(num_tokens, heads, size)


def num_pages(pages: Array) -> int:
    """Returns how many pages the array holds."""
    return pages.shape[0]


def page_size(pages: Array) -> int:
    """Returns how many tokens a page holds."""
    return pages.shape[2]


def kv_heads(pages: Array) -> int:
    """Returns how many key and value heads a page holds; in lanes, how many lines of them."""
    return pages.shape[KV_HEADS_AXIS]


def head_dim(pages: Array) -> int:
    """Returns the size of a head; in lanes, that of a line."""
    return pages.shape[3]


def num_slots(pages: Array) -> int:
    """Returns num_pages * page_size; a token with this slot is dropped."""
    return num_pages(pages) * page_size(pages)


def read_slots(pages: Array, slots: Array) -> Array:
    """Returns the keys or values at `slots`, dtype[*slots.shape, kv_heads, head_dim].

    A slot of `num_slots` or more reads zeros.
    """
    page, offset = slots // page_size(pages), slots % page_size(pages)
    return pages.at[page, :, offset].get(mode="fill", fill_value=0)


def is_quantized(pages: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether pages are quantised and need scales: int8 and fp8 (e4m3)."""
    return jnp.dtype(pages.dtype) in LARGEST


def quantize(new: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Quantises keys or values [num_tokens, kv_heads, head_dim] to the dtype of pages.

    It rounds new / scale to the nearest number, ties to even, and clips it to the largest. NaN
    stays NaN in fp8; int8 has no NaN, and gives an arbitrary number.

    Args:
      scale: f32[kv_heads], above 0.
    """
    largest = LARGEST[jnp.dtype(dtype)]
    scaled = new.astype(jnp.float32) / scale.astype(jnp.float32)[None, :, None]
    scaled = jnp.clip(scaled, -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return scaled.astype(dtype)


def validate_scales(
    k_scale: Array | None, v_scale: Array | None, num_kv_heads: int, k_pages: Array
) -> None:
    """Raises ValueError unless quantised pages have f32[kv_heads] scales, and others none."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != is_quantized(k_pages):
            raise ValueError(
                f"{name}={'none' if scale is None else scale.shape} with pages of "
                f"{k_pages.dtype}; int8 and float8_e4m3fn need both scales, others have none."
            )
        if scale is not None and (
            scale.shape != (num_kv_heads,) or not jnp.issubdtype(scale.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{name} is {scale.dtype}{list(scale.shape)}, must be one float of each key "
                f"head, ({num_kv_heads},)."
            )


def validate_page_arrays(k_pages: Array, v_pages: Array) -> None:
    """Raises ValueError unless both are page arrays of one shape and dtype."""
    if k_pages.ndim != 4:
        raise ValueError(
            f"{k_pages.shape=} must be [num_pages, kv_heads, page_size, head_dim]; "
            "make pages with init_pages."
        )
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"{k_pages.shape=} {k_pages.dtype=} and {v_pages.shape=} {v_pages.dtype=} must agree."
        )


def validate_lines(num_kv_heads: int, size: int, k_pages: Array) -> None:
    """Raises ValueError unless the pages hold num_kv_heads heads of this size, in lanes or not."""
    lines, width = kv_heads(k_pages), head_dim(k_pages)
    if num_kv_heads % lines or num_kv_heads // lines * size > width:
        raise ValueError(
            f"{num_kv_heads} key heads of {size} do not lie in pages of {lines} of {width}; "
            "make pages with init_pages."
        )


def validate_queries(q: Array, k_pages: Array) -> None:
    """Raises ValueError unless q is float[num_tokens, heads, head_dim] for these pages."""
    if q.ndim != 3 or q.shape[2] != head_dim(k_pages):
        raise ValueError(f"{q.shape=} must be [num_tokens, heads, head_dim={head_dim(k_pages)}].")
    if q.shape[1] % kv_heads(k_pages):
        raise ValueError(f"{q.shape[1]=} heads must be a multiple of {kv_heads(k_pages)=}.")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{q.dtype=} must be a float.")


def validate_int32(**arrays: Array) -> None:
    """Raises ValueError unless all arrays are int32; keywords name them in the message."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, must be int32.")
