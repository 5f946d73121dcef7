"""EAGLE-3 heads: against their equations written out in numpy, and in the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from eagle3_heads import FLAGS, TARGET_WIDTH, WIDTH, Reference, make_head
from head_equations import TARGET, VOCAB
from pair_heads import (
    Rows,
    check_all_accepted,
    check_texts,
    constant_scores,
    copied_target,
    fades,
)

import specjax
from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import EagleDrafter
from specjax.testing import check_drafter
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth


@pytest.mark.full
@pytest.mark.parametrize("name", FLAGS)
def test_what_it_says_is_what_its_equations_say(name):
    config, params = make_head(name)
    check_texts(Reference(config, params), Rows(config, params, 3), 3, VOCAB)


@pytest.mark.parametrize("temperature", quick([0.0, 0.8], 0.8))
def test_tokens_are_those_of_plain_decoding(temperature):
    config, params = make_head("own_tables")
    drafter = specjax.LoadedDrafter("head", EagleDrafter(config), params)
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    found = [
        specjax.generate(TARGET, prompts, drafter=of, speculative_config=how, sampling=sampling)
        for of, how in (
            (None, None),
            (drafter, {"policy": "fixed", "num_speculative_tokens": 3}),
        )
    ]
    assert [out.token_ids for out in found[0]] == [out.token_ids for out in found[1]]
    assert found[1].stats.acceptance.num_drafted > 20


@pytest.mark.full
@pytest.mark.parametrize("count", quick([1, 3], 3, slow=[1]))
def test_a_head_that_copies_its_target_is_always_accepted(count):
    """Half of its heads are the target's, and the others attend to their own token alone: they add
    its embedding. The norm of features makes them 0."""
    target = copied_target()
    own = dataclasses.replace(
        target.config, num_heads=8, num_kv_heads=8, qkv_bias=True, vocab_size=VOCAB
    )
    config = Eagle3Config(
        layers=own,
        target_hidden_size=TARGET_WIDTH,
        target_vocab_size=VOCAB,
        aux_layers=(0, 1),
        norm_before_residual=True,
        has_head=False,
    )
    params = eagle3.init(jax.random.key(0), config)
    (copied,), (layer,) = target.params["layers"], params["layers"]
    scores = constant_scores(layer, np.r_[fades(30.0, heads=4), fades(4000.0, heads=4)])
    layer |= {name: copied[name] for name in ("gate_proj", "up_proj", "down_proj")} | scores
    values = np.zeros((8 * 8, 2 * WIDTH), np.float32)
    values[:WIDTH, :WIDTH], values[WIDTH:, :WIDTH] = copied["v_proj"], np.eye(WIDTH)
    layer |= {
        "v_proj": jnp.asarray(values),
        "v_proj_bias": jnp.r_[copied["v_proj_bias"], jnp.zeros(WIDTH)],
        "o_proj": jnp.concatenate([copied["o_proj"], jnp.eye(WIDTH)], axis=1),
    }
    layer["hidden_norm"] = jnp.zeros(WIDTH)
    params["layers"] = (layer,)
    check_all_accepted(target, specjax.LoadedDrafter("copy", EagleDrafter(config), params), count)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(
            static_shapes.from_rank_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
            marks=pytest.mark.slow,
        ),
        pytest.param(Growth(3, 2, 5).cut(3), marks=pytest.mark.full),
    ],
    ids=["chain", "tree", "grown"],
)
def test_it_keeps_the_contract_of_drafters(shape):
    check_head("own_tables", shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [None, static_shapes.from_rank_paths([[0], [1], [0, 0]]), Growth(3, 2, 5).cut(3)],
    ids=["chain", "tree", "grown"],
)
def test_a_head_of_two_layers_which_defers_keeps_it_too(shape):
    check_head("two_layers", shape)


@pytest.mark.slow
@pytest.mark.parametrize("store_features", [True, "captured"])
def test_a_head_of_one_layer_keeps_it_where_it_stores_features(store_features):
    check_head("plain", None, store_features=store_features)


def test_what_a_head_stores_is_checked():
    config, _ = make_head("plain")
    for make in (functools.partial(EagleDrafter, config), specjax.SpeculationConfig):
        with pytest.raises(ValueError, match="='yes' must be True, False, 'captured' or None"):
            make(store_features="yes")


def check_head(name, shape, **fields):
    config, params = make_head(name)
    spec = EagleDrafter(config, shape, **fields)
    check_drafter(specjax.LoadedDrafter("head", spec, params), TARGET)
