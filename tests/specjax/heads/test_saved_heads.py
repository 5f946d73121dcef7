"""Heads over a target come back from save_orbax as they were."""

import golden_heads
import jax
import numpy as np
import pytest

import specjax

HEADS = golden_heads.golden_heads()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back(name, tmp_path):
    (tmp_path / "head").mkdir()
    head = HEADS[name].load(tmp_path / "head")
    specjax.save_orbax(tmp_path / "saved", head)
    loaded = specjax.load_orbax(tmp_path / "saved")
    assert loaded.spec == head.spec
    assert loaded.name == head.name
    assert loaded.notes == head.notes
    assert jax.tree.structure(loaded.params) == jax.tree.structure(head.params)
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(head.params)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
