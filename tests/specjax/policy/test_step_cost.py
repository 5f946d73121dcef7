"""Seconds of a step: measured, fitted, predicted."""

import json
import math

import numpy as np
import pytest

from specjax.decode.bucket import Bucket
from specjax.policy import step_ratios
from specjax.policy.step_cost import (
    DRIFT_MEMORY,
    FEW,
    MEMORY,
    MOST_BUCKETS,
    MOST_FITTED,
    OF_BEFORE,
    StepCosts,
    fit_nonnegative,
)


def true_seconds(bucket, context=0.0):
    """c0 + c1 * verified + c2 * drafted tokens + c3 * forwards, and context."""
    depth, rows = bucket.num_speculative_tokens, bucket.rows
    drafts = rows * depth if bucket.max_drafts is None else bucket.max_drafts
    return 1e-3 + 2e-5 * (rows + drafts) + 5e-6 * rows * depth + 1e-4 * depth + 1e-7 * context


def test_nothing_is_known_of_nothing():
    assert StepCosts().seconds(Bucket(1, 0), 0) is None
    assert StepCosts().fit_error() == 0.0


def test_a_bucket_never_measured_is_predicted_from_others():
    costs = StepCosts()
    measured = [Bucket(1, 0), Bucket(1, 4), Bucket(8, 0), Bucket(8, 4), Bucket(32, 2)]
    for bucket in measured:
        costs.observe(bucket, 0, true_seconds(bucket))
    for bucket in [Bucket(16, 3), Bucket(32, 7), Bucket(2, 1), Bucket(8, 4, 8)]:
        assert costs.seconds(bucket, 0) == pytest.approx(true_seconds(bucket), rel=1e-6)
    assert costs.fit_error() < 1e-6


def test_what_was_measured_wins_over_the_fit():
    costs = StepCosts()
    for rows, seconds in ((1, 1.0), (2, 9.0), (4, 2.0)):
        for _ in range(FEW):
            costs.observe(Bucket(rows, 0), 0, seconds)
    assert costs.seconds(Bucket(2, 0), 0) == pytest.approx(9.0, rel=0.1)
    assert costs.fit_error() > 0.5


def test_a_burst_that_was_disturbed_when_its_bucket_first_ran_is_not_believed():
    """The first of a bucket takes twice as long as it should: the fit counts as much as that."""
    costs = StepCosts()
    measured = [Bucket(1, 0), Bucket(1, 4), Bucket(8, 0), Bucket(8, 4), Bucket(32, 2)]
    for bucket in measured:
        for _ in range(FEW):
            costs.observe(bucket, 0, true_seconds(bucket))
    late = Bucket(8, 2)
    costs.observe(late, 0, 2 * true_seconds(late))
    assert costs.seconds(late, 0) < 1.4 * true_seconds(late)
    for _ in range(2):
        costs.observe(late, 0, true_seconds(late))
    assert costs.seconds(late, 0) == pytest.approx(true_seconds(late), rel=0.1)


def test_one_measurement_says_that_all_cost_the_same():
    costs = StepCosts()
    costs.observe(Bucket(4, 4), 0, 0.5)
    assert costs.seconds(Bucket(4, 0), 0) == pytest.approx(0.5)


def test_a_tree_is_as_dear_as_its_nodes():
    costs = StepCosts({0: 1, 2: 7})
    costs.observe(Bucket(1, 0), 0, 1.0)
    costs.observe(Bucket(1, 2), 0, 7.0)
    assert costs.seconds(Bucket(2, 0), 0) == pytest.approx(2.0)


def test_tokens_cost_as_many_as_are_computed():
    """Products are padded to eights: K = 4 costs as K = 7 does but for the drafts, and K = 8 more.
    Another padding forgets what was predicted."""
    costs = StepCosts(padding=lambda count: -(-count // 8) * 8)
    seconds = lambda rows, depth: 1e-3 + 2e-5 * (-(-rows * (1 + depth) // 8) * 8) + 1e-4 * depth
    for rows, depth in ((1, 0), (1, 7), (4, 0), (4, 3), (8, 1)):
        costs.observe(Bucket(rows, depth), 0, seconds(rows, depth))
    for rows, depth in ((1, 4), (1, 8), (8, 2)):
        assert costs.seconds(Bucket(rows, depth), 0) == pytest.approx(
            seconds(rows, depth), rel=1e-6
        )
    before = costs.seconds(Bucket(1, 8), 0)
    costs.padding = None
    assert costs.seconds(Bucket(1, 8), 0) < 0.99 * before


def test_context_is_fitted_over_all_buckets():
    costs = StepCosts()
    for bucket in (Bucket(1, 0), Bucket(1, 4)):
        for context in (100, 1000, 5000) * FEW:
            costs.observe(bucket, context, true_seconds(bucket, context))
    bucket = Bucket(1, 4)
    expected = true_seconds(bucket, 20_000)
    assert costs.seconds(bucket, 20_000) == pytest.approx(expected, rel=0.05)


def test_context_costs_more_the_more_is_drafted():
    """A drafter reads its own keys and values with every forward."""
    costs = StepCosts()
    true = lambda bucket, context: (
        true_seconds(bucket) + context * 1e-7 * (1 + 0.5 * bucket.num_speculative_tokens)
    )
    for bucket in (Bucket(8, 0), Bucket(8, 1), Bucket(8, 4), Bucket(8, 7)):
        for context in (1000, 10_000, 30_000) * FEW:
            costs.observe(bucket, context, true(bucket, context))
    for bucket in (Bucket(8, 0), Bucket(8, 2), Bucket(8, 7)):
        expected = true(bucket, 60_000)
        assert costs.seconds(bucket, 60_000) == pytest.approx(expected, rel=0.05)


def test_what_was_measured_at_a_context_counts_for_more_there():
    """Steps that jump where a compiler chooses another layout: no slope has that."""
    costs = StepCosts()
    for context, seconds in ((100, 1.0), (10_000, 3.0), (20_000, 3.0), (100_000, 3.1)):
        for _ in range(FEW):
            costs.observe(Bucket(1, 0), context, seconds)
    for context, seconds in ((100, 1.0), (20_000, 3.0), (100_000, 3.1)):
        assert costs.seconds(Bucket(1, 0), context) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("num_bursts", [60, 400])
def test_contexts_that_grow_are_no_slower_machine(num_bursts):
    """Others, known at all of them, are thought to cost what they did."""
    costs, others = StepCosts(), (Bucket(2, 0), Bucket(1, 4))
    own = lambda context: 5e-4 + 1e-7 * context
    for context in np.geomspace(100, 1e5, 30):
        for other in others * FEW:
            costs.observe(other, context, own(context) + 1e-3)
    for context in np.geomspace(100, 1e5, num_bursts):
        costs.observe(Bucket(1, 0), context, own(context))
    assert costs.drift == pytest.approx(1.0, rel=0.25)
    assert costs.seconds(Bucket(1, 0), 1e5) == pytest.approx(own(1e5), rel=0.15)
    for other in others:
        assert costs.seconds(other, 1e5) == pytest.approx(own(1e5) + 1e-3, rel=0.1)


def test_a_few_noisy_measurements_make_no_slope():
    """Contexts within a third of each other, 10 % of scatter: far away it must not mislead."""
    for seed in range(20):
        costs, rng = StepCosts(), np.random.default_rng(seed)
        for bucket in (Bucket(4, 0), Bucket(4, 2)):
            for context in (1000, 1200, 1300):
                noise = np.exp(rng.normal(0.0, 0.1))
                costs.observe(bucket, context, 0.01 * noise)
        assert costs.seconds(Bucket(4, 0), 4000) < 0.02


def test_a_bucket_that_was_measured_once_is_never_free():
    """What is known of the others has a plain step take nothing."""
    costs = StepCosts()
    for depth in (1, 2, 3, 4, 6):
        for _ in range(3):
            costs.observe(Bucket(1, depth), 100, 0.01 * depth**1.05)
    costs.observe(Bucket(1, 0), 100, 0.01)
    assert costs.seconds(Bucket(1, 0), 100) >= 0.0049


def test_what_was_kept_of_another_machine_is_soon_outweighed():
    """Records of twelve contexts have drafting cost 5 % more; now it costs half as much again."""
    costs = StepCosts()
    costs.add_records(
        {
            "rows": 1,
            "num_speculative_tokens": depth,
            "max_drafts": None,
            "context_tokens": 600 * 1.3**place,
            "step_s": 0.01 * (1.05 if depth else 1.0),
            "num_measurements": 16,
        }
        for depth in (0, 3)
        for place in range(-6, 6)
    )
    for burst in range(200):
        drafts = burst % 4 == 3
        costs.observe(Bucket(1, 3 * drafts), 600, 0.015 if drafts else 0.01)
    ratio = costs.seconds(Bucket(1, 3), 600) / costs.seconds(Bucket(1, 0), 600)
    assert ratio > 1.4


@pytest.mark.parametrize("num_bursts", [30, 400])
def test_a_machine_that_slows_down_slows_every_bucket(num_bursts):
    costs = StepCosts()
    for bucket in (Bucket(1, 0), Bucket(1, 4)):
        for _ in range(MEMORY):
            costs.observe(bucket, 0, true_seconds(bucket))
    before = costs.seconds(Bucket(1, 0), 0)
    for _ in range(num_bursts):
        costs.observe(Bucket(1, 4), 0, 2 * true_seconds(Bucket(1, 4)))
    # A share of the drift leaks into what steps are thought to cost.
    assert costs.seconds(Bucket(1, 0), 0) == pytest.approx(2 * before, rel=0.04)
    # What is kept for another run says how it is now.
    kept = {record["num_speculative_tokens"]: record for record in costs.to_records()}
    for depth in (0, 4):
        now = 2 * true_seconds(Bucket(1, depth))
        assert kept[depth]["step_s"] == pytest.approx(now, rel=0.04)


@pytest.mark.parametrize("before", [FEW, MEMORY])
def test_a_few_bursts_that_were_disturbed_move_nothing(before):
    costs = StepCosts()
    for _ in range(before):
        costs.observe(Bucket(1, 0), 0, 1.0)
    for _ in range(3):
        costs.observe(Bucket(1, 0), 0, 1000.0)
    # Just now everything is slow; once it is over nothing is left of it.
    for _ in range(DRIFT_MEMORY):
        costs.observe(Bucket(1, 0), 0, 1.0)
    assert costs.seconds(Bucket(1, 0), 0) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("slow_s", [3.0, 1.5])
def test_a_machine_that_suddenly_takes_twice_as_long_slows_every_bucket(slow_s):
    """Whether what another bucket took in between was measured before that, or after it."""
    costs = StepCosts()
    plain, drafting = Bucket(8, 0), Bucket(8, 1)
    for _ in range(FEW):
        for bucket, seconds in ((plain, 1.0), (drafting, 1.5)):
            costs.observe(bucket, 1000, seconds)
    costs.observe(plain, 1000, 1.0)
    costs.observe(drafting, 1000, slow_s)
    for _ in range(DRIFT_MEMORY):
        costs.observe(plain, 1000, 2.0)
    assert costs.drift == pytest.approx(2.0, rel=0.05)
    assert costs.seconds(plain, 1000) == pytest.approx(2.0, rel=0.05)
    assert costs.seconds(drafting, 1000) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_mean_nothing_are_refused(seconds):
    with pytest.raises(ValueError, match="above 0"):
        StepCosts().observe(Bucket(1, 0), 0, seconds)


def test_what_is_kept_comes_back():
    costs = StepCosts()
    for bucket in (Bucket(1, 0), Bucket(8, 4), Bucket(8, 4, 16)):
        for context in (10, 3000) * FEW:
            costs.observe(bucket, context, true_seconds(bucket, context))
    kept = StepCosts()
    document = json.loads(json.dumps([costs.to_records(), costs.to_bursts()]))
    kept.add_records(document[0], bursts=document[1])
    assert kept.to_bursts() == costs.to_bursts()
    assert set(kept.measured) == set(costs.measured)
    for bucket in (Bucket(8, 4), Bucket(32, 1)):
        expected = costs.seconds(bucket, 500)
        assert kept.seconds(bucket, 500) == pytest.approx(expected, rel=0.01)


BURST = [0, 1, 0, None, 10.0, 1e-3, 1.0]


@pytest.mark.parametrize(
    "bad",
    [
        [],
        BURST[:-1],
        BURST,  # the same place again
        [-1, *BURST[1:]],
        [1, 0, *BURST[2:]],
        [1, *BURST[1:5], math.nan, 1.0],
        [1, *BURST[1:5], 5e-324, 1.0],
        [1, *BURST[1:6], 1e-320],
    ],
)
def test_bursts_that_mean_nothing_are_refused(bad):
    StepCosts().add_records([GOOD], bursts=[BURST])
    with pytest.raises(ValueError, match=r"no burst|no measured step|no record"):
        StepCosts().add_records([GOOD], bursts=[BURST, bad])


def test_bursts_of_buckets_without_records_are_left_out():
    costs = StepCosts()
    costs.add_records([GOOD], bursts=[BURST, [1, 9, 3, None, 10.0, 2e-3, 1.0]])
    assert costs.measured == [Bucket(1, 0)]
    assert costs.to_bursts() == [BURST]
    assert costs.seconds(Bucket(9, 3), 10) > 0


def test_what_is_asked_changes_nothing():
    """Answers are the same in whatever order, and however often, they are asked for."""
    asked, silent = StepCosts(), StepCosts()
    rng = np.random.default_rng(0)
    contexts = np.geomspace(50, 5000, 60)
    for number, context in enumerate(contexts):
        bucket = Bucket(1, (0, 3, 0, 2)[number % 4])
        seconds = true_seconds(bucket, context) * math.exp(rng.normal(0, 0.1))
        for costs in (asked, silent):
            costs.observe(bucket, context, seconds)
        for elsewhere in rng.permutation(contexts)[:5]:
            asked.seconds(Bucket(1, 4), elsewhere)
            asked.doubt(bucket, elsewhere)
    for context in contexts:
        for bucket in (Bucket(1, 0), Bucket(1, 2), Bucket(1, 4)):
            assert asked.seconds(bucket, context) == silent.seconds(bucket, context)
            assert asked.doubt(bucket, context) == silent.doubt(bucket, context)


def test_contexts_near_each_other_say_nothing_of_those_far_off():
    """Drafting was measured at 70 to 170 tokens: at 20,000 it is no hundred times slower."""
    for seed in range(8):
        costs, rng = StepCosts(), np.random.default_rng(seed)
        noisy = lambda seconds, rng=rng: seconds * math.exp(rng.normal(0, 0.07))
        for context in range(70, 170, 10):
            costs.observe(Bucket(1, 0), context, noisy(3.2e-3))
            costs.observe(Bucket(1, 1 + context % 20 // 10), context, noisy(4e-3))
        for context in np.geomspace(200, 20_000, 60):
            costs.observe(Bucket(1, 0), context, noisy(3.2e-3))
        assert costs.seconds(Bucket(1, 1), 20_000) < 6e-3


@pytest.mark.full
def test_a_drift_does_not_run_away_with_the_slope():
    """Contexts that grow on a machine that takes twice as long every second."""
    for seed in range(2):
        costs, rng = StepCosts(), np.random.default_rng(seed)
        for number, context in enumerate(np.linspace(64, 40_000, 700)):
            bucket = Bucket(1, (0, 1, 0, 4)[number % 4])
            slow = 1 + number // 9 % 2
            noise = math.exp(rng.normal(0, 0.05))
            costs.observe(bucket, context, slow * noise * (3e-3 + 6e-4 * bucket[1]))
        assert 2e-3 < costs.seconds(Bucket(1, 0), 40_000) < 1e-2


GOOD = {
    "rows": 1,
    "num_speculative_tokens": 0,
    "max_drafts": None,
    "context_tokens": 1.0,
    "step_s": 1.0,
    "num_measurements": 1,
}


@pytest.mark.parametrize(
    "change",
    [{"rows": None}, {"step_s": 0.0}, {"step_s": "fast"}, {"num_measurements": 0}],
)
def test_records_that_mean_nothing_are_refused(change):
    StepCosts().add_records([GOOD])
    with pytest.raises(ValueError, match="no measured step"):
        StepCosts().add_records([GOOD | change])
    with pytest.raises(ValueError, match="no measured step"):
        StepCosts().add_records([{k: v for k, v in GOOD.items() if k not in change}])


def test_the_fit_has_no_coefficient_below_zero():
    rng = np.random.default_rng(0)
    features = rng.uniform(size=(12, 3))
    # Unbounded, the last coefficient would be -1.
    values = features @ [2.0, 1.0, -1.0]
    fitted = fit_nonnegative(features, values)
    assert np.all(fitted >= 0)
    # No step from there within the bounds lessens the error (the conditions of
    # Karush, Kuhn and Tucker).
    gradient = features.T @ (features @ fitted - values)
    assert np.all(gradient >= -1e-9)
    assert np.abs(gradient * fitted).max() < 1e-9


def test_catching_up_is_learned_by_its_tokens():
    """What is off by chance in bursts with few tokens to catch up with hardly counts."""
    costs, rng = StepCosts(), np.random.default_rng(0)
    assert costs.catch_up_s is None
    usual = {"steps_s": 0.02, "usual_s": 5e-5}
    for tokens in (4, 2000, 8, 1500, 3):
        chance = float(rng.normal(0.0, 5e-3))
        costs.observe_catch_up(tokens, 2e-5 * tokens + chance, **usual)
    assert costs.catch_up_s == pytest.approx(2e-5, rel=0.2)
    for _ in range(9):
        costs.observe_catch_up(10_000, -3.0, **usual)
    assert costs.catch_up_s == 0.0


def test_a_machine_that_slows_down_teaches_little_of_catching_up():
    """Steps that suddenly take twice as long are no catching up."""
    costs = StepCosts()
    costs.observe_catch_up(200, 0.05, steps_s=0.05, usual_s=2e-5)
    assert costs.catch_up_s is not None
    assert costs.catch_up_s < 1e-4


def test_a_bucket_known_from_an_earlier_run_is_not_predicted_at_other_contexts():
    known = StepCosts()
    for bucket, seconds in ((Bucket(8, 0), 1e-3), (Bucket(8, 1), 1.2e-3)):
        for _ in range(MEMORY):
            known.observe(bucket, 800, seconds)
    odd = Bucket(8, 4)
    for _ in range(MEMORY):
        known.observe(odd, 800, 9e-3)
    costs = StepCosts()
    costs.add_records(known.to_records())
    for context in (800, 1600, 3200):  # predicted: 1.8e-3
        assert costs.seconds(odd, context) == pytest.approx(9e-3, rel=0.2)


def test_samples_of_another_are_taken_at_the_drift_of_this_one():
    """Since this one began the machine has become half as fast; the other began after that."""
    costs, other = StepCosts(), StepCosts()
    for seconds in [1.0] * MEMORY + [2.0] * 30:
        costs.observe(Bucket(1, 0), 100, seconds)
    assert costs.drift == pytest.approx(2.0, rel=0.05)
    for _ in range(MEMORY):
        other.observe(Bucket(1, 4), 100, 3.0)
    costs.take(other)
    assert costs.seconds(Bucket(1, 4), 100) == pytest.approx(3.0, rel=0.02)
    assert costs.seconds(Bucket(1, 0), 100) == pytest.approx(2.0, rel=0.02)
    # The part of the machine in each burst is relative to the drift.
    told = lambda own: [burst[-1] for burst in own.to_bursts() if burst[2] == 4]
    assert told(other)
    assert told(costs) == pytest.approx(told(other))


def test_one_measurement_of_this_process_ranks_above_several_of_a_file():
    own, before = StepCosts(), StepCosts()
    own.observe(Bucket(1, 0), 1.0, 2.0)
    before.add_records([GOOD | {"num_measurements": OF_BEFORE}])
    assert own.count(Bucket(1, 0)) < before.count(Bucket(1, 0))
    own.take(before)
    before.take(own)
    for costs in (own, before):
        assert costs.count(Bucket(1, 0)) == 1
    assert own.seconds(Bucket(1, 0), 1.0) == pytest.approx(2.0)


def test_what_a_burst_solves_does_not_grow_with_all_that_was_ever_measured(monkeypatch):
    """183 buckets: a problem holds those of the rows in question and of the nearest ones."""
    solve, sizes = step_ratios._solve, []

    def counted(features, known, apart):
        sizes.append(len(features))
        return solve(features, known, apart)

    costs = StepCosts()
    buckets = [Bucket(rows, depth) for rows in range(1, 62) for depth in (0, 1, 4)]
    costs.add_records(
        [
            bucket._asdict()
            | {"context_tokens": 100.0, "step_s": true_seconds(bucket, 100), "num_measurements": 3}
            for bucket in buckets
        ]
    )
    assert len(costs.measured) == 183
    monkeypatch.setattr(step_ratios, "_solve", counted)
    for _ in range(4):
        for depth in (0, 1, 4):
            costs.observe(Bucket(32, depth), 100, true_seconds(Bucket(32, depth), 100))
            for other in (0, 1, 2, 4):
                costs.seconds(Bucket(32, other), 100)
    assert max(sizes) <= MOST_FITTED < 183 / 2
    # Before the first, and after each until a bucket has four measurements.
    assert 4 < len(sizes) < 4 * 3
    for depth in (0, 1, 4):
        said = costs.seconds(Bucket(32, depth), 100)
        assert said == pytest.approx(true_seconds(Bucket(32, depth), 100), rel=0.01)
    assert set(costs.measured) == set(buckets)


def test_plain_decoding_alone_is_rarely_solved_for(monkeypatch):
    """Call after call of one bucket: what it takes tells of the machine, and of no other."""
    solve, num_solved = step_ratios._solve, [0]

    def counted(*given):
        num_solved[0] += 1
        return solve(*given)

    costs, plain, drafting = StepCosts(), Bucket(1, 0), Bucket(1, 3)
    for bucket in [plain, drafting] * 4:
        costs.observe(bucket, 100, true_seconds(bucket, 100))
    monkeypatch.setattr(step_ratios, "_solve", counted)
    for _ in range(10):
        own = costs.copy()  # as a call begins
        own.begin_run()
        for _ in range(4):
            own.observe(plain, 100, true_seconds(plain, 100))
            own.seconds(drafting, 100)
        own.take(costs)  # as it ends
        costs = own
    assert num_solved[0] <= 7  # of 40 measurements


def test_the_bucket_that_ran_longest_ago_is_forgotten_beyond_a_bound():
    costs = StepCosts()
    for rows in range(1, MOST_BUCKETS + 1):
        costs._add(Bucket(rows, 0), 100.0, 1e-3)
    costs._add(Bucket(1, 0), 100.0, 1e-3)
    costs._add(Bucket(MOST_BUCKETS + 1, 0), 100.0, 1e-3)
    assert len(costs.measured) == MOST_BUCKETS
    assert Bucket(1, 0) in costs.measured
    assert Bucket(2, 0) not in costs.measured
    assert costs.count(Bucket(2, 0)) == 0


def test_the_prior_tells_how_slopes_differ_where_plain_decoding_ran_at_one_context():
    """The prior says half of all seconds."""
    plain, drafting = Bucket(8, 0), Bucket(8, 2)
    true = lambda bucket, context: (
        3e-3 * (1 + 0.6 * bucket.num_speculative_tokens)
        + 1e-6 * context * (1 + 0.1 * bucket.num_speculative_tokens)
    )

    def learned(prior):
        costs = StepCosts(prior=prior)
        for _ in range(4):
            for bucket, context in ((drafting, 500), (plain, 1500), (drafting, 1500)):
                costs.observe(bucket, context, true(bucket, context))
        return costs

    ratio = lambda costs, context: costs.seconds(drafting, context) / costs.seconds(plain, context)
    with_prior = learned(lambda bucket, context: 0.5 * true(bucket, context))
    for context in (500, 1000, 1500, 2000):
        expected = true(drafting, context) / true(plain, context)
        assert ratio(with_prior, context) == pytest.approx(expected, rel=0.02)
    expected = true(drafting, 500) / true(plain, 500)
    assert ratio(learned(None), 500) < 0.9 * expected  # what this test is about


def test_buckets_that_are_compared_are_estimated_by_one_fit(monkeypatch):
    costs, solve, num_solved = StepCosts(), step_ratios._solve, [0]
    for _ in range(4):
        for depth in (0, 2):
            costs.observe(Bucket(8, depth), 400, true_seconds(Bucket(8, depth), 400))

    def counted(*arguments):
        num_solved[0] += 1
        return solve(*arguments)

    monkeypatch.setattr(step_ratios, "_solve", counted)
    for depth, context in ((0, 1e5), (2, 2e5), (1, 3e5)):
        seconds, _ = costs.estimate(Bucket(8, depth), context, 1e5)
        assert seconds is not None
    assert num_solved[0] == 1


def test_the_prior_is_asked_no_more_often_the_more_was_measured():
    asked = [0]

    def prior(bucket, context):
        asked[0] += 1
        return true_seconds(bucket, context)

    def most_asked(num_rows):
        costs = StepCosts(prior=prior)
        for bucket in [Bucket(rows, depth) for rows in range(1, num_rows) for depth in (0, 1, 4)]:
            for context in (100, 200):
                costs.observe(bucket, context, true_seconds(bucket, context))
        found = []
        for _ in range(20):
            asked[0] = 0
            costs.observe(Bucket(1, 0), 100, true_seconds(Bucket(1, 0), 100))
            found.append(asked[0])
        return max(found)

    assert 0 < most_asked(40) <= most_asked(4)
