"""Muon takes matrices and Adam the rest, and rates are those that were asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.training import optimizers


def _updates(params, gradients, vocab_sizes=frozenset()):
    optimiser = optimizers.muon(0.1, 10, 0, 0, vocab_sizes)
    return optimiser.update(gradients, optimiser.init(params), params)[0]


def test_rates_of_each_step():
    rate = optimizers.trapezoid(1.0, steps=8, warmup=3, decay=2)
    found = [float(rate(step)) for step in range(8)]
    np.testing.assert_allclose(found, [0.25, 0.5, 0.75, 1, 1, 1, 2 / 3, 1 / 3], rtol=1e-6)
    short = [float(optimizers.trapezoid(1.0, 2, 30, 40)(step)) for step in range(2)]
    assert min(short) > 0


def test_muon_scales_by_outputs_over_inputs():
    """Updates of tall and wide [out, in] matrices, by the sizes of their axes."""
    gradient = jax.random.normal(jax.random.key(0), (48, 12))
    params = {"wide": jnp.zeros((12, 48)), "tall": jnp.zeros((48, 12))}
    updates = _updates(params, {"wide": gradient.T, "tall": gradient})
    assert jnp.abs(updates["wide"]).max() > 0
    np.testing.assert_allclose(updates["tall"], 2 * updates["wide"].T, rtol=1e-4)


def test_tables_of_tokens_and_norms_learn_by_adam():
    """Adam leaves rows without a gradient, and weighs those with one alike."""
    gradient = jnp.zeros((6, 8)).at[2].set(jnp.arange(1.0, 9.0)).at[4, 0].set(1e-3)
    gradients = {"weight": gradient, "norm": jnp.ones(8)}
    params = jax.tree.map(jnp.zeros_like, gradients)
    of_matrix, of_table = (_updates(params, gradients, frozenset(s)) for s in ([], [6]))
    adam = optax.adam(0.1 * 0.2, b1=0.9, b2=0.98)
    expected = adam.update(gradients, adam.init(params))[0]
    for name in gradients:
        np.testing.assert_allclose(of_table[name], expected[name], rtol=1e-6)
    np.testing.assert_allclose(of_matrix["norm"], expected["norm"], rtol=1e-6)
    np.testing.assert_allclose(
        jnp.abs(of_table["weight"])[2], abs(of_table["weight"][4, 0]), rtol=1e-3
    )
    assert np.ptp(np.abs(of_matrix["weight"][2])) > 0.01


@pytest.mark.parametrize("make", [optimizers.muon, optimizers.adamw])
def test_equal_arguments_give_one_object(make):
    """It is static in a jitted update, which would be compiled again for another."""
    sizes = (frozenset([3]),) if make is optimizers.muon else ()
    assert make(0.1, 4, 1, 1, *sizes) is make(0.1, 4, 1, 1, *sizes)
