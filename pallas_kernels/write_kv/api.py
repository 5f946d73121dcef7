"""Writing keys and values: the public function, its checks, its implementations."""

import functools

from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import call_best, named_for, needs_platform
from pallas_kernels.write_kv.mosaic_tpu import write_kv_mosaic_tpu
from pallas_kernels.write_kv.reference import write_kv_reference
from pallas_kernels.write_kv.xla import write_kv_xla


def write_kv(
    k_pages: Array,  # dtype[num_pages, kv_heads, page_size, head_dim], or in lanes
    v_pages: Array,  # same shape as k_pages
    k: Array,  # dtype[num_tokens, kv_heads, head_dim]
    v: Array,  # same shape as k
    slot_mapping: Array,  # i32[num_tokens]
    *,
    k_scale: Array | None = None,  # f32[kv_heads]
    v_scale: Array | None = None,  # f32[kv_heads]
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Returns the pages with the key and value of each token written at its slot.

    A slot is page * page_size + offset. Tokens with slot `num_slots`, one past the last, or
    any other slot that does not exist, are dropped.

    The pages are updated in place if the caller donates them, or carries them through a
    loop with one array per layer and reads them only after this write.

    Args:
      k_pages: keys, from layout.init_pages.
      v_pages: values, from layout.init_pages.
      k: new keys, cast to the dtype of the pages.
      v: new values, cast to the dtype of the pages.
      slot_mapping: without duplicate slots.
      k_scale: each head's keys are divided by it before they are rounded to int8 or fp8
        (e4m3). Only for such pages.
      v_scale: the same for values.
      implementation: "mosaic_tpu", "xla" or "reference"; None picks the best for this case.

    Raises:
      ValueError: shapes or dtypes disagree.
    """
    layout.validate_page_arrays(k_pages, v_pages)
    if (
        slot_mapping.ndim != 1
        or k.ndim != 3
        or k.shape != v.shape
        or k.shape[:1] != slot_mapping.shape
    ):
        raise ValueError(
            f"{k.shape=} and {v.shape=} must be [num_tokens, kv_heads, head_dim] of "
            f"{slot_mapping.shape=}."
        )
    layout.validate_int32(slot_mapping=slot_mapping)
    layout.validate_lines(k.shape[1], k.shape[2], k_pages)
    layout.validate_scales(k_scale, v_scale, k.shape[1], k_pages)
    if k_scale is not None and v_scale is not None:
        k = layout.quantize(k, k_scale, k_pages.dtype)
        v = layout.quantize(v, v_scale, v_pages.dtype)
    if k.shape[0] == 0:
        return k_pages, v_pages
    k, v = (layout.to_lines(new, k_pages) for new in (k, v))
    arguments = (k_pages, v_pages, k, v, slot_mapping)
    mosaic_tpu = functools.partial(write_kv_mosaic_tpu, *arguments)
    implementation = named_for("write_kv", implementation)
    implementations = {
        "mosaic_tpu": needs_platform("tpu", mosaic_tpu),
        "xla": functools.partial(write_kv_xla, *arguments),
        "reference": functools.partial(write_kv_reference, *arguments),
    }
    return call_best("write_kv", implementations, implementation)
