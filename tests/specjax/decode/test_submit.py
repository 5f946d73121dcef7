"""Which drafts are verified where not all may be, and that choosing them biases nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_accept_mutations import (
    DRAFT,
    DRAFTER_MISTAKES,
    LAW_TOLERANCE,
    NOTICED,
    TARGET,
    sampler,
    total_variation,
)

from specjax.decode.submit import submit
from specjax.trees import static_shapes
from specjax.types import BLOCK, GREEDY, REJECTION, SEEDED, Proposal

compiled = jax.jit(submit, static_argnames="max_drafts")


def kept(max_drafts, *, rules=(SEEDED, SEEDED), num_tokens=(3, 3), **figures):
    rows = len(rules)
    proposal = Proposal(
        token_ids=jnp.zeros((rows, 3), jnp.int32),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        **{name: jnp.asarray(values, jnp.float32) for name, values in figures.items()},
    )
    rules = jnp.asarray(rules, jnp.int32)
    return compiled(proposal, rules, max_drafts=max_drafts).num_tokens.tolist()


def test_the_likeliest_are_kept_from_the_front():
    figures = [[0.9, 0.5, 0.4], [0.6, 0.55, 0.1]]
    expected = [[0, 0], [1, 0], [1, 1], [1, 2], [2, 2], [3, 2], [3, 3], [3, 3]]
    for max_drafts, counts in enumerate(expected):
        assert kept(max_drafts, path_probability=figures) == counts


def test_no_token_is_kept_without_those_before_it():
    figures = [[0.1, 0.9, 0.9], [0.5, 0.4, 0.3]]
    assert kept(3, path_probability=figures) == [0, 3]
    assert kept(4, path_probability=figures) == [1, 3]


def test_equal_figures_go_to_the_lower_node_then_to_the_lower_row():
    figures = np.full((3, 3), 0.5)
    run = functools.partial(
        kept, rules=(SEEDED,) * 3, num_tokens=(3,) * 3, path_probability=figures
    )
    assert run(4) == [2, 1, 1]
    assert run(7) == [3, 2, 2]


def test_tokens_that_do_not_stand_take_no_slot():
    figures = [[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]]
    assert kept(3, num_tokens=(1, 3), path_probability=figures) == [1, 2]


def test_nan_ranks_last():
    figures = [[np.nan, 0.9, 0.9], [0.1, 0.1, 0.1]]
    assert kept(3, path_probability=figures) == [0, 3]


def test_without_figures_depth_decides():
    assert kept(3) == [2, 1]
    tree = static_shapes.from_widths((2, 1)).draft_tree(2)
    proposal = Proposal(
        token_ids=jnp.zeros((2, 4), jnp.int32),
        num_tokens=jnp.array([4, 4]),
        tree=tree,
    )
    rules = jnp.zeros(2, jnp.int32)
    assert compiled(proposal, rules, max_drafts=5).num_tokens.tolist() == [3, 2]


def test_a_row_by_law_is_ranked_by_what_was_known_before():
    prior = [[0.2, 0.1, 0.1], [0.2, 0.1, 0.1]]
    path = [[0.9, 0.9, 0.9], [0.15, 0.15, 0.15]]
    run = functools.partial(kept, 3, prior_confidence=prior, path_probability=path)
    assert run(rules=(SEEDED, REJECTION)) == [3, 0]
    assert run(rules=(REJECTION, GREEDY)) == [1, 2]
    assert run(rules=(BLOCK, REJECTION)) == [2, 1]


def submitted_by(figure, shape):
    """Returns a drafter whose tokens share slots with another row's.

    All of depth 1 are verified, unless the figure knows them; the next one if it ranks
    above the other row's, which it does after some tokens and not after others.
    """
    width = shape.parents.count(0)
    after = [DRAFT((token,)).max() * DRAFT(()).max() for token in range(3)]
    other = [float(np.median(after)) - 1e-3] * (shape.num_nodes - 1)

    def stand(shape, context, tokens):
        figures = [1.0]
        for node in range(1, shape.num_nodes):
            law = DRAFT(context + shape.prefix(tokens, shape.parents[node]))
            above = figures[shape.parents[node]]
            figures.append(above * figure(law, tokens[node - 1]))
        proposal = Proposal(
            token_ids=jnp.zeros((2, shape.num_nodes - 1), jnp.int32),
            num_tokens=jnp.full(2, shape.num_nodes - 1),
            prior_confidence=jnp.asarray([figures[1:], other], jnp.float32),
        )
        rules = jnp.full(2, REJECTION)
        return int(compiled(proposal, rules, max_drafts=width + 1).num_tokens[0])

    return sampler(DRAFT, num_tokens=stand)


VERIFICATIONS = DRAFTER_MISTAKES["confidence that knows the token"][1]


@pytest.mark.parametrize(
    "index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, len(VERIFICATIONS)))]
)
def test_ranking_by_prior_confidence_is_exact_and_a_leak_is_not(index):
    rule, shape, order = VERIFICATIONS[index]
    drafter = submitted_by(lambda law, token: law.max(), shape)
    assert len({drafted.num_tokens for drafted in drafter(shape, ())}) > 1
    assert total_variation(rule, shape, order, TARGET, drafter) < LAW_TOLERANCE
    leaking = submitted_by(lambda law, token: law[token], shape)
    assert total_variation(rule, shape, order, TARGET, leaking) > NOTICED
