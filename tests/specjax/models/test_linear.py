"""Products with weights: any leading shape, many tokens and few, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.layers import linear


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (64,), (65,), (13, 17)])
def test_equals_the_product_with_the_transpose(leading):
    x, weight = _normal(0, *leading, 24), _normal(1, 10, 24)
    out = jax.jit(linear)(x, weight)
    assert out.shape == (*leading, 10)
    np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(weight).T, atol=1e-5)


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
    ours, expected = (
        jax.grad(loss_of(product), (0, 1))(x, weight) for product in (linear, plain)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, expected
    )
