"""Moving keys and values for any device: a gather, then a scatter."""

from jax import Array

from pallas_kernels import layout
from pallas_kernels.write_kv.xla import write_kv_xla


def move_kv_xla(
    k_pages: Array,  # as layout.init_pages makes them
    v_pages: Array,
    source_slots: Array,  # i32[n]
    target_slots: Array,  # i32[n]
) -> tuple[Array, Array]:
    """See `move_kv`."""
    k, v = (layout.read_slots(pages, source_slots) for pages in (k_pages, v_pages))
    return write_kv_xla(k_pages, v_pages, k, v, target_slots)
