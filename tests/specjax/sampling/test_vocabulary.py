"""Sampling over slices of a vocabulary gives what one device gives over the whole of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from jax.sharding import Mesh, PartitionSpec

from specjax import sampling as sampling_lib
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.accept import draw_token, num_draws
from specjax.sampling import RowSampling, row_values
from specjax.sampling.vocabulary import WHOLE, Vocabulary

AXIS, SHARDS = "tensor", 4
WIDTH = 37  # of a slice: no multiple of a block, of lanes or of a draw's columns
VOCAB = SHARDS * WIDTH
ROWS, NUM_TOKENS, MAX_LENGTH, PROMPT_LENGTH = 2, 6, 24, 5
EOS = (WIDTH,)  # the first token of the second slice
ENGINE = EngineConfig(max_bias_entries=8, max_allowed_tokens=5, max_stop_tokens=4, max_logprobs=50)
SLICES, SAME = PartitionSpec(None, AXIS), PartitionSpec()


@functools.cache  # one compilation serves all parameters
def over_slices(function, out_specs=SAME):
    """Compiles function(vocabulary, wide, *others): `wide` [.., vocab] is given as slices."""
    assert len(jax.devices()) >= SHARDS, "tests/conftest.py asks for four CPU devices"
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), (AXIS,))

    @jax.jit
    def run(wide, others):
        return jax.shard_map(
            lambda wide, others: function(Vocabulary(AXIS), wide, *others),
            mesh=mesh,
            in_specs=(SLICES, SAME),
            out_specs=out_specs,
            check_vma=False,
        )(wide, others)

    return run


@functools.cache
def over_the_whole(function):
    return jax.jit(functools.partial(function, WHOLE))


def rows_of(params):
    """RowSampling of ROWS rows: one greedy, which changes nothing, and one with these params."""
    fields = [
        row_values(
            one,
            prompt_length=PROMPT_LENGTH,
            eos_token_ids=EOS,
            seed=3 + index,
            engine_config=ENGINE,
        )
        for index, one in enumerate((SamplingParams(temperature=0, logprobs=0), params))
    ]
    return RowSampling(
        **{name: jnp.asarray(np.stack([field[name] for field in fields])) for name in fields[0]}
    )


def make_case(params, seed=0):
    """Returns logits f32[NUM_TOKENS, VOCAB], and what follows them in every call."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (NUM_TOKENS, VOCAB)).astype(np.float32)
    history = rng.integers(0, VOCAB, (ROWS, MAX_LENGTH))
    history[:, 1::2] = history[:, :1]  # duplicates
    positions = rng.integers(PROMPT_LENGTH, MAX_LENGTH - 2, NUM_TOKENS)
    row_ids = np.arange(NUM_TOKENS) * ROWS // NUM_TOKENS
    where = rows_of(params), *(jnp.asarray(x, jnp.int32) for x in (row_ids, positions, history))
    return jnp.asarray(logits), where


sampled = functools.partial(SamplingParams, temperature=0.7, logprobs=50, entropy=True)
FIRST, LAST = WIDTH - 1, WIDTH  # two tokens beside a border between slices
OPTIONS = {
    "greedy": SamplingParams(temperature=0, logprobs=50),
    "temperature": sampled(),
    "bias on both sides": sampled(logit_bias={FIRST: 9.0, LAST: 9.0, 0: 8.0, VOCAB - 1: 9.0}),
    "greedy with bias": SamplingParams(temperature=0, logit_bias={FIRST: 50.0, LAST: 50.0}),
    "bad": sampled(bad_token_ids=(FIRST, LAST, VOCAB - 1)),
    "allowed": sampled(allowed_token_ids=(1, FIRST, LAST, VOCAB - 1)),
    "allowed in one slice": sampled(allowed_token_ids=(LAST, LAST + 1)),
    "min_tokens": sampled(min_tokens=30, stop_token_ids=(3, VOCAB - 1)),
    "repetition": sampled(repetition_penalty=1.7),
    "frequency and presence": sampled(frequency_penalty=0.9, presence_penalty=1.1),
    "min_p": sampled(min_p=0.05),
    "top_k": sampled(top_k=7),
    "top_k of one": sampled(top_k=1),
    "top_k above a slice": sampled(top_k=WIDTH + 20),
    "top_k of all but one": sampled(top_k=VOCAB - 1),
    "top_p": sampled(top_p=0.8),
    "top_p of one": sampled(top_p=1e-6),
    "all": sampled(top_k=60, top_p=0.9, min_p=0.001, repetition_penalty=1.2, logit_bias={LAST: 3}),
}
QUICK = "greedy", "bias on both sides", "allowed in one slice", "min_tokens", "top_k of one", "all"
options = pytest.mark.parametrize("name", quick(OPTIONS, *QUICK))


def process(vocabulary, logits, *where):
    return sampling_lib.process_logits(logits, *where, vocabulary=vocabulary)


def probs(vocabulary, logits, *where):
    processed = process(vocabulary, logits, *where)
    return sampling_lib.target_probs(processed, *where[:2], vocabulary)


def choose(vocabulary, logits, *where):
    return sampling_lib.choose_tokens(logits, *where, vocabulary=vocabulary)


def score(vocabulary, logits, *where):
    return sampling_lib.choose_and_score(
        logits, *where, max_logprobs=ENGINE.max_logprobs, vocabulary=vocabulary
    )


def draw(vocabulary, weights, draws):
    return draw_token(draws, weights, vocabulary)


def both(function, wide, others, out_specs=SAME):
    """Returns what slices give, and what the whole gives."""
    split = over_slices(function, out_specs)(wide, others)
    if out_specs == SAME:  # then every device has the whole result
        for leaf in jax.tree.leaves(split):
            first, *rest = (shard.data for shard in leaf.addressable_shards)
            for other in rest:
                np.testing.assert_array_equal(first, other)
    return split, over_the_whole(function)(wide, *others)


@options
def test_processed_logits_and_choices_are_equal_to_the_bit(name):
    params = OPTIONS[name]
    for seed in range(3):
        logits, where = make_case(params, seed)
        split, whole = both(process, logits, where, SLICES)
        np.testing.assert_array_equal(split, whole)
        assert np.isneginf(whole).sum() or not (params.top_k or params.bad_token_ids)
        split, whole = both(choose, logits, where)
        np.testing.assert_array_equal(split.token_ids, whole.token_ids)
        np.testing.assert_array_equal(split.is_invalid, whole.is_invalid)


@pytest.mark.full
@pytest.mark.parametrize("name", quick(OPTIONS, "all"))
def test_logprobs_of_slices(name):
    params = OPTIONS[name]
    logits, where = make_case(params, seed=5)
    (choice, split), (expected, whole) = both(score, logits, where)
    np.testing.assert_array_equal(choice.token_ids, expected.token_ids)
    for name in split._fields:
        one, other = getattr(split, name), getattr(whole, name)
        if name.endswith("ids"):
            # Ids of tokens that cannot be chosen mean nothing.
            is_left = np.isfinite(getattr(whole, name.removesuffix("_ids")))
            one, other = one[is_left], other[is_left]
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=name)
    assert np.isfinite(whole.raw).all()
    assert (whole.raw != 0).any()


@options
def test_target_probs_of_slices(name):
    params = OPTIONS[name]
    logits, where = make_case(params, seed=6)
    split, whole = both(probs, logits, where, SLICES)
    np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(split) > 0, np.asarray(whole) > 0)


TIES = {
    "beside a border": (FIRST, LAST),
    "first and last slice": (2, VOCAB - 2),
    "every slice": (5, WIDTH + 1, 2 * WIDTH, 3 * WIDTH + 9),
    "last slice": (3 * WIDTH + 4, 3 * WIDTH + 5),
}


@pytest.mark.parametrize("tokens", TIES.values(), ids=TIES)
def test_the_lowest_id_wins_a_tie_across_slices(tokens):
    logits, where = make_case(OPTIONS["greedy"])
    logits = logits.at[:, list(tokens)].set(40.0)
    split, _ = both(choose, logits, where)
    assert set(np.asarray(split.token_ids)) == {tokens[0]}
    (_, told), _ = both(score, logits, where)
    np.testing.assert_array_equal(told.raw_top_ids[:, : len(tokens)], [tokens] * NUM_TOKENS)


@pytest.mark.parametrize("name", ["greedy", "temperature", "top_k", "top_p", "allowed"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, LAST, LAST + 1, VOCAB - 1, slice(WIDTH, 2 * WIDTH)], ids=str)
def test_numbers_that_are_not_finite_in_one_slice(name, bad, place):
    logits, where = make_case(OPTIONS[name], seed=1)
    logits = logits.at[1::2, place].set(bad)
    split, whole = both(choose, logits, where)
    np.testing.assert_array_equal(split.is_invalid, whole.is_invalid)
    is_valid = ~np.asarray(whole.is_invalid)
    assert is_valid[::2].all()
    assert is_valid[1::2].all() == (bad == -np.inf)
    np.testing.assert_array_equal(split.token_ids[is_valid], whole.token_ids[is_valid])
    assert (np.asarray(split.token_ids) < VOCAB).all()


def test_nothing_left_in_any_slice():
    logits, where = make_case(OPTIONS["greedy"])
    split, whole = both(choose, jnp.full_like(logits, -jnp.inf), where)
    assert np.asarray(split.is_invalid).all()
    np.testing.assert_array_equal(split.token_ids, whole.token_ids)


@pytest.mark.parametrize("vocab", quick([SHARDS, 4 * 5, 4 * 16, VOCAB, 4 * 1000], 4 * 5, VOCAB))
def test_draws_from_slices(vocab):
    """Whole numbers as weights: their sums have no rounding, and draws are equal to the bit."""
    rng = np.random.default_rng(vocab)
    weights = jnp.asarray(rng.integers(0, 9, (200, vocab)) + 1 * (np.arange(vocab) == 0), "float32")
    draws = jnp.asarray(rng.random((200, num_draws(vocab))), jnp.float32)
    split, whole = both(draw, weights, (draws,))
    np.testing.assert_array_equal(split, whole)
    assert len(set(np.asarray(whole))) > min(vocab, 50) / 2


def test_ids_outside_of_the_vocabulary_are_in_no_slice():
    def find(vocabulary, values, ids):
        index = vocabulary.index(ids, values.shape[1])
        return vocabulary.sum((index < values.shape[1]).astype(jnp.int32)), vocabulary.take(
            values, ids
        )

    ids = jnp.array([[-1, 0, WIDTH, VOCAB - 1, VOCAB, 2**30]])
    values = jnp.arange(1.0, VOCAB + 1)[None, :]
    num_owners, taken = over_slices(find)(values, (ids,))
    np.testing.assert_array_equal(num_owners, [[0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(taken, [[0, 1, WIDTH + 1, VOCAB, 0, 0]])


def gather(vocabulary, values):
    return vocabulary.whole(values)


def test_the_whole_is_in_the_order_of_token_ids():
    logits, _ = make_case(SamplingParams())
    np.testing.assert_array_equal(both(gather, logits, ())[0], logits)


def test_a_width_says_whether_there_are_slices():
    assert Vocabulary.of_width(WIDTH, VOCAB, AXIS) == Vocabulary(AXIS)
    assert Vocabulary.of_width(VOCAB, VOCAB, AXIS) == WHOLE  # which the axis does not divide
    assert WHOLE.is_whole
    assert not Vocabulary(AXIS).is_whole


COLLECTIVE = re.compile(
    r"= (.+?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
)


def score_few(vocabulary, logits, *where):
    return sampling_lib.choose_and_score(logits, *where, max_logprobs=2, vocabulary=vocabulary)


@pytest.mark.full
@pytest.mark.parametrize("function", [choose, score_few, probs])
def test_no_collective_carries_logits(function):
    logits, where = make_case(OPTIONS["all"])
    run = over_slices(function, SLICES if function is probs else SAME)
    shapes = COLLECTIVE.findall(run.lower(logits, where).compile().as_text())
    assert shapes
    numbers = [
        int(np.prod([int(size) for size in shape.split(",") if size]))
        for shape in re.findall(r"\w\[([\d,]*)\]", " ".join(shapes))
    ]
    assert max(numbers) < NUM_TOKENS * WIDTH  # not even of one slice
