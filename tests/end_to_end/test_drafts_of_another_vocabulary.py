"""Draft models of another vocabulary: the same tokens, and drafts that mean what they spell."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from helpers import first_layer, tiny_llama
from jax.sharding import Mesh
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.heads.loading import load_drafter
from specjax.text.tokenization import Tokenizer

VOCAB = 32
ENGINE = EngineConfig(page_size=8, max_rows=4)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=24)
WORDS = ["".join(pair) for pair in itertools.product("abcdef", repeat=2)]


# Words that both models have; not alike in both halves of the vocabulary.
BOTH = [*range(2, 12), *range(16, VOCAB, 2)]


def with_words(model, words):
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return dataclasses.replace(model, tokenizer=Tokenizer(backend))


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(0, vocab_size=VOCAB)
    # Logits far enough apart that half of the drafts of other weights are accepted.
    head = 4 * model.params["lm_head"]
    model = dataclasses.replace(model, params={**model.params, "lm_head": head}, name="target")
    return with_words(model, WORDS[:VOCAB])


def prompts(seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size).tolist() for size in (3, 9, 1, 20, 8, 15)]


def in_another_order(model, order, words):
    """Returns a model whose token i is the token order[i] of this one; -1: of random weights."""
    rng = np.random.default_rng(7)

    def rows(table):
        table = np.asarray(table)
        others = rng.normal(size=(len(order), table.shape[1])) * table.std()
        of = np.where((np.asarray(order) >= 0)[:, None], table[np.maximum(order, 0)], others)
        return jax.numpy.asarray(of, table.dtype)

    names = [name for name in ("embed_tokens", "lm_head") if name in model.params]
    params = {**model.params, **{name: rows(model.params[name]) for name in names}}
    config = dataclasses.replace(model.config, vocab_size=len(order))
    other = dataclasses.replace(model, params=params, config=config, name="draft")
    return with_words(other, words)


def run(target, drafter, sampling, mesh=None, **config):
    config = specjax.SpeculationConfig(num_speculative_tokens=3, policy="fixed", **config)
    generation = specjax.generate(
        target,
        prompts(),
        sampling=sampling,
        drafter=drafter,
        speculative_config=config,
        engine=ENGINE,
        mesh=mesh,
    )
    texts = [completion.token_ids for completion in generation]
    return texts, generation.stats.acceptance


@pytest.fixture(scope="module")
def partly(target):
    """The first layer of the target, with half of its words and as many of its own."""
    own = [f"{word}x" for word in WORDS[:9]]
    order = [*BOTH, *[-1] * len(own)]
    words = [WORDS[i] for i in order if i >= 0] + own
    return in_another_order(first_layer(target), order, words)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "num_more"),
    [pytest.param(GREEDY, 0, marks=pytest.mark.full), (SAMPLED, 5)],
    ids=["greedy", "sampled"],
)
def test_the_target_in_another_order_is_always_accepted(target, sampling, num_more):
    order = [*np.random.default_rng(3).permutation(VOCAB).tolist(), *[-1] * num_more]
    words = [WORDS[i] if i >= 0 else f"more{n}" for n, i in enumerate(order)]
    expected, _ = run(target, None, sampling)
    texts, acceptance = run(target, in_another_order(target, order, words), sampling)
    assert texts == expected
    assert acceptance.num_accepted == acceptance.num_drafted > 0


@pytest.mark.full
@pytest.mark.parametrize("size", [VOCAB - 2, VOCAB + 2])
def test_rows_for_no_token(target, size):
    words = WORDS[: VOCAB - 4]
    order = [i if i < VOCAB else -1 for i in range(size)]
    ours = with_words(target, words)
    expected, _ = run(ours, None, GREEDY)
    texts, acceptance = run(ours, in_another_order(target, order, words), GREEDY)
    assert texts == expected
    if size > VOCAB:
        assert acceptance.num_accepted == acceptance.num_drafted
    assert acceptance.num_accepted > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "config"),
    [
        (GREEDY, {}),
        (SAMPLED, {"verification": "delta"}),
        pytest.param(SAMPLED, {"speculative_token_tree": [2, 2, 1]}, marks=pytest.mark.slow),
        pytest.param(GREEDY, {"tree_top_k": 2}, marks=pytest.mark.slow),
        pytest.param(SAMPLED, {"tree_top_k": 2}, marks=pytest.mark.slow),
        pytest.param(SAMPLED, {"corpus_tokens": 256}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_half_of_the_words_are_drafted(target, partly, sampling, config):
    expected, _ = run(target, None, sampling)
    texts, acceptance = run(target, partly, sampling, **config)
    assert texts == expected
    assert 0 < acceptance.num_accepted < acceptance.num_drafted


@pytest.mark.full
def test_over_devices_that_hold_slices_of_the_vocabulary(target, partly):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    expected, alone = run(target, partly, SAMPLED)
    texts, acceptance = run(target, partly, SAMPLED, mesh, draft_tensor_parallel_size=2)
    assert texts == expected
    assert acceptance.num_accepted == alone.num_accepted > 0


@pytest.mark.full
def test_a_word_of_the_target_alone_is_never_drafted(target, partly):
    """Its token is chosen all the same: drafts leave it to the target."""
    loaded = load_drafter(partly, target)
    assert np.flatnonzero(loaded.spec.said.flags).tolist() == BOTH
    texts, _ = run(target, partly, SAMPLED)
    assert any(token not in BOTH for text in texts for token in text)
