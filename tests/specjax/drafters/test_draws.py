"""Siblings that a drafter draws: the law that verification is told of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import EngineConfig, SamplingParams
from specjax.decode.accept import accept_by_rejection, accept_by_traversal
from specjax.drafters.draws import draw_siblings, noise_keys
from specjax.sampling import RowSampling, row_values, target_probs
from specjax.sampling.processing import process_logits
from specjax.trees.static_shapes import from_widths
from specjax.types import DELTA, REJECTION, SEEDED, Proposal

ROWS, VOCAB = 4_000, 6
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)


def rows_of(params, rows=ROWS):
    values = row_values(
        params, prompt_length=1, eos_token_ids=(), seed=0, engine_config=ENGINE
    )
    sampling = {
        name: jnp.asarray(np.repeat(np.asarray(value)[None], rows, axis=0))
        for name, value in values.items()
    }
    seeds = np.random.default_rng(0).integers(0, 2**32, (rows, 2), dtype=np.uint32)
    return RowSampling(**sampling | {"seeds": jnp.asarray(seeds)})


def draw(logits, params, rule, count, rows=ROWS):
    """Returns Siblings, and the noise keys of the rows' roots."""
    sampling = rows_of(params, rows)
    row = jnp.arange(rows)
    at = jnp.full(rows, 3)
    rules = jnp.full(rows, rule)
    keys = noise_keys(sampling, rules, row, at, at, jnp.zeros(rows, jnp.int32))
    return draw_siblings(
        jnp.tile(jnp.asarray(logits, jnp.float32)[None], (rows, 1)),
        sampling,
        row,
        at,
        jnp.zeros((rows, 8), jnp.int32),
        rules=rules,
        keys=keys,
        count=count,
        keeps_probs=True,
    )


def processed_probs(logits, params):
    sampling = rows_of(params, 1)
    where = (
        sampling,
        jnp.zeros(1, jnp.int32),
        jnp.full(1, 3),
        jnp.zeros((1, 8), jnp.int32),
    )
    processed = process_logits(jnp.asarray(logits, jnp.float32)[None], *where)
    return target_probs(processed, sampling, jnp.zeros(1, jnp.int32))[0]


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_traversal])
def test_what_is_drawn_is_verified_exactly(rule, temperature):
    """At a low temperature all but one probability underflow, the runner-up's too."""
    params = SamplingParams(temperature=temperature)
    draft = [10.0, 1.0, 0.0, -1.0, -2.0, -3.0]
    target = processed_probs([3.0, 2.95, 2.95, -9.0, -9.0, -9.0], params)
    siblings = draw(draft, params, REJECTION, 2)
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
    # Five standard errors.
    bound = 5 * np.sqrt(np.asarray(target) / ROWS) + 1e-6
    assert (np.abs(counts / ROWS - np.asarray(target)) < bound).all()


def test_seconds_follow_the_law_without_the_first():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    siblings = draw(logits, SamplingParams(temperature=1), REJECTION, 2)
    first, second = np.asarray(siblings.token_ids).T
    assert (first != second).all()
    left = np.exp(logits)
    left[0] = 0
    share = np.bincount(second[first == 0], minlength=4) / (first == 0).sum()
    assert np.abs(share - left / left.sum()).max() < 0.06


def test_what_is_left_without_probability_is_drawn_evenly():
    logits = [0.0, -np.inf, -np.inf, -np.inf]
    siblings = draw(logits, SamplingParams(temperature=1), REJECTION, 2)
    assert (siblings.token_ids[:, 0] == 0).all()
    share = np.bincount(np.asarray(siblings.token_ids[:, 1]), minlength=4) / ROWS
    assert np.abs(share - np.array([0, 1, 1, 1]) / 3).max() < 0.04


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
        tuple(
            np.asarray(
                noise_keys(sampling, one + rule, one, one + p, one + r, one + n)
            )[0]
        )
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
