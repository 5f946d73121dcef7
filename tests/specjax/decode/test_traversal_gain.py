"""Traversal accepts at least as much as level-wise rejection: exact expectations of many trees.

The rules are written down again here, in float64 and as sums over all outcomes; what
the enumeration finds for the production functions holds them to it.
"""

import numpy as np
import pytest
from enumeration import (
    LAW_TOLERANCE,
    Shape,
    bottom_up,
    compiled,
    draws_without_replacement,
    every_draft,
    mean_accepted,
    probs_of,
    random_law,
    sampler,
    step_laws,
    top_down,
)

from specjax.decode.accept import accept_by_rejection, accept_by_traversal

SHAPES = {
    "2,1": Shape((-1, 0, 0, 1, 2)),
    "1,2": Shape((-1, 0, 1, 1)),
    "left": Shape((-1, 0, 0, 1, 3)),
    "right": Shape((-1, 0, 0, 2)),
    "three": Shape((-1, 0, 0, 0, 3)),
    "by branch": Shape((-1, 0, 1, 0, 3, 3)),
}


class Rules:
    """What both rules make of one draft."""

    def __init__(self, shape, tokens, target, draft):
        self.shape, self.tokens = shape, tokens
        self.target = probs_of(shape, (), tokens, target)
        self.draft = probs_of(shape, (), tokens, draft)

    def siblings(self, node):
        """Yields each child, its token and the law that it was drawn from."""
        drawn = []
        for child in self.shape.children(node):
            token = self.tokens[child - 1]
            yield child, token, draws_without_replacement(self.draft[node], drawn)
            drawn.append(token)

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
        depth = self.shape.depths[node]
        return mean + reach * accept * depth, reach * (1 - accept)


def means(shape, target, draft):
    """Returns the mean number of accepted tokens, level by level and by traversal."""
    total = np.zeros(2)
    for chance, tokens in every_draft(shape, (), draft):
        rules = Rules(shape, tokens, target, draft)
        total += chance * np.array([rules.by_level(), rules.by_traversal()[0]])
    return total


def random_laws(seed):
    """Returns a target's law and a draft's, each flat or sharp."""
    sharpness = np.random.default_rng(seed).choice([0.2, 0.5, 1, 3], 2).tolist()
    return [random_law(2 * seed + index, sharpness=each) for index, each in enumerate(sharpness)]


@pytest.mark.parametrize("name", SHAPES)
def test_traversal_accepts_no_less(name):
    gains = []
    for seed in range(20):
        by_level, by_traversal = means(SHAPES[name], *random_laws(seed))
        gains.append(by_traversal - by_level)
    assert min(gains) > -1e-12
    # Where the last sibling alone has a child, a refusal has nothing to hand on.
    assert max(gains) > 1e-3 or name == "three"


@pytest.mark.full
@pytest.mark.parametrize("name", ["2,1", "left"])
def test_the_production_rules_have_these_means(name):
    shape, (target, draft) = SHAPES[name], random_laws(21)
    expected = means(shape, target, draft)
    for rule, order, mean in (
        (accept_by_rejection, top_down, expected[0]),
        (accept_by_traversal, bottom_up, expected[1]),
    ):
        laws = step_laws(compiled(rule), shape, order, target, sampler(draft), [()])
        assert mean_accepted(laws[()]) == pytest.approx(mean, abs=LAW_TOLERANCE)
