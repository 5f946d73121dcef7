"""Heads beside each other in lanes, as pages lie on a TPU: the same tokens.

The kernels that read them there do not run here; what does reads them as they would.
"""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import first_layer, tiny_llama
from jax.sharding import Mesh

import specjax
from pallas_kernels import layout
from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.paged import kv_cache

pytestmark = pytest.mark.full

PROMPTS = [np.arange(size).tolist() for size in (3, 40, 17)]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=5, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=9),
]
OPTIONS = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"speculative_config": {"speculative_token_tree": [2, 2]}},
}


@pytest.fixture
def in_lanes(monkeypatch):
    def patch():
        monkeypatch.setattr(kv_cache, "target_platform", lambda: "tpu")

    return patch


def page_shapes(stream):
    return {pages.shape for pair in stream._loop.decoder.init().cache.pages for pages in pair}


def run(model, engine, mesh=None, **options):
    stream = Stream(
        model,
        PROMPTS,
        drafter=first_layer(model),
        sampling=SAMPLING,
        engine=engine,
        mesh=mesh,
        **options,
    )
    return [completion.token_ids for completion in stream.result()], stream


@pytest.mark.slow  # the gate has the chain over a mesh
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_the_same_tokens(kind, numerics, in_lanes):
    engine = EngineConfig(page_size=16, max_rows=2, numerics=numerics)
    model = tiny_llama(0)
    expected, stream = run(model, engine, **OPTIONS[kind])
    assert {shape[3] for shape in page_shapes(stream)} == {model.config.head_dim}
    in_lanes()
    # Other sizes: no executable of before.
    engine = dataclasses.replace(engine, page_size=32)
    actual, stream = run(tiny_llama(0), engine, **OPTIONS[kind])
    assert {shape[3] for shape in page_shapes(stream)} == {layout.LANES}
    assert actual == expected


def test_the_same_tokens_where_a_mesh_splits_heads(in_lanes):
    """Lines are a shard's own."""
    model = tiny_llama(0)
    engine = EngineConfig(page_size=16, max_rows=2)
    expected, _ = run(model, engine, **OPTIONS["chain"])
    in_lanes()
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    actual, stream = run(model, engine, mesh, **OPTIONS["chain"])
    assert {shape[1] for shape in page_shapes(stream)} == {2}
    assert actual == expected


def test_bytes_are_those_of_whole_lines(in_lanes):
    config = dataclasses.replace(
        tiny_llama(0).config, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=80
    )
    assert kv_cache.numbers_per_token(config) == 2 * 3 * 4 * 80
    in_lanes()
    assert kv_cache.numbers_per_token(config) == 2 * 3 * 4 * 128
    halves = dataclasses.replace(config, head_dim=64)
    assert kv_cache.numbers_per_token(halves) == 2 * 3 * 4 * 64
    # One head of each of four shards: a line for itself.
    assert kv_cache.numbers_per_token(halves, kv_shards=4) == 2 * 3 * 4 * 128
    assert kv_cache.page_shape(halves, 5, 16, kv_shards=4) == (5, 4, 16, 128)


def test_plain_generation_is_the_same(in_lanes):
    model, other = tiny_llama(0), tiny_llama(0)
    engine = EngineConfig(page_size=16, max_rows=4)
    expected = specjax.generate(model, PROMPTS, sampling=SAMPLING, engine=engine)
    in_lanes()
    engine = dataclasses.replace(engine, page_size=8)
    actual = specjax.generate(other, PROMPTS, sampling=SAMPLING, engine=engine)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
