"""Rollouts take a trainer's tree as it is: the tokens of our own tree, and nothing compiled."""

from __future__ import annotations

import functools
import gc
import weakref

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_llama
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from trainers_models import NnxLlama

import specjax
from specjax import EngineConfig, SamplingParams
from specjax.models.layouts import nnx as nnx_layout
from specjax.models.layouts.named import variants

PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2]]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
ENGINE = EngineConfig(
    page_size=8, max_rows=2, burst_steps=4, max_context=32, numerics="invariant", token_bucket=8
)
# What jax traced, lowered or compiled, also what it then found in a cache.
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: COMPILED.append(name) if "/jax/core/compile/" in name else None
)


def params(seed):
    return tiny_llama(seed).params


CONFIG = tiny_llama(0).config


def decoder(layout="specjax", mesh=None):
    return kept_decoder(layout, mesh)


@functools.cache
def kept_decoder(layout, mesh):
    return specjax.build_decoder(CONFIG, engine=ENGINE, layout=layout, mesh=mesh)


def roll(tree, layout="specjax", mesh=None, **arguments):
    return specjax.rollout(
        decoder(layout, mesh), tree, PROMPTS, sampling=SAMPLING, num_samples=2, **arguments
    )


@functools.cache
def expected(seed):
    return roll(params(seed))


def assert_same(batch, wanted):
    np.testing.assert_array_equal(batch.completion_ids, wanted.completion_ids)
    np.testing.assert_array_equal(batch.logprobs.raw, wanted.logprobs.raw)


def stacked(tree):
    return {**tree, "layers": jax.tree.map(lambda *x: jnp.stack(x), *tree["layers"])}


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


OF_OUR_NAMES = {
    "lists": lambda tree: {**tree, "layers": [*tree["layers"]]},
    "Param": lambda tree: jax.tree.map(nnx.Param, tree),
    "params": lambda tree: {"params": tree},
    "params twice": lambda tree: {"params": {"params": tree}},
    "FrozenDict": lambda tree: flax.core.freeze({"params": {**tree}}),
}


@pytest.mark.full
@pytest.mark.parametrize("form", OF_OUR_NAMES)
def test_trees_of_our_names_move_no_byte(form):
    for seed in (0, 1):
        batch = roll(OF_OUR_NAMES[form](params(seed)))
        assert_same(batch, expected(seed))
        assert batch.metrics["weights_bytes_moved"] == 0


OTHERS = {
    "stacked": ("specjax", stacked),
    "nnx": ("nnx", lambda tree: specjax.convert_back(tree, "nnx", CONFIG)),
    "linen scanned": (
        "linen",
        lambda tree: specjax.convert_back(tree, variants("linen", CONFIG)[2], CONFIG),
    ),
    "tunix": ("tunix", lambda tree: specjax.convert_back(tree, "tunix", CONFIG)),
    # As the `params` of MaxText's training states, in which there are params once more.
    "maxtext": (
        "maxtext",
        lambda tree: {"params": specjax.convert_back(tree, "maxtext", CONFIG)},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_other_trees_are_converted_once_and_compile_nothing(name):
    layout, form = OTHERS[name]
    trees = [form(params(seed)) for seed in (0, 1, 2)]
    batches = [roll(tree, layout) for tree in trees[:2]]
    num_traces = decoder(layout).num_traces
    COMPILED.clear()
    batches.append(roll(trees[2], layout))
    again = roll(trees[2], layout)
    assert decoder(layout).num_traces == num_traces
    assert not COMPILED
    as_they_are = 0 if name == "stacked" else 32 * 4  # the last norm
    for seed, batch in enumerate(batches):
        if name != "maxtext":  # whose query kernel is rounded
            assert_same(batch, expected(seed))
        np.testing.assert_allclose(
            batch.logprobs.raw[:, 0], expected(seed).logprobs.raw[:, 0], atol=1e-5
        )
        assert 0 < batch.metrics["weights_bytes_moved"] < size(params(seed)) - as_they_are
    # The same arrays: neither weights nor pages are made anew.
    assert_same(again, batches[2])
    assert again.metrics["weights_bytes_moved"] == 0
    assert again.metrics["params_version"] == batches[2].metrics["params_version"]


def bytes_of_kernels(tree):
    matrices = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
    return size(matrices) - tree["embed_tokens"].nbytes


@pytest.mark.full
def test_bytes_moved_are_those_of_the_matrices():
    tree = specjax.convert_back(params(3), "nnx", CONFIG)
    assert roll(tree, "nnx").metrics["weights_bytes_moved"] == bytes_of_kernels(params(3))


@pytest.mark.full
def test_the_state_of_an_nnx_module_is_sampled_as_it_computes():
    model = NnxLlama(CONFIG, nnx.Rngs(0))
    batch = roll(nnx.state(model, nnx.Param), "nnx")
    for row in range(batch.num_samples):
        # Prompts are on the right of their part; the module knows no padding: one text at a time.
        text = batch.token_ids[row][batch.token_mask[row]]
        length = int(batch.lengths[row])
        logits = jax.nn.log_softmax(model(text[None])[0])
        chosen = jnp.take_along_axis(logits[:-1], text[1:, None], axis=1)[-length:, 0]
        np.testing.assert_allclose(batch.logprobs.raw[row, :length], chosen, atol=1e-5)


def kept_results(own):
    return own._handed._given.mover.kept


def test_the_copy_goes_with_the_trainers_arrays():
    tree = specjax.convert_back(params(0), "nnx", CONFIG)
    own = decoder("nnx")
    roll(tree, "nnx")
    kept, *_ = kept_results(own)
    kept = weakref.ref(kept)
    assert kept() is not None
    tree["layers"][0]["q_proj"]["kernel"] *= 1.0
    gc.collect()
    assert kept() is None


def test_one_copy_is_kept_at_a_time():
    own = decoder("nnx")
    trees = [specjax.convert_back(params(0), v, CONFIG) for v in variants("nnx", CONFIG)[:2]]
    for tree in trees:
        roll(tree, "nnx")
    forms = own._handed._given.mover._forms.values()
    assert [bool(form.once.result) for form in forms].count(True) == 1
    own.forget()
    assert not kept_results(own)


def test_a_conversion_counts_as_a_trace():
    own, forms = decoder("linen"), variants("linen", CONFIG)
    roll(specjax.convert_back(params(0), forms[0], CONFIG), "linen")
    num_traces = own.num_traces
    for seed in (0, 1):
        roll(specjax.convert_back(params(seed), forms[1], CONFIG), "linen")
        assert own.num_traces == num_traces + 1


def test_arrays_of_numpy_are_read_anew():
    tree = jax.tree.map(np.array, specjax.convert_back(params(0), "nnx", CONFIG))
    first = roll(tree, "nnx")
    assert_same(first, expected(0))
    # All weights were copied from the host.
    assert first.metrics["weights_bytes_moved"] == size(params(0))
    for leaf, other in zip(
        jax.tree.leaves(tree), jax.tree.leaves(specjax.convert_back(params(1), "nnx", CONFIG))
    ):
        leaf[...] = other
    assert_same(roll(tree, "nnx"), expected(1))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["specjax", "nnx"])
def test_over_a_mesh(layout):
    mesh = jax.make_mesh((2,), ("tensor",))
    tree = specjax.convert_back(params(0), layout, CONFIG)
    own = jax.device_put(params(0), specjax.param_shardings(CONFIG, mesh))
    batch = roll(own, "specjax", mesh)
    assert batch.metrics["weights_bytes_moved"] == 0
    wanted = roll(params(0), "specjax", mesh)
    assert wanted.metrics["weights_bytes_moved"] == size(params(0))
    assert_same(batch, wanted)
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = roll(tree, layout, mesh)
    assert_same(batch, wanted)
    assert batch.metrics["weights_bytes_moved"] == size(params(0))  # each array once
    assert roll(tree, layout, mesh).metrics["weights_bytes_moved"] == 0
    batch = roll(jax.device_put(tree, everywhere), layout, mesh)
    assert_same(batch, wanted)
    if layout == "nnx":  # the results are split at once; all else lies as steps need it
        assert batch.metrics["weights_bytes_moved"] == bytes_of_kernels(params(0))


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", [1, -1])
def test_over_a_trainers_own_mesh(order, kind):
    """The trainer's axes have other names, and its devices perhaps another order."""
    mesh = jax.make_mesh((2,), ("tensor",))
    devices = np.array(jax.devices()[:2])[::order]
    place = NamedSharding(Mesh(devices, ("fsdp",), axis_types=(kind,)), PartitionSpec("fsdp"))
    tree = specjax.convert_back(params(0), "nnx", CONFIG)
    split = lambda leaf: jax.device_put(leaf, place) if leaf.shape[0] % 2 == 0 else leaf
    whole = NamedSharding(place.mesh, PartitionSpec())
    tree = jax.tree.map(split, jax.tree.map(lambda leaf: jax.device_put(leaf, whole), tree))
    assert_same(roll(tree, "nnx", mesh), roll(params(0), "specjax", mesh))


def test_what_is_not_in_the_layout_of_the_decoder():
    tree = specjax.convert_back(params(0), "nnx", CONFIG)
    with pytest.raises(
        ValueError, match=r"params is not in the layout 'specjax':\n  expected"
    ) as no:
        roll(tree)
    assert "build_decoder(..., layout='nnx')" in str(no.value)
    with pytest.raises(ValueError, match=r"in the layout 'specjax': specjax\.convert"):
        roll(params(0), "nnx")
    with pytest.raises(ValueError, match="is float16"):
        roll(jax.tree.map(lambda x: x.astype(jnp.float16), tree), "nnx")
    gone = jax.tree.map(lambda x: x * 1.0, tree)
    gone["layers"][1]["q_proj"]["kernel"].delete()
    with pytest.raises(ValueError, match=r"weight layers.1.q_proj.kernel was deleted"):
        roll(gone, "nnx")
    assert_same(roll(tree, "nnx"), expected(0))


def test_a_layout_that_does_not_fit_is_refused_when_the_decoder_is_built():
    with pytest.raises(ValueError, match="layout=torch is none of"):
        specjax.build_decoder(CONFIG, layout="torch")
    with pytest.raises(NotImplementedError, match="layout='gemma' is that of"):
        specjax.build_decoder(CONFIG, layout="gemma")
    lacking = nnx_layout(tiny_llama(0, tie_word_embeddings=True).config)
    with pytest.raises(ValueError, match="says no place of 'lm_head'"):
        specjax.build_decoder(CONFIG, layout=lacking)
