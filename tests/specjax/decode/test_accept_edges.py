"""Rules at their edges: no drafts, exact ties, zeros, NaN, and shapes that do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import NEVER, SURELY, Shape, chain, make_proposal, noise_shape, tree

from specjax.decode.accept import (
    accept_by_blocks,
    accept_by_equality,
    accept_by_rejection,
    accept_by_traversal,
    accept_leniently,
    accept_synthetic,
    accept_typical,
)

FULL = pytest.mark.full
VOCAB, ROWS = 5, 512  # one size, so that rules are compiled once
CHAIN, TREE = chain(3), Shape((-1, 0, 0, 1, 1, 2))
IN_LAW = {
    "rejection": jax.jit(accept_by_rejection),
    "blocks": jax.jit(accept_by_blocks),
    "traversal": jax.jit(accept_by_traversal),
}
ON_BOTH = [
    (rule, shape) for rule in IN_LAW for shape in (CHAIN, TREE) if (rule, shape) != ("blocks", TREE)
]
both = pytest.mark.parametrize("rule, shape", ON_BOTH, ids=str)
jitted_equality = jax.jit(accept_by_equality)


def random_rows(shape: Shape, rows: int, seed: int = 0):
    """Returns noise, tokens, target and draft laws of rows without relation."""
    rng = np.random.default_rng(seed)
    size = (rows, shape.num_nodes)
    noise = rng.uniform(1e-6, 1 - 1e-6, (rows, *noise_shape(shape, VOCAB)))
    noise = noise.astype(np.float32)
    target = rng.dirichlet([1.0] * VOCAB, size).astype(np.float32)
    draft = rng.dirichlet([1.0] * VOCAB, size).astype(np.float32)[:, :-1]
    tokens = rng.integers(VOCAB, size=(rows, shape.num_nodes - 1))
    return noise, tokens, target, draft


@functools.cache
def all_rules(is_tree: bool):
    """Returns every rule that takes such drafts, as functions of the same arguments."""

    def typical(noise, proposal, target_probs):
        choices = jnp.argmax(target_probs, axis=2)
        return accept_typical(proposal, target_probs, choices)

    def equality(noise, proposal, target_probs):
        return accept_by_equality(proposal, jnp.argmax(target_probs, axis=2))

    def synthetic(noise, proposal, target_probs):
        depth = proposal.max_depth
        choices = jnp.argmax(target_probs, axis=2)
        rates = jnp.full(depth, 0.7)
        return accept_synthetic(noise[:, :depth, 0], proposal, choices, rates)

    def lenient(noise, proposal, target_probs):
        lenience = jnp.full(noise.shape[0], 0.5)
        return accept_leniently(noise, proposal, target_probs, lenience)

    others = [equality, lenient, typical, synthetic]
    rules = IN_LAW | {rule.__name__: jax.jit(rule) for rule in others}
    return [each for each in rules.items() if not is_tree or each[0] != "blocks"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_no_drafts_at_all(is_tree):
    """K = 0: one token of the target's, from shapes without a draft slot."""
    shape = Shape((-1,), is_tree)
    noise, tokens, _, draft = random_rows(shape, 4)
    target = np.eye(VOCAB, dtype=np.float32)[[[3], [0], [4], [1]]]
    for name, rule in all_rules(shape.is_tree):
        proposal = make_proposal(shape, tokens, draft)
        acceptance = rule(noise, proposal, target)
        assert acceptance.num_accepted.tolist() == [0] * 4, name
        assert acceptance.token_ids.tolist() == [[3], [0], [4], [1]]
        assert (acceptance.nodes is not None) == is_tree
        assert not is_tree or acceptance.nodes.shape == (4, 0)


@pytest.mark.full
@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)], ids=str)
def test_no_rows_draft(shape):
    """num_tokens = 0 in shapes that have draft slots; what stands there is NaN."""
    noise, tokens, target, draft = random_rows(shape, ROWS)
    choices = np.arange(ROWS) % VOCAB
    target[:, 1:] = np.nan
    draft[:] = np.nan
    target[:, 0] = np.eye(VOCAB)[choices]
    proposal = make_proposal(shape, tokens, draft, np.zeros(ROWS))
    for name, rule in all_rules(shape.is_tree):
        acceptance = rule(noise, proposal, target)
        assert np.all(acceptance.num_accepted == 0), name
        assert np.array_equal(acceptance.token_ids[:, 0], choices), name


@both
def test_all_accepted_where_draft_and_target_are_equal(rule, shape):
    noise, tokens, target, _ = random_rows(shape, ROWS)
    noise[::2, :, 0] = NEVER  # the largest draw there is
    proposal = make_proposal(shape, tokens, target[:, :-1])
    acceptance = IN_LAW[rule](noise, proposal, target)
    # The first child is certain; one of them leads to the deepest first path.
    assert np.all(acceptance.num_accepted == max(shape.depths))
    if shape.is_tree:
        assert np.all(acceptance.nodes == np.array([1, 3])[None, :])
    assert np.all((acceptance.token_ids >= 0) & (acceptance.token_ids < VOCAB))


@both
def test_none_accepted_where_the_target_cannot_say_them(rule, shape):
    noise, tokens, target, draft = random_rows(shape, ROWS)
    noise[::2, :, 0] = SURELY  # the smallest draws there are
    tokens = 2 + tokens % 3
    target[:, :, 2:] = 0
    target /= target.sum(axis=2, keepdims=True)
    for zero in (False, True):
        draft[:, :, 2:] = 0 if zero else draft[:, :, 2:]
        proposal = make_proposal(shape, tokens, draft)
        acceptance = IN_LAW[rule](noise, proposal, target)
        assert np.all(acceptance.num_accepted == 0)
        assert np.all(acceptance.token_ids[:, 0] < 2)


@both
@pytest.mark.parametrize("value", [SURELY, 2.0**-33, 0.3, NEVER])
def test_a_one_hot_target_is_greedy_decoding(rule, shape, value):
    """Temperature 0: whatever the noise and the draft, equality with the argmax."""
    noise, tokens, _, draft = random_rows(shape, ROWS, seed=1)
    noise[::2] = value
    choices = np.random.default_rng(2).integers(2, size=(ROWS, shape.num_nodes))
    tokens = tokens % 2
    target = np.eye(VOCAB, dtype=np.float32)[choices]
    for sharp in (False, True):
        if sharp:  # and a draft that has underflown to zeros, the choice among them
            draft = np.where(draft > 0.3, draft, 0.0)
            draft[:, :, -1] += 1 - draft.sum(axis=2)
        proposal = make_proposal(shape, tokens, draft, np.arange(ROWS) % shape.num_nodes)
        greedy = jitted_equality(proposal, choices)
        acceptance = IN_LAW[rule](noise, proposal, target)
        counts = np.asarray(acceptance.num_accepted)
        assert np.array_equal(counts, greedy.num_accepted)
        assert len(np.unique(counts)) == max(shape.depths) + 1
        within = np.arange(greedy.token_ids.shape[1])[None, :] <= counts[:, None]
        assert np.all((acceptance.token_ids == greedy.token_ids) | ~within)
        if shape.is_tree:
            same = acceptance.nodes == greedy.nodes
            assert np.all(same | ~within[:, 1:])


@both
@pytest.mark.parametrize("value", [1e-38, 2.0**-33, NEVER])
def test_never_emits_what_the_target_cannot_say(rule, shape, value):
    noise, tokens, target, draft = random_rows(shape, ROWS, seed=3)
    noise[::2] = value
    target[target < 0.15] = 0
    target /= target.sum(axis=2, keepdims=True)
    draft[draft < 0.1] = 0
    draft /= draft.sum(axis=2, keepdims=True)
    acceptance = IN_LAW[rule](noise, make_proposal(shape, tokens, draft), target)
    row = np.arange(ROWS)
    at = np.zeros(ROWS, int)
    for place in range(max(shape.depths) + 1):
        emitted = np.asarray(acceptance.token_ids)[:, place]
        counts = np.asarray(acceptance.num_accepted)
        assert np.all((target[row, at, emitted] > 0) | (counts < place))
        if place < max(shape.depths):
            nodes = place + 1
            if shape.is_tree:
                nodes = np.asarray(acceptance.nodes)[:, place]
            at = np.where(counts > place, nodes, at)


@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=FULL)], ids=str)
def test_nan_does_not_spread_to_other_rows(shape):
    noise, tokens, target, draft = random_rows(shape, ROWS, seed=4)
    for name, rule in all_rules(shape.is_tree):
        clean = rule(noise, make_proposal(shape, tokens, draft), target)
        for spoiled in range(3):
            arrays = [noise.copy(), target.copy(), draft.copy()]
            arrays[spoiled][[1, 3]] = np.nan
            some = rule(arrays[0], make_proposal(shape, tokens, arrays[2]), arrays[1])
            for got, expected in zip(jax.tree.leaves(some), jax.tree.leaves(clean), strict=True):
                assert np.array_equal(got[::2], expected[::2]), name
            assert np.all((some.token_ids >= 0) & (some.token_ids < VOCAB))
            assert np.all(some.num_accepted >= 0)
            assert np.all(some.num_accepted <= max(shape.depths))


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_repeated_siblings_are_tried_once(rule):
    """By hand: what a second draw of a token costs or gains is nothing."""
    rng = np.random.default_rng(5)
    noise, _, target, draft = random_rows(tree(3), 256, seed=5)
    tokens = rng.permuted(np.tile(np.arange(VOCAB), (256, 1)), axis=1)[:, :2]
    once = np.column_stack([tokens, tokens[:, :1]])
    twice = np.column_stack([tokens[:, 0], tokens[:, 0], tokens[:, 1]])
    draft[:] = draft[:, :1]
    as_drawn = IN_LAW[rule](noise, make_proposal(tree(3), once, draft), target)
    moved = noise.copy()
    moved[:, 2], target_moved = noise[:, 1], target.copy()
    target_moved[:, 3] = target[:, 2]
    moved[:, 3, 1:] = noise[:, 2, 1:]
    repeated = IN_LAW[rule](moved, make_proposal(tree(3), twice, draft), target_moved)
    assert np.array_equal(as_drawn.num_accepted, repeated.num_accepted)
    within = np.arange(2)[None, :] <= np.asarray(as_drawn.num_accepted)[:, None]
    assert np.all((as_drawn.token_ids == repeated.token_ids) | ~within)
    nodes = np.asarray(repeated.nodes)[:, 0]
    assert set(nodes[repeated.num_accepted == 1].tolist()) == {1, 3}


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_num_tokens_cuts_a_tree(rule):
    """A tree of which the last nodes do not stand is the smaller tree."""
    noise, tokens, target, draft = random_rows(TREE, ROWS, seed=6)
    proposal = make_proposal(TREE, tokens, draft, np.full(ROWS, 4))
    cut = IN_LAW[rule](noise, proposal, target)
    smaller = make_proposal(Shape(TREE.parents[:5]), tokens[:, :4], draft[:, :4])
    whole = IN_LAW[rule](noise[:, :5], smaller, target[:, :5])
    counts = np.asarray(whole.num_accepted)
    assert np.array_equal(cut.num_accepted, counts)
    within = np.arange(3)[None, :] <= counts[:, None]
    assert np.all((cut.token_ids == whole.token_ids) | ~within)
    assert np.all((cut.nodes == whole.nodes) | ~within[:, 1:])


def test_a_tree_of_one_row_is_not_that_of_another():
    """Rows of one batch with trees of their own, as in batches of one shape each."""
    shapes = [TREE, Shape((-1, 0, 0, 0, 1, 3)), Shape((-1, 0, 1, 0, 3, 3))]
    noise, tokens, target, draft = random_rows(TREE, ROWS, seed=7)
    proposals = [make_proposal(shape, tokens, draft) for shape in shapes]
    which = np.arange(ROWS) % 3

    def each_its_own(*parts):
        return np.stack(parts)[which, np.arange(ROWS)]

    mixed = jax.tree.map(each_its_own, *proposals)
    for rule in (IN_LAW["rejection"], IN_LAW["traversal"]):
        together = rule(noise, mixed, target)
        alone = [rule(noise, proposal, target) for proposal in proposals]
        expected = jax.tree.map(each_its_own, *alone)
        for some, other in zip(together, expected, strict=True):
            assert np.array_equal(some, other)


@pytest.mark.full
def test_nothing_left_to_recover_falls_back_to_the_target():
    # The target is nowhere above the draft, as when both agree to rounding.
    target = jnp.tile(jnp.array([0.5, 0.25, 0.0]), (2, 2, 1))
    draft = np.tile([0.5, 0.5, 0.0], (2, 1, 1))
    # The smaller weight comes first.
    noise = jnp.array([[[0.9, 0.5]] * 2, [[0.9, 0.3]] * 2])
    for rule, shape in [
        ("rejection", chain(1)),
        ("rejection", tree(1)),
        ("blocks", chain(1)),
        ("traversal", chain(1)),
    ]:
        proposal = make_proposal(shape, [[1], [1]], draft)
        acceptance = IN_LAW[rule](noise, proposal, target)
        assert acceptance.num_accepted.tolist() == [0, 0]
        assert acceptance.token_ids[:, 0].tolist() == [0, 1]


def test_one_draft_token_by_hand():
    # Token 1 has target .2 and draft .5, so it stands below noise .4. The residual
    # is (.4, 0, 0) there: token 0 always.
    target = jnp.tile(jnp.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]), (2, 1, 1))
    proposal = make_proposal(chain(1), [[1]] * 2, np.tile([0.3, 0.5, 0.2], (2, 1, 1)))
    noise = jnp.array([[[0.39, 0.5], [0.5, 0.5]], [[0.41, 0.5], [0.5, 0.5]]])
    for rule in IN_LAW.values():
        acceptance = rule(noise, proposal, target)
        assert acceptance.num_accepted.tolist() == [1, 0]
        assert acceptance.token_ids[0].tolist() == [1, 2]
        assert acceptance.token_ids[1, 0] == 0


def test_a_second_sibling_by_hand():
    # Token 1 is rejected. Of the target (.5, .2, .3) less the draft (.2, .6, .2) the
    # rest is (.3, 0, .1), that is (.75, 0, .25); token 2 was drawn from (.5, 0, .5),
    # so it stands below .5, and else token 0 is all that is left.
    target = jnp.tile(jnp.array([0.5, 0.2, 0.3]), (1, 3, 1))
    proposal = make_proposal(tree(2), [[1, 2]], np.tile([0.2, 0.6, 0.2], (1, 2, 1)))
    for draw, expected in [(0.49, [2, 2]), (0.51, [0])]:
        noise = jnp.array([[[0.4, 0.9], [draw, 0.9], [0.9, 0.4]]])
        acceptance = IN_LAW["rejection"](noise, proposal, target)
        count = len(expected) - 1
        assert acceptance.num_accepted.tolist() == [count]
        assert acceptance.token_ids[0, : count + 1].tolist() == expected
        assert count == 0 or acceptance.nodes.tolist() == [[2]]


@both
def test_rules_refuse_what_does_not_fit(rule, shape):
    noise, tokens, target, draft = random_rows(shape, 2)
    run = {"rejection": accept_by_rejection, "blocks": accept_by_blocks}
    run = run.get(rule, accept_by_traversal)
    proposal = make_proposal(shape, tokens, draft)
    with pytest.raises(ValueError, match=r"proposal\.probs"):
        run(noise, make_proposal(shape, tokens), target)
    for wrong in (target[:, 1:], target[:, :, 1:], target[1:]):
        with pytest.raises(ValueError, match="target_probs"):
            run(noise, proposal, wrong)
    for wrong in (noise[:, 1:], noise[..., 0], noise[1:]):
        with pytest.raises(ValueError, match="noise"):
            run(wrong, proposal, target)


def test_blocks_refuse_a_tree():
    noise, tokens, target, draft = random_rows(TREE, 2)
    with pytest.raises(ValueError, match="accept_by_traversal"):
        accept_by_blocks(noise, make_proposal(TREE, tokens, draft), target)
