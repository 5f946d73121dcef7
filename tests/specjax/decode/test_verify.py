"""Rows decided by rules of their own: in chunks of any size, and with their log-probabilities."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from pallas_kernels.ragged import tokens_of
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.rules import NO_OPTIONS
from specjax.decode.verify import _Decision, _nodes
from specjax.paged.forward import make_batch
from specjax.sampling import RowSampling, row_values
from specjax.sampling.vocabulary import WHOLE
from specjax.types import DELTA, REJECTION, SEEDED, TYPICAL, Proposal

ROWS, DEPTH, VOCAB, ROOM = 63, 2, 4, 16
NUM_NODES = ROWS * (DEPTH + 1)
ROW_BYTES = 4 * VOCAB * (DEPTH + 1)
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)
RULES = (SEEDED, REJECTION, TYPICAL, REJECTION, DELTA)
TEMPERATURES = (0.7, 0.9, 1.5, 0.0, 1.0)


class _HiddenAreLogits(_Decision):
    def logits(self, nodes):
        return nodes.hidden, WHOLE


def softmax(logits):
    return jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1)


def a_batch():
    """Returns rows of every rule, a proposal for them, and their nodes' logits f32[n, VOCAB]."""
    rng = np.random.default_rng(0)
    turn = np.arange(ROWS) % len(RULES)
    fields = [
        row_values(
            SamplingParams(temperature=TEMPERATURES[at], logprobs=0),
            prompt_length=1,
            eos_token_ids=(),
            seed=row,
            engine_config=ENGINE,
        )
        for row, at in enumerate(turn.tolist())
    ]
    state = SimpleNamespace(
        sampling=RowSampling(
            **{name: jnp.asarray(np.stack([f[name] for f in fields])) for name in fields[0]}
        ),
        cache=SimpleNamespace(lengths=jnp.asarray(rng.integers(1, 9, ROWS), jnp.int32)),
        history=jnp.asarray(rng.integers(0, VOCAB, (ROWS, ROOM)), jnp.int32),
        rules=jnp.asarray(np.array(RULES)[turn], jnp.int32),
        is_active=jnp.asarray(np.arange(ROWS) % 6 != 4),
        rows=ROWS,
    )
    proposal = Proposal(
        token_ids=jnp.asarray(rng.integers(0, VOCAB, (ROWS, DEPTH)), jnp.int32),
        num_tokens=jnp.asarray(np.where(np.arange(ROWS) % 7 == 3, 1, DEPTH), jnp.int32),
        probs=softmax(rng.normal(0, 2, (ROWS, DEPTH, VOCAB))),
    )
    return state, proposal, jnp.asarray(rng.normal(0, 2, (NUM_NODES, VOCAB)), jnp.float32)


@functools.cache
def decided(rows_at_once):
    """Returns the first flat node of each row, i32[ROWS + 1], and the Verification."""
    state, proposal, logits = a_batch()
    batch = make_batch(
        state.history,
        jnp.zeros((ROWS, 1), jnp.int32),
        state.cache.lengths,
        jnp.where(state.is_active, proposal.num_tokens + 1, 0),
        num_tokens=NUM_NODES,
        page_size=ROOM,
        num_slots=ROOM,
    )
    spec = SimpleNamespace(
        config=SimpleNamespace(vocab_size=VOCAB),
        rules=(REJECTION, TYPICAL),
        rule_options=NO_OPTIONS,
        max_logprobs=1,
        logit_bytes=rows_at_once * ROW_BYTES,
    )
    flat = tokens_of(batch.row_starts, NUM_NODES, proposal.num_nodes)
    nodes = _nodes(state, proposal, batch, logits)
    decision = _HiddenAreLogits(spec, None, state)
    run = jax.jit(lambda: decision.by_rules_in_chunks(proposal, nodes, flat))
    return np.asarray(batch.row_starts), run()


@pytest.mark.full
def test_rows_in_chunks_are_decided_as_all_at_once():
    """A chunk's rows have the rules and temperatures of their own; the last chunk is not full."""
    chunks, whole = decided(4)[1].acceptance, decided(ROWS)[1].acceptance
    state, proposal, _ = a_batch()
    own = np.flatnonzero(state.is_active)
    np.testing.assert_array_equal(chunks.num_accepted[own], whole.num_accepted[own])
    emitted = np.arange(DEPTH + 1) <= np.asarray(whole.num_accepted)[:, None]
    for row in own.tolist():
        tokens = (np.asarray(each.token_ids)[row, emitted[row]] for each in (chunks, whole))
        np.testing.assert_array_equal(*tokens)
    # Every rule and temperature accepts some drafts and rejects some.
    turn, count = own % len(RULES), np.asarray(whole.num_accepted)[own]
    assert set(turn[count > 0]) == set(range(len(RULES)))
    assert set(turn[count < np.asarray(proposal.num_tokens)[own]]) == set(range(len(RULES)))


@pytest.mark.full
@pytest.mark.parametrize("rows_at_once", quick([4, ROWS], 4))
def test_every_emitted_token_has_its_log_probability(rows_at_once):
    """Of accepted drafts, and of the token of the target's own that follows them."""
    (starts, found), (state, _, logits) = decided(rows_at_once), a_batch()
    for row in np.flatnonzero(state.is_active).tolist():
        count = int(found.acceptance.num_accepted[row]) + 1
        own = np.asarray(logits)[starts[row] : starts[row] + count]
        temperature = float(state.sampling.temperature[row]) or 1.0
        for name, values in (("raw", own), ("tempered", own / temperature)):
            every = np.asarray(jax.nn.log_softmax(values))
            expected = every[np.arange(count), found.acceptance.token_ids[row, :count]]
            told = getattr(found.logprobs, name)[row, :count]
            np.testing.assert_allclose(told, expected, atol=1e-5, err_msg=f"{name} of {row=}")
