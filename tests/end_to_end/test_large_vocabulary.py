"""Vocabularies above 4,096 words, where filters and noise look at a few blocks first."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import ENGINE, first_layer, tiny_llama

import specjax
from specjax.config.sampling import SamplingParams
from specjax.sampling.argmax import FEW, FEW_BLOCK

VOCAB = 5003  # no multiple of a block
PLAIN = SamplingParams(temperature=0.3, max_tokens=12, seed=3)
FILTERED = [
    dataclasses.replace(PLAIN, top_p=0.9),
    dataclasses.replace(PLAIN, top_k=50),
    dataclasses.replace(PLAIN, top_k=40, top_p=0.5, min_p=0.001),
]
ROWS = {
    # Noise for every word of the plain rows; the nucleus at 1.5 holds most words.
    "mixed": [
        *FILTERED,
        PLAIN,
        dataclasses.replace(PLAIN, temperature=0.0),
        dataclasses.replace(PLAIN, temperature=1.5, top_p=0.9),
    ],
    # Noise for the few words that filters leave.
    "filtered": 2 * FILTERED,
}


@pytest.fixture(scope="module")
def target():
    """A model whose second layer changes little, so that the first is right often."""
    model = tiny_llama(0, vocab_size=VOCAB)
    first, second = model.params["layers"]
    quiet = jax.tree.map(lambda weights: 0.8 * weights, second)
    return dataclasses.replace(model, params={**model.params, "layers": [first, quiet]})


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_filters_are_lossless(target, rows):
    assert VOCAB > 2 * FEW * FEW_BLOCK
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (3, 9, 5, 17, 2, 8)]
    run = lambda k: specjax.generate(
        target,
        prompts,
        drafter=first_layer(target),
        num_speculative_tokens=k,
        sampling=ROWS[rows],
        engine=ENGINE,
    )
    plain, drafted = run(0), run(3)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    counts = drafted.stats.acceptance
    assert all(completion.acceptance.num_accepted for completion in drafted)
    assert counts.num_accepted < counts.num_drafted
