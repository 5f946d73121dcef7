"""Hidden states of the flat step, after any layers, against the uncached forward's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import random_model, tiny_gpt2_config, tiny_llama_config
from made_up_families import heron_config

from specjax.models.dense import sequence_logits
from specjax.paged import forward as flat
from specjax.paged import kv_cache
from specjax.paged.forward import Part

CONFIGS = {
    "llama": tiny_llama_config(),
    "gpt2": tiny_gpt2_config(),
    "heron": heron_config(),
}
ROWS, LENGTH, PAGE_SIZE = 2, 24, 8
COUNTS = [5, 3]  # new tokens of each row, after LENGTH - 8
TAPS = (2, 3, 0, 1)  # the normed output first
NUM_TOKENS = 12  # 4 are padding


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """Returns config, params, texts, and hidden states [rows, length, hidden] per tap."""
    config = CONFIGS[request.param]
    params = random_model(config, 0).params
    texts = np.random.default_rng(1).integers(0, 61, (ROWS, LENGTH), np.int32)
    run = jax.jit(sequence_logits, static_argnames=("config", "taps"))
    logits, tapped = run(params, config, jnp.asarray(texts), taps=TAPS)
    return config, params, texts, (logits, tapped)


def batches(texts, first, counts, num_tokens):
    table = jnp.asarray(kv_cache.own_pages(ROWS, LENGTH // PAGE_SIZE))
    return flat.make_batch(
        jnp.asarray(texts),
        table,
        jnp.full(ROWS, first, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        num_tokens=num_tokens,
        page_size=PAGE_SIZE,
        num_slots=ROWS * LENGTH,
    )


def steps(config, texts, token_bucket, has_beside, taps):
    """Returns a function that feeds a prefix of every row, then COUNTS more tokens."""
    first = LENGTH - 8
    options = {"token_bucket": token_bucket}

    def run(params):
        pages = kv_cache.init_pages(config, ROWS * LENGTH // PAGE_SIZE, PAGE_SIZE, jnp.float32)
        prefix = batches(texts, 0, [first] * ROWS, ROWS * first)
        pages = flat.forward(params, config, pages, prefix, max_tokens_per_row=first, **options)[1]
        beside = None
        counts = COUNTS
        if has_beside:
            counts = [COUNTS[0], 0]
            beside = Part(batches(texts, first, [0, COUNTS[1]], 4), 4)
        batch = batches(texts, first, counts, NUM_TOKENS)
        return flat.forward(
            params,
            config,
            pages,
            batch,
            max_tokens_per_row=8,
            beside=beside,
            taps=taps,
            **options,
        )

    return run


def expected(tapped, row):
    first = LENGTH - 8
    return [np.asarray(tap)[row, first : first + COUNTS[row]] for tap in tapped]


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("token_bucket", quick([None, 4], 4))
def test_taps_are_those_of_whole_sequences(case, token_bucket):
    config, params, texts, (logits, tapped) = case
    hidden, _, found = jax.jit(steps(config, texts, token_bucket, False, TAPS))(params)
    assert found.beside == ()
    places = [slice(0, 5), slice(5, 8)]
    for row, place in enumerate(places):
        assert_close([tap[place] for tap in found.batch], expected(tapped, row))
        scores = flat.logits(params, config, hidden[place])
        assert_close([scores], expected([logits], row))
    np.testing.assert_array_equal(found.batch[0], hidden)


@pytest.mark.full
def test_taps_of_what_runs_beside(case):
    config, params, texts, (_, tapped) = case
    _, _, found = jax.jit(steps(config, texts, None, True, TAPS))(params)
    assert_close([tap[:5] for tap in found.batch], expected(tapped, 0))
    assert_close([tap[:3] for tap in found.beside], expected(tapped, 1))
    assert {tap.shape for tap in found.batch} == {(NUM_TOKENS, config.hidden_size)}
    assert {tap.shape for tap in found.beside} == {(4, config.hidden_size)}


@pytest.mark.full
@pytest.mark.parametrize("token_bucket", [None, 4])
def test_no_taps_cost_nothing(token_bucket):
    config = CONFIGS["llama"]
    params = jax.eval_shape(lambda: random_model(config, 0).params)
    texts = np.zeros((ROWS, LENGTH), np.int32)

    def operations(taps):
        run = jax.jit(steps(config, texts, token_bucket, False, taps))
        # The line of main names the results.
        return [line for line in run.lower(params).as_text().splitlines() if "@main" not in line]

    assert operations(()) == operations(None) != operations((0,))
