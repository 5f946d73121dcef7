"""Hidden states in float32 beside weights of 16 bits: no product rounds them.

On accelerators matrix units round float32 to 16 bits unless they are told otherwise.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_gpt2_config, tiny_llama_config
from made_up_families import heron_config

from pallas_kernels.implementations import lowered_for
from specjax.models import layers
from specjax.models.abstract import abstract_weights
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention

HALVES = ["bfloat16", "float16"]
CONFIGS = {"llama": tiny_llama_config, "gpt2": tiny_gpt2_config, "experts": heron_config}
DOT = re.compile(r"stablehlo\.dot_general .*precision = \[(\w+), (\w+)\].*: \((.*)\) -> (.*)")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def spaced(*shape):
    """Returns numbers about 0, of all 24 bits, and so large that sums do not hide errors."""
    return 13 + normal(0, *shape)


def of_experts(x, weight):
    return layers._in_parts(functools.partial(_einsum, "...ef,edf->...d"), x, weight)


def _einsum(subscripts, x, weight, dtype):
    return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_products_in_parts_are_those_of_all_digits(num_tokens, dtype):
    x, weight = spaced(num_tokens, 24), normal(1, 10, 24).astype(dtype)
    out = jax.jit(layers._linear_in_parts)(x, weight)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=24 * 60 * 2.0**-24)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_experts_are_those_of_all_digits(dtype):
    x, weight = spaced(7, 3, 24), normal(1, 3, 10, 24).astype(dtype)
    out = jax.jit(of_experts)(x, weight)
    exact = np.einsum("tef,edf->td", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(out, exact, atol=72 * 60 * 2.0**-24)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_token_that_overflows_stays_infinite(odd, dtype):
    x, weight = normal(0, 5, 24), 1 + jnp.abs(normal(1, 10, 24).astype(dtype))
    out = np.asarray(layers._linear_in_parts(x.at[2, 3].set(odd), weight))
    np.testing.assert_array_equal(out[2], np.full(10, odd, np.float32))
    others = np.arange(5) != 2
    np.testing.assert_array_equal(out[others], layers._linear_in_parts(x, weight)[others])


@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_products_in_parts(dtype):
    x, weight = normal(0, 5, 24), normal(1, 10, 24).astype(dtype)
    loss_of = lambda product: lambda x, weight: jnp.sum(jnp.sin(product(x, weight)))
    plain = lambda x, weight: x @ weight.astype(jnp.float32).T
    pair = (jax.grad(loss_of(each), (0, 1))(x, weight) for each in (layers._linear_in_parts, plain))
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=0.05)
    jax.tree.map(lambda ours, theirs: close(*map(np.float32, (ours, theirs))), *pair)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_product_of_a_forward_rounds_hidden_states_on_a_tpu(name, dtype):
    config = dataclasses.replace(CONFIGS[name](), activation_dtype="float32")
    family = family_of(config)

    def forward(params, token_ids):
        attend = lambda layer, q, k, v, cache, sinks=None: (
            dense_causal_attention(
                q, k, v, scale=1.0, sinks=sinks, precision=jax.lax.Precision.HIGHEST
            ),
            cache,
        )
        caches = (None,) * config.num_layers
        hidden, _ = family.forward(params, config, token_ids, jnp.arange(6)[None], attend, caches)
        return family.logits(params, config, hidden)

    tokens = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    with lowered_for("tpu"):
        traced = jax.jit(forward).trace(abstract_weights(config, dtype), tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = DOT.findall(text)
    assert len(products) == text.count("dot_general") >= 15
    for left, right, inputs, result in products:
        assert result.endswith("xf32>"), inputs
        if "HIGHEST" not in (left, right):
            assert all(each.endswith("xbf16>") for each in inputs.split(", ")), inputs
