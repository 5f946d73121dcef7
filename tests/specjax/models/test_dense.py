"""Whole sequences at once, and the same function by more weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_gpt2, tiny_llama, uncached_logits

from specjax.cli.bench.widen import widen
from specjax.models.dense import sequence_logits
from specjax.models.layers import layer_norm, rms_norm

logits = jax.jit(sequence_logits, static_argnums=1)


@pytest.mark.parametrize("model", [tiny_llama(0), tiny_gpt2(0)], ids=["llama", "gpt2"])
def test_padding_changes_nothing(model):
    rng = np.random.default_rng(0)
    text = rng.integers(0, 61, 9)
    plain = uncached_logits(model.params, model.config, jnp.asarray(text[None]))[0]
    ids, mask = np.full((3, 16), 60), np.zeros((3, 16), bool)
    for row, first in enumerate((0, 7, 3)):
        ids[row, first : first + 9], mask[row, first : first + 9] = text, True
    padded = logits(model.params, model.config, jnp.asarray(ids), jnp.asarray(mask))
    assert np.isfinite(padded).all()
    for row in range(3):
        np.testing.assert_allclose(padded[row][mask[row]], plain, atol=1e-5)


@pytest.mark.full
def test_padding_has_a_finite_gradient():
    model = tiny_llama(0)
    ids = jnp.ones((2, 8), jnp.int32)
    mask = jnp.arange(8)[None, :] >= jnp.array([[6], [8]])  # one row is nothing but padding

    def loss(params):
        said = sequence_logits(params, model.config, ids, mask)
        return jnp.sum(jnp.where(mask[:, :, None], said, 0.0) ** 2)

    grads = jax.jit(jax.grad(loss))(model.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("num_parameters", quick([1e6, 3e6], 1e6))
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"layer_windows": (4, None)},
        {"mlp_bias": True},
    ],
    ids=["plain", "tied", "window", "bias"],
)
def test_a_model_widened_computes_the_same(num_parameters, overrides):
    model = tiny_llama(1, **overrides)
    wide = widen(model, num_parameters)
    assert wide.num_parameters() == pytest.approx(num_parameters, rel=0.35)
    assert wide.num_parameters() > model.num_parameters()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 12)))
    for row in range(2):
        expected = uncached_logits(model.params, model.config, ids[row : row + 1])
        actual = uncached_logits(wide.params, wide.config, ids[row : row + 1])
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=5e-5)


def test_what_cannot_be_widened():
    with pytest.raises(NotImplementedError, match="Llama-type models without q_norm"):
        widen(tiny_llama(0, qk_norm=True), 1e6)
    with pytest.raises(ValueError, match="is below the 19,424"):
        widen(tiny_llama(0), 100)


def test_sines_and_cosines_are_computed_once_for_all_layers():
    model = tiny_llama(0)
    assert model.config.num_layers > 1
    run = jax.jit(sequence_logits, static_argnums=1)
    shape = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    text = run.trace(model.params, model.config, shape).lower().compile().as_text()
    for operation in ("cosine", "sine"):
        assert text.count(f" {operation}(") == 1


def test_taps_count_from_the_normed_output_too():
    model = tiny_llama(0)
    ids = jnp.arange(8)[None]
    run = jax.jit(sequence_logits, static_argnames=("config", "taps"))
    _, from_the_first = run(model.params, model.config, ids, taps=(2, 1, 0))
    _, from_the_last = run(model.params, model.config, ids, taps=(-1, -2, -3))
    for ours, theirs in zip(from_the_last, from_the_first, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for tap in (4, -4):
        with pytest.raises(ValueError, match=r"must lie from -3 to 3, for a target of 2 layers"):
            sequence_logits(model.params, model.config, ids, taps=(tap,))


@pytest.mark.parametrize("model", [tiny_llama(0), tiny_gpt2(0)], ids=["llama", "gpt2"])
def test_the_tap_before_the_final_norm(model):
    params, eps = model.params, model.config.norm_eps
    ids = jnp.arange(8)[None]
    _, (normed, before) = sequence_logits(params, model.config, ids, taps=(2, 3))
    if model.config.architecture == "gpt2":
        expected = layer_norm(before, params["norm"], params["norm_bias"], eps)
    else:
        expected = rms_norm(before, params["norm"], eps)
    np.testing.assert_allclose(expected, normed, rtol=1e-5, atol=1e-5)
