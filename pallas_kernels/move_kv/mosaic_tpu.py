"""Moving keys and values on a TPU: out of the pages of all layers, then into others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout, page_updates

HELD_BYTES = 32 << 20  # of HBM, between reading and writing


def move_kv_mosaic_tpu(
    pages: Any,  # pytree of arrays of pages, of one shape and dtype
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Any:
    """See `move_kv`. What stays where it is costs nothing.

    Raises:
      NotImplementedError: arrays that differ, or a size that no tile fits.
    """
    arrays, structure = jax.tree.flatten(pages)
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(kinds) != 1:
        raise NotImplementedError(f"equal arrays of pages, not {kinds}.")
    if source_slots.shape[0] == 0:
        return pages
    num_slots = layout.num_slots(arrays[0])
    exists = (source_slots >= 0) & (source_slots < num_slots)
    moves = exists & (source_slots != target_slots)
    sources, targets = (
        jnp.where(moves, slots, num_slots) for slots in (source_slots, target_slots)
    )
    moved = []
    for first in range(0, len(arrays), at_once := _arrays_at_once(arrays[0], sources)):
        few = arrays[first : first + at_once]
        held = page_updates.read_tokens(few, sources, interpret=interpret)
        moved += page_updates.write_tokens(few, held, targets, name="move_kv", interpret=interpret)
    return jax.tree.unflatten(structure, moved)


def _arrays_at_once(pages: Array, slots: Array) -> int:
    """Returns how many arrays to move at once, so that tokens take at most HELD_BYTES."""
    held = slots.shape[0] * page_updates.token_bytes(pages)
    return max(HELD_BYTES // max(held, 1), 1)
