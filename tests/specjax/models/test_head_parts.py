"""Vocabularies of heads that are a part of their target's."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.head_parts import in_target_vocabulary


@pytest.mark.parametrize("has_own_tokens", [False, True])
def test_scores_lie_where_the_target_has_the_token(has_own_tokens):
    """Tokens that the head cannot say are as unlikely as can be, even where all scores are low."""
    scores = jnp.array([[-3.0, -1.0, -2.0], [-9.0, -7.0, -8.0]])
    config = SimpleNamespace(maps_vocabulary=has_own_tokens, target_vocab_size=5)
    found = in_target_vocabulary({"target_ids": jnp.array([4, 0, 2])}, config, scores)
    if has_own_tokens:
        low = -np.inf
        expected = [[-1.0, low, -2.0, low, -3.0], [-7.0, low, -8.0, low, -9.0]]
    else:
        expected = scores
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32
