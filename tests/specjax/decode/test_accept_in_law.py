"""Rules that are exact in law, enumerated: several steps emit what the target would."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import (
    BATCH,
    LAW_TOLERANCE,
    Shape,
    bottom_up,
    chain,
    compiled,
    make_proposal,
    mean_accepted,
    noise_shape,
    random_law,
    sampler,
    step_laws,
    top_down,
    total_variation,
    tree,
)

from specjax.decode.accept import (
    accept_by_blocks,
    accept_by_rejection,
    accept_by_traversal,
    drawing,
)

RULES = {
    "rejection": (compiled(accept_by_rejection), top_down),
    "blocks": (compiled(accept_by_blocks), bottom_up),
    "traversal": (compiled(accept_by_traversal), bottom_up),
}
CHAINS = {"chain 2": chain(2), "chain 3": chain(3)}
TREES = {
    "2,1": tree(2, 1),
    "2,2": tree(2, 2),
    "3,1": tree(3, 1),  # every token of a vocabulary of 3
    "late branch": Shape((-1, 0, 1, 1, 2)),
    # A first child that leads further than its sibling, numbered by depth.
    "long left": Shape((-1, 0, 0, 1, 3)),
    # Numbered along the branches, and the second child has children of its own.
    "by branch": Shape((-1, 0, 1, 0, 3, 3)),
}
SHAPES = CHAINS | TREES
ON_CHAINS = [(rule, shape) for rule in RULES for shape in CHAINS]
ON_TREES = [(rule, shape) for rule in ("rejection", "traversal") for shape in TREES]
# Of these each rule has a chain and, if it takes one, a tree; the others are in the full set.
QUICK = [
    *((rule, "chain 3") for rule in RULES),
    ("rejection", "2,1"),
    ("traversal", "2,1"),
    ("traversal", "by branch"),
]
FULL = pytest.mark.full


def full_but(quick, cases):
    """Returns parameters of which all but the quick ones are marked."""
    return [pytest.param(*case, marks=() if case in quick else FULL) for case in cases]


def distance(rule: str, shape: Shape, target, drafter, length=3) -> float:
    run, order = RULES[rule]
    return total_variation(run, shape, order, target, drafter, length=length)


@pytest.mark.parametrize("rule, shape", full_but(QUICK, ON_CHAINS + ON_TREES))
def test_steps_emit_the_target_law(rule, shape):
    drafter = sampler(random_law(100, sharpness=0.7))
    assert distance(rule, SHAPES[shape], random_law(0), drafter) < LAW_TOLERANCE


@pytest.mark.parametrize("rule", RULES)
def test_four_tokens_have_the_target_law(rule):
    drafter = sampler(random_law(101))
    assert distance(rule, chain(2), random_law(1), drafter, 4) < LAW_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    "rule, shape",
    [
        *((rule, chain(2)) for rule in RULES),
        ("rejection", tree(2, 1)),
        ("traversal", tree(2, 1)),
        *((rule, chain(3)) for rule in RULES),
        *((rule, Shape((-1, 0, 0, 1, 3))) for rule in ("rejection", "traversal")),
    ],
)
def test_the_law_over_four_tokens_of_vocabulary(rule, shape):
    drafter = sampler(random_law(102, 4))
    assert distance(rule, shape, random_law(2, 4), drafter) < LAW_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize(
    "rule, shape, order",
    [
        (accept_by_rejection, chain(2), top_down),
        (accept_by_blocks, chain(2), bottom_up),
        (accept_by_rejection, tree(2, 1), top_down),
        (accept_by_traversal, tree(2, 1), bottom_up),
    ],
)
def test_the_law_of_tokens_drawn_in_two_levels(rule, shape, order, vocab, monkeypatch):
    """As tokens of a large vocabulary are: a part of it, and a token of that."""
    monkeypatch.setattr(drawing, "WAYS", 2)
    assert noise_shape(shape, vocab) == (shape.num_nodes, 3)
    drafter = sampler(random_law(106, vocab))
    gap = total_variation(compiled(rule), shape, order, random_law(6, vocab), drafter, length=2)
    assert gap < LAW_TOLERANCE


def shifted(prefix, by=0):
    """A law that lacks a token, which one depending on the length of the prefix."""
    return np.roll([0.0, 0.3, 0.7], by + len(prefix))


def one_hot(prefix):
    return np.eye(3)[len(prefix) % 3]


EDGES = {
    "equal": (random_law(7), random_law(7)),
    "one-hot draft": (random_law(7), one_hot),
    "one-hot target": (one_hot, random_law(7)),
    "both one-hot": (one_hot, one_hot),
    "disjoint in part": (shifted, functools.partial(shifted, by=1)),
    "draft without a token": (random_law(8), shifted),
    "target without a token": (shifted, random_law(8)),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "rule, shape",
    [
        *((rule, "chain 2") for rule in RULES),
        pytest.param("rejection", "2,2", marks=FULL),
        pytest.param("traversal", "2,2", marks=FULL),
    ],
)
def test_the_law_at_its_edges(rule, shape, edge):
    # Where a draft law has fewer tokens than there are siblings, the last of them are
    # uniform over what is left (Sequoia).
    target, draft = EDGES[edge]
    length = 3 if shape == "chain 2" else 2
    shape = SHAPES[shape]
    assert distance(rule, shape, target, sampler(draft), length) < LAW_TOLERANCE


@pytest.mark.full
def test_every_token_among_the_siblings_is_always_accepted():
    """Sequoia: with as many siblings as tokens, whatever the draft law."""
    rule, order = RULES["rejection"]
    for draft in (random_law(100), one_hot, shifted):
        laws = step_laws(rule, tree(3, 1), order, random_law(0), sampler(draft), [()])
        emitted_one = sum(chance for emitted, chance in laws[()].items() if len(emitted) == 1)
        assert emitted_one < LAW_TOLERANCE


@pytest.mark.parametrize(
    "rule, shape",
    [
        *((rule, "chain 2") for rule in RULES),
        pytest.param("rejection", "2,2", marks=FULL),
        pytest.param("traversal", "2,2", marks=FULL),
    ],
)
def test_fewer_tokens_stand(rule, shape):
    for num_tokens in range(SHAPES[shape].num_nodes - 1):
        drafter = sampler(random_law(103), num_tokens=num_tokens)
        gap = distance(rule, SHAPES[shape], random_law(3), drafter, 2)
        assert gap < LAW_TOLERANCE, num_tokens


@pytest.mark.full
@pytest.mark.parametrize(
    "rule, shape",
    [
        ("rejection", "chain 3"),
        ("blocks", "chain 3"),
        pytest.param("rejection", "by branch", marks=FULL),
        pytest.param("traversal", "2,2", marks=FULL),
        ("traversal", "by branch"),
    ],
)
def test_how_many_stand_may_depend_on_what_was_drawn_before(rule, shape):
    draft = random_law(112)

    def stand(shape, context, tokens):
        """Stops before the first node whose parent's law is unsure."""
        for node in range(1, shape.num_nodes):
            if max(draft(context + shape.prefix(tokens, shape.parents[node]))) < 0.6:
                return node - 1
        return shape.num_nodes - 1

    drafter = sampler(draft, num_tokens=stand)
    cuts = {drafted.num_tokens for drafted in drafter(SHAPES[shape], ())}
    assert len(cuts) > 1, "nothing to test: choose another seed"
    assert distance(rule, SHAPES[shape], random_law(4), drafter) < LAW_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", pytest.param("traversal", marks=FULL)])
def test_siblings_drawn_with_replacement(rule):
    """Repeated siblings are skipped; the others were drawn from what those left."""
    for shape in (tree(2, 1), tree(3, 1)):
        drafter = sampler(random_law(105), with_replacement=True)
        assert distance(rule, shape, random_law(5), drafter, 2) < LAW_TOLERANCE


def random_rows(shape: Shape, seed: int, rows: int = BATCH, vocab: int = 3):
    """Returns noise, a proposal and target probabilities of rows without relation."""
    rng = np.random.default_rng(seed)
    noise = rng.uniform(1e-6, 1 - 1e-6, (rows, *noise_shape(shape, vocab)))
    tokens = rng.integers(vocab, size=(rows, shape.num_nodes - 1))
    target, draft = (
        rng.dirichlet([0.8] * vocab, (rows, shape.num_nodes)).astype(np.float32) for _ in range(2)
    )
    num_tokens = rng.integers(shape.num_nodes, size=rows)
    proposal = make_proposal(shape, tokens, draft[:, :-1], num_tokens)
    return jnp.asarray(noise, jnp.float32), proposal, jnp.asarray(target)


def assert_same_prefixes(some, other):
    counts = np.asarray(some.num_accepted)
    assert np.array_equal(counts, other.num_accepted)
    assert len(set(counts.tolist())) > 2
    within = np.arange(some.token_ids.shape[1])[None, :] <= counts[:, None]
    assert np.array_equal(
        np.where(within, some.token_ids, -1), np.where(within, other.token_ids, -1)
    )


def test_traversal_of_a_chain_is_block_verification():
    rows = random_rows(chain(3), seed=0)
    assert_same_prefixes(RULES["blocks"][0](*rows), RULES["traversal"][0](*rows))


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_tree_without_branches_is_a_chain(rule):
    rows = random_rows(chain(3), seed=1)
    as_tree = random_rows(dataclasses.replace(chain(3), is_tree=True), seed=1)
    of_chain, of_tree = (RULES[rule][0](*each) for each in (rows, as_tree))
    assert_same_prefixes(of_chain, of_tree)
    assert of_chain.nodes is None
    for nodes, count in zip(of_tree.nodes.tolist(), of_tree.num_accepted.tolist()):
        assert nodes[:count] == [1, 2, 3][:count]


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    ["chain 2", "2,1", *(pytest.param(s, marks=FULL) for s in ("chain 3", "2,2", "by branch"))],
)
def test_deciding_together_accepts_no_less(shape):
    """Expected, over random laws; on some shape and law it accepts more.

    Many more trees: test_traversal_gain.
    """
    gains = []
    together = "blocks" if shape in CHAINS else "traversal"
    for seed in range(2):
        target, drafter = random_law(seed), sampler(random_law(200 + seed))
        means = [
            mean_accepted(step_laws(rule, SHAPES[shape], order, target, drafter, [()])[()])
            for rule, order in (RULES["rejection"], RULES[together])
        ]
        gains.append(means[1] - means[0])
    assert min(gains) > -LAW_TOLERANCE
    assert max(gains) > 1e-3
