"""Seconds of a step: believed, predicted, doubted."""

import itertools
import json
import math

import numpy as np
import pytest

from benchmarks.replay import Clock
from specjax.decode.bucket import Bucket
from specjax.policy import step_cost
from specjax.policy.step_cost import (
    MEMORY,
    MOST_KNOWN,
    OWN_SD,
    StepCosts,
)


def true_seconds(bucket, context=0.0):
    """c0 + c1 * verified + c2 * drafted tokens + c3 * forwards, and context."""
    depth, rows = bucket.num_speculative_tokens, bucket.rows
    drafts = rows * depth if bucket.max_drafts is None else bucket.max_drafts
    return 1e-3 + 2e-5 * (rows + drafts) + 5e-6 * rows * depth + 1e-4 * depth + 1e-7 * context


def observe(costs, buckets, times=4, context=0.0, seconds=true_seconds):
    """Measures buckets in turn, as often as told."""
    for bucket in [*buckets] * times:
        costs.observe(bucket, context, seconds(bucket))


def deviation(costs, bucket, other, context=0.0):
    """Returns the deviation of log(seconds of a bucket / seconds of another)."""
    predicted = costs.predict([bucket, other], [context] * 2, [32, 32])
    return float(predicted.deviations(1)[0])


def test_nothing_is_known_of_nothing():
    assert StepCosts().seconds(Bucket(1, 0), 0) is None
    assert StepCosts(prior=lambda bucket, context: 0.5).seconds(Bucket(1, 0), 0) > 0.4


def test_a_bucket_never_measured_is_predicted_from_others():
    costs = StepCosts()
    observe(costs, [Bucket(1, 0), Bucket(1, 4), Bucket(8, 0), Bucket(8, 4), Bucket(32, 2)], 8)
    for bucket in [Bucket(16, 3), Bucket(2, 1), Bucket(4, 0), Bucket(8, 4, 8)]:
        assert costs.seconds(bucket, 0) == pytest.approx(true_seconds(bucket), rel=0.08)


def test_what_was_measured_wins_over_the_sum():
    """K = 2 takes half as long again as between K = 1 and K = 3, as a padded product does."""
    costs = StepCosts()
    seconds = lambda bucket: (
        true_seconds(bucket) * (1.5 if bucket.num_speculative_tokens == 2 else 1)
    )
    observe(costs, [Bucket(1, depth) for depth in range(4)], 16, seconds=seconds)
    for depth in range(4):
        found = costs.seconds(Bucket(1, depth), 0)
        assert found == pytest.approx(seconds(Bucket(1, depth)), rel=0.08)


def test_a_prior_says_how_buckets_differ():
    prior = lambda bucket, context: true_seconds(bucket) / 3  # a third of the truth, for all
    costs = StepCosts(prior=prior)
    observe(costs, [Bucket(1, 0)], 3)
    for bucket in (Bucket(1, 4), Bucket(32, 2)):
        assert costs.seconds(bucket, 0) == pytest.approx(true_seconds(bucket), rel=0.2)


@pytest.mark.parametrize("slow", [2.0, 20.0])
def test_one_disturbed_burst_moves_little(slow):
    """The first of its bucket too."""
    costs, buckets = StepCosts(), [Bucket(1, 0), Bucket(1, 4), Bucket(8, 0), Bucket(8, 4)]
    observe(costs, buckets)
    late = Bucket(8, 2)
    costs.observe(late, 0, slow * true_seconds(late))
    assert costs.seconds(late, 0) < 1.35 * true_seconds(late)
    for number in range(3):
        costs.observe(buckets[number], 0, true_seconds(buckets[number]))
    for bucket in buckets:
        assert costs.seconds(bucket, 0) == pytest.approx(true_seconds(bucket), rel=0.12)


def test_a_bucket_that_takes_another_time_than_before_is_believed_soon():
    """Drafting takes three times as long, plain decoding as long as ever, which rarely runs."""
    costs, plain, drafting = StepCosts(), Bucket(1, 0), Bucket(1, 3)
    observe(costs, [plain, drafting], MEMORY)
    for _ in range(6):
        for _ in range(20):
            costs.observe(drafting, 0, 3 * true_seconds(drafting))
        costs.observe(plain, 0, true_seconds(plain))
    ratio = costs.seconds(drafting, 0) / costs.seconds(plain, 0)
    assert ratio > 2 * true_seconds(drafting) / true_seconds(plain)


@pytest.mark.parametrize("num_bursts", [6, 400])
def test_a_machine_that_slows_down_slows_every_bucket(num_bursts):
    costs, plain, drafting = StepCosts(), Bucket(1, 0), Bucket(1, 4)
    observe(costs, [plain, drafting], 16)
    for _ in range(num_bursts):
        costs.observe(drafting, 0, 2 * true_seconds(drafting))
    # The longer only one of them runs, the less is sure of the other.
    ratio = costs.seconds(plain, 0) / true_seconds(plain)
    assert ratio == pytest.approx(2.0, rel=0.1)
    assert costs.seconds(drafting, 0) == pytest.approx(2 * true_seconds(drafting), rel=0.05)


def test_of_many_bursts_of_a_shared_machine_the_ratios_are_right():
    """One in eight takes up to twice as long, and the first call's all half as long again."""
    for seed in range(4):
        costs, clock = StepCosts(), Clock(seed, 0.06, wander=0.06, disturbed=0.12)
        rng = np.random.default_rng(seed)
        for number in range(100):
            bucket = Bucket(8, int(rng.integers(0, 5)))
            slow = 1.5 if number < 4 else 1.0
            costs.observe(bucket, 0, slow * clock() * true_seconds(bucket))
        buckets = [Bucket(8, depth) for depth in range(5)]
        ratios = [costs.seconds(bucket, 0) / true_seconds(bucket) for bucket in buckets]
        assert max(ratios) / min(ratios) < 1.2


def test_a_tree_is_as_dear_as_its_nodes():
    chains, trees = StepCosts(), StepCosts({0: 1, 2: 7})
    for costs in (chains, trees):
        observe(costs, [Bucket(1, 0), Bucket(8, 0), Bucket(32, 0)], 8)
    one, other = (costs.seconds(Bucket(8, 2), 0) for costs in (chains, trees))
    assert other > 1.25 * one


def test_tokens_cost_as_many_as_are_computed():
    """Products are padded to eights: K = 4 costs as K = 7 does but for the drafts, and K = 8 more.
    Another padding is another belief."""
    padded = lambda count: -(-count // 8) * 8
    costs = StepCosts(padding=padded)
    seconds = lambda bucket: (
        1e-3
        + 1e-4 * padded(bucket.rows * (1 + bucket.num_speculative_tokens))
        + 1e-4 * bucket.num_speculative_tokens
    )
    observe(
        costs, itertools.starmap(Bucket, [(1, 0), (1, 7), (4, 0), (4, 3), (8, 1)]), 8, 0, seconds
    )
    for rows, depth in ((1, 4), (1, 8), (8, 2)):
        bucket = Bucket(rows, depth)
        assert costs.seconds(bucket, 0) == pytest.approx(seconds(bucket), rel=0.1)
    before = costs.seconds(Bucket(1, 8), 0)
    costs.describe({}, None, None)
    assert costs.seconds(Bucket(1, 8), 0) < 0.95 * before


def test_context_costs_more_the_more_is_drafted():
    """A drafter reads its own keys and values with every forward."""
    costs = StepCosts()
    true = lambda bucket, context: (
        true_seconds(bucket) + context * 1e-7 * (1 + 0.5 * bucket.num_speculative_tokens)
    )
    for context in (1000, 10_000, 30_000) * 6:
        for depth in (0, 1, 4, 7):
            costs.observe(Bucket(8, depth), context, true(Bucket(8, depth), context))
    for bucket in (Bucket(8, 0), Bucket(8, 2), Bucket(8, 7)):
        assert costs.seconds(bucket, 60_000) == pytest.approx(true(bucket, 60_000), rel=0.12)


def test_contexts_near_each_other_say_nothing_of_those_far_off():
    """Drafting was measured at 70 to 170 tokens: at 20,000 it is no hundred times slower."""
    for seed in range(4):
        costs, rng = StepCosts(), np.random.default_rng(seed)
        noisy = lambda seconds, rng=rng: seconds * math.exp(rng.normal(0, 0.07))
        for context in range(70, 170, 10):
            costs.observe(Bucket(1, 0), context, noisy(3.2e-3))
            costs.observe(Bucket(1, 1 + context % 20 // 10), context, noisy(4e-3))
        for context in np.geomspace(200, 20_000, 60):
            costs.observe(Bucket(1, 0), context, noisy(3.2e-3))
        assert costs.seconds(Bucket(1, 1), 20_000) < 6e-3


@pytest.mark.parametrize("fixed_s", [0.0, 8e-3])
def test_what_a_burst_takes_beside_its_steps_is_no_part_of_a_step(fixed_s):
    """A probe is short: what sending and reading it takes would make its steps look dear."""
    costs = StepCosts()
    for steps in (32, 8) * 12:
        costs.observe(Bucket(1, 0), 0, true_seconds(Bucket(1, 0)) + fixed_s / steps, steps)
    for _ in range(3):
        costs.observe(Bucket(1, 3), 0, true_seconds(Bucket(1, 3)) + fixed_s / 8, 8)
    for bucket in (Bucket(1, 0), Bucket(1, 3)):
        for steps in (8, 32):
            true = true_seconds(bucket) + fixed_s / steps
            assert costs.seconds(bucket, 0, steps) == pytest.approx(true, rel=0.1)


def test_catching_up_is_learned_by_its_tokens():
    costs = StepCosts()
    for behind in (0, 100, 0, 1000) * 8:
        seconds = true_seconds(Bucket(1, 2)) + behind * 2e-5 / 32
        costs.observe(Bucket(1, 2), 0, seconds, 32, behind)
        costs.observe(Bucket(1, 0), 0, true_seconds(Bucket(1, 0)))
    late, usual = (costs.seconds(Bucket(1, 2), 0, 1, behind) for behind in (500, 0))
    assert late - usual == pytest.approx(500 * 2e-5, rel=0.2)
    # Plain decoding has nothing to catch up with.
    assert costs.seconds(Bucket(1, 0), 0, 1, 500) == costs.seconds(Bucket(1, 0), 0, 1)


# Steps with nothing to verify

WIDE, PLAIN = Bucket(1, 7), Bucket(1, 0)
PLAIN_S, NARROW_S, WIDE_S = 0.010, 0.0115, 0.020


def of_share(share):
    return share * WIDE_S + (1 - share) * NARROW_S


@pytest.mark.parametrize("shares", [(0.0, 0.6), (0.03, 0.03), (0.5, 1.0), (0.0, 0.0)])
def test_narrow_steps_are_dearer_than_plain_ones_and_cheaper_than_wide_ones(shares):
    """Plain decoding is timed now and then; the seconds of other shares are told as far as they
    can be."""
    costs, rng = StepCosts(), np.random.default_rng(0)
    for at in range(200):
        share = shares[at % 10 == 0]
        wide, narrow = of_share(share) * rng.lognormal(0, 0.03), PLAIN_S * rng.lognormal(0, 0.03)
        costs.observe(WIDE, 0.0, wide, wide_share=share)
        if at % 12 == 0:
            costs.observe(PLAIN, 0.0, narrow)
    for share in {*shares, 0.06 if shares[0] < 0.06 else 0.6}:
        predicted = costs.predict([WIDE, PLAIN], [0.0] * 2, [32] * 2, wide_shares=[share, 1.0])
        ratio = predicted.seconds[0] / predicted.seconds[1]
        assert ratio == pytest.approx(of_share(share) / PLAIN_S, rel=0.06)
    # What was never or hardly seen is doubted.
    if max(shares) < 0.1:
        doubt = costs.predict([WIDE, PLAIN], [0.0] * 2, [32] * 2).deviations(1)[0]
        off = math.log(costs.seconds(WIDE, 0.0) / costs.seconds(PLAIN, 0.0) / (WIDE_S / PLAIN_S))
        assert doubt > max(0.1, abs(off) / 3)


def test_derivatives_are_those_of_the_mean_of_both():
    costs = StepCosts()
    observe(costs, [WIDE, PLAIN, Bucket(4, 2)], 3)
    costs.observe(WIDE, 5.0, 0.013, wide_share=0.3)
    asked = [WIDE, Bucket(4, 2)], [5.0, 40.0], [8, 32]
    at = lambda: np.log(costs.predict(*asked, 3, wide_shares=[0.3, 0.8]).seconds)
    along, mean = costs.predict(*asked, 3, wide_shares=[0.3, 0.8]).along, costs._mean.copy()
    for place in range(len(mean)):
        found = []
        for step in (1e-5, -1e-5):
            costs._mean = mean + step * (np.arange(len(mean)) == place)
            found.append(at())
        np.testing.assert_allclose((found[0] - found[1]) / 2e-5, along[:, place], atol=1e-6)


def test_bursts_without_a_wide_step_drive_out_no_others():
    costs = StepCosts()
    for share in [1.0] * 4 + [0.0] * 2 * MEMORY:
        costs.observe(WIDE, 0.0, of_share(share), wide_share=share)
    assert costs.count(WIDE) == 4 + MEMORY
    again = StepCosts()
    again.add_records(json.loads(json.dumps(costs.to_records())))
    assert again.count(WIDE) == 4 + MEMORY
    assert again.seconds(WIDE, 0.0) == pytest.approx(WIDE_S, rel=0.2)


def test_how_sure_it_is():
    costs, plain, drafting = StepCosts(), Bucket(1, 0), Bucket(1, 4)
    costs.observe(plain, 0, true_seconds(plain))
    unmeasured = deviation(costs, drafting, plain)
    costs.observe(drafting, 0, true_seconds(drafting))
    once = deviation(costs, drafting, plain)
    observe(costs, [plain, drafting], 8)
    often = deviation(costs, drafting, plain)
    assert unmeasured > 0.15 > once > 0.07 > often
    assert deviation(costs, plain, plain) == 0
    # Other rows are told apart less well, and what has not run for long is less sure.
    assert deviation(costs, Bucket(8, 4), plain) > 0.15
    observe(costs, [plain], 2000)
    assert often < deviation(costs, drafting, plain) < 2 * OWN_SD
    # A slower machine is no doubt about ratios.
    observe(costs, [plain, drafting], 8, seconds=lambda bucket: 3 * true_seconds(bucket))
    assert deviation(costs, drafting, plain) < 0.07


def test_what_is_asked_changes_nothing():
    asked, silent, rng = StepCosts(), StepCosts(), np.random.default_rng(0)
    contexts = np.geomspace(50, 5000, 40)
    for number, context in enumerate(contexts):
        bucket = Bucket(1, (0, 3, 0, 2)[number % 4])
        seconds = true_seconds(bucket, context) * math.exp(rng.normal(0, 0.1))
        for costs in (asked, silent):
            costs.observe(bucket, context, seconds)
        for elsewhere in rng.permutation(contexts)[:5]:
            asked.seconds(Bucket(1, 4), elsewhere)
            deviation(asked, bucket, Bucket(3, 1), elsewhere)
    for bucket in (Bucket(1, 0), Bucket(1, 2), Bucket(1, 4)):
        assert asked.seconds(bucket, 300) == silent.seconds(bucket, 300)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_mean_nothing_are_refused(seconds):
    with pytest.raises(ValueError, match="above 0"):
        StepCosts().observe(Bucket(1, 0), 0, seconds)


# Between calls and processes


def test_what_is_kept_comes_back():
    costs = StepCosts()
    for bucket in (Bucket(1, 0), Bucket(8, 4), Bucket(8, 4, 16)):
        for context in (10, 3000) * 8:
            costs.observe(bucket, context, true_seconds(bucket, context), 16)
    kept = StepCosts()
    kept.add_records(json.loads(json.dumps(costs.to_records())))
    assert kept.to_records() == costs.to_records()
    assert set(kept.measured) == set(costs.measured)
    for bucket in (Bucket(8, 4), Bucket(1, 0)):
        expected = costs.seconds(bucket, 500)
        assert kept.seconds(bucket, 500) == pytest.approx(expected, rel=0.03)
    # The new process may find another machine.
    kept.observe(Bucket(8, 4), 500, 2 * true_seconds(Bucket(8, 4), 500))
    kept.observe(Bucket(8, 4), 500, 2 * true_seconds(Bucket(8, 4), 500))
    assert kept.seconds(Bucket(1, 0), 500) > 1.6 * costs.seconds(Bucket(1, 0), 500)


def test_what_was_kept_of_another_machine_is_soon_outweighed():
    """Records have drafting cost 5 % more; now it costs half as much again."""
    costs = StepCosts()
    record = {"max_drafts": None, "context_tokens": 600.0, "num_steps": 32, "num_behind": 0}
    costs.add_records(
        record
        | {"rows": 1, "num_speculative_tokens": depth, "step_s": 0.01 * (1.05 if depth else 1)}
        for depth in (0, 3) * MEMORY
    )
    for burst in range(40):
        drafts = burst % 4 == 3
        costs.observe(Bucket(1, 3 * drafts), 600, 0.015 if drafts else 0.01)
    ratio = costs.seconds(Bucket(1, 3), 600) / costs.seconds(Bucket(1, 0), 600)
    assert ratio > 1.35


def test_what_is_written_can_be_read_whatever_was_measured():
    costs = StepCosts()
    for seconds in (1e-12, 1e-3, 1e9):
        costs.observe(Bucket(1, 0), 10, seconds, 32, 0)
    costs.observe(Bucket(1, 3), 2e6, 1e-3, 1, 2 * 10**6)
    kept = StepCosts()
    kept.add_records(json.loads(json.dumps(costs.to_records())))
    assert kept.count(Bucket(1, 0)) == 1
    assert kept.count(Bucket(1, 3)) == 1


def test_the_latest_bursts_are_kept_whoever_measured_them():
    before = StepCosts()
    observe(before, [Bucket(1, 0)], MEMORY)
    costs = StepCosts()
    costs.add_records(before.to_records())
    costs.observe(Bucket(1, 0), 0, 1.0)
    records = costs.to_records()
    assert len(records) == MEMORY
    assert [record["step_s"] for record in records].count(1.0) == 1
    assert records[-1]["step_s"] == 1.0
    assert costs.count(Bucket(1, 0)) == MEMORY


def test_of_two_runs_the_one_that_measured_a_bucket_oftener_is_believed():
    one, other, bucket = StepCosts(), StepCosts(), Bucket(1, 0)
    observe(one, [bucket], 2)
    observe(other, [bucket, Bucket(1, 3)], 5, seconds=lambda each: 3 * true_seconds(each))
    one.take(other)
    assert set(one.measured) == {bucket, Bucket(1, 3)}
    assert one.count(bucket) == 5
    assert one.seconds(bucket, 0) == pytest.approx(3 * true_seconds(bucket), rel=0.05)
    # What this process measured ranks above what a file holds.
    own = StepCosts()
    observe(own, [bucket], 2)
    of_file = StepCosts()
    of_file.add_records(other.to_records())
    own.take(of_file)
    assert own.count(bucket) == 2
    assert own.count(Bucket(1, 3)) == 5


def test_the_bucket_that_ran_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(step_cost, "MOST_BUCKETS", 20)
    costs = StepCosts()
    for rows in range(1, 23):
        costs.observe(Bucket(rows, 0), 0, true_seconds(Bucket(rows, 0)))
        costs.observe(Bucket(1, 0), 0, true_seconds(Bucket(1, 0)))
    assert len(costs.measured) == 20
    assert costs.count(Bucket(2, 0)) == 0
    assert costs.count(Bucket(1, 0)) == MEMORY
    # What the others say of it stands.
    assert costs.seconds(Bucket(2, 0), 0) == pytest.approx(true_seconds(Bucket(2, 0)), rel=0.1)
    again = StepCosts()
    again.add_records(costs.to_records())
    assert len(again.measured) == 20


def test_what_two_runs_measured_is_no_more_than_is_kept(monkeypatch):
    """A file of more would be refused by the process that reads it."""
    monkeypatch.setattr(step_cost, "MOST_BUCKETS", 20)
    one, other = StepCosts(), StepCosts()
    for costs, first in ((one, 1), (other, 10_000)):
        for rows in range(first, first + 20):
            costs.observe(Bucket(rows, 0), 0, 1e-3)
    one.take(other)
    assert len(one.measured) == 20
    StepCosts().add_records(one.to_records())


def test_a_file_written_since_is_believed_where_this_process_measured_nothing():
    before = StepCosts()
    observe(before, [Bucket(1, 0), Bucket(1, 1)], MEMORY)
    mine, theirs = StepCosts(), StepCosts()
    for costs in (mine, theirs):
        costs.add_records(before.to_records())
    observe(mine, [Bucket(1, 0)], 1)
    observe(theirs, [Bucket(1, 0), Bucket(1, 1)], MEMORY, seconds=lambda bucket: 0.5)
    of_file = StepCosts()
    of_file.add_records(theirs.to_records())
    mine.take(of_file, is_newer=True)
    latest = {record["num_speculative_tokens"]: record["step_s"] for record in mine.to_records()}
    assert latest == {0: true_seconds(Bucket(1, 0)), 1: 0.5}


def test_a_copy_goes_on_alone_and_holds_no_model():
    calls = []
    prior = lambda bucket, context: calls.append(bucket) or true_seconds(bucket)
    costs = StepCosts(prior=prior)
    observe(costs, [Bucket(1, 0), Bucket(1, 2)], 4)
    copy = costs.copy()
    assert not any(value is prior for value in vars(copy).values())
    copy.describe({}, prior, None)
    assert copy.seconds(Bucket(1, 2), 0) == costs.seconds(Bucket(1, 2), 0)
    observe(copy, [Bucket(1, 2)], 8, seconds=lambda bucket: 5.0)
    assert costs.seconds(Bucket(1, 2), 0) < 1.0


@pytest.mark.full
def test_extreme_figures_leave_finite_ones():
    """A file may hold any figures within its limits, in any order."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = StepCosts()
        costs.add_records(
            {
                "rows": int(10 ** rng.uniform(0, 4.8)),
                "num_speculative_tokens": int(10 ** rng.uniform(0, 3)),
                "max_drafts": None,
                "context_tokens": 10 ** rng.uniform(0, 11.9),
                "step_s": 10 ** rng.uniform(-8.9, 5.9),
                "num_steps": int(10 ** rng.uniform(0, 5.9)),
                "num_behind": int(10 ** rng.uniform(0, 5.9)),
            }
            for _ in range(60)
        )
        with np.errstate(all="raise", under="ignore"):
            predicted = costs.predict([Bucket(1, 0), Bucket(4, 3)], [10, 10], [32, 32])
            assert np.all(np.isfinite(predicted.seconds))
            assert np.all(predicted.seconds > 0)
            assert np.all(np.isfinite(predicted.deviations(0)))


GOOD = {
    "rows": 1,
    "num_speculative_tokens": 0,
    "max_drafts": None,
    "context_tokens": 1.0,
    "step_s": 1.0,
    "num_steps": 8,
    "num_behind": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": None},
        {"rows": 0},
        {"num_speculative_tokens": -1},
        {"max_drafts": 0},
        {"step_s": 0.0},
        {"step_s": math.nan},
        {"step_s": "fast"},
        {"context_tokens": -1.0},
        {"context_tokens": math.inf},
        {"num_steps": 0},
        {"num_behind": -1},
        {"wide_share": 1.01},
        {"wide_share": math.nan},
        {"num_behind": MOST_KNOWN**2},
    ],
)
def test_records_that_mean_nothing_are_refused(change):
    costs = StepCosts()
    with pytest.raises(ValueError, match="no measured step"):
        costs.add_records([GOOD, GOOD | change])
    assert costs.measured == []
    costs.add_records([GOOD])


@pytest.mark.parametrize("name", ["rows", "step_s", "context_tokens", "max_drafts"])
def test_records_that_lack_a_figure_are_refused(name):
    with pytest.raises(ValueError, match="no measured step"):
        StepCosts().add_records([{key: GOOD[key] for key in GOOD if key != name}])
