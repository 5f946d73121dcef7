"""What a draft model proposes: the target's own race at each node's position and text.

Half of the rows draw with the target's noise, half take the likeliest tokens (`delta`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

from pallas_kernels import layout
from specjax.cli.bench.fixed_batch import begin
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.draft import draft
from specjax.decode.sizes import Sizes
from specjax.drafters.base import NOT_KEPT
from specjax.drafters.spec import ModelDrafter
from specjax.drafters.token_set import TokenSet
from specjax.engine.request import Request
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.sampling import process_logits, row_values
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.trees.draft_tree import path_token_ids
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import from_widths
from specjax.types import DELTA, SEEDED, DecoderParams

ROWS, DEPTH, VOCAB, ROOM = 8, 3, 17, 16
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)
# What is drawn depends on the text before it by more than the model.
PARAMS = SamplingParams(
    temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=9
)
SHAPES = {
    "chain": None,
    "tree": from_widths((2, 2, 1)),
    # Keeps all that it looks at.
    "grown": Growth(max_depth=DEPTH, width=2, num_drafts=10),
}
MOST_NODES = 1 + 2 + 4 + 4
MODEL = tiny_llama(0, vocab_size=VOCAB, num_layers=1)


@pytest.mark.parametrize(
    "options", [{"num_shards": 0}, {"num_shards": -2}, {"num_shards": 1.0}, {"max_positions": 0}]
)
def test_numbers_that_mean_nothing(options):
    with pytest.raises(ValueError, match="must be a whole number from 1"):
        ModelDrafter(MODEL.config, **options)
    if "num_shards" in options:
        with pytest.raises(ValueError, match="must be a whole number from 1"):
            ModelDrafter(MODEL.config).split(**options)


def prompt_of(row):
    return [(row * 5 + place) % VOCAB for place in range(row % 3 + 1)]


def rule_of(row):
    return SEEDED if row < ROWS // 2 else DELTA


def request_of(row):
    prompt = prompt_of(row)
    return Request(
        prompt_index=row,
        sample_index=0,
        prompt_token_ids=prompt,
        params=PARAMS,
        seed=row,
        draft_cap=DEPTH,
        rule=rule_of(row),
        max_length=len(prompt) + PARAMS.max_tokens,
        sampling_values=row_values(
            PARAMS,
            prompt_length=len(prompt),
            eos_token_ids=(),
            seed=row,
            engine_config=ENGINE,
        ),
    )


@functools.cache
def drafted(name, said=None):
    """Returns the state after a step's drafting, and the draft."""
    sizes = Sizes(rows=ROWS, page_size=ROOM, num_pages=ROWS, pages_per_row=1, burst_steps=1)
    decoder = Decoder(
        DecoderConfig(
            target=MODEL.config,
            drafter=ModelDrafter(MODEL.config, SHAPES[name], said=said),
            sizes=sizes,
            engine=ENGINE,
        )
    )
    weights = DecoderParams(MODEL.params, MODEL.params)
    state = begin(decoder, weights, list(map(request_of, range(ROWS))))
    state = dataclasses.replace(state, is_active=jnp.ones(ROWS, bool))
    drafter = decoder.step_spec(DEPTH).drafter
    run = jax.jit(lambda state: draft(drafter, weights, state, DEPTH, VOCAB))
    return run(state)


@jax.jit
def race(text, positions, sampling, has_noise):
    """Returns what the target takes the argmax of after texts i32[n, ROOM], and the last one's
    keys."""
    config, params, every = MODEL.config, MODEL.params, jnp.arange(text.shape[0])
    architecture = family_of(config)

    def attend(layer, q, k, v, _):
        return dense_causal_attention(q, k, v, scale=config.scale), k

    places = jnp.broadcast_to(jnp.arange(ROOM), text.shape)
    hidden, (keys,) = architecture.forward(params, config, text, places, attend, (None,))
    logits = architecture.logits(params, config, hidden[every, positions])
    scores = process_logits(logits, sampling, every, positions, text)
    noise = gumbel_noise(token_keys(sampling.seeds, positions + 1, TARGET_TOKEN), VOCAB)
    return scores + has_noise[:, None] * noise, keys[every, positions]


def races(state, paths):
    """Returns scores f32[rows, nodes, VOCAB] after the drafts on each path, and keys of its end.

    Args:
      paths: i32[rows, nodes, depth], -1 after a path's end.
    """
    text = np.zeros((ROWS, MOST_NODES, ROOM), np.int32)
    positions = np.zeros((ROWS, MOST_NODES), np.int32)
    for row in range(ROWS):
        for node, path in enumerate(np.asarray(paths)[row].tolist()):
            own = [*prompt_of(row), *(token for token in path if token >= 0)]
            text[row, node, : len(own)] = own
            positions[row, node] = len(own) - 1
    in_nodes = lambda x: np.repeat(np.asarray(x), MOST_NODES, axis=0)
    has_noise = np.array([rule_of(row) == SEEDED for row in range(ROWS)], np.float32)
    found = race(
        text.reshape(-1, ROOM),
        positions.reshape(-1),
        jax.tree.map(in_nodes, state.sampling),
        in_nodes(has_noise),
    )
    return [np.asarray(x).reshape(ROWS, MOST_NODES, *x.shape[1:]) for x in found]


@pytest.mark.full
def test_a_chain_is_what_the_target_would_say():
    state, found = drafted("chain")
    proposal = found.proposal
    tokens = np.asarray(proposal.token_ids)
    paths = np.full((ROWS, DEPTH, DEPTH), -1)
    for depth in range(1, DEPTH):
        paths[:, depth, :depth] = tokens[:, :depth]
    said = races(state, paths)[0].argmax(axis=2)[:, :DEPTH]
    assert (said == tokens).all()
    assert len({tuple(row) for row in tokens.tolist()}) > 1


SAID = TokenSet.of(np.arange(VOCAB) % 2 == 1)


@pytest.mark.full
def test_a_chain_of_some_tokens_is_the_best_of_them():
    state, found = drafted("chain", SAID)
    tokens = np.asarray(found.proposal.token_ids)
    paths = np.full((ROWS, DEPTH, DEPTH), -1)
    for depth in range(1, DEPTH):
        paths[:, depth, :depth] = tokens[:, :depth]
    scores = np.where(SAID.flags, races(state, paths)[0], -np.inf)
    assert (scores.argmax(axis=2)[:, :DEPTH] == tokens).all()
    everything = races(state, paths)[0].argmax(axis=2)[:, :DEPTH]
    assert (everything != tokens).any()


@pytest.mark.full
@pytest.mark.parametrize("name", ["tree", "grown"])
def test_trees_of_some_tokens(name):
    proposal = drafted(name, SAID)[1].proposal
    assert set(np.unique(proposal.token_ids)) <= set(np.flatnonzero(SAID.flags))


@pytest.mark.full
def test_siblings_are_the_best_of_the_race_after_their_parent():
    state, found = drafted("tree")
    proposal = found.proposal
    shape, tokens = SHAPES["tree"], np.asarray(proposal.token_ids)
    paths = np.asarray(path_token_ids(proposal.tree, proposal.token_ids))
    order = np.argsort(-races(state, paths)[0], axis=2)
    for node in range(1, shape.num_nodes):
        expected = order[:, shape.parents[node], shape.ranks[node]]
        assert (tokens[:, node - 1] == expected).all(), node


@pytest.mark.full
def test_a_grown_tree_knows_how_likely_the_target_is_to_say_its_paths():
    state, found = drafted("grown")
    proposal = found.proposal
    tokens = np.asarray(proposal.token_ids)
    assert (np.asarray(proposal.num_tokens) == SHAPES["grown"].num_drafts).all()
    paths = np.asarray(path_token_ids(proposal.tree, proposal.token_ids))
    probs = np.asarray(jax.nn.softmax(races(state, paths)[0]))
    parents = np.asarray(proposal.tree.parents)
    reached = np.ones((ROWS, tokens.shape[1] + 1))
    for row in range(ROWS):
        for node, token in enumerate(tokens[row], start=1):
            above = parents[row, node]
            reached[row, node] = reached[row, above] * probs[row, above, token]
    np.testing.assert_allclose(proposal.path_probability, reached[:, 1:], rtol=1e-4)
    # The likeliest child of the root comes first, and is what the target says there.
    assert (tokens[:, 0] == probs[:, 0].argmax(axis=1)).all()
    assert np.asarray(proposal.tree.depths).max() == DEPTH


@pytest.mark.full
@pytest.mark.parametrize("name", ["tree", "grown"])
def test_keys_of_nodes_lie_where_the_draft_says(name):
    state, found = drafted(name)
    proposal, kept_at = found.proposal, np.asarray(found.kept_at)
    paths = path_token_ids(proposal.tree, proposal.token_ids)
    _, keys = races(state, paths)
    parents = np.asarray(proposal.tree.parents)
    (pages, _), *_ = state.drafter
    for row in range(ROWS):
        # Whatever has children was fed.
        assert (kept_at[row, parents[row, 1:]] != NOT_KEPT).all()
        root = len(prompt_of(row)) - 1
        assert int(found.written[row]) == root + 1
        for node in np.flatnonzero(kept_at[row] != NOT_KEPT).tolist():
            slot = jnp.int32(row * ROOM + root + kept_at[row, node])
            held = layout.read_slots(pages, slot)
            np.testing.assert_allclose(held, keys[row, node], atol=1e-5)
