"""Trees in other layouts: there and back, forms of trees, copies, and what a wrong tree is told."""

import dataclasses

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_gpt2, tiny_llama, tiny_llama_config

import specjax
from specjax.models.base import RopeConfig
from specjax.models.dense import sequence_logits
from specjax.models.layouts import (
    Heads,
    Interleaved,
    Layout,
    Offset,
    Place,
    Scaled,
    Transposed,
    maxtext,
)
from specjax.models.layouts.named import NAMES, specjax_own, variants
from specjax.models.layouts.tables import leaves_of

MODEL = tiny_llama(0)
PARAMS, CONFIG = MODEL.params, MODEL.config

MODELS = {
    "llama": MODEL,
    # The square root of 16 is a power of two: scaling is exact.
    "llama 3.1": tiny_llama(0, head_dim=16, rope=RopeConfig(kind="llama3", factor=8.0)),
    "qwen2": tiny_llama(0, family="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": tiny_llama(0, family="qwen3", qk_norm=True),
    "gpt2": tiny_gpt2(0),
}
QUICK = "qwen3", "gpt2"


def cases():
    """Yields every model with every variant of every layout that covers it."""
    for name, model in MODELS.items():
        for layout in NAMES:
            try:
                possible = variants(layout, model.config)
            except NotImplementedError:
                continue
            for variant in possible:
                marks = () if name in QUICK else pytest.mark.full
                yield pytest.param(
                    model, layout, variant, id=f"{name}: {variant.name}", marks=marks
                )


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("model", "layout", "variant"), [*cases()])
def test_there_and_back(model, layout, variant):
    theirs = specjax.convert_back(model.params, variant, model.config)
    ours = specjax.convert(theirs, layout, model.config)
    is_exact = layout != "maxtext" or model is not MODEL
    if not is_exact:  # head_dim 8: two roundings of the query kernel
        for ours_layer, layer in zip(ours["layers"], model.params["layers"], strict=True):
            np.testing.assert_allclose(ours_layer["q_proj"], layer["q_proj"], rtol=3e-7)
            ours_layer["q_proj"] = layer["q_proj"]
    assert_equal(ours, model.params)
    again = specjax.convert_back(ours, variant, model.config)
    assert_equal(again, theirs)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(theirs)}
    assert dtypes == {jnp.dtype("float32")}


def test_bfloat16_stays():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODELS["llama 3.1"].params)
    config = MODELS["llama 3.1"].config
    tree = specjax.convert_back(half, "maxtext", config)
    assert_equal(specjax.convert(tree, "maxtext", config), half)


# Operations, by hand


def test_pairs_become_halves():
    pairs = jnp.array([[0, 10, 1, 11, 2, 12]])
    halves = jnp.array([[0, 1, 2, 10, 11, 12]])
    np.testing.assert_array_equal(Interleaved().to_ours(pairs), halves)
    np.testing.assert_array_equal(Interleaved().to_theirs(halves), pairs)


def test_heads_are_laid_side_by_side():
    x = jnp.arange(12).reshape(2, 3, 2)
    np.testing.assert_array_equal(Heads(1, 2).to_ours(x), x.reshape(2, 6))
    np.testing.assert_array_equal(Heads(0, 3).to_ours(x), x.reshape(6, 2))
    np.testing.assert_array_equal(Heads(0, 3).to_theirs(x.reshape(6, 2)), x)


def test_values_that_are_not_the_same():
    x = jnp.array([2.0, 4.0])
    assert Scaled(0.5).to_ours(x).tolist() == [4, 8]
    assert Scaled(0.5).to_theirs(x).tolist() == [1, 2]
    assert Offset(1.0).to_ours(x).tolist() == [1, 3]
    assert Offset(1.0).to_theirs(x).tolist() == [3, 5]


# Forms of trees


def boxed(tree):
    return jax.tree.map(nnx.Param, tree)


FORMS = {
    "lists": lambda tree: {**tree, "layers": [*tree["layers"]]},
    "numbered": lambda tree: {**tree, "layers": dict(enumerate(tree["layers"]))},
    "Param": boxed,
    "State": lambda tree: nnx.state(nnx.List([nnx.data(boxed(tree))]))[0],
    "Partitioned": lambda tree: jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), tree),
    "params": lambda tree: {"params": tree},
    "params twice": lambda tree: {"params": {"params": tree}},
    "FrozenDict": lambda tree: flax.core.freeze({"params": {**tree}}),
    "by path": leaves_of,
}


@pytest.mark.parametrize("form", FORMS)
def test_trees_of_our_names_are_taken_without_a_copy(form):
    found = specjax.convert(FORMS[form](PARAMS), "specjax", CONFIG)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    assert all(a is b for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(PARAMS)))


@pytest.mark.parametrize("layout", ["nnx", "linen", "tunix", "maxtext"])
def test_params_inside_params(layout):
    """As the `params` of MaxText's training states."""
    for variant in variants(layout, CONFIG):
        theirs = specjax.convert_back(PARAMS, variant, CONFIG)
        bare = theirs["params"] if variant.is_wrapped else theirs
        expected = specjax.convert(bare, layout, CONFIG)
        for tree in ({"params": bare}, {"params": {"params": bare}}):
            assert_equal(specjax.convert(tree, layout, CONFIG), expected)
            frozen = flax.core.freeze(tree)
            assert_equal(specjax.convert(frozen, layout, CONFIG), expected)


def test_stacked_layers_are_told_by_their_names():
    stacked = {**PARAMS, "layers": jax.tree.map(lambda *x: jnp.stack(x), *PARAMS["layers"])}
    assert_equal(specjax.convert(stacked, "specjax", CONFIG), PARAMS)


def test_arrays_may_be_numpys():
    tree = jax.tree.map(np.asarray, specjax.convert_back(PARAMS, "linen", CONFIG))
    assert_equal(specjax.convert(tree, "linen", CONFIG), PARAMS)


def test_a_layout_of_ones_own():
    matrix = (Transposed(),)
    names = {name for name in PARAMS["layers"][0] if name.endswith("proj")}
    own = Layout(
        "mine",
        {
            "embed_tokens": Place("tok"),
            "norm": Place("out.g", (Offset(1.0),)),
            "lm_head": Place("head", matrix),
            "layers.input_norm": Place("blocks.{layer}.g1"),
            "layers.post_attention_norm": Place("blocks.{layer}.g2"),
            **{f"layers.{name}": Place(f"w.{name}", matrix, stack_axis=2) for name in names},
        },
    )
    tree = specjax.convert_back(PARAMS, own, CONFIG)
    assert {*tree} == {"tok", "out", "head", "blocks", "w"}
    assert {*tree["blocks"]} == {0, 1}
    assert tree["w"]["gate_proj"].shape == (32, 48, 2)
    found = specjax.convert(tree, own, CONFIG)
    np.testing.assert_allclose(found.pop("norm"), PARAMS["norm"], atol=1e-6)
    assert_equal(found, {name: leaf for name, leaf in PARAMS.items() if name != "norm"})
    lacking = Layout("mine", {k: v for k, v in own.places.items() if k != "layers.o_proj"})
    with pytest.raises(ValueError, match=r"'mine' says no place of 'layers.o_proj'"):
        specjax.convert(tree, lacking, CONFIG)


# Inside jit


@pytest.mark.full
@pytest.mark.parametrize("layout", ["nnx", "linen", "tunix"])
def test_transpositions_cost_no_memory_inside_jit(layout):
    # More tokens than are multiplied from the left on a CPU.
    token_ids = jnp.ones((2, 64), jnp.int32)

    def bytes_besides(tree, layout):
        logits = lambda tree: sequence_logits(
            specjax.convert(tree, layout, CONFIG), CONFIG, token_ids
        )
        return jax.jit(logits).lower(tree).compile().memory_analysis().temp_size_in_bytes

    ours = bytes_besides(PARAMS, "specjax")
    for variant in variants(layout, CONFIG):
        if "stacked" not in variant.name:
            tree = specjax.convert_back(PARAMS, variant, CONFIG)
            assert bytes_besides(tree, variant) == ours


@pytest.mark.full
def test_gradients_have_the_layout_of_the_weights():
    tree = specjax.convert_back(PARAMS, "maxtext", CONFIG)
    loss = lambda params: jnp.sum(sequence_logits(params, CONFIG, jnp.array([[1, 2, 3]])) ** 2)
    of_tree = lambda tree: loss(specjax.convert(tree, "maxtext", CONFIG))
    found = jax.jit(jax.grad(of_tree))(tree)
    wanted = specjax.convert_back(jax.jit(jax.grad(loss))(PARAMS), "maxtext", CONFIG)
    key = lambda tree: tree["params"]["decoder"]["layers_1"]["self_attention"]
    np.testing.assert_allclose(
        key(found)["key"]["kernel"], key(wanted)["key"]["kernel"], rtol=1e-4, atol=1e-6
    )
    # Theirs is ours by 8 ** -0.5, so its gradient is ours by 8 ** 0.5.
    np.testing.assert_allclose(
        key(found)["query"]["kernel"], 8 * key(wanted)["query"]["kernel"], rtol=1e-4, atol=1e-5
    )


# What a wrong tree is told


def refusal(tree, layout="specjax", config=CONFIG):
    with pytest.raises(ValueError) as caught:
        specjax.convert(tree, layout, config)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["nnx", "linen", "tunix", "maxtext"])
def test_a_tree_in_another_named_layout_is_named(layout):
    text = refusal(specjax.convert_back(PARAMS, layout, CONFIG))
    assert f"specjax.convert(tree, {layout!r}, config)" in text
    assert f"build_decoder(..., layout={layout!r})" in text


def test_both_trees_stand_side_by_side():
    tree = specjax.convert_back(PARAMS, "nnx", CONFIG)
    lines = refusal(tree).splitlines()
    assert lines[0] == "tree is not in the layout 'specjax':"
    assert lines[1].split() == ["expected", "given"]
    assert lines[2].split("  ")[1] == "embed_tokens (61, 32)"
    assert lines[2].endswith("  embed_tokens.embedding (61, 32)")
    assert len(lines) == 2 + 10 + 1 + 1
    assert lines[12] == "  and 11 more"


def test_shapes_of_one_path_come_first():
    swapped = {**PARAMS, "lm_head": PARAMS["lm_head"].T, "extra": jnp.zeros(2)}
    lines = refusal(swapped).splitlines()
    assert lines[2:4] == [
        "  lm_head (61, 32)  lm_head (32, 61)",
        "  -                 extra (2,)",
    ]
    assert "No named layout" in lines[4]


def test_the_weights_of_a_training_state_are_named():
    scanned = specjax.convert_back(PARAMS, variants("maxtext", CONFIG)[1], CONFIG)
    state = {"params": scanned, "opt_state": {"mu": scanned}, "step": jnp.zeros(())}
    text = refusal(state, "maxtext").splitlines()[-1]
    assert "more than weights (opt_state, step)" in text
    assert text.endswith("tree['params'] is in the layout 'maxtext'; pass that.")
    assert_equal(
        specjax.convert(state["params"], "maxtext", CONFIG),
        specjax.convert(scanned, "maxtext", CONFIG),
    )
    # Of another model, it says nothing of the kind.
    assert "No named layout" in refusal(state, "maxtext", tiny_llama_config(num_layers=3))


def test_what_is_no_array_is_named_by_its_type():
    assert "norm object" in refusal({**PARAMS, "norm": object()})


def test_names_and_models_that_no_layout_has():
    with pytest.raises(ValueError, match="layout=torch is none of specjax, nnx, linen"):
        specjax.convert(PARAMS, "torch", CONFIG)
    with pytest.raises(
        NotImplementedError, match=r"layout='gemma' is that of google-deepmind"
    ) as no:
        specjax.convert(PARAMS, "gemma", CONFIG)
    for word in ("llama", "qwen3", "gpt2", "specjax.models.register", "maxtext"):
        assert word in str(no.value)
    with pytest.raises(TypeError, match=r"expected a name or a specjax\.models\.layouts\.Layout"):
        specjax.convert(PARAMS, 3, CONFIG)
    biased = dataclasses.replace(CONFIG, qkv_bias=True)
    for layout, config in (
        ("maxtext", biased),
        ("tunix", dataclasses.replace(CONFIG, o_bias=True)),
        ("tunix", MODELS["gpt2"].config),
    ):
        with pytest.raises(NotImplementedError, match=f"layout '{layout}' covers llama"):
            specjax.convert(PARAMS, layout, config)


# specjax's own layout, in numbers


def test_shapes_of_a_config():
    shapes = tiny_llama_config(tie_word_embeddings=True).param_shapes(jnp.bfloat16)
    assert {*shapes} == {"embed_tokens", "layers", "norm"}
    assert len(shapes["layers"]) == 2
    assert shapes["layers"][1]["down_proj"] == jax.ShapeDtypeStruct((32, 48), jnp.bfloat16)
    assert shapes["layers"][0]["q_proj"].shape == (4 * 8, 32)
    del shapes["norm"]  # a caller's own
    assert {*CONFIG.param_shapes()} == {"embed_tokens", "layers", "norm", "lm_head"}
    assert "norm" in tiny_llama_config(tie_word_embeddings=True).param_shapes(jnp.bfloat16)


def test_shardings_of_a_config():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    places = specjax.param_shardings(CONFIG, mesh)
    assert jax.tree.structure(places) == jax.tree.structure(PARAMS)
    placed = jax.device_put(PARAMS, places)
    shapes = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, placed)
    assert shapes["layers"][0]["q_proj"] == (16, 32)
    assert shapes["layers"][0]["o_proj"] == (32, 16)
    assert shapes["norm"] == (32,)
    with pytest.raises(ValueError, match="not divisible by the mesh's tensor axis of 4"):
        specjax.param_shardings(CONFIG, jax.make_mesh((4,), ("tensor",)))


def test_names_are_those_that_convert_takes():
    for name in NAMES:
        assert name in specjax.convert.__doc__


def test_norms_of_heads_are_in_the_order_of_heads():
    model = MODELS["qwen3"]
    layout = maxtext(model.config, is_interleaved=True)
    ours = model.params["layers"][0]
    norms = jnp.arange(model.config.head_dim, dtype=jnp.float32)
    params = {**model.params, "layers": ({**ours, "q_norm": norms}, *model.params["layers"][1:])}
    theirs = specjax.convert_back(params, layout, model.config)
    attention = theirs["params"]["decoder"]["layers_0"]["self_attention"]
    half = model.config.head_dim // 2
    assert attention["query_norm"]["scale"][:4].tolist() == [0, half, 1, half + 1]


def test_queries_that_a_config_does_not_scale_keep_their_bits():
    model = MODELS["llama 3.1"]
    config = dataclasses.replace(model.config, attention_scale=1.0)
    theirs = specjax.convert_back(model.params, "maxtext", model.config)
    kernel = theirs["params"]["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
    back = specjax.convert_back(specjax.convert(theirs, "maxtext", config), "maxtext", config)
    found = back["params"]["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
    np.testing.assert_array_equal(found, kernel)


def test_shapes_are_of_no_mesh():
    config = tiny_llama_config(vocab_size=67)
    for count in (2, 4):
        mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            params = jax.tree.map(lambda x: jnp.zeros(x.shape), config.param_shapes())
            assert_equal(specjax.convert(params, "specjax", config), params)


def test_a_layout_has_each_array_once():
    own = specjax_own(CONFIG)
    places = {**own.places, "layers.q_proj": Place("q_proj")}
    with pytest.raises(ValueError, match=r"two of our arrays at 'q_proj'; give each a path"):
        specjax.convert_back(PARAMS, Layout("mine", places), CONFIG)
    places = {**own.places, "norm": Place("norm", stack_axis=0)}
    with pytest.raises(ValueError, match=r"stacks 'norm', which is not of a layer"):
        specjax.convert_back(PARAMS, Layout("mine", places), CONFIG)
