"""Merged continuations against a dictionary of paths, and by example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_values import validate_values

from specjax.trees.draft_tree import GrownTree
from specjax.trees.merging import merge

compiled = jax.jit(merge, static_argnames="num_drafts")


def merge_by_dictionary(continuations, num_drafts: int) -> list[tuple[int, int]]:
    """Returns (token, parent) of node 1, 2, ...: one continuation at a time."""
    nodes, drafts = {(): 0}, []
    for continuation in continuations:
        for end in range(1, len(continuation) + 1):
            path = tuple(continuation[:end])
            if path not in nodes and len(drafts) < num_drafts:
                nodes[path] = len(drafts) + 1
                drafts.append((path[-1], nodes[path[:-1]]))
            if path not in nodes:
                break
    return drafts


def run(rows, num_drafts: int, depth: int) -> GrownTree:
    """Merges lists of continuations; past a length stands a token that others have."""
    num_continuations = 4  # one compiled shape for most tests
    array = np.full((len(rows), num_continuations, depth), 0, np.int32)
    lengths = np.zeros((len(rows), num_continuations), np.int32)
    for row, continuations in enumerate(rows):
        for index, continuation in enumerate(continuations):
            array[row, index, : len(continuation)] = continuation
            lengths[row, index] = len(continuation)
    found = compiled(array, lengths, num_drafts=num_drafts)
    validate_values(found.tree, found.num_tokens, found.token_ids)
    return jax.tree.map(np.asarray, found)


def drafts_of(found: GrownTree, row: int) -> list[tuple[int, int]]:
    count = int(found.num_tokens[row])
    tokens = found.token_ids[row, :count].tolist()
    return list(zip(tokens, found.tree.parents[row, 1 : count + 1].tolist()))


def spoken(text: str, num_drafts: int, depth: int = 3):
    """Merges continuations written with commas, and returns words with their parents."""
    words = [part.split() for part in text.split(",")]
    ids = {word: i for i, word in enumerate(sorted({w for part in words for w in part}))}
    names = {index: word for word, index in ids.items()}
    found = run([[[ids[word] for word in part] for part in words]], num_drafts, depth)
    return [(names[token], parent) for token, parent in drafts_of(found, 0)]


HAMLET = "not to be, sleep in, not to die, go to"
MERGED = [
    ("not", 0),
    ("to", 1),
    ("be", 2),
    ("sleep", 0),
    ("in", 4),
    ("die", 2),
    ("go", 0),
    ("to", 7),
]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 6, 9])
def test_example_and_budgets(num_drafts):
    assert spoken(HAMLET, num_drafts) == MERGED[:num_drafts]


def test_shape_of_what_is_returned():
    found = run([[[3, 4]], [[]]], 5, 4)
    assert found.token_ids.shape == (2, 5)
    assert found.num_tokens.tolist() == [2, 0]
    assert found.tree.parents.tolist() == [[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 0, 0, 0]]
    assert found.tree.max_depth == 4
    assert found.path_probability is None
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(found)}
    assert dtypes == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c", [("a", 0), ("b", 1), ("c", 2)]),  # a chain
        ("a b, a b, a b", [("a", 0), ("b", 1)]),  # duplicates
        ("a b c, a b", [("a", 0), ("b", 1), ("c", 2)]),  # a prefix adds nothing
        ("a, a b c", [("a", 0), ("b", 1), ("c", 2)]),  # and is continued
        (",,a b", [("a", 0), ("b", 1)]),  # lengths 0
        (",,", []),
        ("a a a, a a", [("a", 0), ("a", 1), ("a", 2)]),  # repetition inside a path
        ("a b, c b", [("a", 0), ("b", 1), ("c", 0), ("b", 3)]),  # same token elsewhere
        # What agrees again after it has differed is not shared.
        ("a x c, a y c", [("a", 0), ("x", 1), ("c", 2), ("y", 1), ("c", 4)]),
        # The beginning is the first's, what follows the second's.
        ("a, a b, a b c", [("a", 0), ("b", 1), ("c", 2)]),
    ],
)
def test_by_example(text, expected):
    assert spoken(text, 9) == expected


def test_agrees_with_a_dictionary():
    rng = np.random.default_rng(1)
    rows, num_continuations, depth = 64, 4, 3
    for vocab in (1, 2, 3):
        texts = [
            [
                rng.integers(vocab, size=rng.integers(depth + 1)).tolist()
                for _ in range(num_continuations)
            ]
            for _ in range(rows)
        ]
        for num_drafts in (3, 9):
            found = run(texts, num_drafts, depth)
            for row, text in enumerate(texts):
                assert drafts_of(found, row) == merge_by_dictionary(text, num_drafts)


def test_a_smaller_budget_is_a_beginning():
    text = [[[0, 1, 2], [0, 2], [1, 1, 1], [0, 1, 0]]]
    whole = drafts_of(run(text, 9, 3), 0)
    for num_drafts in (0, 1, 3, 6):
        assert drafts_of(run(text, num_drafts, 3), 0) == whole[:num_drafts]


def test_merging_stays_on_the_device():
    function = functools.partial(merge, num_drafts=5)
    array, lengths = jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    traced = str(jax.make_jaxpr(function)(array, lengths))
    assert "callback" not in traced
    assert "while" not in traced


@pytest.mark.parametrize(
    ("shapes", "dtype", "num_drafts", "complaint"),
    [
        (((2, 3), (2,)), jnp.int32, 4, "num_continuations, max_depth"),
        (((2, 3, 4), (2, 4)), jnp.int32, 4, r"lengths.shape=\(2, 4\)"),
        (((2, 0, 4), (2, 0)), jnp.int32, 4, "at least one continuation"),
        (((2, 3, 0), (2, 3)), jnp.int32, 4, "at least one continuation"),
        (((2, 3, 4), (2, 3)), jnp.float32, 4, "must both be int32"),
        (((2, 3, 4), (2, 3)), jnp.int32, -1, "num_drafts=-1 must be at least 0"),
    ],
)
def test_merge_refuses(shapes, dtype, num_drafts, complaint):
    continuations, lengths = (jnp.zeros(shape, dtype) for shape in shapes)
    with pytest.raises(ValueError, match=complaint):
        merge(continuations, lengths, num_drafts=num_drafts)
