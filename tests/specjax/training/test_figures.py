"""What sums along text say of the acceptance of drafts."""

import numpy as np
import pytest

from specjax.training import figures
from specjax.training.objective import Chains, Sums
from specjax.types import GREEDY, REJECTION, SEEDED, TYPICAL


def sums_of(greedy, sampled, by_law):
    none = np.zeros(3)
    return Sums(none, none, none, none, none, greedy, sampled, by_law)


SUMS = sums_of(
    Chains(np.array([20.0, 8.0, 7.0]), np.array([10.0, 2.0, 1.0])),
    Chains(np.array([40.0, 40.0, 40.0]), np.array([10.0, 4.0, 2.0])),
    Chains(np.array([10.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0])),
)


def test_survival_by_rule_and_temperature():
    assert figures.survival(SUMS, [(SEEDED, 1.0)]) == (0.25, 0.1, 0.05)
    # Seven steps tell too little of the third draft token.
    assert figures.survival(SUMS, [(GREEDY, 1.0)]) == (0.5, 0.25)
    assert figures.survival(SUMS, [(SEEDED, 0.0)]) == (0.5, 0.25)
    assert figures.survival(SUMS, [(REJECTION, 1.0)]) == (0.1,)


def test_survival_of_texts_of_several_rules_is_the_mean():
    assert figures.survival(SUMS, [(SEEDED, 1.0), (SEEDED, 0.0)]) == pytest.approx((0.375, 0.175))


def test_survival_of_rules_that_accept_otherwise_is_not_known():
    assert figures.survival(SUMS, [(TYPICAL, 1.0)]) == ()
    assert figures.survival(SUMS, [(TYPICAL, 1.0), (SEEDED, 1.0)]) == (0.25, 0.1, 0.05)
    assert figures.survival(SUMS, []) == ()
