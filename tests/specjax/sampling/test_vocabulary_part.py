"""Sampling over a part of a vocabulary: what the whole gives where the rest is impossible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_vocabulary import OPTIONS, VOCAB, choose, make_case

from specjax.sampling.vocabulary import WHOLE
from specjax.sampling.vocabulary_part import VocabularyPart

WIDTH = 90
IDS = np.random.default_rng(4).permutation(VOCAB)[:WIDTH].astype(np.int32)


def part_of(token_ids):
    return VocabularyPart(token_ids=token_ids, vocab_size=VOCAB)


@functools.cache  # one compilation serves all parameters
def compiled():
    def run(token_ids, scores, *where):
        part = part_of(token_ids)
        return choose(part, scores, *where), choose(WHOLE, part.whole(scores), *where)

    return jax.jit(run)


@pytest.mark.full
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS)
def test_the_part_draws_what_the_whole_draws(params):
    logits, where = make_case(params)
    for seed in range(4):
        shuffled = jnp.roll(logits, 7 * seed, axis=1)[:, IDS]
        found, expected = compiled()(IDS, shuffled, *where)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(found.is_invalid, expected.is_invalid)
        assert np.isin(found.token_ids[~found.is_invalid], IDS).all()


def test_scores_lie_where_the_whole_has_the_token():
    """Other tokens are as unlikely as can be, even where all scores are low."""
    part = VocabularyPart(token_ids=jnp.array([4, 0, 2]), vocab_size=5)
    found = part.whole(jnp.array([[-3.0, -1.0, -2.0], [-9.0, -7.0, -8.0]]))
    low = -np.inf
    np.testing.assert_array_equal(
        found, [[-1.0, low, -2.0, low, -3.0], [-7.0, low, -8.0, low, -9.0]]
    )
    assert found.dtype == jnp.float32


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_is_what_an_array_of_the_whole_says_of_the_part(axis):
    part = VocabularyPart(token_ids=jnp.array([4, 0, 2]), vocab_size=5)
    whole = np.arange(10.0).reshape(2, 5)
    whole, expected = (
        (whole.T, whole[:, [4, 0, 2]].T) if axis == 0 else (whole, whole[:, [4, 0, 2]])
    )
    found = part.slice_of(jnp.array(whole), 3, axis)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(part.slice_of(found, 3, axis), expected)


def test_tokens_outside_the_part_have_no_index():
    part = VocabularyPart(token_ids=jnp.array([4, 0, 2]), vocab_size=5)
    ids = jnp.array([[4, 3, 0, 2, -1, 5, 2**30]])
    np.testing.assert_array_equal(part.index(ids, 3), [[0, 3, 1, 2, 3, 3, 3]])
    values = jnp.array([[5.0, 6.0, 7.0]])
    np.testing.assert_array_equal(part.take(values, ids), [[5, 0, 6, 7, 0, 0, 0]])
    np.testing.assert_array_equal(part.one_hot(ids[0, :4], 3), np.eye(4, 3)[[0, 3, 1, 2]])
    with pytest.raises(NotImplementedError, match="do not follow"):
        part.first_id(3)


def test_the_best_are_named_by_their_tokens():
    index, scores = jnp.array([[2, 0]]), jnp.array([[3.0, 1.0]])
    part = VocabularyPart(token_ids=jnp.array([4, 0, 2]), vocab_size=5)
    ids, same = part.best_few(index, scores, 3, 2)
    np.testing.assert_array_equal(ids, [[2, 4]])
    np.testing.assert_array_equal(same, scores)
