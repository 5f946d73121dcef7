"""The best tree of known marginals against a heap."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from best_first import best_first
from tree_values import validate_values

from specjax.trees.draft_tree import GrownTree

compiled = jax.jit(best_first, static_argnames="num_drafts")


def best_first_by_heap(probs, token_ids, num_drafts: int) -> list[tuple]:
    """Returns (token, parent, probability) of node 1, 2, ... of one row.

    A node stands for its next sibling and its first child until it is popped; keys
    are (-product, depth, parent, rank).
    """
    max_depth, num_ranks = probs.shape
    nodes, above = [], [np.float32(1)]
    heap = [(-probs[0, 0], 0, 0, 0)]
    while heap and len(nodes) < num_drafts:
        product, depth, parent, rank = heapq.heappop(heap)
        if product == 0:
            break
        nodes.append((int(token_ids[depth, rank]), parent, float(-product)))
        above.append(-product)
        if rank + 1 < num_ranks:
            sibling = -above[parent] * probs[depth, rank + 1]
            heapq.heappush(heap, (sibling, depth, parent, rank + 1))
        if depth + 1 < max_depth:
            child = product * probs[depth + 1, 0]
            heapq.heappush(heap, (child, depth + 1, len(nodes), 0))
    return nodes


def nodes_of(grown: GrownTree, row: int) -> list[tuple]:
    count = int(grown.num_tokens[row])
    assert grown.path_probability is not None
    columns = (
        grown.token_ids[row, :count],
        grown.tree.parents[row, 1 : count + 1],
        grown.path_probability[row, :count],
    )
    return list(zip(*(np.asarray(column).tolist() for column in columns)))


def run(probs, num_drafts: int, token_ids=None) -> list[list[tuple]]:
    probs = np.asarray(probs, np.float32)
    if token_ids is None:
        token_ids = np.broadcast_to(np.arange(10, 10 + probs.shape[2]), probs.shape)
    token_ids = np.asarray(token_ids, np.int32)
    grown = compiled(probs, token_ids, num_drafts=num_drafts)
    grown = jax.tree.map(np.asarray, grown)
    assert grown.token_ids.shape == grown.path_probability.shape
    assert grown.token_ids.shape == (probs.shape[0], num_drafts)
    assert grown.tree.num_nodes == num_drafts + 1
    validate_values(grown.tree, grown.num_tokens, grown.token_ids)
    return [nodes_of(grown, row) for row in range(probs.shape[0])]


EXAMPLE = [[[0.7, 0.3], [0.6, 0.4]]]


@pytest.mark.parametrize("num_drafts", [1, 4, 9])
def test_example(num_drafts):
    expected = [
        (10, 0, 0.7),
        (10, 1, 0.42),
        (11, 0, 0.3),
        (11, 1, 0.28),
        (10, 3, 0.18),
        (11, 3, 0.12),
    ][:num_drafts]
    (found,) = run(EXAMPLE, num_drafts)
    # A budget above the candidates leaves the rest out.
    assert [node[:2] for node in found] == [node[:2] for node in expected]
    assert [p for *_, p in found] == pytest.approx([p for *_, p in expected])


def sharpness(rng, kind: str, shape) -> np.ndarray:
    """Returns descending probabilities: peaky, flat, mixed, or with many ties."""
    if kind == "ties":
        # Powers of two multiply exactly, so that equal products are equal.
        values = 2.0 ** -rng.integers(0, 3, shape)
    else:
        power = {"peaky": 0.2, "flat": 5.0}.get(kind) or rng.choice([0.1, 1, 9])
        values = rng.dirichlet(np.full(shape[2], power), shape[:2])
    return -np.sort(-values, axis=2).astype(np.float32)


@pytest.mark.parametrize("kind", ["peaky", "flat", "mixed", "ties"])
@pytest.mark.parametrize(
    ("max_depth", "num_ranks", "num_drafts"),
    [(4, 5, 12), (6, 2, 7), (2, 9, 30), (1, 4, 3)],
)
def test_agrees_with_a_heap(kind, max_depth, num_ranks, num_drafts):
    rng = np.random.default_rng(2)
    rows = 40
    probs = sharpness(rng, kind, (rows, max_depth, num_ranks))
    token_ids = rng.permuted(np.broadcast_to(np.arange(num_ranks), probs.shape), axis=2)
    found = run(probs, num_drafts, token_ids)
    for row in range(rows):
        assert found[row] == best_first_by_heap(probs[row], token_ids[row], num_drafts)


def test_all_probabilities_one_half():
    """Ties go to the lower depth, then the earlier parent, then the lower rank."""
    (found,) = run([[[0.5, 0.5], [0.5, 0.5]]], 5)
    assert [node[:2] for node in found] == [(10, 0), (11, 0), (10, 1), (11, 1), (10, 2)]


def test_certain_tokens_make_a_chain():
    """A child as likely as its parent, and siblings that never come."""
    (found,) = run([[[1.0, 0.0]] * 3], 6)
    assert found == [(10, 0, 1.0), (10, 1, 1.0), (10, 2, 1.0)]


def test_what_is_no_probability_counts_as_zero_or_one():
    nan, inf = np.nan, np.inf
    (found,) = run([[[inf, 0.5, nan], [0.25, -0.0, -1.0]]], 6)
    assert found == [(10, 0, 1.0), (11, 0, 0.5), (10, 1, 0.25), (10, 2, 0.125)]


def test_a_row_without_drafts():
    """Rows of zeros, which is how padding looks, get no node; others lose nothing."""
    rows = run([*EXAMPLE, [[0.0, 0.0], [0.0, 0.0]]], 3)
    assert rows == [*run(EXAMPLE, 3), []]
    tokens = np.ones((2, 1, 2), np.int32)
    grown = compiled(np.zeros((2, 1, 2), np.float32), tokens, num_drafts=3)
    assert grown.token_ids.tolist() == [[0, 0, 0]] * 2
    assert grown.tree.parents.tolist() == [[-1, 0, 0, 0]] * 2
    assert grown.path_probability.tolist() == [[0.0, 0.0, 0.0]] * 2


def test_expected_length_is_the_best_of_all_trees():
    """No connected set of nodes has a larger sum of products; by trying them all."""
    rng = np.random.default_rng(3)
    for _ in range(3):
        probs = sharpness(rng, "mixed", (1, 3, 2))[0]
        ranks = [(a,) for a in range(2)]
        ranks += [(*p, b) for p in ranks for b in range(2)]
        ranks += [(*p, b) for p in ranks if len(p) == 2 for b in range(2)]
        value = {p: np.prod([probs[d, r] for d, r in enumerate(p)]) for p in ranks}
        for num_drafts in (5,):
            (found,) = run(probs[None], num_drafts)
            best = max(sum(map(value.get, tree)) for tree in trees(ranks, num_drafts))
            assert sum(p for *_, p in found) == pytest.approx(best, rel=1e-5)


def trees(nodes: list[tuple], size: int, chosen=frozenset({()})):
    """Yields every set of `size` nodes that holds the parent of each."""
    if len(chosen) == size + 1:
        yield chosen - {()}
        return
    for index, node in enumerate(nodes):
        if node[:-1] in chosen:
            yield from trees(nodes[index + 1 :], size, chosen | {node})


def test_it_stays_on_the_device_without_loops():
    function = functools.partial(best_first, num_drafts=8)
    traced = str(jax.make_jaxpr(function)(jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4), jnp.int32)))
    assert "callback" not in traced
    assert "while" not in traced


@pytest.mark.parametrize(
    ("probs", "token_ids", "num_drafts", "complaint"),
    [
        ((2, 3), (2, 3), 4, r"\[rows, max_depth, m\]"),
        ((2, 3, 4), (2, 3, 5), 4, r"token_ids.shape=\(2, 3, 5\)"),
        ((2, 0, 4), (2, 0, 4), 4, "no axis empty"),
        ((2, 3, 4), (2, 3, 4), 0, "num_drafts=0 must be at least 1"),
    ],
)
def test_best_first_refuses(probs, token_ids, num_drafts, complaint):
    with pytest.raises(ValueError, match=complaint):
        best_first(jnp.ones(probs), jnp.ones(token_ids, jnp.int32), num_drafts=num_drafts)
