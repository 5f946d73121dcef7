"""Importance weights and gaps of samples, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.rl.gaps import BEYOND, PER, importance_weights, sequence_gaps

BEHAVIOUR = jnp.array([[-1.0, -2.0, -3.0, 7.0], [-0.5, -1.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]])
SHIFT = jnp.array([[0.5, -1.0, 1.5, 9.0], [0.25, 0.25, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = jnp.arange(4)[None] < jnp.array([[3], [2], [0]])
E = np.exp(1.0)


@pytest.mark.parametrize(
    ("per", "ratios"),
    [
        ("token", [[E**0.5, E**-1, E**1.5], [E**0.25] * 2]),
        ("sequence", [[E] * 3, [E**0.5] * 2]),
        ("mean", [[E ** (1 / 3)] * 3, [E**0.25] * 2]),
    ],
)
def test_ratios_by_hand(per, ratios):
    weights, is_within = importance_weights(
        BEHAVIOUR, BEHAVIOUR + SHIFT, MASK, per=per, highest=100.0
    )
    wanted = np.zeros((3, 4))
    for row, own in enumerate(ratios):
        wanted[row, : len(own)] = own
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    np.testing.assert_array_equal(is_within, MASK)


def test_bounds():
    given = BEHAVIOUR, BEHAVIOUR + SHIFT, MASK
    clipped = importance_weights(*given, lowest=0.5, highest=2.0)
    np.testing.assert_allclose(clipped.weights[0], [E**0.5, 0.5, 2.0, 0.0], rtol=1e-6)
    masked = importance_weights(*given, lowest=0.5, highest=2.0, beyond="mask")
    np.testing.assert_allclose(masked.weights[0], [E**0.5, 0.0, 0.0, 0.0], rtol=1e-6)
    for told in (clipped, masked):
        np.testing.assert_array_equal(told.is_within[0], [True, False, False, False])
    annealed = jax.jit(lambda bound: importance_weights(*given, lowest=0.5, highest=bound).weights)
    np.testing.assert_array_equal(annealed(2.0), clipped.weights)
    whole = importance_weights(*given, per="sequence", highest=2.0, beyond="mask")
    assert not whole.weights[0].any()
    assert whole.weights[1].any()


def test_no_gradient_flows_through_weights_and_padding_may_be_nan():
    behaviour = jnp.where(MASK, BEHAVIOUR, jnp.nan)
    loss = lambda other: jnp.sum(
        importance_weights(behaviour, other, MASK).weights * jnp.where(MASK, other, 0.0)
    )
    gradient = jax.jit(jax.grad(loss))(BEHAVIOUR + SHIFT)
    weights = importance_weights(BEHAVIOUR, BEHAVIOUR + SHIFT, MASK).weights
    np.testing.assert_allclose(gradient, weights, rtol=1e-6)


def test_gaps_of_samples_are_those_of_a_batch_of_one():
    told = sequence_gaps(BEHAVIOUR, BEHAVIOUR + SHIFT, MASK)
    for row in range(3):
        one = slice(row, row + 1)
        alone = specjax.logprob_gap(BEHAVIOUR[one], (BEHAVIOUR + SHIFT)[one], MASK[one])
        for name in ("mean_gap", "largest_gap", "kl"):
            np.testing.assert_allclose(told[name][row], alone[name], rtol=1e-6)
    np.testing.assert_allclose(told["log_ratio"], [1.0, 0.5, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per": "row"}, f"per='row' must be one of {', '.join(PER)}"),
        ({"beyond": "drop"}, f"beyond='drop' must be one of {', '.join(BEYOND)}"),
        ({"lowest": 2.0}, "must be in order"),
        ({"mask": MASK[:, :2]}, "alike"),
    ],
)
def test_what_it_refuses(change, message):
    given = {"behaviour": BEHAVIOUR, "other": BEHAVIOUR, "mask": MASK} | change
    with pytest.raises(ValueError, match=message):
        importance_weights(**given)
