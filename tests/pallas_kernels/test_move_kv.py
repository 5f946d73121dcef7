"""Moving keys and values between slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layout
from pallas_kernels.move_kv import move_kv


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reads_all_before_it_writes_any(implementation, dtype):
    """A path through a tree: nodes 2, 5 and 6 of a row become 1, 2 and 3."""
    rng = np.random.default_rng(0)
    shape = layout.page_shape(8, 4, 2, 64)
    pages = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)]
    source = jnp.array([14, 17, 18, 3, 0], jnp.int32)
    target = jnp.array([13, 14, 15, 3, 32], jnp.int32)  # the last is dropped
    move = jax.jit(move_kv, static_argnames="implementation")
    moved = move(pages, source, target, implementation=implementation)
    everywhere = jnp.arange(32)
    for before, after in zip(pages, moved, strict=True):
        expected = np.array(layout.read_slots(before, everywhere))
        expected[[13, 14, 15]] = expected[[14, 17, 18]]
        np.testing.assert_array_equal(layout.read_slots(after, everywhere), expected)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_slots_that_do_not_exist(implementation):
    pages = layout.init_pages(2, 8, 1, 8, jnp.float32)
    pages = tuple(page + 1 for page in pages)
    source = jnp.array([3, 3, 3], jnp.int32)
    target = jnp.array([-1, 16, 1000], jnp.int32)
    for after in move_kv(pages, source, target, implementation=implementation):
        assert (after == 1).all()


def test_refusals():
    pages = layout.init_pages(2, 8, 1, 8, jnp.float32)
    slots = jnp.arange(3, dtype=jnp.int32)
    with pytest.raises(ValueError, match="one equal length"):
        move_kv(pages, slots, slots[:2])
    with pytest.raises(ValueError, match="target_slots is float32"):
        move_kv(pages, slots, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match="equal slots"):
        move_kv([pages, pages[0][:1]], slots, slots)
    with pytest.raises(NotImplementedError, match="runs on tpu, and this is cpu"):
        move_kv(pages, slots, slots, implementation="mosaic_tpu")
