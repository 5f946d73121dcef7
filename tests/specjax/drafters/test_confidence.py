"""What a draft model says of how sure it is: before a token is drawn, and of the token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

from specjax.cli.bench.fixed_batch import begin
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.draft import draft
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import ModelDrafter
from specjax.engine.request import Request
from specjax.heads.equations import dflash
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.specs import DFlashDrafter
from specjax.sampling import row_values
from specjax.trees.static_shapes import from_widths
from specjax.types import REJECTION, SEEDED, DecoderParams

ROWS, DEPTH, VOCAB = 64, 2, 5
PROMPT = [1, 2, 3]
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)
MODEL = tiny_llama(0, vocab_size=VOCAB, num_layers=1)
SHAPES = {"chain": None, "tree": from_widths((2, 1))}


@functools.cache
def proposal_of(name, rule):
    """Returns a step's proposal for rows that differ in their seeds alone."""
    spec = ModelDrafter(MODEL.config, SHAPES[name])
    return proposal_by(spec, MODEL.params, rule)


def proposal_by(spec, own, rule):
    """As `proposal_of`, of a drafter with weights `own`."""
    model = MODEL
    sizes = Sizes(rows=ROWS, page_size=16, num_pages=ROWS, pages_per_row=1, burst_steps=1)
    decoder = Decoder(
        DecoderConfig(
            target=model.config,
            drafter=spec,
            sizes=sizes,
            engine=ENGINE,
            rules=(REJECTION,),
            max_drafts_per_shard=8,
        )
    )
    params = SamplingParams(temperature=1, max_tokens=9)
    requests = [
        Request(
            prompt_index=row,
            sample_index=0,
            prompt_token_ids=PROMPT,
            params=params,
            seed=row,
            draft_cap=DEPTH,
            rule=rule,
            max_length=len(PROMPT) + 9,
            sampling_values=row_values(
                params,
                prompt_length=len(PROMPT),
                eos_token_ids=(),
                seed=row,
                engine_config=ENGINE,
            ),
        )
        for row in range(ROWS)
    ]
    weights = DecoderParams(model.params, own)
    state = begin(decoder, weights, requests)
    state = dataclasses.replace(state, is_active=jnp.ones(ROWS, bool))
    drafter = decoder.step_spec(DEPTH).drafter
    run = jax.jit(lambda state: draft(drafter, weights, state, DEPTH, 61)[1].proposal)
    return jax.tree.map(np.asarray, run(state))


@pytest.mark.full
@pytest.mark.parametrize("name", ["tree", pytest.param("chain", marks=pytest.mark.slow)])
def test_prior_confidence_is_a_function_of_what_was_drawn_before(name):
    proposal = proposal_of(name, REJECTION)
    prior, tokens = proposal.prior_confidence, proposal.token_ids
    num_first = 1 if name == "chain" else 2
    assert len(set(tokens[:, 0].tolist())) > 1
    # Of depth 1 nothing was drawn before, whatever the seed and the token.
    assert (prior[:, :num_first] == prior[:1, :num_first]).all()
    assert (np.diff(prior[0, :num_first]) <= 0).all()  # the second sibling is less sure
    for child in range(num_first, tokens.shape[1]):
        above = child - num_first
        by_token = {}
        for token, figure in zip(tokens[:, above].tolist(), prior[:, child].tolist()):
            by_token.setdefault(token, set()).add(figure)
        assert len(by_token) > 1
        assert all(len(figures) == 1 for figures in by_token.values())
        assert len(set.union(*by_token.values())) > 1


@pytest.mark.full
def test_path_probability_knows_the_tokens():
    proposal = proposal_of("chain", SEEDED)
    path, tokens = proposal.path_probability, proposal.token_ids
    assert ((path > 0) & (path <= 1)).all()
    assert (path[:, 1] <= path[:, 0]).all()
    # The noise that decides is in it: one token, many figures.
    likely = np.bincount(tokens[:, 0]).argmax()
    assert len(set(path[tokens[:, 0] == likely, 0].tolist())) > 1


@pytest.mark.full
def test_a_confidence_head_is_taken_at_its_word():
    """One that says 0.25 of every token, and knows nothing of what is drawn."""
    width = MODEL.config.hidden_size
    config = DFlashConfig(
        layers=MODEL.config,
        target_hidden_size=width,
        target_vocab_size=VOCAB,
        aux_layers=(0,),
        block_size=4,
        mask_token_id=0,
        causal_layers=(True,),
        has_confidence=True,
    )
    own = dflash.init(jax.random.key(0), config, std=0.3)
    own["confidence"] = jnp.zeros((1, width))
    own["confidence_bias"] = jnp.log(jnp.array([1 / 3]))
    proposal = proposal_by(DFlashDrafter(config), own, REJECTION)
    expected = np.broadcast_to([0.25, 0.0625], (ROWS, DEPTH))
    np.testing.assert_allclose(proposal.prior_confidence, expected, rtol=1e-6)
    assert len(np.unique(proposal.token_ids)) == VOCAB
    assert np.std(proposal.path_probability) > 0.01
