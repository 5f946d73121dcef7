"""Siblings that a drafter draws: the law that verification is told of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.accept import accept_by_rejection, accept_by_traversal
from specjax.drafters.draws import Siblings, draw_siblings, noise_keys
from specjax.sampling import RowSampling, row_values, target_probs
from specjax.sampling.processing import process_logits
from specjax.sampling.seeded_noise import DRAFT, gumbel_noise, token_keys
from specjax.trees.static_shapes import from_widths
from specjax.types import DELTA, REJECTION, SEEDED, Proposal, is_by_law

ROWS, VOCAB = 100_000, 6
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)


def rows_of(params, rows):
    """Returns rows of these parameters, or of a list of them in turn."""
    each = params if isinstance(params, list) else [params]
    values = [
        row_values(one, prompt_length=1, eos_token_ids=(), seed=0, engine_config=ENGINE)
        for one in each
    ]
    turn = np.arange(rows) % len(each)
    sampling = {
        name: jnp.asarray(np.stack([value[name] for value in values])[turn]) for name in values[0]
    }
    seeds = np.random.default_rng(0).integers(0, 2**32, (rows, 2), dtype=np.uint32)
    return RowSampling(**sampling | {"seeds": jnp.asarray(seeds)})


def draw(logits, params, rule, count, rows, keeps_probs=True, by=draw_siblings):
    """Returns the Siblings of one law in all rows, or of f32[rows, vocab].

    Args:
      rule: of all rows, or i32[rows].
      by: `draw_siblings`, or what stands in for it.
    """
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    logits = jnp.broadcast_to(logits, (rows, logits.shape[1]))
    rules = jnp.broadcast_to(jnp.asarray(rule, jnp.int32), rows)
    return _draw(logits, rows_of(params, rows), rules, count, keeps_probs, by)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _draw(logits, sampling, rules, count, keeps_probs, by):
    rows = logits.shape[0]
    row = jnp.arange(rows)
    at = jnp.full(rows, 3)
    keys = noise_keys(sampling, rules, row, at, at, jnp.zeros(rows, jnp.int32))
    return by(
        logits,
        sampling,
        row,
        at,
        jnp.zeros((rows, 8), jnp.int32),
        rules=rules,
        keys=keys,
        count=count,
        keeps_probs=keeps_probs,
    )


def draw_many(logits, params, rule, count, by=draw_siblings):
    """Returns the Siblings of ROWS nodes of one row, each with a key of its own."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (ROWS, len(logits)))
    return _draw_many(logits, rows_of(params, 1), jnp.full(1, rule), count, by)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _draw_many(logits, sampling, rules, count, by):
    one, at = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, 3)
    seeds = jnp.stack([jnp.arange(ROWS, dtype=jnp.uint32), one.astype(jnp.uint32)], 1)
    return by(
        logits,
        sampling,
        one,
        at,
        jnp.zeros((1, 8), jnp.int32),
        rules=rules,
        keys=token_keys(seeds, at, DRAFT),
        count=count,
        keeps_probs=True,
    )


def obvious_siblings(
    logits, sampling, row_ids, positions, history, *, rules, keys, count, keeps_probs
):
    """`draw_siblings` as it is defined: all noise, and one maximum after the other."""
    processed = process_logits(logits, sampling, row_ids, positions, history)
    weights, probs = processed, None
    if keeps_probs:
        probs = target_probs(processed, sampling, row_ids)
        weights = jnp.where(is_by_law(rules)[:, None], jnp.log(probs), processed)
    noise = gumbel_noise(keys, logits.shape[1])
    is_random = (sampling.temperature > 0) & (rules != DELTA)
    scores = jnp.where(is_random[:, None], weights + noise, processed)
    row, found = jnp.arange(logits.shape[0]), []
    for _ in range(count):
        best = jnp.argmax(scores, axis=1)
        is_out = jnp.max(scores, axis=1) == -jnp.inf
        best = jnp.where(is_out, jnp.argmax(noise, axis=1), best)
        found.append(best)
        scores = scores.at[row, best].set(-jnp.inf)
        noise = noise.at[row, best].set(-jnp.inf)
    return Siblings(jnp.stack(found, axis=1), probs)


@jax.jit
def probs_of_a_row(logits, sampling):
    row_ids = jnp.zeros(1, jnp.int32)
    where = sampling, row_ids, jnp.full(1, 3), jnp.zeros((1, 8), jnp.int32)
    return target_probs(process_logits(logits, *where), sampling, row_ids)


def processed_probs(logits, params):
    return probs_of_a_row(jnp.asarray(logits, jnp.float32)[None], rows_of(params, 1))[0]


def standard_errors(rule, temperature, by=draw_siblings):
    """Returns how far the first token's frequencies are from the target, of two siblings drawn."""
    params = SamplingParams(temperature=temperature)
    draft = [10.0, 1.0, 0.0, -1.0, -2.0, -3.0]
    target = processed_probs([3.0, 2.95, 2.95, -9.0, -9.0, -9.0], params)
    siblings = draw_many(draft, params, REJECTION, 2, by)
    tree = from_widths((2,)).draft_tree(ROWS)
    probs = jnp.stack([siblings.probs, jnp.zeros_like(siblings.probs)], axis=1)
    proposal = Proposal(
        token_ids=siblings.token_ids,
        num_tokens=jnp.full(ROWS, 2),
        probs=probs,
        tree=tree,
    )
    noise = jax.random.uniform(jax.random.key(1), (ROWS, 3, 2), minval=1e-7)
    out = jax.jit(rule)(noise, proposal, jnp.tile(target[None, None], (ROWS, 3, 1)))
    counts = np.bincount(np.asarray(out.token_ids[:, 0]), minlength=VOCAB)
    error = np.sqrt(np.asarray(target) / ROWS) + 2e-7
    return np.max(np.abs(counts / ROWS - np.asarray(target)) / error)


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.1, marks=pytest.mark.full)])
@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_traversal])
def test_what_is_drawn_is_verified_exactly(rule, temperature):
    """At a low temperature all but one probability underflow, the runner-up's too."""
    assert standard_errors(rule, temperature) < 5


def most_likely(*args, count, **options):
    siblings = draw_siblings(*args, count=count, **options)
    return siblings._replace(token_ids=jax.lax.top_k(siblings.probs, count)[1])


def ranked_after_drawing(*args, **options):
    siblings = draw_siblings(*args, **options)
    chances = jnp.take_along_axis(siblings.probs, siblings.token_ids, axis=1)
    order = jnp.argsort(chances, axis=1)
    return siblings._replace(token_ids=jnp.take_along_axis(siblings.token_ids, order, axis=1))


def of_another_temperature(*args, **options):
    siblings = draw_siblings(*args, **options)
    return siblings._replace(probs=jnp.sqrt(siblings.probs))


@pytest.mark.full
@pytest.mark.parametrize("mistake", [most_likely, ranked_after_drawing, of_another_temperature])
def test_a_draw_that_is_not_what_it_says_is_noticed(mistake):
    assert standard_errors(accept_by_rejection, 1.0, mistake) > 10


@pytest.mark.parametrize("rule", [REJECTION, SEEDED])
@pytest.mark.parametrize(
    "params, is_kept",
    [
        (SamplingParams(), [1, 1, 1, 1, 1, 1]),
        (SamplingParams(temperature=0.5), [1, 1, 1, 1, 1, 1]),
        (SamplingParams(top_k=3), [1, 1, 1, 0, 0, 0]),
        (SamplingParams(top_p=0.85), [1, 1, 1, 1, 0, 0]),
        (SamplingParams(top_k=4, top_p=0.7, temperature=2), [1, 1, 1, 0, 0, 0]),
    ],
    ids=["all", "sharp", "top_k", "top_p", "both"],
)
def test_pairs_have_the_law_of_draws_without_replacement(params, is_kept, rule):
    """The joint law of two siblings, within 5 standard errors of 100,000 rows."""
    law = np.array([0.35, 0.25, 0.15, 0.12, 0.08, 0.05])
    siblings = draw_many(np.log(law), params, rule, 2)
    law = law ** (1 / params.filled({}).temperature) * is_kept
    law /= law.sum()
    pairs = law[:, None] * law[None, :] / (1 - law[:, None])
    np.fill_diagonal(pairs, 0)
    first, second = np.asarray(siblings.token_ids).T
    counts = np.zeros_like(pairs)
    np.add.at(counts, (first, second), 1)
    assert not counts[pairs == 0].any()
    assert (np.abs(counts / ROWS - pairs) <= 5 * np.sqrt(pairs / ROWS)).all()
    np.testing.assert_allclose(siblings.probs[0], law, atol=1e-6)


def random_logits(kind, rows, vocab):
    """Returns f32[rows, vocab]: all tokens likely, many equal, few possible, or hardly any."""
    rng = np.random.default_rng(vocab)
    logits = (3 * rng.normal(size=(rows, vocab))).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "few":
        logits[rng.uniform(size=logits.shape) > 20 / vocab] = -np.inf
    if kind == "hardly any":
        logits[:] = -np.inf
        for row, num_left in zip(logits, rng.integers(1, 4, rows), strict=True):
            row[rng.integers(vocab, size=num_left)] = rng.normal(size=num_left)
    return logits


MIXED_PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_k=2),
    SamplingParams(temperature=0.05),
    SamplingParams(top_p=0.9, temperature=1.5),
    SamplingParams(top_k=40, min_p=0.01),
    SamplingParams(logit_bias={3: 5.0}),
]
RULES = [DELTA, SEEDED, REJECTION]  # 7 by 3: every row has a pair of its own


KINDS = ["likely", "ties", "few", "hardly any"]


@pytest.mark.parametrize(
    ("kind", "keeps_probs"),
    [
        ("ties", True),
        ("likely", False),
        *(
            pytest.param(kind, keeps_probs, marks=pytest.mark.full)
            for kind in KINDS
            for keeps_probs in (True, False)
            if (kind, keeps_probs) not in (("ties", True), ("likely", False))
        ),
    ],
)
@pytest.mark.parametrize(
    "vocab",
    [7, *(pytest.param(v, marks=pytest.mark.slow) for v in (300, 4_097, 10_000))],
)
def test_siblings_are_those_of_the_definition(kind, vocab, keeps_probs):
    """Rows of every rule and filter in one batch, and batches without filters."""
    rows = 63
    logits = random_logits(kind, rows, vocab)
    some_rules = np.resize(RULES if keeps_probs else RULES[:2], rows)
    for params in (MIXED_PARAMS, [SamplingParams(), SamplingParams(temperature=0.7)]):
        arguments = logits, params, some_rules, 3, rows, keeps_probs
        expected = draw(*arguments, by=obvious_siblings)
        siblings = draw(*arguments)
        assert np.array_equal(siblings.token_ids, expected.token_ids)
        ordered = np.sort(siblings.token_ids, axis=1)
        assert (np.diff(ordered, axis=1) > 0).all()
        assert ordered.max() < vocab
        if keeps_probs:
            assert np.array_equal(siblings.probs, expected.probs)


@pytest.mark.full
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_of_no_numbers_changes_no_other(value):
    logits = random_logits("likely", 9, 5_000)
    clean = draw(logits, MIXED_PARAMS, np.resize(RULES, 9), 3, 9)
    logits[[0, 4]] = value
    spoiled = draw(logits, MIXED_PARAMS, np.resize(RULES, 9), 3, 9)
    others = np.setdiff1d(np.arange(9), [0, 4])
    assert np.array_equal(clean.token_ids[others], spoiled.token_ids[others])
    assert ((spoiled.token_ids >= 0) & (spoiled.token_ids < 5_000)).all()


@pytest.mark.full
@pytest.mark.parametrize("vocab", [pytest.param(VOCAB, marks=pytest.mark.slow), 5_000])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=4, top_p=0.9)],
    ids=["all", "filtered"],
)
def test_seeded_rows_draw_the_same_whoever_keeps_probabilities(params, vocab):
    logits = random_logits("likely", 200, vocab)
    kept, lean = (draw(logits, params, SEEDED, 3, 200, keeps) for keeps in (True, False))
    assert np.array_equal(kept.token_ids, lean.token_ids)
    assert lean.probs is None


def test_rows_of_a_mixed_batch_draw_as_alone():
    logits = random_logits("likely", 60, 300)
    mixed = draw(logits, SamplingParams(), np.resize(RULES, 60), 3, 60)
    for place, rule in enumerate(RULES):
        alone = draw(logits, SamplingParams(), rule, 3, 60)
        assert np.array_equal(mixed.token_ids[place::3], alone.token_ids[place::3])
    likeliest = np.argsort(-logits, axis=1)[::3, :3]
    assert np.array_equal(mixed.token_ids[::3], likeliest)


def test_what_is_left_without_probability_is_drawn_evenly():
    logits = [0.0, -np.inf, -np.inf, -np.inf]
    siblings = draw_many(logits, SamplingParams(), REJECTION, 2)
    assert (siblings.token_ids[:, 0] == 0).all()
    share = np.bincount(np.asarray(siblings.token_ids[:, 1]), minlength=4) / ROWS
    assert np.abs(share - np.array([0, 1, 1, 1]) / 3).max() < 0.008  # 5 standard errors


@pytest.mark.parametrize("rule", [DELTA, SEEDED])
def test_certain_draws_are_the_likeliest_in_order(rule):
    temperature = 1 if rule == DELTA else 0
    params = SamplingParams(temperature=temperature)
    siblings = draw([1.0, 3.0, 2.0, 0.0], params, rule, 3, rows=4)
    assert siblings.token_ids.tolist() == [[1, 2, 0]] * 4


def test_keys_differ_by_node_and_step_under_rules_by_law():
    sampling = rows_of(SamplingParams(), 1)
    one = jnp.zeros(1, jnp.int32)
    keys = [
        tuple(np.asarray(noise_keys(sampling, one + rule, one, one + p, one + r, one + n))[0])
        for rule, p, r, n in [
            (REJECTION, 5, 4, 1),
            (REJECTION, 5, 4, 2),
            (REJECTION, 5, 5, 1),
            (SEEDED, 5, 4, 1),
            (SEEDED, 5, 4, 2),
        ]
    ]
    assert len(set(keys)) == 4
    assert keys[3] == keys[4]  # shared with the target, whatever the node
