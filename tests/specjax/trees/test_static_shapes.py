"""Shapes fixed beforehand: by widths, by Medusa's lists, and what follows from parents."""

import pytest
from tree_values import validate_values

from specjax.trees.static_shapes import TreeShape, from_rank_paths, from_widths


def test_from_widths_by_example():
    shape = from_widths((2, 1))
    assert shape.parents == (-1, 0, 0, 1, 2)
    assert shape.ranks == (0, 0, 1, 0, 0)
    assert shape.depths == (0, 1, 1, 2, 2)
    assert (shape.num_nodes, shape.num_drafts, shape.max_depth) == (5, 4, 2)
    assert shape.nodes_at(0) == (0,)
    assert shape.nodes_at(2) == (3, 4)
    assert shape.rank_paths == ((), (0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize("widths", [(), (1,), (3,), (4, 2, 1), (1, 1, 1, 1), (2, 2, 2)])
def test_from_widths(widths):
    shape = from_widths(widths)
    expected, level = 1, 1
    for width in widths:
        level *= width
        expected += level
    assert shape.num_nodes == expected
    assert shape.widths == widths
    assert shape.max_depth == len(widths)
    assert from_rank_paths(shape.rank_paths) == shape
    validate_values(shape.draft_tree(rows=2))


def test_chain_and_root_alone():
    assert from_widths((1, 1, 1)).parents == (-1, 0, 1, 2)
    assert from_widths(()) == from_rank_paths([]) == TreeShape((-1,))
    alone = TreeShape((-1,))
    assert (alone.num_drafts, alone.max_depth, alone.widths) == (0, 0, ())


def test_from_rank_paths_orders_the_list():
    shape = from_rank_paths([(1,), (0, 1), (0, 0), (0,), (0, 0, 0)])
    assert shape.rank_paths == ((), (0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert shape.parents == (-1, 0, 0, 1, 1, 3)
    assert shape.ranks == (0, 0, 1, 0, 1, 0)
    assert shape.widths == (2, 2, 1)


@pytest.mark.parametrize(
    ("rank_paths", "complaint"),
    [
        ([(0,), (0,)], "lists a node twice"),
        ([(0,), (1, 0)], r"\(1, 0\) needs \(1,\)"),
        ([(0,), (2,)], r"\(2,\) needs \(1,\)"),
        ([(0,), (-1,)], r"\(-1,\) needs \(-2,\)"),
    ],
)
def test_from_rank_paths_refuses(rank_paths, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_rank_paths(rank_paths)


@pytest.mark.parametrize(
    ("parents", "complaint"),
    [
        ((), "must begin with -1"),
        ((0, 0), "must begin with -1"),
        ((-1, 1), "node=1 has parent=1; expected 0 to 0"),
        ((-1, 0, -1), "node=2 has parent=-1"),
    ],
)
def test_tree_shape_refuses(parents, complaint):
    with pytest.raises(ValueError, match=complaint):
        TreeShape(parents)


def test_from_widths_refuses():
    with pytest.raises(ValueError, match=r"widths=\(2, 0\) must all be at least 1"):
        from_widths((2, 0))


def test_shape_is_a_constant():
    """Equal shapes are one key, whatever has been asked of them."""
    asked, fresh = TreeShape((-1, 0, 0)), TreeShape((-1, 0, 0))
    assert asked.widths == (2,)
    assert asked == fresh
    assert hash(asked) == hash(fresh)


def test_draft_tree_of_a_shape():
    tree = from_widths((2, 1)).draft_tree(rows=3)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]] * 3
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]] * 3
    assert tree.max_depth == 2
