"""Products with weights: any leading shape, many tokens and few, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.layers import linear, product_width


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


LEADING = [(), (1,), (5,), (2, 3), (8,), (9,), (33,), (56,), (64,), (65,), (13, 17)]
QUICK = [(), (5,), (2, 3), (33,), (13, 17)]


@pytest.mark.parametrize(
    "leading", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in LEADING]
)
def test_equals_the_product_with_the_transpose(leading):
    x, weight = _normal(0, *leading, 24), _normal(1, 10, 24)
    out = jax.jit(linear)(x, weight)
    assert out.shape == (*leading, 10)
    np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(weight).T, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [5, 33])
def test_a_token_of_nan_spoils_no_other(num_tokens):
    """Nor is the sum of a token NaN because 0 * inf is, in the padding beside it."""
    x, weight = _normal(0, num_tokens, 24), _normal(1, 10, 24)
    expected = jax.jit(linear)(x, weight)
    out = jax.jit(linear)(x.at[2].set(jnp.nan), weight)
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), np.arange(num_tokens) == 2)
    others = np.arange(num_tokens) != 2
    np.testing.assert_array_equal(out[others], expected[others])
    spoilt = jax.jit(linear)(x, weight.at[4, 0].set(jnp.inf))
    assert np.isinf(spoilt[:, 4]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 4, 1), np.delete(expected, 4, 1))


def test_widths_that_tokens_are_padded_to():
    widths = [product_width(n) for n in (1, 4, 5, 8, 9, 17, 33, 41, 49, 64, 65, 300)]
    assert widths == [1, 4, 8, 8, 16, 32, 40, 48, 64, 64, 65, 300]


@pytest.mark.parametrize("num_tokens", [3, 100])
def test_sums_of_bfloat16_in_float32(num_tokens):
    x = _normal(0, num_tokens, 24).astype(jnp.bfloat16)
    weight = _normal(1, 10, 24).astype(jnp.bfloat16)
    assert linear(x, weight).dtype == jnp.bfloat16
    out = linear(x, weight, jnp.float32)
    assert out.dtype == jnp.float32
    wide = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    np.testing.assert_allclose(out, wide, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 100])
def test_gradients(num_tokens):
    x, weight = _normal(0, num_tokens, 24), _normal(1, 10, 24)
    plain = lambda x, weight: x @ weight.T
    loss_of = lambda product: lambda x, weight: jnp.sum(jnp.sin(product(x, weight)))
    ours, expected = (jax.grad(loss_of(product), (0, 1))(x, weight) for product in (linear, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, expected)
