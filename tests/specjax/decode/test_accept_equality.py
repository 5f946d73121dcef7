"""Equality on chains and trees: the output is the undrafted text, whatever was drafted."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Shape, chain, make_proposal, random_law, tree

from specjax.decode.accept import accept_by_equality
from specjax.types import Acceptance, DraftTree

VOCAB = 3
accept = jax.jit(accept_by_equality)


def every_choice(law, noise: np.ndarray, prefix) -> np.ndarray:
    """Returns the token chosen after a prefix under each noise [n, positions, vocab]."""
    scores = np.log(law(prefix))[None, :] + noise[:, len(prefix)]
    return np.argmax(scores, axis=1)


def plain_text(law, noise: np.ndarray, length: int) -> np.ndarray:
    """Returns what sampling without a draft emits under each noise, [n, length]."""
    text = np.zeros((len(noise), 0), int)
    for _ in range(length):
        chosen = np.zeros(len(noise), int)
        for prefix in set(map(tuple, text.tolist())):
            here = np.all(text == np.array(prefix, int)[None, :], axis=1)
            chosen[here] = every_choice(law, noise[here], prefix)
        text = np.column_stack([text, chosen])
    return text


@pytest.mark.parametrize(
    "shape",
    [chain(3), tree(2, 1), tree(3), Shape((-1, 0, 0, 1, 3)), Shape((-1, 0, 1, 0, 2))],
    ids=lambda shape: str(shape.parents),
)
def test_every_proposal_and_every_order_of_the_noise(shape):
    """`seeded`: the text is that of plain sampling, token for token.

    Every proposal, those with repeated siblings too; and at every position every order
    of the noise of the tokens. The law depends on the prefix, so that equal noise makes
    unequal choices, and the law and the noise each decide in part.
    """
    law, depth = random_law(0, sharpness=5.0), max(shape.depths)
    orders = np.array(list(itertools.permutations([0.0, 0.8, 1.6])))
    noise = np.array(list(itertools.product(orders, repeat=depth + 1)))
    text = plain_text(law, noise, depth + 1)
    num_drafts = shape.num_nodes - 1
    assert len(np.unique(text, axis=0)) > VOCAB ** (depth + 1) / 2
    for start, drafted in enumerate(itertools.product(range(VOCAB), repeat=num_drafts)):
        choices = [
            every_choice(law, noise, shape.prefix(drafted, node)) for node in range(shape.num_nodes)
        ]
        num_tokens = (np.arange(len(noise)) + start) % (num_drafts + 1)
        proposal = make_proposal(shape, np.tile(drafted, (len(noise), 1)), None, num_tokens)
        choices = jnp.asarray(np.column_stack(choices), jnp.int32)
        assert_emits(accept(proposal, choices), text, shape, proposal)


def assert_emits(acceptance: Acceptance, text, shape: Shape, proposal) -> None:
    """Asserts that the output is `text`, up to where no standing node goes on."""
    counts, emitted = np.asarray(acceptance.num_accepted), acceptance.token_ids
    drafted, num_tokens = map(np.asarray, (proposal.token_ids, proposal.num_tokens))
    within = np.arange(text.shape[1])[None, :] <= counts[:, None]
    assert np.all(np.where(within, emitted, -1) == np.where(within, text, -1))
    last = np.zeros_like(counts)
    for node in range(1, shape.num_nodes):  # the first of equal siblings
        parent, depth = shape.parents[node], shape.depths[node]
        is_right = (node <= num_tokens) & (last == parent)
        last[is_right & (drafted[:, node - 1] == text[:, depth - 1])] = node
    assert np.all(counts == np.array(shape.depths)[last])
    if acceptance.nodes is not None:
        paths = [shape.path(node) for node in last]
        for row, path in zip(np.asarray(acceptance.nodes), paths, strict=True):
            assert row[: len(path)].tolist() == path


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_equality_emits_the_choices_along_the_path(depth):
    """For every draft and trees of arbitrary choices, whatever made them."""
    rng = np.random.default_rng(depth)
    drafts = list(itertools.product(range(VOCAB), repeat=depth))
    prefixes = [d[:length] for d in drafts for length in range(depth + 1)]
    for num_tokens in range(depth + 1):
        for _ in range(10):
            choice = {prefix: int(rng.integers(VOCAB)) for prefix in prefixes}
            plain = []
            for _ in range(depth + 1):
                plain.append(choice[tuple(plain)])
            after_nodes = [
                [choice[draft[:length]] for length in range(depth + 1)] for draft in drafts
            ]
            tokens = np.array(drafts, np.int32).reshape(len(drafts), depth)
            acceptance = accept(
                make_proposal(chain(depth), tokens, None, [num_tokens] * len(drafts)),
                jnp.asarray(after_nodes, jnp.int32),
            )
            emitted, counts = map(np.asarray, acceptance[:2])
            for draft, row, accepted in zip(drafts, emitted, counts, strict=True):
                right = 0
                while right < num_tokens and draft[right] == plain[right]:
                    right += 1
                assert accepted == right
                assert row[: right + 1].tolist() == plain[: right + 1]


def test_equality_by_hand():
    proposal = make_proposal(chain(3), [[5, 6, 7]] * 5, None, [3, 3, 3, 2, 0])
    choices = [[5, 6, 7, 8], [5, 9, 7, 8], [4, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    acceptance = accept_by_equality(proposal, jnp.array(choices))
    assert isinstance(acceptance, Acceptance)
    # A right token after a wrong one does not count.
    assert acceptance.num_accepted.tolist() == [3, 1, 0, 2, 0]
    assert acceptance.token_ids.tolist() == choices
    assert acceptance.nodes is None


def test_equality_in_a_tree_by_hand():
    # parents = [-1, 0, 0, 1, 2, 2]      0
    #                                   / \
    #                                  1   2        token 7 at both
    #                                  |   |\
    #                                  3   4 5      tokens 8, 9, 9
    shape = Shape((-1, 0, 0, 1, 2, 2))
    rows = {
        # Node 1 wins over its equal, node 2, though only that one would go on.
        "first of equal siblings": ([7, 7, 8, 9, 9], [7, 9, 9, 0, 0, 0], 5, [1], 9),
        "first of equal leaves": ([6, 7, 8, 9, 9], [7, 1, 9, 2, 3, 4], 5, [2, 4], 3),
        "second leaf": ([6, 7, 8, 4, 9], [7, 1, 9, 2, 3, 4], 5, [2, 5], 4),
        "the leaf does not stand": ([6, 7, 8, 4, 9], [7, 1, 9, 2, 3, 4], 4, [2], 9),
        "nothing stands": ([6, 7, 8, 4, 9], [7, 1, 9, 2, 3, 4], 0, [], 7),
        "none is right": ([6, 5, 8, 4, 9], [7, 6, 5, 8, 4, 9], 5, [], 7),
        "a right child of a wrong node": (
            [6, 5, 8, 4, 9],
            [7, 8, 9, 0, 0, 0],
            5,
            [],
            7,
        ),
    }  # drafted, choices, num_tokens -> nodes, the token after them
    drafted, choices, num_tokens, paths, after = zip(*rows.values(), strict=True)
    acceptance = accept_by_equality(
        make_proposal(shape, drafted, None, num_tokens), jnp.array(choices)
    )
    for row, name in enumerate(rows):
        count = acceptance.num_accepted[row]
        assert acceptance.nodes[row, :count].tolist() == paths[row], name
        tokens = [drafted[row][node - 1] for node in paths[row]]
        assert acceptance.token_ids[row, : count + 1].tolist() == [*tokens, after[row]]


def test_entries_past_the_last_node_mean_nothing():
    shape = tree(2, 1)
    proposal = make_proposal(shape, [[1, 2, 1, 2]] * 3, None, [2] * 3)
    assert proposal.tree is not None
    parents, depths = proposal.tree.parents.copy(), proposal.tree.depths.copy()
    for row, garbage in ((1, 99), (2, -7)):
        parents[row, 3:] = depths[row, 3:] = garbage
    other = DraftTree(parents=parents, depths=depths, max_depth=2)
    proposal = dataclasses.replace(proposal, tree=other)
    choices = jnp.array([[2, 0, 1, 0, 0]] * 3)
    acceptance = accept_by_equality(proposal, choices)
    assert acceptance.num_accepted.tolist() == [1] * 3
    assert acceptance.token_ids[:, :2].tolist() == [[2, 1]] * 3


def test_equality_refuses_what_does_not_fit():
    for shape in ((2, 3), (1, 2), (1, 4)):
        with pytest.raises(ValueError, match="target_token_ids"):
            accept_by_equality(make_proposal(chain(2), [[1, 1]]), jnp.zeros(shape, jnp.int32))
