"""Moving keys and values on a TPU: out of their pages, and into others, layer by layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout, page_updates
from pallas_kernels.page_updates import Updates
from pallas_kernels.write_kv.mosaic_tpu import VMEM_BYTES


def move_kv_mosaic_tpu(
    pages: Any,  # pytree of an even number of arrays of pages, of one shape and dtype
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Any:
    """See `move_kv`. What stays where it is costs nothing.

    Raises:
      NotImplementedError: arrays that differ, a size that no tile fits, or more tokens than
        VMEM holds.
    """
    arrays, structure = jax.tree.flatten(pages)
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(kinds) != 1 or len(arrays) % 2:
        raise NotImplementedError(f"pairs of equal arrays of pages, not {kinds}.")
    first = arrays[0]
    page_updates.check_pages(first)
    page, num_tokens = first.shape[1:], source_slots.shape[0]
    needed = vmem_bytes(first, num_tokens)
    if needed > VMEM_BYTES:
        raise NotImplementedError(f"{num_tokens=} need {needed} bytes of VMEM.")
    size, num_slots = layout.page_size(first), layout.num_slots(first)
    exists = (source_slots >= 0) & (source_slots < num_slots)
    moves = exists & (source_slots != target_slots)
    targets = page_updates.group_by_page(
        jnp.where(moves, target_slots, num_slots), size, num_slots
    )
    sources = page_updates.group_by_page(
        jnp.where(moves, source_slots, num_slots), size, num_slots
    )
    num_scalars = 2 * len(sources)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    held = pltpu.VMEM((num_tokens, page[0], page[2]), jnp.float32)
    buffer = pltpu.VMEM((page_updates.DEPTH, *page), first.dtype)
    sems = pltpu.SemaphoreType.DMA((page_updates.DEPTH, 2))
    moved = pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(first.shape, first.dtype)] * len(arrays),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[anywhere] * len(arrays),
            out_specs=[anywhere] * len(arrays),
            scratch_shapes=[held, held, buffer, buffer, sems, sems],
        ),
        input_output_aliases={num_scalars + i: i for i in range(len(arrays))},
        interpret=interpret,
        name="move_kv",
    )(*sources, *targets, *arrays)
    return jax.tree.unflatten(structure, moved)


def vmem_bytes(page: Any, num_tokens: int) -> int:
    """Returns the bytes of VMEM that moving so many tokens keeps there."""
    kv_heads, _, head_dim = page.shape[1:]
    held = 4 * num_tokens * -(-kv_heads // 8) * 8 * head_dim
    buffers = page_updates.DEPTH * math.prod(page.shape[1:]) * page.dtype.itemsize
    return 2 * (held + buffers)


def _kernel(*refs):
    num_fields = len(Updates._fields)
    sources, targets = (
        Updates(*refs[:num_fields]),
        Updates(*refs[num_fields : 2 * num_fields]),
    )
    *arrays, k_held, v_held, k_buffer, v_buffer, read_sems, write_sems = refs[
        2 * num_fields :
    ]
    num_arrays = len(arrays) // 2
    held, buffers = [k_held, v_held], [k_buffer, v_buffer]
    for place in range(0, num_arrays, 2):
        read = list(arrays[place : place + 2])
        written = list(arrays[num_arrays + place : num_arrays + place + 2])
        page_updates.collect(sources, held, read, buffers, read_sems)
        page_updates.apply(targets, held, read, written, buffers, read_sems, write_sems)
