"""What a step asks of a drafter, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_llama_config

from specjax.config import EngineConfig
from specjax.decode.decoder import Decoder, Sizes
from specjax.decode.draft import draft
from specjax.drafters.base import Draft, Drafter
from specjax.drafters.spec import NoDrafter
from specjax.types import Proposal

ROWS, DEPTH, VOCAB = 2, 3, 61


def proposing(**fields):
    """Returns a drafter that proposes zeros, all of them standing, whatever it is asked for."""

    def propose(params, state, decode_state, num_tokens):
        proposal = Proposal(
            token_ids=jnp.zeros((ROWS, DEPTH), jnp.int32),
            num_tokens=jnp.full(ROWS, DEPTH),
            **fields,
        )
        return Draft(proposal, state, decode_state.cache.lengths)

    return Drafter(init=lambda *sizes: (), prefill=lambda *batch: (), draft=propose)


@pytest.fixture(scope="module")
def state():
    sizes = Sizes(rows=ROWS, page_size=8, num_pages=8, pages_per_row=4, burst_steps=1)
    decoder = Decoder(tiny_llama_config(), NoDrafter(), sizes, EngineConfig())
    return decoder.init()


def with_row(state, *, length, max_length, num_pages, cap=DEPTH):
    """Returns the state with its first row active."""
    table = jnp.where(jnp.arange(4) < num_pages, jnp.arange(4), -1)
    put = lambda values, value: values.at[0].set(value)
    cache = dataclasses.replace(
        state.cache,
        block_table=put(state.cache.block_table, table.astype(jnp.int32)),
        lengths=put(state.cache.lengths, length),
    )
    return dataclasses.replace(
        state,
        cache=cache,
        max_lengths=put(state.max_lengths, max_length),
        draft_caps=put(state.draft_caps, cap),
        is_active=put(state.is_active, True),
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (dict(length=5, max_length=30, num_pages=4), DEPTH),
        (dict(length=5, max_length=30, num_pages=4, cap=1), 1),
        # Two more tokens may come, and the target adds one of them.
        (dict(length=5, max_length=8, num_pages=4), 1),
        (dict(length=5, max_length=7, num_pages=4), 0),
        # Slots 6 and 7 are what the one page has behind the root.
        (dict(length=5, max_length=30, num_pages=1), 2),
        (dict(length=7, max_length=30, num_pages=1), 0),
    ],
)
def test_no_more_stand_than_cap_output_and_slots_allow(state, row, expected):
    state = with_row(state, **row)
    run = jax.jit(lambda state: draft(proposing(), (), state, DEPTH)[1].proposal)
    assert run(state).num_tokens.tolist() == [expected, 0]


def test_probabilities_that_tokens_were_not_drawn_from_are_refused(state):
    stored = jnp.full((ROWS, DEPTH, VOCAB), 1 / VOCAB)
    with pytest.raises(ValueError, match="stored with earlier rollouts"):
        draft(proposing(probs=stored), (), state, DEPTH)
    fresh = proposing(probs=stored)._replace(draws_afresh=True)
    draft(fresh, (), state, DEPTH)
