"""Traversal accepts at least as much as level-wise rejection: exact expectations of many trees.

The rules are written down again here, in float64 and as sums over all outcomes; what
the enumeration finds for the production functions holds them to it.
"""

import itertools

import numpy as np
import pytest
from enumeration import (
    LAW_TOLERANCE,
    Shape,
    bottom_up,
    compiled,
    mean_accepted,
    sampler,
    step_laws,
    top_down,
)

from specjax.decode.accept import accept_by_rejection, accept_by_traversal

SHAPES = {
    "2,1": (-1, 0, 0, 1, 2),
    "1,2": (-1, 0, 1, 1),
    "left": (-1, 0, 0, 1, 3),
    "right": (-1, 0, 0, 2),
    "three": (-1, 0, 0, 0, 3),
    "by branch": (-1, 0, 1, 0, 3, 3),
}


def without(law, drawn):
    """Returns the law of the next sibling; even over what is left where nothing is."""
    left = law.copy()
    left[drawn] = 0
    if left.sum() <= 0:
        left = np.ones_like(law)
        left[drawn] = 0
    return left / left.sum()


class Tree:
    """Drafted tokens of a tree, and both laws at each of its nodes."""

    def __init__(self, parents, tokens, target, draft):
        self.tokens, self.depths = tokens, [0]
        self.children = [[] for _ in parents]
        paths = [()]
        for node, parent in enumerate(parents[1:], 1):
            self.children[parent].append(node)
            self.depths.append(self.depths[parent] + 1)
            paths.append((*paths[parent], tokens[node - 1]))
        self.target = [np.asarray(target(path)) for path in paths]
        self.draft = [np.asarray(draft(path)) for path in paths]

    def siblings(self, node):
        """Yields each child, its token and the law that it was drawn from."""
        drawn = []
        for child in self.children[node]:
            token = self.tokens[child - 1]
            yield child, token, without(self.draft[node], drawn)
            drawn.append(token)

    def probability(self):
        """Returns how likely these tokens are to be drafted."""
        nodes = range(len(self.children))
        drawn = itertools.chain.from_iterable(map(self.siblings, nodes))
        return np.prod([law[token] for _, token, law in drawn])

    def by_level(self, node=0):
        """Returns the mean number of tokens that rejection accepts below a node."""
        left, mean, reach = self.target[node], 0.0, 1.0
        for child, token, law in self.siblings(node):
            accept = min(1.0, left[token] / law[token])
            mean += reach * accept * (1 + self.by_level(child))
            reach *= 1 - accept
            excess = np.maximum(left - law, 0)
            left = excess / excess.sum() if excess.sum() > 0 else left
        return mean

    def by_traversal(self, node=0, accept=1.0):
        """Returns a node's part of the mean, and the chance that nothing below stands."""
        left, mean, reach = self.target[node], 0.0, 1.0
        for child, token, law in self.siblings(node):
            ratio = min(1.0, accept * left[token] / law[token])
            part, refused = self.by_traversal(child, ratio)
            mean += reach * part
            reach *= refused
            excess = np.maximum(accept * left - law, 0)
            total = excess.sum()
            if total > 0:
                left = excess / total
            if node:
                accept = total / max(total + 1 - accept, total) if total > 0 else 0.0
        if not node:
            return mean, 0.0
        return mean + reach * accept * self.depths[node], reach * (1 - accept)


def means(parents, target, draft, vocab):
    """Returns the mean number of accepted tokens, level by level and by traversal."""
    total = np.zeros(2)
    for tokens in itertools.product(range(vocab), repeat=len(parents) - 1):
        tree = Tree(parents, tokens, target, draft)
        chance = tree.probability()
        if chance > 0:
            total += chance * np.array([tree.by_level(), tree.by_traversal()[0]])
    return total


def random_law(rng, concentration, vocab):
    """Returns a law of each prefix, drawn when it is first asked for."""
    laws = {}

    def law(prefix):
        if prefix not in laws:
            laws[prefix] = rng.dirichlet([concentration] * vocab)
        return laws[prefix]

    return law


def random_laws(rng, vocab):
    return [random_law(rng, rng.choice([0.2, 0.5, 1, 3]), vocab) for _ in range(2)]


@pytest.mark.parametrize("name", SHAPES)
def test_traversal_accepts_no_less(name):
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(20):
        by_level, by_traversal = means(SHAPES[name], *random_laws(rng, 3), 3)
        gains.append(by_traversal - by_level)
    assert min(gains) > -1e-12
    # Where the last sibling alone has a child, a refusal has nothing to hand on.
    assert max(gains) > 1e-3 or name == "three"


@pytest.mark.parametrize("name", ["2,1", "left"])
def test_the_production_rules_have_these_means(name):
    shape = Shape(SHAPES[name])
    target, draft = random_laws(np.random.default_rng(1), 3)
    expected = means(shape.parents, target, draft, 3)
    for rule, order, mean in (
        (accept_by_rejection, top_down, expected[0]),
        (accept_by_traversal, bottom_up, expected[1]),
    ):
        laws = step_laws(compiled(rule), shape, order, target, sampler(draft), [()])
        assert mean_accepted(laws[()]) == pytest.approx(mean, abs=LAW_TOLERANCE)
