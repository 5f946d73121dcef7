"""Writing keys and values on a TPU."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout, page_updates

VMEM_BYTES = 12 << 20  # of 16 MiB, the least of all generations


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
      NotImplementedError: a size that no tile fits, or more tokens than VMEM holds.
    """
    page = k_pages.shape[1:]
    page_updates.check_pages(k_pages)
    needed = vmem_bytes(k_pages, k.shape[0])
    if needed > VMEM_BYTES:
        raise NotImplementedError(f"{k.shape=} needs {needed} bytes of VMEM.")
    updates = page_updates.group_by_page(
        slot_mapping, layout.page_size(k_pages), layout.num_slots(k_pages)
    )
    num_scalars = len(updates)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    k_pages, v_pages = pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype)] * 2,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[whole, whole, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                *[pltpu.VMEM((page_updates.DEPTH, *page), k_pages.dtype)] * 2,
                *[pltpu.SemaphoreType.DMA((page_updates.DEPTH, 2))] * 2,
            ],
        ),
        input_output_aliases={num_scalars + 2: 0, num_scalars + 3: 1},
        interpret=interpret,
        name="write_kv",
    )(*updates, k.astype(k_pages.dtype), v.astype(v_pages.dtype), k_pages, v_pages)
    return k_pages, v_pages


def vmem_bytes(k_pages: Any, num_tokens: int) -> int:
    """Returns the bytes of VMEM that writing so many tokens keeps there."""
    kv_heads, _, head_dim = k_pages.shape[1:]
    size = k_pages.dtype.itemsize
    sublanes = 8 * 4 // size
    tokens = num_tokens * -(-kv_heads // sublanes) * sublanes * head_dim
    return 2 * size * (tokens + page_updates.DEPTH * math.prod(k_pages.shape[1:]))


def _kernel(*refs):
    num_scalars = len(page_updates.Updates._fields)
    updates = page_updates.Updates(*refs[:num_scalars])
    k, v, *pages = refs[num_scalars:]
    k_in, v_in, k_out, v_out, k_buffer, v_buffer, read_sems, write_sems = pages
    page_updates.apply(
        updates,
        [k, v],
        [k_in, v_in],
        [k_out, v_out],
        [k_buffer, v_buffer],
        read_sems,
        write_sems,
    )
