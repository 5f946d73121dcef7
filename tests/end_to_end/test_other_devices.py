"""Weights on another device than the usual one, or in the host's memory, in one process."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_llama
from jax.sharding import SingleDeviceSharding

import specjax
from specjax import EngineConfig, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 8]]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=8, seed=3)
ENGINE = EngineConfig(page_size=8, max_rows=2, burst_steps=4, max_context=32)


def weights(seed, place):
    return jax.device_put(tiny_llama(seed).params, place)


@pytest.mark.full
def test_generations_on_two_devices():
    tokens = []
    for device in (0, 3, 0, 5):
        model = dataclasses.replace(tiny_llama(0), params=weights(0, jax.devices()[device]))
        said = specjax.generate(model, PROMPTS, sampling=SAMPLING, engine=ENGINE)
        tokens.append([each.token_ids for each in said.completions])
    assert tokens[1:] == tokens[:-1]


def memories():
    """The host's memories, of which a trainer may keep weights in one."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sorted(kinds - {device.default_memory().kind})


@pytest.mark.full
@pytest.mark.parametrize("layout", ["specjax", "nnx"])
def test_rollouts_of_weights_that_lie_elsewhere(layout):
    decoder = specjax.build_decoder(tiny_llama(0).config, engine=ENGINE, layout=layout)
    tree = specjax.convert_back(tiny_llama(0).params, layout, decoder.config)
    roll = lambda place: specjax.rollout(
        decoder, jax.device_put(tree, place), PROMPTS, sampling=SAMPLING
    )
    first = roll(jax.devices()[0])
    for device in (3, 0):
        batch = roll(jax.devices()[device])
        np.testing.assert_array_equal(batch.completion_ids, first.completion_ids)
    assert memories()
    for kind in memories():
        batch = roll(SingleDeviceSharding(jax.devices()[0], memory_kind=kind))
        np.testing.assert_array_equal(batch.completion_ids, first.completion_ids)
        assert batch.metrics["weights_bytes_moved"] == sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.full
def test_a_decoder_that_began_on_another_device():
    config = tiny_llama(0).config
    batches = []
    for device in (3, 0):
        decoder = specjax.build_decoder(config, engine=ENGINE)
        params = weights(0, jax.devices()[device])
        batches.append(specjax.rollout(decoder, params, PROMPTS, sampling=SAMPLING))
    np.testing.assert_array_equal(*[batch.completion_ids for batch in batches])
