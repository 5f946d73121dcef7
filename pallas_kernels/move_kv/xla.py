"""Moving keys and values for any device: a gather, then a scatter."""

from typing import Any

import jax
from jax import Array

from pallas_kernels import layout
from pallas_kernels.write_kv.xla import write_slots


def move_kv_xla(
    pages: Any,  # pytree of arrays as layout.init_pages makes them
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
) -> Any:
    """See `move_kv`."""

    def move(own: Array) -> Array:
        return write_slots(own, layout.read_slots(own, source_slots), target_slots)

    return jax.tree.map(move, pages)
