"""What a decoder takes for known weights and lengths, and small figures of rollouts by hand."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax.config.engine import EngineConfig
from specjax.rl.batch import ERROR, LENGTH, STOP, UNFINISHED, Rollout
from specjax.rl.decoder import MOST_PROMPTS, NEWEST_WEIGHT, build_decoder

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def decoder():
    engine = EngineConfig(page_size=4, max_rows=2, max_context=32, num_pages=16)
    return build_decoder(tiny_llama(0, num_layers=1), engine=engine)


def handed(decoder, params, version=None):
    """Hands weights over; returns whether pages that were filled before can be found."""
    loop = decoder.hand_over(params, version)
    (pool,) = loop.scheduler.pools
    is_found = bool(pool.find(TEXT))
    if not is_found:
        (page,) = pool.take(1)
        pool.remember(0, TEXT[:4], page)
        pool.give_back([page])
    decoder.let_go()
    return is_found


def test_pages_are_found_under_the_same_weights_and_version_only(decoder):
    params, others = (tiny_llama(seed, num_layers=1).params for seed in (0, 1))
    found, versions = [], []
    for weights, version in (
        (params, 3),
        (params, None),
        (params, 3),
        (params, 4),
        (params, None),
        (others, None),
        (others, 5),
        (params, 5),
    ):
        found.append(handed(decoder, weights, version))
        versions.append(decoder.params_version)
    assert found == [False, True, True, False, True, False, True, False]
    assert versions == [3, 3, 3, 4, 4, 5, 5, 5]


def test_lengths_of_earlier_answers_are_averaged_and_the_oldest_forgotten(decoder):
    assert decoder.expected_length([1]) == 0
    decoder.learn_length([1], 10)
    assert decoder.expected_length([1]) == 10
    decoder.learn_length([1], 20)
    assert 10 < decoder.expected_length([1]) == 10 + 10 * NEWEST_WEIGHT < 20
    for number in range(2, MOST_PROMPTS + 2):
        decoder.learn_length([number], 5)
    assert decoder.expected_length([1]) == 0
    assert decoder.expected_length([2]) == 5


def test_what_did_not_come_to_an_end_of_its_own_is_truncated():
    reasons = jnp.array([STOP, LENGTH, UNFINISHED, ERROR])
    batch = types.SimpleNamespace(finish_reasons=reasons)
    is_truncated = Rollout.is_truncated.fget(batch)
    assert is_truncated.tolist() == [False, True, True, False]


def test_the_gap_of_two_log_probabilities_by_hand():
    behaviour = jnp.array([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]])
    shift = jnp.array([[0.5, -1.0, 7.0], [0.25, 7.0, 7.0]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    gap = specjax.logprob_gap(behaviour, behaviour + shift, mask)
    ratios = [math.exp(r) for r in (0.5, -1.0, 0.25)]
    assert float(gap["mean_gap"]) == pytest.approx(1.75 / 3)
    assert float(gap["largest_gap"]) == pytest.approx(1.0)
    assert float(gap["mean_ratio"]) == pytest.approx(sum(ratios) / 3)
    expected = np.mean([x - 1 - r for x, r in zip(ratios, (0.5, -1.0, 0.25))])
    assert float(gap["kl"]) == pytest.approx(expected, rel=1e-5)
    nothing = specjax.logprob_gap(behaviour, behaviour + shift, jnp.zeros_like(mask))
    assert not any(map(float, nothing.values()))
