"""Tokens drawn from weights: the exact law over vocabularies of a model's size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.accept import drawing, num_draws
from specjax.decode.accept.drawing import WAYS, column_sums, draw_token, draw_way
from specjax.decode.rules import rule_noise
from specjax.sampling.seeded_noise import uniforms

NUM_WORDS = 2**32
LAW_TOLERANCE = 1e-6


def weights_of(name: str, vocab: int) -> np.ndarray:
    """Returns f32[vocab] of sum 1, up to rounding."""
    rng = np.random.default_rng(0)
    weights = {
        "even": lambda: np.ones(vocab),
        "peaked": lambda: np.exp(4 * rng.normal(size=vocab)),
        "one of two": lambda: rng.integers(2, size=vocab).astype(float),
    }[name]()
    return (weights / weights.sum()).astype(np.float32)


def unit(words):
    """Returns the uniform draw that random words f32[n] make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.sampling.seeded_noise.random_bits", lambda *_: words)
        patch.setattr("specjax.sampling.seeded_noise.token_keys", lambda *_: None)
        return uniforms(None, None, 0, 1)


@functools.partial(jax.jit, static_argnums=3)
def _count(weights, ranks, rank, num_halvings):
    """Returns the last word that draws a way of at most this rank, u32[n]; by bisection."""

    def is_below(word):
        way = draw_way(unit(word), weights)
        return jnp.take_along_axis(ranks, way[:, None], axis=1)[:, 0] <= rank

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        holds = is_below(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    first = jnp.zeros(len(rank), jnp.uint32)
    last = jnp.full(len(rank), NUM_WORDS - 1, jnp.uint32)
    low, _ = jax.lax.fori_loop(0, num_halvings, halve, (first, last))
    return low, is_below(first), is_below(last)


def way_probs(weights: np.ndarray) -> np.ndarray:
    """Returns how many of all words draw each way, over their number, f64[n, ways]."""
    rows, ways = weights.shape
    ranks = np.argsort(np.argsort(weights, axis=1, kind="stable"), axis=1)
    rank = np.tile(np.arange(ways), rows)
    low, has_first, has_all = map(
        np.asarray,
        _count(np.repeat(weights, ways, axis=0), np.repeat(ranks, ways, axis=0), rank, 32),
    )
    words = np.where(has_first, low.astype(float) + 1, 0)
    words = np.where(has_all, NUM_WORDS, words).reshape(rows, ways)
    probs = np.diff(words, axis=1, prepend=0) / NUM_WORDS
    return np.take_along_axis(probs, ranks, axis=1)


def exact_law(weights: np.ndarray) -> np.ndarray:
    """Returns the probability of every token over all words of all draws, f64[vocab]."""
    levels = jax.jit(lambda row: column_sums(row))(weights[None])
    law = np.ones(1)
    for level in levels[-2::-1]:
        columns = np.asarray(drawing._in_columns(level))[0]  # [ways, columns]
        law = (way_probs(columns.T).T * law[None, :]).reshape(-1)
        assert not law[level.shape[1] :].any()
        law = law[: level.shape[1]]
    return law


@pytest.mark.parametrize("vocab", [32_000, pytest.param(128_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["even", "peaked"])
def test_the_law_at_a_vocabulary_of_a_models_size(name, vocab, say):
    weights = weights_of(name, vocab)
    law, target = exact_law(weights), weights.astype(float)
    target /= target.sum()
    gap = np.abs(law - target).sum() / 2
    say(f"{name}, {vocab}: total variation {gap:.1e}")
    assert law.sum() == pytest.approx(1, abs=1e-12)
    assert gap < LAW_TOLERANCE
    # Every token that one of the draws can tell from nothing has its chance.
    assert np.all(law[target > 1e-9] > 0)


def test_the_law_of_tokens_without_weight():
    weights = weights_of("one of two", 5_000)
    law = exact_law(weights)
    assert not law[weights == 0].any()
    assert np.abs(law - weights / weights.sum(dtype=float)).sum() / 2 < LAW_TOLERANCE


@pytest.mark.parametrize("vocab", [1, 2, 16, 17, 300, 5_000])
def test_a_token_is_the_way_of_ways(vocab):
    """Draw by draw, from sums by numpy of what is left."""
    rng = np.random.default_rng(vocab)
    weights = rng.dirichlet(np.full(vocab, 0.1), 200).astype(np.float32)
    draws = rng.uniform(size=(200, num_draws(vocab))).astype(np.float32)
    tokens = np.asarray(jax.jit(draw_token)(draws, weights))
    sizes = [vocab]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // WAYS))
    part_of = [np.arange(vocab)]  # by level, the part of that level a token belongs to
    for columns in sizes[1:]:
        part_of.append(part_of[-1] % columns)
    num_checked = 0
    for row, token in enumerate(tokens):
        left = np.ones(vocab, bool)
        is_near = False
        for draw, part in zip(draws[row], part_of[-2::-1], strict=True):
            parts, which = np.unique(part[left], return_inverse=True)
            sums = np.bincount(which, weights[row, left].astype(float))
            order = np.argsort(sums, kind="stable")
            cumulative = np.cumsum(sums[order])
            at = np.searchsorted(cumulative, draw * cumulative[-1], side="right")
            # Two ways of adding up may differ at an end.
            is_near |= np.abs(cumulative / cumulative[-1] - draw).min() < 1e-5
            left &= part == parts[order[at]]
        assert is_near or np.flatnonzero(left).tolist() == [token]
        num_checked += not is_near
    assert num_checked > 190


def test_a_small_weight_comes_first():
    weights = jnp.tile(jnp.array([0.0, 2.0, 0.0, 1.0, 1.0, 0.0]), (6, 1))
    draws = jnp.array([1e-30, 0.24, 0.26, 0.49, 0.51, 0.9999999])[:, None]
    assert draw_token(draws, weights).tolist() == [3, 3, 4, 4, 1, 1]


@pytest.mark.parametrize("value", [1e-38, 2.0**-33, 0.5, 1 - 2.0**-24])
def test_never_draws_a_token_without_weight(value):
    rng = np.random.default_rng(0)
    vocab, rows = 8192, 512
    weights = np.zeros((rows, vocab), np.float32)
    for row in weights:
        few = rng.integers(1, 400)
        row[rng.permutation(vocab)[:few]] = rng.dirichlet(np.full(few, 0.1))
    weights *= 10.0 ** rng.integers(-20, 20, (rows, 1))
    draws = np.full((rows, num_draws(vocab)), value, np.float32)
    drawn = np.asarray(jax.jit(draw_token)(draws, weights))
    assert np.all(weights[np.arange(rows), drawn] > 0)


def test_what_is_no_weight_draws_a_token_all_the_same():
    for value in (np.nan, np.inf, 0.0):
        weights = np.full((4, 300), 1.0, np.float32)
        weights[1], weights[2, 7], weights[3, 250:] = value, value, value
        draws = np.random.default_rng(0).uniform(size=(4, num_draws(300)))
        drawn = np.asarray(jax.jit(draw_token)(jnp.asarray(draws, jnp.float32), weights))
        assert np.all((drawn >= 0) & (drawn < 300))


def test_noise_belongs_to_seed_root_role_and_node():
    """Nodes and vocabularies that a step adds change no number of the others."""
    noise_of = jax.jit(rule_noise, static_argnums=(2, 3))
    seeds = jnp.array([[1, 2], [3, 4]], jnp.uint32)
    roots = jnp.array([5, 6])
    noise = np.asarray(noise_of(seeds, roots, 4, 128_000))
    assert noise.shape == (2, 4, 1 + num_draws(128_000)) == (2, 4, 6)
    assert len(np.unique(noise)) == noise.size
    fewer = np.asarray(noise_of(seeds[1:], roots[1:], 3, 32_000))
    assert np.array_equal(fewer[0], noise[1, :3, : fewer.shape[2]])
    later = np.asarray(noise_of(seeds, roots + 1, 4, 128_000))
    assert not np.isin(later, noise).any()
