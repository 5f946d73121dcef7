"""The target in few bits as its own drafter: its weights, its products, and what it drafts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_gpt2, tiny_llama, uncached_logits

import specjax
from specjax import EngineConfig
from specjax.drafters.quantised_target import QuantisedTarget, head_of, layers_of
from specjax.drafters.self_drafter import SelfDrafter
from specjax.models.layers import linear
from specjax.models.quantised import Quantised, num_groups, quantise
from specjax.testing import check_drafter
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import from_widths

PROMPTS = [[1, 2, 3, 1, 2, 3], [7], [5, 6, 8, 9, 1, 2, 4]]
ENGINE = EngineConfig(page_size=8, max_rows=4, burst_steps=4, max_context=64)
TREE = from_widths((2, 1))


# Matrices


@pytest.mark.full
@pytest.mark.parametrize(("bits", "groups", "most"), [(8, 1, 0.004), (8, 4, 0.004), (4, 4, 0.08)])
def test_a_matrix_is_near_the_one_it_was_made_of(bits, groups, most):
    matrix = jax.random.normal(jax.random.key(0), (6, 16))
    found = quantise(matrix, bits, groups)
    assert found.shape == (6, 16)
    assert found.values.dtype == {8: jnp.int8, 4: jnp.int4}[bits]
    # Half a step of the group's scale, at most.
    steps = jnp.repeat(found.scales.T, 16 // groups, axis=1)
    assert jnp.all(jnp.abs(found.matrix(jnp.float32) - matrix) <= 0.5001 * steps)
    assert jnp.max(steps) < most * 10


def test_the_largest_of_each_group_is_kept():
    matrix = jnp.asarray([[1.0, -2.0, 8.0, 4.0], [0.0, 0.0, -3.0, 1.0]])
    found = quantise(matrix, 8, 2)
    np.testing.assert_allclose(found.scales * 127, [[2, 0], [8, 3]])
    np.testing.assert_array_equal(found.values[:, 0], [[64, -127], [127, 64]])
    np.testing.assert_array_equal(found.matrix(jnp.float32)[1, :2], [0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_becomes_nan(bad):
    matrix = jnp.ones((2, 4)).at[1, 3].set(bad)
    found = np.asarray(quantise(matrix, 8, 2).matrix(jnp.float32))
    np.testing.assert_array_equal(np.isnan(found), [[False] * 4, [False, False, True, True]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_product_is_that_of_the_matrix(groups, dtype):
    """`times` is what runs on a TPU or GPU; a CPU widens the matrix."""
    draw = jax.random.normal
    few = quantise(draw(jax.random.key(0), (6, 16)), 8, groups)
    x = draw(jax.random.key(1), (3, 16), dtype)
    wide = np.asarray(x, np.float64) @ np.asarray(few.matrix(jnp.float32), np.float64).T
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}[dtype]
    found = few.times(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=tolerance, atol=tolerance)
    assert few.times(x, jnp.float32).dtype == jnp.float32
    by_cpu = np.asarray(linear(x[None], few, jnp.float32)[0], np.float64)
    np.testing.assert_allclose(by_cpu, wide, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((16, None), 1),
        ((16, 4), 4),
        ((12, 8), 2),  # groups of 6 divide 12
        ((16, 128), 1),
        ((16, None, 4), 4),  # a group per device
        ((16, 8, 4), 4),
        ((16, 2, 2), 8),
    ],
)
def test_groups_divide_the_inputs_of_each_device(arguments, wanted):
    assert num_groups(*arguments) == wanted


# Weights


@functools.cache
def model_of(name):
    return {
        "untied": lambda: tiny_llama(0, tie_word_embeddings=False),
        "tied": lambda: tiny_llama(0, tie_word_embeddings=True),
        "qwen3": lambda: tiny_llama(0, family="qwen3", qk_norm=True),
        "biases": lambda: tiny_llama(0, qkv_bias=True, o_bias=True, mlp_bias=True),
        "gpt2": lambda: tiny_gpt2(0),
    }[name]()


FAMILIES = "untied", "tied", "qwen3", "biases", "gpt2"


@pytest.mark.parametrize("name", FAMILIES)
def test_its_weights_are_the_matrices_alone(name):
    model = model_of(name)
    maker = SelfDrafter(skip_layers=(0,)).made_by
    made = maker(model.config, model.params)
    assert set(made["layers"]) == {str(n) for n in range(1, model.config.num_layers)}
    of_layer = model.params["layers"][1]
    matrices = {key for key, leaf in of_layer.items() if leaf.ndim == 2}
    assert set(made["layers"]["1"]) == matrices
    (head,) = set(made) - {"layers"}
    assert head == ("embed_tokens" if model.config.tie_word_embeddings else "lm_head")
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made)
    said = SelfDrafter(skip_layers=(0,)).abstract_params(model.config, jnp.float32)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), said) == shapes
    assert maker.num_bytes(model.config) == sum(x.nbytes for x in jax.tree.leaves(made))


@pytest.mark.full
@pytest.mark.parametrize("name", quick(FAMILIES, "biases", "gpt2"))
def test_its_forward_is_near_the_targets(name):
    """Without pages; layers left out are left out of the target too."""
    model, texts = model_of(name), jnp.asarray([[3, 1, 4, 1, 5]])
    for maker in (QuantisedTarget(8), QuantisedTarget(8, skip_layers=(1,))):
        made = maker(model.config, model.params)
        kept, config = maker.kept_layers(model.config), maker.config(model.config)
        # A forward reads the embedding of the target, and the logits another one.
        own = layers_of(model.params, made)
        own = jax.tree.map(
            lambda x: x.matrix(jnp.float32) if isinstance(x, Quantised) else x,
            own | {k: v for k, v in head_of({}, made, config).items() if k == "lm_head"},
            is_leaf=lambda x: isinstance(x, Quantised),
        )
        cut = {**model.params, "layers": tuple(model.params["layers"][n] for n in kept)}
        wanted, found = (uncached_logits(p, config, texts) for p in (cut, own))
        assert float(jnp.max(jnp.abs(found - wanted))) < 0.06 * float(jnp.max(jnp.abs(wanted)))
        assert not np.array_equal(found, wanted)


def test_options_of_layers_go_with_them():
    config = dataclasses.replace(tiny_llama(0, num_layers=3).config, layer_windows=(4, None, 9))
    assert config.of_layers((0, 2)).layer_windows == (4, 9)
    assert config.of_layers((0, 2)).num_layers == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 6}, "bits=6 must be 8 or 4"),
        ({"bits": 8.0}, "bits=8.0 must be 8 or 4"),
        ({"group_size": 0}, "group_size=0"),
        ({"skip_layers": (-1,)}, "numbers of layers from 0"),
        ({"skip_layers": 3}, "numbers of layers from 0"),
        ({"skip_layers": ("3",)}, "numbers of layers from 0"),
        ({"num_shards": 0}, "num_shards=0"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        SelfDrafter(**options)


@pytest.mark.parametrize("layers", [(2,), (0, 1)])
def test_layers_that_the_target_lacks_or_all_it_has(layers):
    with pytest.raises(ValueError, match="skip_layers"):
        specjax.load_drafter(SelfDrafter(skip_layers=layers), tiny_llama(0))


def test_weights_that_are_given_are_refused():
    loaded = specjax.LoadedDrafter("mine", SelfDrafter(), {"layers": jnp.ones(3)})
    with pytest.raises(ValueError, match="made from the target's"):
        specjax.generate(tiny_llama(0), PROMPTS, drafter=loaded)


# Drafts

TARGET = tiny_llama(0, vocab_size=31, num_layers=2, hidden_size=16, intermediate_size=16)
SPECS = {
    "int8": SelfDrafter(),
    "int4": SelfDrafter(bits=4, group_size=8),
    "skips": SelfDrafter(skip_layers=(0,)),
    "tree": SelfDrafter(shape=TREE),
    "grown": SelfDrafter(shape=Growth(2, 2, 3)),
}


@pytest.mark.parametrize("name", quick(SPECS, slow=["int8", "tree", "grown"]))
def test_it_holds_what_a_drafter_must(name):
    check_drafter(SPECS[name], TARGET, num_speculative_tokens=2)
