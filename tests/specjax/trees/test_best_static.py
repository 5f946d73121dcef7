"""The best fixed trees against all trees, and by numbers done by hand."""

import functools
import itertools

import numpy as np
import pytest

from specjax.trees.best_static import (
    best_tree,
    expected_committed,
    taken_probabilities,
)
from specjax.trees.static_shapes import TreeShape, from_rank_paths, from_widths


@functools.cache
def forests(num_nodes: int) -> tuple[tuple, ...]:
    """Returns every ordered forest of that many nodes as nested tuples: Catalan's numbers."""
    if num_nodes == 0:
        return ((),)
    found = []
    for size in range(1, num_nodes + 1):
        for below in forests(size - 1):
            found += [(below, *others) for others in forests(num_nodes - size)]
    return tuple(found)


def rank_paths(forest, path=()):
    for rank, below in enumerate(forest):
        yield (*path, rank)
        yield from rank_paths(below, (*path, rank))


@functools.cache
def shapes(num_nodes: int) -> list[TreeShape]:
    return [from_rank_paths(rank_paths(forest)) for forest in forests(num_nodes - 1)]


def expected_by_walking(shape: TreeShape, conditional) -> float:
    """Plays the step: at each node its children are tried in turn, and 1 token is certain."""
    conditional = np.atleast_2d(conditional)

    def walk(node: int, depth: int) -> float:
        chances = conditional[min(depth, len(conditional) - 1)]
        tokens, is_open = 0.0, 1.0  # is_open: all children so far were rejected
        for child, parent in enumerate(shape.parents):
            if parent == node:
                rank = shape.ranks[child]
                chance = chances[rank] if rank < len(chances) else 0.0
                tokens += is_open * chance * (1 + walk(child, depth + 1))
                is_open *= 1 - chance
        return tokens

    return 1 + walk(0, 0)


def cases():
    rng = np.random.default_rng(8)
    return [
        [0.8, 0.4, 0.2],
        [0.1, 0.9],  # the second sibling is the one that counts
        [0.5],  # one sibling: only chains
        [0.6, 0.0, 0.5],  # a useless one before a useful one
        [[0.9, 0.3], [0.2, 0.1], [0.7, 0.7]],  # by depth
        [1.0, 0.5],
        [0.0, 0.0],
        rng.random((4, 4)).tolist(),
        rng.random(5).tolist(),
    ]


def test_taken_by_hand():
    taken = taken_probabilities([0.5, 0.5, 0.5], 2)
    assert taken.tolist() == [[0.5, 0.25, 0.125]] * 2
    by_depth = taken_probabilities([[0.5, 1.0], [0.25, 0.0]], 3)
    assert by_depth.tolist() == [[0.5, 0.5], [0.25, 0.0], [0.25, 0.0]]
    assert taken_probabilities([1.0, 0.7], 1).tolist() == [[1.0, 0.0]]


def test_expected_by_hand():
    #   0      the second child is taken where the first is rejected: .2 * .5 = .1
    #  / \     1 + .8 + .1 + .8 * .8
    # 1   2
    # |
    # 3
    shape = TreeShape((-1, 0, 0, 1))
    assert expected_committed(shape, [0.8, 0.5]) == pytest.approx(2.54)
    assert expected_committed(shape, [0.8]) == pytest.approx(2.44)  # none measured
    assert expected_committed(TreeShape((-1,)), [0.8]) == 1.0
    chain = from_widths((1,) * 4)
    alpha = 0.7
    geometric = (1 - alpha**5) / (1 - alpha)
    assert expected_committed(chain, [alpha]) == pytest.approx(geometric)


@pytest.mark.parametrize("conditional", cases())
def test_expectation_agrees_with_walking(conditional):
    for shape in itertools.chain(*map(shapes, (1, 2, 4, 5))):
        found = expected_committed(shape, conditional)
        assert found == pytest.approx(expected_by_walking(shape, conditional))


@pytest.mark.parametrize("conditional", cases())
@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 6])
def test_best_tree_agrees_with_all_trees(conditional, max_depth):
    best = 1.0
    for num_nodes in range(1, 8):
        fits = [s for s in shapes(num_nodes) if s.max_depth <= max_depth]
        values = [expected_by_walking(shape, conditional) for shape in fits]
        best = max([best, *values])
        found = best_tree(conditional, num_nodes=num_nodes, max_depth=max_depth)
        assert found.num_committed == pytest.approx(best)
        assert found.shape.num_nodes <= num_nodes
        assert found.shape.max_depth <= max_depth
        value = expected_by_walking(found.shape, conditional)
        assert value == pytest.approx(found.num_committed)


def test_best_tree_by_hand():
    # Children are taken with .8, .1 and .02: a chain's k-th node gives .8 ** k, more
    # than the root's second child as long as k <= 10.
    conditional = [0.8, 0.5, 0.2]
    best = functools.partial(best_tree, conditional, max_depth=20)
    assert best(num_nodes=11).shape == from_widths((1,) * 10)
    chain_and_one = [(0,) * depth for depth in range(1, 11)] + [(1,)]
    assert best(num_nodes=12).shape == from_rank_paths(chain_and_one)
    shallow = best_tree(conditional, num_nodes=4, max_depth=2)
    assert shallow.shape == from_rank_paths([(0,), (1,), (0, 0)])
    assert shallow.num_committed == pytest.approx(1 + 0.8 + 0.1 + 0.64)


def test_a_node_that_adds_nothing_is_left_out():
    assert best_tree([0.0, 0.0], num_nodes=9, max_depth=4).shape == TreeShape((-1,))
    found = best_tree([1.0, 0.5], num_nodes=9, max_depth=3)
    assert found == (from_widths((1, 1, 1)), 4.0)
    # More nodes than fit into the depth and the siblings measured.
    assert best_tree([0.5, 0.5], num_nodes=99, max_depth=2).shape == from_widths((2, 2))


def test_one_node():
    assert best_tree([0.9], num_nodes=1, max_depth=5) == (TreeShape((-1,)), 1.0)
    assert best_tree([0.9], num_nodes=5, max_depth=0).shape.num_nodes == 1


def test_a_larger_budget_never_hurts():
    conditional = np.random.default_rng(9).random(6)
    values = [
        best_tree(conditional, num_nodes=n, max_depth=6).num_committed
        for n in (1, 2, 3, 8, 16, 33, 64)
    ]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("conditional", "complaint"),
    [
        ([], "no axis empty"),
        (0.5, r"has shape \[\]"),
        ([[[0.5]]], r"has shape \[1, 1, 1\]"),
        ([0.5, 1.5], r"lies in \[0.5, 1.5\]"),
        ([0.5, -0.1], r"lies in \[-0.1, 0.5\]"),
        ([0.5, np.nan], r"lies in \[nan, nan\]"),
    ],
)
def test_best_tree_refuses_what_is_no_probability(conditional, complaint):
    with pytest.raises(ValueError, match=complaint):
        best_tree(conditional, num_nodes=3, max_depth=2)


def test_best_tree_refuses_impossible_sizes():
    with pytest.raises(ValueError, match="num_nodes=0 must be at least 1"):
        best_tree([0.5], num_nodes=0, max_depth=2)
    with pytest.raises(ValueError, match="max_depth=-1 at least 0"):
        best_tree([0.5], num_nodes=2, max_depth=-1)
