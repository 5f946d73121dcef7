"""Weights of models written in other libraries give the same logits in specjax's layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_llama_config
from trainers_models import (
    LinenLlama,
    NnxLlama,
    maxtext_logits,
    maxtext_shapes,
    tunix_logits,
    tunix_shapes,
)

import specjax
from specjax.models.base import RopeConfig
from specjax.models.dense import sequence_logits
from specjax.models.layouts import linen, maxtext

TOKEN_IDS = np.random.default_rng(0).integers(1, 61, (2, 12))
CONFIG = tiny_llama_config(num_layers=3)
# Float32 products of 32 to 48 terms, in another order.
CLOSE = {"rtol": 0, "atol": 1e-5}


def logits(params, config=CONFIG):
    return sequence_logits(params, config, jnp.asarray(TOKEN_IDS))


def drawn(shapes, seed=0):
    """Returns random float32 weights by path, those of norms near 1."""
    rng = np.random.default_rng(seed)
    near = lambda path: float(path.endswith((".scale", "norm.w")))
    return {
        path: jnp.asarray(near(path) + 0.2 * rng.standard_normal(shape), jnp.float32)
        for path, shape in shapes.items()
    }


def shaken(tree):
    """Returns weights of which no two leaves, and no two entries of a norm, are alike."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(1)
    moved = [leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)


@pytest.mark.full
@pytest.mark.parametrize("has_heads", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_nnx(has_heads, qkv_bias):
    config = tiny_llama_config(num_layers=3, qkv_bias=qkv_bias)
    model = NnxLlama(config, nnx.Rngs(0), has_heads)
    graph, state = nnx.split(model)
    state = shaken(state)
    expected = nnx.merge(graph, state)(jnp.asarray(TOKEN_IDS))
    params = specjax.convert(state, "nnx", config)
    np.testing.assert_allclose(logits(params, config), expected, **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("has_heads", [False, True])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_linen(is_scanned, has_heads):
    model = LinenLlama(CONFIG, is_scanned, has_heads)
    variables = shaken(model.init(jax.random.key(0), jnp.asarray(TOKEN_IDS)))
    expected = model.apply(variables, jnp.asarray(TOKEN_IDS))
    params = specjax.convert(variables, "linen", CONFIG)
    np.testing.assert_allclose(logits(params), expected, **CLOSE)
    # The way back gives a tree that the module runs on.
    layout = linen(CONFIG, is_stacked=is_scanned, has_heads=has_heads)
    back = specjax.convert_back(params, layout, CONFIG)
    assert jax.tree.structure(back) == jax.tree.structure(variables)
    np.testing.assert_array_equal(model.apply(back, jnp.asarray(TOKEN_IDS)), expected)


MAXTEXT = tiny_llama_config(
    num_layers=3,
    head_dim=16,
    rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0),
)


@functools.cache
def maxtext_weights():
    return drawn(maxtext_shapes(MAXTEXT))


@pytest.mark.full
def test_maxtext():
    weights = maxtext_weights()
    expected = maxtext_logits(weights, MAXTEXT, TOKEN_IDS)
    params = specjax.convert(weights, "maxtext", MAXTEXT)
    np.testing.assert_allclose(logits(params, MAXTEXT), expected, **CLOSE)


@pytest.mark.parametrize("axis", [0, 1])
def test_maxtext_scanned(axis):
    weights = maxtext_weights()
    scanned = {path: leaf for path, leaf in weights.items() if "layers_" not in path}
    for path in weights:
        if "layers_0" in path:
            layers = [weights[path.replace("layers_0", f"layers_{i}")] for i in range(3)]
            scanned[path.replace("layers_0", "layers")] = jnp.stack(layers, axis)
    layout = "maxtext" if axis == 1 else maxtext(MAXTEXT, is_stacked=True, stack_axis=0)
    found = specjax.convert({"params": scanned}, layout, MAXTEXT)
    wanted = specjax.convert(weights, "maxtext", MAXTEXT)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), found, wanted))


def test_what_maxtext_does_not_rewrite():
    """Half-split rotations of other ropes than Llama 3.1's; queries with a norm are not scaled."""
    plain = tiny_llama_config(qk_norm=True, family="qwen3", head_dim=16)
    tree = specjax.convert_back(plain_params := drawn_tree(plain), "maxtext", plain)
    query = tree["params"]["decoder"]["layers_1"]["self_attention"]["query"]["kernel"]
    ours = plain_params["layers"][1]["q_proj"].reshape(4, 16, 32)
    np.testing.assert_array_equal(query, jnp.moveaxis(ours, 2, 0))


def drawn_tree(config):
    rng = np.random.default_rng(2)
    shapes = config.param_shapes()
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), shapes)


@pytest.mark.full
def test_tunix():
    config = tiny_llama_config(
        family="qwen3", qk_norm=True, tie_word_embeddings=True, rope=RopeConfig(theta=1e6)
    )
    weights = drawn(tunix_shapes(config))
    expected = tunix_logits(weights, config, TOKEN_IDS)
    params = specjax.convert(weights, "tunix", config)
    np.testing.assert_allclose(logits(params, config), expected, **CLOSE)
