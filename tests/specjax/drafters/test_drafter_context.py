"""The target's embedding and head, as a drafter reads them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_gpt2, tiny_llama
from jax.sharding import Mesh, PartitionSpec

from specjax.drafters.base import DrafterContext
from specjax.models import llama, sharding
from specjax.models.base import Model
from specjax.models.dense import sequence_logits
from specjax.models.families import FAMILIES
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams

IDS = jnp.arange(7, dtype=jnp.int32)[None]
SCALED = {"embedding_multiplier": 12.0, "logits_divisor": 3.0, "logits_softcap": 0.5}


def context_of(model: Model, **fields) -> DrafterContext:
    return DrafterContext(
        target=model.config, num_speculative_tokens=2, dtype=jnp.float32, **fields
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{}, SCALED], ids=["plain", "scaled"])
def test_they_are_those_of_the_targets_own_forward(tied, fields):
    model = tiny_llama(0, tie_word_embeddings=tied, **fields)
    run = jax.jit(sequence_logits, static_argnames=("config", "taps"))
    logits, (embedded, hidden) = run(model.params, model.config, IDS, taps=(0, -1))
    context, params = context_of(model), DecoderParams(model.params)
    np.testing.assert_array_equal(context.target_embedding(params, IDS), embedded)
    by_hand = model.params["embed_tokens"][IDS] * fields.get("embedding_multiplier", 1.0)
    np.testing.assert_array_equal(embedded, by_hand)
    found = context.target_logits(params, hidden)
    assert (found.shape, found.dtype) == ((1, 7, 61), jnp.float32)
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-6)
    # A head may have the hidden state of each row, without a second axis.
    np.testing.assert_allclose(context.target_logits(params, hidden[0]), logits[0], rtol=1e-5)


def test_positions_are_left_out():
    model = tiny_gpt2(0)
    _, (embedded,) = sequence_logits(model.params, model.config, IDS, taps=(0,))
    found = context_of(model).target_embedding(DecoderParams(model.params), IDS)
    added = found + model.params["embed_positions"][:7][None]
    np.testing.assert_array_equal(added, embedded)


def test_hidden_states_of_a_wider_dtype_are_cast():
    model = tiny_llama(0)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    context = dataclasses.replace(context_of(model), dtype=jnp.bfloat16)
    hidden = jnp.linspace(-1, 1, 32)[None]
    found = context.target_logits(DecoderParams(narrow), hidden)
    same = context.target_logits(DecoderParams(narrow), hidden.astype(jnp.bfloat16))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, same)


def test_a_family_may_embed_in_its_own_way(monkeypatch):
    embed = lambda params, config, ids, axis: -params["embed_tokens"][ids]
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(llama.FAMILY, embed=embed))
    model = tiny_llama(0)
    found = context_of(model).target_embedding(DecoderParams(model.params), IDS)
    np.testing.assert_array_equal(found, -model.params["embed_tokens"][IDS])


@pytest.mark.parametrize("by_slices", [False, True])
def test_over_a_mesh_the_vocabulary_is_whole_or_in_slices(by_slices):
    model = tiny_llama(0, vocab_size=64)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    hidden = jnp.linspace(-1, 1, 3 * 32).reshape(3, 32)
    context = context_of(model, tensor_axis="tensor")

    def logits(params):
        params = DecoderParams(params)
        if not by_slices:
            return context.target_logits(params, hidden)
        scores, vocabulary = context.own_target_logits(params, hidden)
        assert vocabulary == Vocabulary("tensor")
        assert scores.shape == (3, 32)
        return scores

    split = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(sharding.param_specs(model.params, mesh, model.config),),
        out_specs=PartitionSpec(None, "tensor") if by_slices else PartitionSpec(),
        check_vma=False,
    )
    whole = context_of(model).target_logits(DecoderParams(model.params), hidden)
    np.testing.assert_allclose(jax.jit(split)(model.params), whole, rtol=1e-5, atol=1e-6)
