"""Which rows a rule decides, and the noise and rates it decides them by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.accept import num_draws
from specjax.decode.rules import (
    RuleOptions,
    Target,
    choose_by_row,
    decide,
    is_decided_by,
    rule_noise,
)
from specjax.decode.verify import _by_equality
from specjax.sampling import Choice
from specjax.trees.draft_tree import from_parents
from specjax.types import (
    BLOCK,
    DELTA,
    LENIENT,
    REJECTION,
    SEEDED,
    SYNTHETIC,
    TRAVERSAL,
    TYPICAL,
    Acceptance,
    Proposal,
)

VOCAB = 5


def seeds_of(count):
    return jnp.stack([jnp.arange(count), jnp.full(count, 7)], axis=1).astype(jnp.uint32)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK, TRAVERSAL, LENIENT, TYPICAL])
def test_at_temperature_zero_rules_by_law_leave_rows_to_equality(rule):
    rules = jnp.array([rule, rule, SEEDED, DELTA], jnp.int32)
    temperature = jnp.array([0.0, 0.8, 0.8, 0.0])
    is_lossy = rule == TYPICAL
    decided = is_decided_by(rule, rules, temperature)
    assert decided.tolist() == [is_lossy, True, False, False]
    of = lambda value: Acceptance(jnp.full((4, 2), value, jnp.int32), jnp.full(4, value, jnp.int32))
    chosen = choose_by_row(rules, rule, temperature, of(1), of(0))
    assert chosen.num_accepted.tolist() == [int(is_lossy), 1, 0, 0]
    assert chosen.token_ids[:, 0].tolist() == [int(is_lossy), 1, 0, 0]


def test_every_node_of_every_row_and_step_has_draws_of_its_own():
    rows, num_nodes = 3, 9
    noise = [
        np.asarray(rule_noise(seeds_of(rows), jnp.full(rows, root), num_nodes, VOCAB))
        for root in (4, 5)
    ]
    assert noise[0].shape == (rows, num_nodes, 1 + num_draws(VOCAB))
    drawn = np.stack(noise)
    assert ((drawn > 0) & (drawn < 1)).all()
    assert len(np.unique(drawn)) == drawn.size


def test_the_last_synthetic_rate_goes_on():
    rows, depth = 4000, 3
    proposal = Proposal(
        token_ids=jnp.zeros((rows, depth), jnp.int32), num_tokens=jnp.full(rows, depth)
    )
    target = Target(jnp.zeros((rows, depth + 1), jnp.int32), jnp.ones((rows, depth + 1, 1)))
    options = RuleOptions(synthetic_rates=(1.0, 0.5))
    found = decide(
        SYNTHETIC,
        options,
        proposal,
        target,
        seeds_of(rows),
        jnp.zeros(rows, jnp.int32),
    )
    share = np.bincount(found.num_accepted, minlength=depth + 1) / rows
    assert share == pytest.approx([0, 0.5, 0.25, 0.25], abs=0.04)


def test_only_invalid_logits_on_the_accepted_path_count():
    """Nodes 1 and 2 are siblings, 3 follows 2; the target says token 2, then token 3."""
    proposal = Proposal(
        token_ids=jnp.array([[1, 2, 3]] * 3, jnp.int32),
        num_tokens=jnp.full(3, 3),
        tree=from_parents(jnp.array([-1, 0, 0, 2], jnp.int32), 2, rows=3),
    )
    said = jnp.array([2, 9, 3, 4] * 3, jnp.int32)
    is_invalid = jnp.zeros(12, bool).at[jnp.array([1, 6, 11])].set(True)
    flat = jnp.arange(12).reshape(3, 4)
    all_said = Choice(said, is_invalid), jnp.arange(12.0)
    found = jax.jit(_by_equality)(proposal, all_said, flat)
    assert found.acceptance.token_ids.tolist() == [[2, 3, 4]] * 3
    assert found.is_invalid.tolist() == [
        [False, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert found.logprobs.tolist() == [[0, 2, 3], [4, 6, 7], [8, 10, 11]]
