"""What a step asks of a drafter, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_llama_config

from specjax.config.engine import EngineConfig
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.draft import draft
from specjax.decode.sizes import Sizes
from specjax.drafters import none
from specjax.drafters.base import Draft, Drafter, DrafterContext, DrafterSpec
from specjax.drafters.guard import DrafterError, guarded
from specjax.drafters.spec import NoDrafter
from specjax.trees import draft_tree
from specjax.types import (
    NO_FAULT,
    NOT_A_NUMBER,
    NOT_A_TOKEN,
    OUTSIDE_VOCABULARY,
    DecoderParams,
    Proposal,
)

ROWS, DEPTH, VOCAB = 2, 3, 61
PARAMS = DecoderParams(())  # read by no drafter here


def proposing(**fields):
    """Returns a drafter that proposes zeros, all of them standing, whatever it is asked for."""

    def propose(params, state, decode_state, num_tokens):
        proposal = Proposal(
            **{
                "token_ids": jnp.zeros((ROWS, DEPTH), jnp.int32),
                "num_tokens": jnp.full(ROWS, DEPTH),
                **fields,
            }
        )
        return Draft(proposal, state, decode_state.cache.lengths)

    return Drafter(propose)


def guard(drafter):
    context = DrafterContext(
        target=tiny_llama_config(), num_speculative_tokens=DEPTH, dtype=jnp.dtype("float32")
    )
    return guarded(drafter, DrafterSpec(), context)


@pytest.fixture(scope="module")
def state():
    sizes = Sizes(rows=ROWS, page_size=8, num_pages=8, pages_per_row=4, burst_steps=1)
    decoder = Decoder(
        DecoderConfig(
            target=tiny_llama_config(), drafter=NoDrafter(), sizes=sizes, engine=EngineConfig()
        )
    )
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
    run = jax.jit(lambda state: draft(proposing(), PARAMS, state, DEPTH, VOCAB)[1].proposal)
    assert run(state).num_tokens.tolist() == [expected, 0]


def test_nothing_is_drafted_past_the_positions_a_drafter_was_made_for(state):
    drafter = proposing()._replace(max_positions=7)
    for length, expected in ((4, 3), (5, 2), (6, 1), (7, 0), (9, 0)):
        row = with_row(state, length=length, max_length=30, num_pages=4)
        proposal = draft(drafter, PARAMS, row, DEPTH, VOCAB)[1].proposal
        assert proposal.num_tokens.tolist() == [expected, 0]


def test_probabilities_that_tokens_were_not_drawn_from_are_refused(state):
    stored = jnp.full((ROWS, DEPTH, VOCAB), 1 / VOCAB)
    with pytest.raises(DrafterError, match="stored with earlier rollouts"):
        draft(guard(proposing(probs=stored)), PARAMS, state, DEPTH, VOCAB)
    fresh = proposing(probs=stored)._replace(draws_afresh=True)
    draft(guard(fresh), PARAMS, state, DEPTH, VOCAB)


EVEN = jnp.full((ROWS, DEPTH, VOCAB), 1 / VOCAB)
FIGURES = jnp.ones((ROWS, DEPTH))
# Of DEPTH nodes behind the root, the last is a child of the first.
TREE = draft_tree.from_parents(jnp.array([[-1, 0, 0, 1]] * ROWS), 2)


def tokens(*ids):
    return {"token_ids": jnp.array([ids] * ROWS, jnp.int32)}


@pytest.mark.parametrize(
    ("fields", "num_tokens", "fault"),
    [
        (tokens(0, 60, 5), 3, NO_FAULT),
        (tokens(-1, 1, 2), 0, OUTSIDE_VOCABULARY),
        (tokens(0, 61, 2), 1, OUTSIDE_VOCABULARY),
        (tokens(0, 1, 2**31 - 1), 2, OUTSIDE_VOCABULARY),
        (tokens(0, NOT_A_TOKEN, 99), 1, NOT_A_NUMBER),
        ({"probs": EVEN}, 3, NO_FAULT),
        ({"probs": EVEN.at[0, 0, 7].set(jnp.nan)}, 0, NOT_A_NUMBER),
        ({"probs": EVEN.at[0, 2, 60].set(jnp.inf)}, 2, NOT_A_NUMBER),
        # What follows the first node stands last.
        ({"probs": EVEN.at[0, 1, 7].set(jnp.nan), "tree": TREE}, 2, NOT_A_NUMBER),
        ({"probs": EVEN.at[0, 2, 7].set(jnp.nan), "tree": TREE}, 3, NO_FAULT),
        # Ranked last, if anybody ranks; cut by nobody.
        ({"prior_confidence": FIGURES.at[0, 1].set(jnp.nan)}, 3, NOT_A_NUMBER),
        ({"path_probability": FIGURES.at[0, 1].set(jnp.nan)}, 3, NOT_A_NUMBER),
        # Nobody was asked for the third.
        (tokens(0, 1, -1) | {"num_tokens": jnp.full(ROWS, 2)}, 2, NO_FAULT),
        (
            {
                "token_ids": jnp.full((ROWS, DEPTH), NOT_A_TOKEN).at[:, 0].set(7),
                "probs": EVEN.at[:, 1:].set(jnp.nan),
                "prior_confidence": FIGURES.at[:, 1:].set(jnp.nan),
                "path_probability": FIGURES.at[:, 1:].set(-jnp.inf),
                "num_tokens": jnp.full(ROWS, 1),
            },
            1,
            NO_FAULT,
        ),
        ({"num_tokens": jnp.full(ROWS, -4)}, 0, NO_FAULT),
    ],
)
def test_what_a_drafter_does_wrong_is_not_verified(state, fields, num_tokens, fault):
    state = with_row(state, length=5, max_length=30, num_pages=4)
    drafter = proposing(**fields)._replace(draws_afresh=True)
    run = jax.jit(lambda state: draft(drafter, PARAMS, state, DEPTH, VOCAB))
    after, drafted = run(state)
    proposal = drafted.proposal
    assert proposal.num_tokens.tolist() == [num_tokens, 0]
    # The other row is not active: what it holds means nothing.
    assert drafted.fault.tolist() == [fault, NO_FAULT]
    assert after.draft_caps[0] == (DEPTH if fault == NO_FAULT else 0)
    assert 0 <= proposal.token_ids.min() <= proposal.token_ids.max() < VOCAB
    if proposal.probs is not None:
        assert jnp.all(jnp.isfinite(proposal.probs))


def test_a_draft_of_no_tokens_has_no_fault(state):
    state = with_row(state, length=5, max_length=30, num_pages=4)
    _, drafted = draft(none.drafter(), PARAMS, state, 0, VOCAB)
    assert drafted.fault.tolist() == [NO_FAULT] * ROWS
