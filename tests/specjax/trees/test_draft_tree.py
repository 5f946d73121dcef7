"""Depths, ancestors, paths, leaves and siblings against walks of one row at a time."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_values import validate_values

from specjax.trees import draft_tree
from specjax.trees.draft_tree import NO_NODE, from_parents
from specjax.types import NO_PARENT, DraftTree

# The tree drawn in types.DraftTree.
EXAMPLE = [-1, 0, 0, 1, 2, 2]


@functools.partial(jax.jit, static_argnums=3)
def survey(parents, counts, token_ids, max_depth):
    """Returns all that can be said of trees, compiled together."""
    tree = from_parents(parents, max_depth)
    return {
        "tree": tree,
        "bits": draft_tree.ancestor_bits(tree),
        "paths": draft_tree.paths(tree, counts),
        "path_token_ids": draft_tree.path_token_ids(tree, token_ids),
        "is_leaf": draft_tree.is_leaf(tree, counts),
        "ranks": draft_tree.sibling_ranks(tree),
        "children": draft_tree.children(tree, counts, max_children=3),
    }


def token_ids_of(parents) -> np.ndarray:
    """Returns tokens that differ from each other and from every node index."""
    rows, num_nodes = np.shape(parents)
    count = rows * (num_nodes - 1)
    return np.arange(100, 100 + count, dtype=np.int32).reshape(rows, num_nodes - 1)


def look(parents, counts, max_depth: int) -> types.SimpleNamespace:
    parents, counts = np.asarray(parents, np.int32), np.asarray(counts, np.int32)
    found = survey(parents, counts, token_ids_of(parents), max_depth)
    return types.SimpleNamespace(**jax.tree.map(np.asarray, found))


def random_parents(rng, rows: int, num_nodes: int, max_depth: int) -> np.ndarray:
    """Returns trees of all kinds: chains with a bush at the end, and stars."""
    parents = np.full((rows, num_nodes), NO_PARENT, np.int32)
    for row in range(rows):
        window, depths = rng.integers(1, num_nodes + 1), [0]
        for node in range(1, num_nodes):
            may_be = [n for n in range(node) if depths[n] < max_depth][-window:]
            parents[row, node] = rng.choice(may_be)
            depths.append(depths[parents[row, node]] + 1)
    return parents


def walk(parents, node: int) -> list[int]:
    """Returns the nodes from depth 1 down to this one; empty for the root."""
    path = []
    while node != 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def padded(path: list[int], size: int) -> list[int]:
    return path + [NO_NODE] * (size - len(path))


def cases():
    """Returns parents, counts and max_depth, from one node to three words of bits."""
    rng, found = np.random.default_rng(0), []
    for num_nodes, max_depth in [(1, 2), (2, 1), (7, 6), (33, 4), (70, 5)]:
        parents = random_parents(rng, 4, num_nodes, max_depth)
        counts = rng.integers(0, num_nodes, 4).astype(np.int32)
        counts[0] = num_nodes - 1
        name = f"{num_nodes}-nodes-{max_depth}-deep"
        found.append(pytest.param(parents, counts, max_depth, id=name))
    return found


def test_example():
    found = look([EXAMPLE] * 2, [5, 3], 2)
    assert found.tree.depths.tolist() == [[0, 1, 1, 2, 2, 2]] * 2
    expected = [0b000001, 0b000011, 0b000101, 0b001011, 0b010101, 0b100101]
    assert found.bits[:, :, 0].tolist() == [expected] * 2
    no = NO_NODE
    tokens = [[no, no], [105, no], [106, no], [105, 107], [106, 108], [106, 109]]
    assert found.path_token_ids[1].tolist() == tokens
    # Without nodes 4 and 5, node 2 ends a path.
    assert [np.flatnonzero(row).tolist() for row in found.is_leaf] == [[3, 4, 5], [2, 3]]
    assert found.ranks[0].tolist() == [0, 0, 1, 0, 0, 1]
    children = [[1, 2, no], [3, no, no], [4, 5, no]] + [[no] * 3] * 3
    assert found.children[0].tolist() == children
    validate_values(found.tree, None, token_ids_of([EXAMPLE] * 2))


@pytest.mark.parametrize(("parents", "counts", "max_depth"), cases())
def test_agrees_with_walks(parents, counts, max_depth):
    rows, num_nodes = parents.shape
    found, token_ids = look(parents, counts, max_depth), token_ids_of(parents)
    validate_values(found.tree, counts)
    assert found.bits.shape == (rows, num_nodes, -(-num_nodes // 32))
    assert found.bits.dtype == np.uint32
    assert found.path_token_ids.dtype == found.paths.dtype == np.int32
    for row, node in np.ndindex(rows, num_nodes):
        path = walk(parents[row], node)
        assert found.tree.depths[row, node] == len(path)
        bits = sum(int(word) << 32 * w for w, word in enumerate(found.bits[row, node]))
        assert bits == 1 + sum(1 << other for other in path)
        tokens = [int(token_ids[row, other - 1]) for other in path]
        assert found.path_token_ids[row, node].tolist() == padded(tokens, max_depth)
        path = path if node <= counts[row] else []
        assert found.paths[row, node].tolist() == padded(path, max_depth)


@pytest.mark.parametrize(("parents", "counts", "max_depth"), cases())
def test_leaves_and_siblings_agree_with_walks(parents, counts, max_depth):
    num_nodes = parents.shape[1]
    found = look(parents, counts, max_depth)
    for row, count in enumerate(counts.tolist()):
        standing = parents[row, : count + 1].tolist()
        leaves = [node for node in range(count + 1) if node not in standing]
        assert np.flatnonzero(found.is_leaf[row]).tolist() == leaves
        for node in range(num_nodes):
            parent = parents[row, node]
            assert found.ranks[row, node] == parents[row, :node].tolist().count(parent)
            after = [child for child, above in enumerate(standing) if above == node]
            assert found.children[row, node].tolist() == padded(after[:3], 3)


def test_a_root_alone():
    found = look([[NO_PARENT]] * 2, [0, 0], 0)
    assert found.tree.depths.tolist() == [[0], [0]]
    assert found.bits.tolist() == [[[1]], [[1]]]
    assert found.paths.shape == found.path_token_ids.shape == (2, 1, 0)
    assert found.is_leaf.all()
    assert found.children.tolist() == [[[NO_NODE] * 3]] * 2
    validate_values(found.tree)


def test_a_chain_is_a_tree():
    tree = draft_tree.chain(2, 3)
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert (tree.num_nodes, tree.max_depth) == (4, 3)
    assert look(tree.parents, [3, 3], 3).bits[0, :, 0].tolist() == [1, 3, 7, 15]
    assert draft_tree.chain(2, 0).parents.tolist() == [[-1], [-1]]
    validate_values(tree)


@pytest.mark.parametrize("rubbish", [-7, 5, 6, 99, 2**31 - 1])
def test_what_stands_past_the_last_node_does_not_matter(rubbish):
    """Padding may hold anything, parents outside the tree and circles included."""
    parents = np.array([EXAMPLE, EXAMPLE], np.int32)
    parents[1, 4:] = rubbish
    found, clean = (look(p, [5, 3], 2) for p in (parents, [EXAMPLE] * 2))
    validate_values(found.tree, [5, 3])
    for name in ("paths", "is_leaf", "children"):
        same = jax.tree.map(np.array_equal, getattr(found, name), getattr(clean, name))
        assert np.all(same), name
    for name in ("bits", "path_token_ids", "ranks"):
        assert np.array_equal(getattr(found, name)[1, :4], getattr(clean, name)[1, :4])


def test_functions_stay_on_the_device():
    parents, counts = np.array([EXAMPLE], np.int32), np.array([5], np.int32)
    traced = jax.make_jaxpr(survey, static_argnums=3)(parents, counts, token_ids_of(parents), 2)
    assert "callback" not in str(traced)


@pytest.mark.parametrize(
    ("parents", "max_depth", "complaint"),
    [
        (jnp.zeros((1, 2, 3), jnp.int32), 2, r"int32\[rows, num_nodes\]"),
        (jnp.zeros((2, 0), jnp.int32), 2, "at least the root"),
        (jnp.zeros(3), 2, r"parents is float32\[3\]"),
        (jnp.zeros(3, jnp.int32), -1, "max_depth=-1 must be at least 0"),
    ],
)
def test_from_parents_refuses(parents, max_depth, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_parents(parents, max_depth)


def test_path_token_ids_refuses_a_token_of_the_root():
    tree = draft_tree.chain(2, 3)
    with pytest.raises(ValueError, match=r"num_nodes - 1\] = \[2, 3\]"):
        draft_tree.path_token_ids(tree, jnp.zeros((2, 4), jnp.int32))


@pytest.mark.parametrize(
    ("parents", "depths", "complaint"),
    [
        ([0, 0, 1], [0, 1, 2], "node 0 has parent 0 and depth 0"),
        ([-1, 0, 1], [1, 1, 2], "node 0 has parent -1 and depth 1"),
        ([-1, 2, 0], [0, 2, 1], "node=1 has parent=2; expected 0 to 0"),
        ([-1, 0, 2], [0, 1, 2], "node=2 has parent=2; expected 0 to 1"),
        ([-1, -1, 0], [0, 0, 1], "node=1 has parent=-1"),
        ([-1, 0, 1], [0, 1, 1], "node=2 has depth=1; expected 2"),
        ([-1, 0, 1], [0, 1, 2], "depth=2 above max_depth=1"),
    ],
)
def test_validate_values_says_what_is_wrong(parents, depths, complaint):
    tree = DraftTree(parents=np.array([parents]), depths=np.array([depths]), max_depth=1)
    with pytest.raises(ValueError, match=complaint):
        validate_values(tree)


def test_validate_values_of_counts_and_siblings():
    tree = from_parents(jnp.array(EXAMPLE, jnp.int32), 2, rows=2)
    check = functools.partial(validate_values, tree)
    with pytest.raises(ValueError, match="row=1 has num_tokens=6; expected 0 to 5"):
        check(np.array([5, 6]))
    alike = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 4]])
    with pytest.raises(ValueError, match=r"row=1: nodes 4 and 5 are siblings .* token 4"):
        check(None, alike)
    check(np.array([5, 4]), alike)  # node 5 does not stand in row 1
    # The same token under different parents is no repetition.
    check(None, np.array([[1, 2, 1, 1, 2]] * 2))
