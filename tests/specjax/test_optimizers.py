"""Muon takes matrices and Adam the rest, and rates are those that were asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import optimizers


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


def test_a_matrix_is_turned_as_a_whole_and_a_table_row_by_row():
    """Muon gives every direction of a matrix its share; Adam leaves rows without a gradient."""
    gradient = jnp.zeros((6, 8)).at[2].set(jnp.arange(1.0, 9.0))
    gradients = {"matrix": gradient, "table": gradient, "norm": jnp.ones(8)}
    shifted = {"matrix": gradient.at[4, 0].set(1e-3), "table": gradient, "norm": jnp.ones(8)}
    params = jax.tree.map(jnp.zeros_like, gradients)
    updates = _updates(params, shifted, frozenset([6]))
    # Here both have 6 rows: a table is what has an axis of the vocabulary's length.
    rows = lambda array: np.flatnonzero(np.abs(array).max(axis=1) > 1e-6).tolist()
    assert (
        rows(updates["table"])
        == rows(updates["matrix"])
        == [2, 4][:1] + ([4] if rows(updates["matrix"]) == [2, 4] else [])
    )
    as_matrix = _updates(params, shifted)
    assert rows(as_matrix["matrix"]) == [2, 4]
    adam = optax.adam(0.1 * optimizers.ADAM_SHARE, b1=0.9, b2=0.98)
    expected = adam.update({"norm": jnp.ones(8)}, adam.init({"norm": jnp.zeros(8)}))[0]
    np.testing.assert_allclose(updates["norm"], expected["norm"], rtol=1e-6)


@pytest.mark.parametrize("make", [optimizers.muon, optimizers.adamw])
def test_equal_arguments_give_one_object(make):
    """It is static in a jitted update, which would be compiled again for another."""
    sizes = (frozenset([3]),) if make is optimizers.muon else ()
    assert make(0.1, 4, 1, 1, *sizes) is make(0.1, 4, 1, 1, *sizes)
