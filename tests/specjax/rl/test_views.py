"""Matrices that steps multiply as a trainer has them, as on a TPU or GPU: no byte is copied.

The tests let a CPU take them so too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_llama
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import specjax
from specjax import EngineConfig, SamplingParams
from specjax.api import assemble
from specjax.models.layers import linear
from specjax.models.layouts.named import variants
from specjax.models.views import View

PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2]]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
ENGINE = EngineConfig(page_size=8, max_rows=2, burst_steps=4, max_context=32)
CONFIG = tiny_llama(0).config
PLAIN = [variant for name in ("nnx", "linen", "tunix") for variant in variants(name, CONFIG)]
PLAIN = [each for each in PLAIN if all(p.stack_axis is None for p in each.places.values())]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(assemble, "VIEWED", {"cpu": (None, 0, 1)})


def params(seed):
    return tiny_llama(seed).params


@functools.cache
def expected(seed):
    decoder = specjax.build_decoder(CONFIG, engine=ENGINE)
    return specjax.rollout(decoder, params(seed), PROMPTS, sampling=SAMPLING)


def roll(decoder, tree):
    return specjax.rollout(decoder, tree, PROMPTS, sampling=SAMPLING)


def assert_same(batch, wanted):
    np.testing.assert_array_equal(batch.completion_ids, wanted.completion_ids)
    np.testing.assert_allclose(batch.logprobs.raw, wanted.logprobs.raw, atol=2e-5)


HEADS = {None: lambda w: w, 0: lambda w: w.reshape(4, 2, -1), 1: lambda w: w.reshape(-1, 4, 2)}


@pytest.mark.parametrize("heads_axis", HEADS)
def test_products(heads_axis):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 3, 8)).astype(np.float32)
    matrix = draw.normal(size=(8, 8)).astype(np.float32)  # [out, in]: both sizes alike
    view = View(HEADS[heads_axis](jnp.asarray(matrix.T)), heads_axis)
    assert view.shape == matrix.shape
    np.testing.assert_allclose(linear(x, view), x @ matrix.T, rtol=1e-5, atol=1e-6)
    half = view.astype(jnp.bfloat16)
    rounded = np.asarray(jnp.asarray(matrix, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(linear(x, half), x @ rounded.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec, heads_axis, wanted",
    [
        (("t", None), None, (None, "t")),
        ((None, "t"), None, ("t", None)),
        (("t", None), 1, (None, "t", None)),
        ((None, "t"), 0, ("t", None, None)),
        ((), 1, (None, None, None)),
    ],
)
def test_specs(spec, heads_axis, wanted):
    assert View(None, heads_axis).split(PartitionSpec(*spec)) == PartitionSpec(*wanted)


@pytest.mark.full
@pytest.mark.parametrize("index", quick(range(len(PLAIN)), len(PLAIN) - 1))
def test_no_byte_is_copied(index):
    layout = PLAIN[index]
    decoder = specjax.build_decoder(
        CONFIG, engine=ENGINE, layout=layout, drafter="history", num_speculative_tokens=3
    )
    num_traces = []
    for seed in (0, 1, 1):  # twice the same text, of different arrays
        tree = specjax.convert_back(params(seed), layout, CONFIG)
        batch = roll(decoder, jax.tree.map(jnp.copy, tree))
        assert_same(batch, expected(seed))
        assert batch.metrics["weights_bytes_moved"] == 0
        num_traces.append(decoder.num_traces)
    assert num_traces[1] == num_traces[2]


@pytest.mark.full
def test_what_a_product_does_not_take_is_converted():
    """Layers that are stacked, values that are scaled, and weights in float32."""
    scanned = variants("maxtext", CONFIG)[-1]
    decoder = specjax.build_decoder(CONFIG, engine=ENGINE, layout="maxtext")
    tree = specjax.convert_back(params(0), scanned, CONFIG)
    batch = roll(decoder, tree)
    assert_same(batch, expected(0))
    assert batch.metrics["weights_bytes_moved"] > 0


@pytest.mark.full
def test_heads_that_a_tpu_would_move_are_converted(monkeypatch):
    monkeypatch.setattr(assemble, "VIEWED", {"cpu": assemble.VIEWED["cpu"][:2]})
    decoder = specjax.build_decoder(CONFIG, engine=ENGINE, layout="tunix")
    batch = roll(decoder, specjax.convert_back(params(0), "tunix", CONFIG))
    assert_same(batch, expected(0))
    names = ("q_proj", "k_proj", "v_proj")
    converted = [layer[name] for layer in params(0)["layers"] for name in names]
    assert batch.metrics["weights_bytes_moved"] == sum(x.nbytes for x in converted)


@pytest.mark.full
def test_masters_are_cast_into_our_layout():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0))
    engine = {"page_size": 8, "max_rows": 2, "max_context": 32, "activation_dtype": "float32"}
    build = functools.partial(specjax.build_decoder, CONFIG, engine=engine, dtype=jnp.bfloat16)
    wanted = roll(build(), half)
    decoder = build(layout="nnx")
    for weights, bytes_moved in ((params(0), True), (half, False)):
        batch = roll(decoder, specjax.convert_back(weights, "nnx", CONFIG))
        assert_same(batch, wanted)
        assert bool(batch.metrics["weights_bytes_moved"]) == bytes_moved


@pytest.mark.full
@pytest.mark.parametrize("layout", ["nnx", "tunix"])
def test_over_a_mesh(layout):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    decoder = specjax.build_decoder(
        CONFIG,
        engine=ENGINE,
        layout=layout,
        mesh=mesh,
        mesh_axes={"fsdp": "data", "tp": "tensor"},
    )
    # As its trainer splits them: heads, MLP and vocabulary over "tp".
    ours = specjax.param_shardings(CONFIG, mesh, {"fsdp": "data", "tp": "tensor"})
    placed = jax.device_put(params(0), ours)
    tree = jax.jit(lambda tree: specjax.convert_back(tree, layout, CONFIG))(placed)
    batch = roll(decoder, tree)
    assert_same(batch, expected(0))
    assert batch.metrics["weights_bytes_moved"] == 0
    whole = NamedSharding(mesh, PartitionSpec())
    batch = roll(decoder, jax.device_put(tree, whole))
    assert_same(batch, expected(0))
    assert batch.metrics["weights_bytes_moved"] > 0
    score = specjax.score(decoder, tree, batch)
    np.testing.assert_allclose(score.raw, batch.logprobs.raw, atol=2e-5)


@pytest.mark.full
def test_an_engine_over_fp8_pages():
    """Scales of the pages are measured with the views."""
    model = tiny_llama(0)
    engine = EngineConfig(page_size=8, max_rows=2, max_context=32, kv_cache_dtype="float8_e4m3fn")
    greedy = SamplingParams(temperature=0, max_tokens=12)
    said = specjax.generate(tiny_llama(1), PROMPTS, sampling=greedy, engine=engine)
    with specjax.Engine(model, engine=engine, layout="tunix") as running:
        running.update_params(specjax.convert_back(params(1), "tunix", CONFIG))
        texts = [[*running.stream(prompt, greedy)][-1].completion for prompt in PROMPTS]
    assert [text.token_ids for text in texts] == [each.token_ids for each in said.completions]
