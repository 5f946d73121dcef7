"""A drafter over 1, 2, 4 or all devices of the target's tensor axis: the tokens of one device."""

import jax
import numpy as np
import pytest
from helpers import first_layer, tiny_llama
from jax.sharding import Mesh

from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams

WIDE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
)
ENGINE = EngineConfig(page_size=8, max_rows=4)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=20)
SIZES = (1, 5, 40, 17)


def mesh_of(**sizes):
    count = int(np.prod([*sizes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, **WIDE)


def prompts_of(seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, size).tolist() for size in SIZES]


def run(target, drafter, mesh=None, sampling=(GREEDY, SAMPLED) * 2, engine=ENGINE, **config):
    stream = Stream(
        target,
        prompts_of(),
        drafter=drafter,
        speculative_config={"num_speculative_tokens": 3, "policy": "fixed"} | config,
        sampling=[*sampling] if isinstance(sampling, tuple) else sampling,
        engine=engine,
        mesh=mesh,
    )
    result = stream.result()
    assert [c.error for c in result] == [None] * len(SIZES)
    return stream, [c.token_ids for c in result], result.stats.acceptance


def weight_shapes(stream, name):
    """Returns the shapes in which devices hold a weight of the drafter's first layer."""
    leaf = stream._loop.params.drafter["layers"][0][name]
    return {shard.data.shape for shard in leaf.addressable_shards}


def page_shapes(stream):
    pages = jax.tree.leaves(stream._loop._run.device_state.drafter)
    return {shard.data.shape[1] for leaf in pages for shard in leaf.addressable_shards}


@pytest.fixture(scope="module")
def single(target):
    _, tokens, acceptance = run(target, first_layer(target))
    assert acceptance.num_accepted > 0
    return tokens, acceptance


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_tokens_of_one_device(target, single, num_shards):
    mesh, draft = mesh_of(tensor=8), first_layer(target)
    stream, tokens, acceptance = run(target, draft, mesh, draft_tensor_parallel_size=num_shards)
    assert tokens == single[0]
    # The same drafts, but for near-ties: a shard with other keys would accept far fewer.
    assert acceptance.num_accepted > 0.9 * single[1].num_accepted
    assert acceptance.num_drafted > 0
    assert weight_shapes(stream, "q_proj") == {(64 // num_shards, 64)}
    assert weight_shapes(stream, "down_proj") == {(64, 128 // num_shards)}
    assert page_shapes(stream) == {8 // num_shards}
