"""Acceptance by position and by row."""

import numpy as np
import pytest

from specjax.policy.survival import PRIOR_RATE, Survival

DEPTH = 3


def overall(survival):
    """Returns the rate of each position for a row of which nothing is known."""
    return survival.rates([-1])[0] * survival.profile()


def burst(survival, rates, *, steps=1000, asked=DEPTH, proposed=None, seed=0):
    """Shows a burst in which row r's drafts stand with rates[r] each, whatever their place."""
    rng = np.random.default_rng(seed)
    rows = len(rates)
    depth = np.full((steps, rows), asked)
    if proposed is not None:
        depth = np.where(rng.uniform(size=depth.shape) < proposed, asked, 0)
    stands = rng.uniform(size=(steps, rows, DEPTH)) < np.array(rates)[None, :, None]
    accepted = np.minimum(stands.cumprod(axis=2).sum(axis=2), depth)
    survival.observe(np.arange(rows), accepted + 1, accepted, depth, depth, np.full(rows, asked))


def by_row(survival, requests):
    """Returns the survival of each request's draft tokens, f64[requests, depth]."""
    return survival.of_rates(survival.rates(requests))


def test_before_anything_is_known():
    survival = Survival(DEPTH)
    assert overall(survival) == pytest.approx([PRIOR_RATE] * DEPTH)
    assert by_row(survival, [7])[0] == pytest.approx(PRIOR_RATE ** np.arange(1, 4))
    assert survival.presence() == pytest.approx([1.0] * DEPTH)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_the_rate_of_each_position_is_learned(rate):
    survival = Survival(DEPTH)
    burst(survival, [rate] * 4, steps=4000)
    rates = overall(survival)
    tried = 1 if rate == 0 else DEPTH  # nothing behind a rejected token was tried
    assert rates[:tried] == pytest.approx([rate] * tried, abs=0.06)
    assert rates == pytest.approx([rate] * DEPTH, abs=0.1)


def test_a_position_never_tried_has_the_rate_before_it():
    survival = Survival(DEPTH)
    burst(survival, [0.9] * 4, asked=1)
    rates = overall(survival)
    assert rates[1] == rates[0] == rates[2]


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_what_may_stand_is_no_less_than_what_is_thought(rate):
    """However few trials there were, weighted as they are by deep positions that did badly."""
    for steps in (0, 1, 3, 30, 1000):
        survival = Survival(DEPTH)
        burst(survival, [rate] * 4, steps=steps)
        assert np.all(survival.optimism() >= 1)
        burst(survival, [1.0] * 4, asked=1, steps=steps)
        assert np.all(np.isfinite(survival.optimism()))


def test_rows_differ():
    survival = Survival(DEPTH)
    burst(survival, [0.95, 0.1])
    high, low, unknown = by_row(survival, [0, 1, 99])
    assert high[0] == pytest.approx(0.95, abs=0.06)
    assert low[0] == pytest.approx(0.1, abs=0.06)
    assert low[0] < unknown[0] < high[0]


def test_a_row_that_is_not_asked_becomes_like_the_others_again():
    survival = Survival(DEPTH)
    burst(survival, [0.9, 0.9, 0.05])
    assert survival.rates([2])[0] < 0.15
    steps, asked = 4000, np.array([DEPTH, DEPTH, 0])
    drafted = np.tile(asked, (steps, 1))
    # The others go on as they were: nothing says that the text has changed.
    stands = np.random.default_rng(1).uniform(size=(steps, 3, DEPTH)) < 0.9
    accepted = np.minimum(stands.cumprod(axis=2).sum(axis=2), drafted)
    survival.observe(np.arange(3), accepted + 1, accepted, drafted, drafted, asked)
    unknown, again = survival.rates([99, 2])
    assert again == pytest.approx(unknown, abs=0.02)


def test_what_was_is_forgotten():
    survival = Survival(DEPTH)
    burst(survival, [0.9] * 4)
    burst(survival, [0.1] * 4, seed=1)
    assert overall(survival)[0] == pytest.approx(0.1, abs=0.07)


def test_rows_that_ended_and_steps_that_drafted_nothing_say_nothing():
    survival = Survival(DEPTH)
    nothing = np.zeros((5, 2), int)
    survival.observe(np.arange(2), nothing, nothing, nothing, nothing, np.full(2, 3))
    assert overall(survival) == pytest.approx([PRIOR_RATE] * DEPTH)
    assert survival.presence() == pytest.approx([1.0] * DEPTH)


def test_what_ended_rows_report_counts_for_nothing():
    survival = Survival(DEPTH)
    drafted, nothing = np.full((50, 2), 3), np.zeros((50, 2), int)
    survival.observe(np.arange(2), nothing, nothing, drafted, drafted, np.full(2, 3))
    assert overall(survival) == pytest.approx([PRIOR_RATE] * DEPTH)
    assert survival.presence() == pytest.approx([1.0] * DEPTH)


def test_a_drafter_that_found_nothing_and_now_does():
    survival = Survival(DEPTH)
    burst(survival, [0.9] * 4, proposed=0.0, steps=1000)
    assert survival.presence()[0] < 0.01
    burst(survival, [0.9] * 4, steps=1000)
    assert survival.presence() == pytest.approx([1.0] * DEPTH, abs=0.05)


def test_a_drafter_that_often_has_nothing_to_say():
    survival = Survival(DEPTH)
    burst(survival, [0.9] * 4, proposed=0.25)
    assert survival.presence() == pytest.approx([0.25] * DEPTH, abs=0.05)
    assert overall(survival)[0] == pytest.approx(0.9, abs=0.06)


def test_rows_asked_for_less_do_not_count_as_silent():
    survival = Survival(DEPTH)
    burst(survival, [0.9] * 4, asked=1)
    assert survival.presence()[1] > 0.9


def test_optimism_falls_with_what_is_known():
    few, many = Survival(DEPTH), Survival(DEPTH)
    burst(few, [0.5], steps=10)
    burst(many, [0.5] * 4, steps=400)
    for survival in (few, many):
        optimism = survival.optimism()
        assert np.all(np.diff(optimism) >= 0)
        assert optimism[0] > 1
        assert survival.optimism(0.0) == pytest.approx(np.ones(DEPTH))
    assert few.optimism()[0] > 1.2 > 1.1 > many.optimism()[0]
    sure = Survival(DEPTH)
    burst(sure, [1.0] * 4)
    assert np.all(np.isfinite(sure.optimism()))


def test_requests_that_are_over_are_forgotten():
    survival = Survival(DEPTH)
    for first in range(0, 400, 4):
        ones = np.ones((2, 4), int)
        numbers = np.arange(first, first + 4)
        survival.observe(numbers, ones + 1, ones, ones, ones, np.full(4, 1))
    left = np.arange(396, 400)
    before = survival.rates(left)
    survival.forget_others(left)
    assert survival.rates(left).tolist() == before.tolist()
    assert survival.rates([395, 0]).tolist() == survival.rates([-1, 1000]).tolist()
    assert survival.rates([396]) > survival.rates([395])


def test_text_that_changes_is_noticed_in_one_burst():
    """What was known of all rows, and of this one, counts for little then."""
    survival = Survival(1)
    asked, drafted = np.ones(1, int), np.ones((32, 1), int)
    for _ in range(40):
        none = np.zeros((32, 1), int)
        survival.observe(np.zeros(1), none + 1, none, drafted, drafted, asked)
    assert survival.rates(np.zeros(1))[0] < 0.05
    some = np.ones((8, 1), int)
    survival.observe(np.zeros(1), some + 1, some, some, some, asked)
    assert survival.rates(np.zeros(1))[0] > 0.5
    assert survival.num_trials < 20
    # Luck as it was likely changes nothing.
    trials = survival.num_trials
    survival.observe(np.zeros(1), some + 1, some, some, some, asked)
    assert survival.num_trials > trials


def bursts_of(rates_of, num_bursts=60):
    """Shows bursts of new batches of 8 rows; returns what may still differ of a row unseen."""
    survival = Survival(1)
    rng = np.random.default_rng(0)
    asked = np.ones(8, int)
    for number in range(num_bursts):
        requests, rates = np.arange(8) + 8 * (number // 4), rates_of(number // 4)
        stands = (rng.uniform(size=(4, 8)) < rates).astype(int)
        ones = np.ones((4, 8), int)
        survival.observe(requests, stands + 1, stands, ones, ones, asked)
    return survival


def doubt(survival, requests):
    return survival.doubts(requests, survival.rates(requests))[0]


def test_how_much_rows_differ_is_learned_from_rows():
    unseen = np.array([-1])
    at_first = doubt(Survival(1), unseen)
    alike = bursts_of(lambda batch: np.full(8, 0.6))
    differ = bursts_of(lambda batch: np.random.default_rng(batch).choice([0.2, 1.0], 8))
    assert at_first == pytest.approx(np.sqrt(PRIOR_RATE * (1 - PRIOR_RATE) / 9))
    assert doubt(alike, unseen) < 0.5 * at_first
    assert doubt(differ, unseen) == pytest.approx(0.4, abs=0.1)
    # Trials of a row tell of it, and one row tells nothing of others.
    assert doubt(differ, np.array([8 * 14])) < 0.5 * doubt(differ, unseen)
    alone = Survival(1)
    burst(alone, [0.5], asked=1)
    assert doubt(alone, unseen) == pytest.approx(at_first, rel=0.2)


def test_how_much_rows_differ_is_kept():
    differ = bursts_of(lambda batch: np.random.default_rng(batch).choice([0.2, 1.0], 8))
    record, unseen = differ.to_record(), np.array([-1])
    again = Survival.of_record(record, 1)
    assert doubt(again, unseen) == pytest.approx(doubt(differ, unseen), rel=0.15)
    del record["pairs"]  # as of records of before
    assert doubt(Survival.of_record(record, 1), unseen) < doubt(again, unseen)
    for pairs in (
        [1.0],
        "no",
        [np.nan, 1.0],
        [1.0, -1.0],
        [1e17, 0.0],
        [-1e17, 0.0],
        "12",
        [1e30, 1e30],
        None,
    ):
        with pytest.raises(ValueError, match="no acceptance"):
            Survival.of_record(record | {"pairs": pairs}, 1)
