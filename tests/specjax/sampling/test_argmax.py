"""Races decided by a bound first: the same token as the scores of all, whatever the bound."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from scipy import stats

from pallas_kernels.implementations import lowered_for
from specjax import sampling as sampling_lib
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.sampling import RowSampling, argmax, processing, row_values
from specjax.sampling.seeded_noise import (
    TARGET_TOKEN,
    gumbel_bound,
    gumbel_noise,
    token_keys,
)

LEAST_P_VALUE = 1e-6  # as in test_seeded_noise
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1, max_stop_tokens=1)
SLOW, FULL = pytest.mark.slow, pytest.mark.full
LARGE = 5003  # more than twice FEW blocks, and no multiple of a block
NUM_TOKENS = 8


def random_keys(seed, num_tokens=NUM_TOKENS):
    words = np.random.default_rng(seed).integers(0, 2**32, (num_tokens, 2))
    return jnp.asarray(words, jnp.uint32)


def logits_of(kind, vocab, seed=0, num_tokens=NUM_TOKENS):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (num_tokens, vocab)).astype(np.float32)
    if kind == "peaked":
        values *= 8
    if kind == "ties":
        values = np.round(values)
    if kind == "equal":
        values[:] = 1.5
    if kind == "masked":
        values[rng.random(values.shape) < 0.98] = -np.inf
    if kind == "last":  # of a block cut short
        values[:, -1] = 10.0
    if kind == "one_finite":
        values[:] = -np.inf
        values[np.arange(num_tokens), rng.integers(0, vocab, num_tokens)] = -3.0
    if kind == "nothing":
        values[:] = -np.inf
    if kind == "tiny":  # far from 0, so that sums round coarsely
        values = values * 1e6 - 3e8
    return values


KINDS = ["flat", "peaked", "ties", "equal", "masked", "one_finite", "nothing", "tiny"]


def is_random_of(num_tokens=NUM_TOKENS):
    """Two rows of temperature 0 among the others."""
    return jnp.asarray(np.arange(num_tokens) % 4 != 3, jnp.float32)[:, None]


@jax.jit
def race(values, keys):
    """The search of choose_tokens, every other part of it left out."""
    is_random = is_random_of(values.shape[0])
    return argmax.bounded_argmax(
        values,
        lambda part, ids: part + is_random * gumbel_noise(keys, ids),
        lambda part, ids: part + is_random * gumbel_bound(keys, ids),
    )


@jax.jit
def all_scores(values, keys):
    noise = gumbel_noise(keys, values.shape[1])
    return values + is_random_of(values.shape[0]) * noise


@pytest.mark.parametrize("vocab", quick([1, 3, 127, 128, 129, 1000, LARGE], 1, 129, LARGE))
@pytest.mark.parametrize("kind", KINDS)
def test_the_winner_is_that_of_all_scores(kind, vocab):
    for seed in range(4):
        values, keys = logits_of(kind, vocab, seed), random_keys(seed)
        scores = np.asarray(all_scores(values, keys))
        index, best = race(values, keys)
        np.testing.assert_array_equal(index, scores.argmax(axis=1))
        np.testing.assert_allclose(best, scores.max(axis=1), rtol=1e-6)


@pytest.mark.full
def test_many_small_races():
    """10,000 rows, each with the winner of all its scores."""
    values, keys = logits_of("flat", 400, num_tokens=10_000), random_keys(1, 10_000)
    scores = np.asarray(all_scores(values, keys))
    np.testing.assert_array_equal(race(values, keys)[0], scores.argmax(axis=1))


@pytest.mark.parametrize("vocab", [1000, 32_000])
@pytest.mark.parametrize("find", ["bounded", "first"])
def test_nan_and_infinity_come_first_and_touch_no_other_row(find, vocab):
    """On CPU a plain maximum of so many values drops NaN."""
    values, keys = logits_of("flat", vocab), random_keys(0)
    search = race if find == "bounded" else jax.jit(lambda x, _: argmax.first_argmax(x))
    clean, _ = search(values, keys)
    values[0, [300, 700]] = np.nan
    values[1, [900, 950]] = np.inf
    values[2, 800], values[2, 810] = np.inf, np.nan
    values[3, 999] = np.nan
    index, best = search(values, keys)
    assert index[:4].tolist() == [300, 900, 800, 999]
    assert np.all(np.isposinf(best[:4]))
    np.testing.assert_array_equal(index[4:], clean[4:])
    assert np.all(np.isfinite(best[4:]))


def looks(values, score, bound):
    """Returns how many blocks per row the search computes scores for, and the result."""
    count = 0

    def add(_):
        nonlocal count
        count += 1

    def counted(part, ids):
        jax.debug.callback(add, part[0, 0])
        return score(part, ids)

    result = jax.jit(lambda x: argmax.bounded_argmax(x, counted, bound))(values)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return count, result


@pytest.mark.full
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "masked"])
def test_a_bound_that_is_no_help_sees_every_block(kind):
    values, keys = logits_of(kind, 20 * argmax.BLOCK), random_keys(3)
    score = lambda part, ids: part + gumbel_noise(keys, ids)
    endless = lambda part, ids: jnp.where(part == -jnp.inf, part, 1e9)
    count, (index, _) = looks(jnp.asarray(values), score, endless)
    assert count == 20
    scores = values + np.asarray(gumbel_noise(keys, values.shape[1]))
    np.testing.assert_array_equal(index, scores.argmax(axis=1))


@pytest.mark.full
@pytest.mark.parametrize("slack", [0.5, 2.0, 5.0])
def test_looser_bounds_see_more_blocks_and_find_the_same(slack):
    values, keys = logits_of("flat", 20 * argmax.BLOCK), random_keys(4)
    score = lambda part, ids: part + gumbel_noise(keys, ids)
    loose = lambda part, ids: score(part, ids) + slack
    count, (index, _) = looks(jnp.asarray(values), score, loose)
    assert 1 < count <= 20
    scores = values + np.asarray(gumbel_noise(keys, values.shape[1]))
    np.testing.assert_array_equal(index, scores.argmax(axis=1))


@pytest.mark.full
def test_the_bound_of_the_noise_sees_few_blocks():
    counts = []
    for seed, kind in itertools.product(range(4), ["flat", "peaked", "equal"]):
        keys = random_keys(seed)
        score = lambda part, ids, keys=keys: part + gumbel_noise(keys, ids)
        bound = lambda part, ids, keys=keys: part + gumbel_bound(keys, ids)
        values = jnp.asarray(logits_of(kind, 100 * argmax.BLOCK, seed))
        counts.append(looks(values, score, bound)[0])
    assert np.mean(counts) < 2.5


def test_equal_scores_are_not_searched_for_the_lowest():
    score = lambda part, ids: part
    values = jnp.asarray(logits_of("equal", 20 * argmax.BLOCK))
    count, (index, _) = looks(values, score, score)
    assert count == 1
    assert index.tolist() == [0] * NUM_TOKENS


@pytest.mark.parametrize("excess", [lambda ids: ids, lambda ids: ids >= 10 * argmax.BLOCK])
@pytest.mark.parametrize("kind", ["ties", "equal"])
def test_equal_scores_seen_last_block_first_give_the_lowest(kind, excess):
    """Also where the bound of an earlier block is no more than the best score."""
    score = lambda part, ids: part
    bound = lambda part, ids: part + excess(ids)
    values = logits_of(kind, 20 * argmax.BLOCK)
    _, (index, _) = looks(jnp.asarray(values), score, bound)
    np.testing.assert_array_equal(index, values.argmax(axis=1))


@pytest.mark.parametrize("num_blocks", [0, 1, argmax.FEW, argmax.FEW + 1])
def test_scores_of_few_blocks(num_blocks):
    """One value in each of num_blocks blocks, the last, cut short, among them."""
    rng = np.random.default_rng(num_blocks)
    values = np.full((NUM_TOKENS, LARGE), -np.inf, np.float32)
    total = -(-LARGE // argmax.FEW_BLOCK)
    for row in values:
        blocks = rng.choice(total - 1, max(num_blocks - 1, 0), replace=False)
        places = argmax.FEW_BLOCK * blocks + rng.integers(0, argmax.FEW_BLOCK)
        row[[*places, LARGE - 1][:num_blocks]] = rng.integers(0, 3)
    keys = random_keys(num_blocks)
    for noise in (gumbel_noise(keys, LARGE), jnp.zeros_like(values)):
        index, best = argmax.sparse_argmax(
            jnp.asarray(values),
            lambda part, ids, noise=noise: part + jnp.take_along_axis(noise, ids, axis=1),
            lambda values: (jnp.full(NUM_TOKENS, -7), jnp.zeros(NUM_TOKENS)),
        )
        scores = values + np.asarray(noise)
        expected = scores.argmax(axis=1)
        if num_blocks > argmax.FEW:
            expected = np.full(NUM_TOKENS, -7)  # `otherwise` was asked
        np.testing.assert_array_equal(index, expected)
        if 0 < num_blocks <= argmax.FEW:
            np.testing.assert_array_equal(best, scores.max(axis=1))


def cut_inputs(top_k=0, top_p=1.0, min_p=0.0):
    of = lambda value, dtype: jnp.full(NUM_TOKENS, value, dtype)
    return of(min_p, jnp.float32), of(top_k, jnp.int32), of(top_p, jnp.float32)


cut_of_all = jax.jit(processing._cut)
cut_of_few = jax.jit(processing._cut_few)
cut_few_first = jax.jit(processing._cut_few_first)


def scaled_of(kind, seed=0):
    values = logits_of(kind, LARGE, seed)
    return jnp.asarray(values - values.max(axis=1, keepdims=True))


FEW_KINDS = ["flat", "peaked", "ties", "equal", "masked", "last"]


@pytest.mark.parametrize("kind", quick(FEW_KINDS, "flat", "ties"))
@pytest.mark.parametrize("top_k", [1, 50, 64, 65, 300, 2047, 2048, 2049, 5002, 5003])
def test_top_k_of_the_few_is_that_of_all(kind, top_k):
    scaled = scaled_of(kind)
    expected = cut_of_all(scaled, *cut_inputs(top_k))
    cut, is_enough = cut_of_few(scaled, *cut_inputs(top_k))
    np.testing.assert_array_equal(cut[is_enough], expected[is_enough])
    np.testing.assert_array_equal(cut_few_first(scaled, *cut_inputs(top_k)), expected)
    assert np.all(is_enough) or top_k > argmax.FEW


@pytest.mark.parametrize("kind", quick(FEW_KINDS, "flat", "ties"))
@pytest.mark.parametrize("top_k", quick([0, 40], 40))
@pytest.mark.parametrize("min_p", [0.0, 0.01])
def test_top_p_of_the_few_is_that_of_all(kind, top_k, min_p):
    scaled = scaled_of(kind)
    weights = np.exp(np.asarray(scaled, np.float64))
    for top_p in (1e-6, 0.3, 0.95, 0.9999):
        inputs = cut_inputs(top_k, top_p, min_p)
        expected = np.asarray(cut_of_all(scaled, *inputs))
        actual = np.asarray(cut_few_first(scaled, *inputs))
        # Sums in another order: a token may fall on the other side if its mass is nothing.
        between = [
            weights[row][
                (scaled[row] >= min(actual[row], expected[row]))
                & (scaled[row] < max(actual[row], expected[row]))
            ].sum()
            for row in range(NUM_TOKENS)
        ]
        assert np.all(np.array(between) <= 1e-5 * weights.sum(axis=1))


def test_a_nucleus_is_in_the_few_or_not():
    """What is peaked is, what is flat is not, and each token is decided alone."""
    inputs = cut_inputs(top_p=0.9)
    _, of_flat = cut_of_few(scaled_of("flat"), *inputs)
    _, of_peaked = cut_of_few(scaled_of("peaked"), *inputs)
    assert not np.any(of_flat)
    assert np.all(of_peaked)
    mixed = jnp.concatenate([scaled_of("flat")[:4], scaled_of("peaked")[4:]])
    np.testing.assert_array_equal(
        cut_few_first(mixed, *inputs)[4:], cut_of_few(mixed, *inputs)[0][4:]
    )
    np.testing.assert_allclose(cut_few_first(mixed, *inputs), cut_of_all(mixed, *inputs), atol=1e-4)


@pytest.mark.parametrize("vocab", [LARGE, pytest.param(32_000, marks=SLOW)])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "masked"])
@pytest.mark.parametrize(
    "num_rows", [pytest.param(1, marks=FULL), 3, pytest.param(NUM_TOKENS, marks=FULL)]
)
def test_the_cut_of_a_row_is_the_same_bits_among_other_rows(kind, num_rows, vocab):
    values = logits_of(kind, vocab, num_tokens=2 * NUM_TOKENS)
    scaled = jnp.asarray(values - values.max(axis=1, keepdims=True))
    sizes = [
        (0, 0.9, 0.0),
        (50, 1.0, 0.0),
        (0, 1.0, 0.01),
        (40, 0.8, 0.01),
        (0, 1.0, 0),
    ]
    top_k, top_p, min_p = (
        jnp.asarray(np.resize(column, len(values)), dtype)
        for column, dtype in zip(zip(*sizes), (jnp.int32, jnp.float32, jnp.float32))
    )
    inputs = (scaled, min_p, top_k, top_p)
    for search in (cut_of_few, cut_few_first):
        of_all = jax.tree.leaves(search(*inputs))
        for start in range(0, len(values) - num_rows + 1, num_rows):
            part = slice(start, start + num_rows)
            of_part = jax.tree.leaves(search(*(x[part] for x in inputs)))
            for ours, theirs in zip(of_part, of_all, strict=True):
                ours, theirs = np.asarray(ours), np.asarray(theirs[part])
                assert ours.tobytes() == theirs.tobytes()


def rows_of(*params):
    fields = [
        row_values(
            one,
            prompt_length=1,
            eos_token_ids=(),
            seed=7 + index,
            engine_config=ENGINE,
        )
        for index, one in enumerate(params)
    ]
    return RowSampling(
        **{name: jnp.asarray(np.stack([f[name] for f in fields])) for name in fields[0]}
    )


choose = jax.jit(sampling_lib.choose_tokens)
process = jax.jit(sampling_lib.process_logits)

FILTERS = [
    [{}],
    [{"temperature": 0.7}, {"temperature": 0}, {"temperature": 2.0}, {}],
    [{"top_k": 50}],
    [{"top_p": 0.9}],
    [{"top_k": 20, "top_p": 0.8, "min_p": 0.01}, {"top_k": 3}],
    [{"top_k": 20}, {}, {"temperature": 0}, {"top_p": 0.5}],
]


@pytest.mark.parametrize("vocab", [pytest.param(64, marks=SLOW), LARGE])
@pytest.mark.parametrize("kind", quick(["flat", "peaked", "ties", "masked"], "flat", "masked"))
@pytest.mark.parametrize("features", quick(FILTERS, FILTERS[1], FILTERS[4]))
def test_choices_are_the_winners_of_processed_logits_and_noise(kind, features, vocab):
    params = [SamplingParams(**features[i % len(features)]) for i in range(4)]
    sampling = rows_of(*params)
    row = jnp.arange(NUM_TOKENS) % 4
    history = jnp.zeros((4, 4), jnp.int32)
    temperature = np.asarray(sampling.temperature)[np.asarray(row)]
    for seed in range(3):
        logits = logits_of(kind, vocab, seed)
        logits[:, seed] = 0.25  # whatever the mask left
        positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32) + 100 * seed
        args = (jnp.asarray(logits), sampling, row, positions, history)
        keys = token_keys(sampling.seeds[row], positions + 1, TARGET_TOKEN)
        noise = np.asarray(gumbel_noise(keys, vocab)) * (temperature > 0)[:, None]
        expected = (np.asarray(process(*args)) + noise).argmax(axis=1)
        choice = choose(*args)
        np.testing.assert_array_equal(choice.token_ids, expected)
        assert not np.any(choice.is_invalid)


# Each as a batch of its own too, since a batch without filters takes a shorter way.
BRANCH_BATCHES = {
    "mixed": [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    ],
    "greedy and temperatures": [{"temperature": 0}, {}, {"temperature": 0.7}],
}


@pytest.mark.full
@pytest.mark.parametrize("batch", ["mixed", pytest.param("greedy and temperatures", marks=SLOW)])
@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_the_branch_of_accelerators_chooses_the_same_tokens(monkeypatch, batch, kind):
    """What runs on GPU and TPU, run here: every score, and cuts bisected over all."""
    features = BRANCH_BATCHES[batch]
    params = [SamplingParams(**each) for each in features]
    row = jnp.arange(24, dtype=jnp.int32) % len(params)
    logits = logits_of(kind, LARGE, num_tokens=24)
    logits[7, 4000] = np.nan
    history = jnp.zeros((len(params), 4), jnp.int32)
    args = (jnp.asarray(logits), rows_of(*params), row, row + 100, history)
    here = choose(*args)
    for module, of_cpu in ((argmax, "_argmax_of_blocks"), (processing, "_cut_few_first")):
        monkeypatch.setattr(module, of_cpu, None)  # which nothing calls
    with lowered_for("gpu"):
        # Another function than `choose` jits, so that it is traced anew.
        there = jax.jit(lambda *args: sampling_lib.choose_tokens(*args))(*args)
    assert np.flatnonzero(there.is_invalid).tolist() == [7]
    np.testing.assert_array_equal(there.is_invalid, here.is_invalid)
    valid = np.flatnonzero(~np.asarray(here.is_invalid))
    np.testing.assert_array_equal(there.token_ids[valid], here.token_ids[valid])
    assert 0 <= there.token_ids[7] < LARGE


@pytest.mark.full
@pytest.mark.parametrize(
    "features",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "bad_token_ids": (11,)},
        {"temperature": 0, "allowed_token_ids": (3,)},
        {},
        {"top_k": 1},
        {"top_k": 20},
        {"repetition_penalty": 1.1},
    ],
    ids=lambda features: "-".join(features) or "random",
)
def test_bad_logits_of_a_large_vocabulary_are_flagged(features):
    params = [SamplingParams(**features)] * NUM_TOKENS
    logits = logits_of("flat", LARGE)
    row = jnp.arange(NUM_TOKENS)
    rest = (rows_of(*params), row, row, jnp.zeros((NUM_TOKENS, 16), jnp.int32))
    clean = choose(jnp.asarray(logits), *rest)
    logits[1, 4000], logits[3, 0], logits[4, LARGE - 1] = np.nan, np.inf, np.nan
    logits[6] = -np.inf
    choice = choose(jnp.asarray(logits), *rest)
    bad = [1, 3, 4, 6]
    assert np.flatnonzero(choice.is_invalid).tolist() == bad
    for place in (3, 1500, 4000, LARGE - 1):
        one = logits_of("flat", LARGE)
        one[2, place] = np.nan
        flagged = choose(jnp.asarray(one), *rest).is_invalid
        assert np.flatnonzero(flagged).tolist() == [2], place
    good = [0, 2, 5, 7]
    np.testing.assert_array_equal(
        choice.token_ids[jnp.array(good)], clean.token_ids[jnp.array(good)]
    )
    assert np.all((choice.token_ids >= 0) & (choice.token_ids < LARGE))
    processed = process(jnp.asarray(logits), *rest)
    probs = sampling_lib.target_probs(processed, rest[0], row)
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("features", "vocab", "chunk"),
    [
        ({}, 300, 20_000),
        ({"top_k": 20}, LARGE, 2_000),
        pytest.param({"top_p": 0.9}, LARGE, 2_000, marks=SLOW),
    ],
)
def test_choices_follow_their_distribution(features, vocab, chunk):
    """40,000 draws, a race among blocks of logits and among what a filter left."""
    logits = logits_of("peaked", vocab, num_tokens=1)
    sampling = rows_of(SamplingParams(**features))
    row = jnp.zeros(chunk, jnp.int32)
    history = jnp.zeros((1, 4), jnp.int32)
    args = (jnp.asarray(logits), sampling, row[:1], row[:1], history)
    probs = np.asarray(jax.nn.softmax(process(*args), axis=1), np.float64)[0]
    counts = np.zeros(vocab)
    tiled = jnp.tile(args[0], (chunk, 1))
    processed = jnp.tile(process(*args), (chunk, 1))
    for start in range(0, 40_000, chunk):
        positions = start + jnp.arange(chunk, dtype=jnp.int32)
        given = {"processed": processed} if features else {}
        choice = choose(tiled, sampling, row, positions, history, **given)
        counts += np.bincount(choice.token_ids, minlength=vocab)
    assert np.all(counts[probs == 0] == 0)
    is_common = 40_000 * probs >= 5
    grouped = lambda of: np.append(of[is_common], of[~is_common].sum() + 1e-9)
    expected = grouped(40_000 * probs)
    expected *= 40_000 / expected.sum()
    observed = grouped(counts)
    observed *= 40_000 / observed.sum()
    assert stats.chisquare(observed, expected).pvalue > LEAST_P_VALUE


MORE = 3 * argmax.BLOCK + 7


@pytest.mark.full
@pytest.mark.parametrize("size", quick([1, 5, argmax.BLOCK, MORE], 1, MORE))
@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
def test_one_pass_finds_what_blocks_find(size, special):
    rng = np.random.default_rng(size)
    values = np.round(rng.normal(0, 2, (6, size))).astype(np.float32)  # with ties
    values[::2, rng.integers(size)] = special
    values[5] = -np.inf
    index, best = argmax._argmax_in_one_pass(jnp.asarray(values), argmax.as_it_is)
    expected, largest = argmax._argmax_of_blocks(jnp.asarray(values), argmax.as_it_is)
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(best, largest)
    counted = np.where(np.isnan(values), np.inf, values)
    np.testing.assert_array_equal(index, counted.argmax(axis=1))


@pytest.mark.full
@pytest.mark.parametrize("ways", quick([2, 8, 16], 8))
@pytest.mark.parametrize(("kind", "most_passes"), [("flat", 9), ("ties", 11)])
def test_a_search_finds_the_level_in_few_passes(monkeypatch, ways, kind, most_passes):
    values = np.random.default_rng(0).normal(0, 3, (3, 4000)).astype(np.float32)
    values -= values.max(axis=1, keepdims=True)
    if kind == "ties":
        values = np.round(values)
    passes, narrowed = [], processing._Search._narrowed
    monkeypatch.setattr(
        processing._Search, "_narrowed", lambda *search: passes.append(1) or narrowed(*search)
    )
    top_k = jnp.array([1, 50, 3999])
    with jax.disable_jit():  # each pass is a call then
        cut = processing._top_k_cut(
            jnp.asarray(values), top_k, jnp.full(3, -jnp.inf), processing.WHOLE, ways
        )
    np.testing.assert_array_equal(cut, -np.sort(-values)[np.arange(3), top_k - 1])
    assert len(passes) <= most_passes or ways == 2
    assert len(passes) > 2
