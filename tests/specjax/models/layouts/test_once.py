"""Weights are converted once, and the result is kept no longer than the arrays."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.layouts.once import Once


def doubled():
    return Once(lambda arrays: {name: 2 * array for name, array in arrays.items()})


def test_the_same_arrays_are_converted_once():
    once, arrays = doubled(), {"a": jnp.ones(2), "b": jnp.zeros(3)}
    first = once(arrays)
    assert once({**arrays}) is first
    assert once.num_conversions == 1
    assert once({**arrays, "b": jnp.zeros(3)}) is not first
    assert once.num_conversions == 2


@pytest.mark.full
def test_the_result_goes_with_the_arrays():
    once = doubled()
    arrays = {"a": jnp.ones(2), "b": jnp.zeros(3)}
    assert once(arrays)["a"].tolist() == [2, 2]
    del arrays["b"]
    gc.collect()
    assert once.result is None
    # The end of older arrays does not touch what newer ones became.
    old, new = {"a": jnp.ones(2)}, {"a": jnp.ones(2)}
    once(old)
    once(new)
    del old
    gc.collect()
    assert once.has(new)
    assert once.result is not None


def test_numpy_arrays_may_change_in_place():
    once, array = doubled(), np.ones(2)
    assert once({"a": array})["a"].tolist() == [2, 2]
    array += 1
    assert once({"a": array})["a"].tolist() == [4, 4]
    assert not once.has({"a": array})
    assert once.result is None  # it would never be used


def test_arrays_under_other_names_are_others():
    once, one, other = doubled(), jnp.ones(2), jnp.zeros(2)
    once({"a": one, "b": other})
    assert once({"a": other, "b": one})["a"].tolist() == [0, 0]


def test_what_was_deleted_is_named():
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(ValueError, match="weight a was deleted"):
        doubled()({"a": array})
