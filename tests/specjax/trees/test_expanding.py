"""Expanding and reranking against lists, and against the best tree of known marginals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from best_first import best_first
from tree_values import validate_values

from specjax.trees import expanding
from specjax.trees.draft_tree import GrownTree

compiled_best_first = jax.jit(best_first, static_argnames="num_drafts")


def nodes_of(grown: GrownTree, row: int) -> list[tuple]:
    """Returns (token, parent, probability) of node 1, 2, ..."""
    count = int(grown.num_tokens[row])
    assert grown.path_probability is not None
    columns = (
        grown.token_ids[row, :count],
        grown.tree.parents[row, 1 : count + 1],
        grown.path_probability[row, :count],
    )
    return list(zip(*(np.asarray(column).tolist() for column in columns)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def compiled_grow(levels, width: int, num_drafts: int):
    rows, _, top_k = levels[0][0].shape
    candidates = expanding.init(rows, max_depth=len(levels), width=width, top_k=top_k)
    frontiers = [expanding.root_frontier(rows)]
    for depth, level in enumerate(levels):
        size = frontiers[-1].nodes.shape[1]
        level = (array[:, :size] for array in level)
        candidates, frontier = expanding.expand(candidates, frontiers[-1], *level, depth=depth)
        frontiers.append(frontier)
    return frontiers, expanding.rerank(candidates, num_drafts=num_drafts)


def grow(levels, width: int, num_drafts: int):
    """Grows trees from (log_probs, token_ids) per depth; returns frontiers and trees."""
    found = compiled_grow(levels, width, num_drafts)
    frontiers, grown = jax.tree.map(np.asarray, found)
    validate_values(grown.tree, grown.num_tokens, grown.token_ids)
    return frontiers, grown


def grow_by_lists(levels, row: int, width: int, num_drafts: int):
    """Returns the tokens of each frontier and (token, parent, probability), of one row."""
    root = {"score": np.float32(0), "token": 0, "parent": None}
    frontier, kept, spoken = [root], [], []
    for log_probs, token_ids in levels:
        fresh = [
            {"score": node["score"] + score, "token": int(token), "parent": node}
            for node, scores, tokens in zip(frontier, log_probs[row], token_ids[row])
            for score, token in zip(scores, tokens)
        ]
        kept += fresh
        # Sorting is stable: among equals the earlier one stays first.
        frontier = sorted(fresh, key=lambda node: -node["score"])[:width]
        spoken.append([node["token"] for node in frontier])
    best = sorted(kept, key=lambda node: -node["score"])
    best = [node for node in best if node["score"] > -np.inf][:num_drafts]
    number = {id(node): index + 1 for index, node in enumerate(best)} | {id(root): 0}
    return spoken, [
        (node["token"], number[id(node["parent"])], float(np.exp(node["score"]))) for node in best
    ]


def random_levels(rng, rows, max_depth, width, top_k, *, has_ties: bool):
    """Returns sorted log-probabilities and tokens that differ among siblings."""
    shape = rows, width, top_k
    for _ in range(max_depth):
        if has_ties:
            # Whole numbers add exactly; 0 is a child as likely as its parent.
            log_probs = -rng.choice([0, 0, 1, 1, 2, np.inf], shape)
        else:
            log_probs = np.log(rng.dirichlet(np.ones(top_k + 2), shape[:2]))
            log_probs = log_probs[:, :, :top_k]
        log_probs = -np.sort(-log_probs, axis=2).astype(np.float32)
        tokens = rng.permuted(np.broadcast_to(np.arange(9), (*shape[:2], 9)), axis=2)
        yield log_probs, tokens[:, :, :top_k].astype(np.int32)


def example():
    """The tree drawn in the module: a, b; aa, ab, ba, bb."""
    first = np.log([[[0.6, 0.4]]]), [[[1, 2]]]
    second = np.log([[[0.5, 0.4], [0.9, 0.1]]]), [[[1, 2], [1, 2]]]
    levels = [first, second]
    return [(np.float32(p), np.int32(tokens)) for p, tokens in levels]


@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_example(num_drafts):
    frontiers, grown = grow(example(), 2, num_drafts)
    assert [frontier.token_ids.tolist() for frontier in frontiers] == [
        [[0]],
        [[1, 2]],
        [[1, 1]],
    ]
    assert frontiers[1].nodes.tolist() == [[1, 2]]
    assert frontiers[1].origins.tolist() == [[0, 0]]
    # Depth 2 begins at node 1 + width * top_k; ba is its third, aa its first.
    assert frontiers[2].nodes.tolist() == [[7, 5]]
    assert frontiers[2].origins.tolist() == [[1, 0]]
    tokens = [(1, 0), (2, 0), (1, 2), (1, 1), (2, 1), (2, 2)][:num_drafts]
    probabilities = [0.6, 0.4, 0.36, 0.3, 0.24, 0.04][:num_drafts]
    found = nodes_of(grown, 0)
    # A budget above the candidates: num_tokens is what there is.
    assert [node[:2] for node in found] == tokens
    assert [p for *_, p in found] == pytest.approx(probabilities)
    assert grown.token_ids.shape == grown.path_probability.shape == (1, num_drafts)
    assert not grown.path_probability[0, len(tokens) :].any()
    assert not grown.token_ids[0, len(tokens) :].any()
    assert not grown.tree.parents[0, len(tokens) + 1 :].any()


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(
    ("max_depth", "width", "top_k", "num_drafts"),
    [(4, 3, 2, 9), (3, 2, 4, 7), (2, 4, 2, 30), (3, 1, 1, 3)],
)
def test_agrees_with_lists(has_ties, max_depth, width, top_k, num_drafts):
    rng, rows = np.random.default_rng(4), 25
    levels = [*random_levels(rng, rows, max_depth, width, top_k, has_ties=has_ties)]
    frontiers, grown = grow(levels, width, num_drafts)
    for row in range(rows):
        spoken, expected = grow_by_lists(levels, row, width, num_drafts)
        for frontier, tokens in zip(frontiers[1:], spoken):
            # Fewer candidates than places leave entries that are no node.
            assert frontier.token_ids[row, : len(tokens)].tolist() == tokens
            is_none = frontier.log_probs[row, len(tokens) :] == -np.inf
            assert is_none.all()
        found = nodes_of(grown, row)
        assert [node[:2] for node in found] == [node[:2] for node in expected]
        probabilities = [p for *_, p in found]
        assert probabilities == pytest.approx([p for *_, p in expected], rel=1e-5)
        assert probabilities == sorted(probabilities, reverse=True)


def test_wide_enough_it_finds_the_best_tree():
    """Where the path changes nothing, growing loses nothing if no frontier is cut short."""
    rng, rows, max_depth, top_k, num_drafts = np.random.default_rng(5), 30, 3, 3, 6
    probs = rng.dirichlet(np.ones(top_k), (rows, max_depth)).astype(np.float32)
    probs = -np.sort(-probs, axis=2)
    token_ids = np.broadcast_to(np.arange(top_k, dtype=np.int32), probs.shape)
    shape = rows, num_drafts, top_k
    levels = [
        (
            np.broadcast_to(np.log(probs[:, depth])[:, None], shape),
            np.broadcast_to(token_ids[:, depth][:, None], shape),
        )
        for depth in range(max_depth)
    ]
    _, grown = grow(levels, num_drafts, num_drafts)
    expected = compiled_best_first(probs, token_ids, num_drafts=num_drafts)
    assert np.array_equal(grown.token_ids, expected.token_ids)
    assert np.array_equal(grown.tree.parents, expected.tree.parents)
    np.testing.assert_allclose(grown.path_probability, expected.path_probability, rtol=1e-5)


@pytest.mark.parametrize("certain", [0.0, -0.0, 1e-6])
def test_a_child_never_outscores_its_parent(certain):
    """log_softmax may round above 0; a certain child ties with its parent and follows it."""
    log_probs = np.full((1, 2, 2), certain, np.float32)
    token_ids = np.array([[[3, 4], [5, 6]]], np.int32)
    _, grown = grow([(log_probs, token_ids)] * 3, 2, 10)
    assert grown.num_tokens.tolist() == [10]
    assert grown.path_probability.tolist() == [[1.0] * 10]
    assert grown.tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]


def test_a_model_that_fails_leaves_no_node():
    """NaN log-probabilities reach neither the frontier nor the tree."""
    (first, tokens), second = example()
    first = np.where([[[True, False]]], first, np.nan).astype(np.float32)
    frontiers, grown = grow([(first, tokens), second], 2, 8)
    assert grown.num_tokens.tolist() == [3]
    assert grown.tree.parents.tolist() == [[-1, 0, 1, 1, 0, 0, 0, 0, 0]]
    assert frontiers[1].log_probs.tolist()[0][1] == -np.inf
    assert [node[:2] for node in nodes_of(grown, 0)] == [(1, 0), (1, 1), (2, 1)]


def test_rows_do_not_mix():
    """Rows in another order give the same trees in that order."""
    rng = np.random.default_rng(6)
    levels = [*random_levels(rng, 25, 4, 3, 2, has_ties=False)]
    order = rng.permutation(25)
    _, grown = grow(levels, 3, 9)
    _, shuffled = grow([(p[order], t[order]) for p, t in levels], 3, 9)
    assert len({tuple(nodes_of(grown, row)) for row in range(25)}) == 25
    for place, row in enumerate(order):
        assert nodes_of(shuffled, place) == nodes_of(grown, row)


def test_depth_may_be_traced():
    """A loop on the device, whose frontier keeps one shape, gives the same trees."""
    rng, rows, max_depth, width = np.random.default_rng(7), 25, 4, 3
    levels = [*random_levels(rng, rows, max_depth, width, 2, has_ties=True)]
    log_probs, token_ids = (jnp.stack(parts) for parts in zip(*levels))

    @jax.jit
    def loop(log_probs, token_ids):
        def body(depth, carry):
            level = log_probs[depth], token_ids[depth]
            return expanding.expand(*carry, *level, depth=depth)

        start = expanding.init(rows, max_depth=max_depth, width=width, top_k=2)
        carry = start, expanding.root_frontier(rows, size=width)
        candidates, frontier = jax.lax.fori_loop(0, max_depth, body, carry)
        return expanding.rerank(candidates, num_drafts=9), frontier

    grown, frontier = loop(log_probs, token_ids)
    frontiers, expected = grow(levels, width, 9)
    for found, wanted in zip(jax.tree.leaves(grown), jax.tree.leaves(expected)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    is_node = np.asarray(frontier.log_probs) > -np.inf
    assert np.array_equal(
        np.asarray(frontier.nodes)[is_node], np.asarray(frontiers[-1].nodes)[is_node]
    )


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        (((1, 1, 2), (1, 1, 3)), r"token_ids.shape=\(1, 1, 3\)"),
        (((1, 2, 2), (1, 2, 2)), r"frontier.nodes.shape=\(1, 1\)"),
        (((1, 1, 3), (1, 1, 3)), r"top_k=3 candidates.top_k=2"),
    ],
)
def test_expand_refuses(shapes, complaint):
    candidates = expanding.init(1, max_depth=2, width=2, top_k=2)
    arrays = jnp.zeros(shapes[0]), jnp.zeros(shapes[1], jnp.int32)
    with pytest.raises(ValueError, match=complaint):
        expanding.expand(candidates, expanding.root_frontier(1), *arrays, depth=0)


def test_other_refusals():
    candidates = expanding.init(1, max_depth=2, width=2, top_k=2)
    wide = expanding.root_frontier(1, size=3)
    with pytest.raises(ValueError, match="size=3 must be at most width=2"):
        expanding.expand(candidates, wide, jnp.zeros((1, 3, 2)), jnp.zeros((1, 3, 2), int), depth=0)
    with pytest.raises(ValueError, match="num_drafts=0 must be at least 1"):
        expanding.rerank(candidates, num_drafts=0)
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        expanding.init(1, max_depth=2, width=2, top_k=0)


def test_growing_stays_on_the_device():
    def once(log_probs, token_ids):
        candidates = expanding.init(1, max_depth=1, width=2, top_k=2)
        root = expanding.root_frontier(1)
        candidates, _ = expanding.expand(candidates, root, log_probs, token_ids, depth=0)
        return expanding.rerank(candidates, num_drafts=2)

    assert "callback" not in str(jax.make_jaxpr(once)(*example()[0]))
