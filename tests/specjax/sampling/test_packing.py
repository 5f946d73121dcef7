"""Small arrays as one: every bit comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling.packing import pack, take, unpack

VALUES = {
    "ids": jnp.array([3, -(2**31), 2**31 - 1], jnp.int32),
    "bits": jnp.array([[1, 2**32 - 1]] * 3, jnp.uint32),
    "flags": jnp.array([[[True], [False]]] * 3),
    "scores": jnp.array([[0.5, jnp.nan], [-0.0, jnp.inf], [1e-45, -jnp.inf]], jnp.float32),
    "nothing": jnp.zeros((3, 0), jnp.float32),
    "missing": None,
}


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_pack_and_unpack():
    packed = pack(VALUES)
    assert packed.shape == (3, 7)
    assert packed.dtype == jnp.int32
    assert_same_bits(unpack(packed, jax.eval_shape(lambda: VALUES)), VALUES)


def test_leading_axes_are_kept():
    packed = jnp.stack([pack(VALUES)] * 2)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), VALUES)
    assert_same_bits(unpack(packed, VALUES), twice)


def test_take_is_an_index_into_each_leaf():
    index = jnp.array([[2, 0], [1, 1]])
    assert_same_bits(take(VALUES, index), jax.tree.map(lambda leaf: leaf[index], VALUES))


def test_no_rows():
    empty = jax.tree.map(lambda leaf: leaf[:0], VALUES)
    assert pack(empty).shape == (0, 7)
    assert_same_bits(unpack(pack(empty), VALUES), empty)


def test_other_widths_are_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        pack([jnp.zeros(3, jnp.bfloat16)])
