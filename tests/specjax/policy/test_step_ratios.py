"""How buckets compare, on a machine that changes its speed."""

import math

import numpy as np
import pytest

from specjax.decode.bucket import Bucket
from specjax.policy.step_ratios import JUMP, MOST_BURSTS, Burst, StepRatios

PLAIN, DRAFTING, OTHER = Bucket(1, 0), Bucket(1, 3), Bucket(1, 1)
TRUE = {PLAIN: 1.0, DRAFTING: 1.8, OTHER: 1.5}


def bases(ratios, buckets=(PLAIN, DRAFTING), wander=0.5, features=None, counts=None, usual=0.0):
    log = lambda columns: np.log(columns.seconds)
    usual = dict.fromkeys(buckets, usual)  # nothing is known of them
    if counts is None:
        ran = [burst.bucket for _, burst in ratios.bursts()]
        counts = [ran.count(bucket) for bucket in buckets]
    if features is None:
        features = np.eye(len(buckets))  # nothing that they share
    return ratios.bases(log, usual, wander, np.ones_like, features, np.array(counts))


def run(ratios, buckets, slower):
    for bucket, slow in zip(buckets, slower, strict=True):
        ratios.add(Burst(bucket, 64.0, TRUE[bucket] * slow))


def apart(found, bucket, other):
    return math.exp(found.logs[bucket] - found.logs[other])


def test_a_machine_that_slows_down_steadily_changes_no_ratio():
    ratios, order = StepRatios(), [PLAIN, DRAFTING] * 20
    run(ratios, order, np.geomspace(1.0, 4.0, len(order)))
    found = bases(ratios)
    assert apart(found, DRAFTING, PLAIN) == pytest.approx(1.8, rel=0.02)


def test_buckets_that_never_ran_side_by_side_compare_by_a_third():
    ratios = StepRatios()
    run(ratios, [PLAIN, OTHER] * 8, [1.0] * 16)
    ratios.begin_run()
    run(ratios, [OTHER, DRAFTING] * 8, [3.0] * 16)
    found = bases(ratios, tuple(TRUE))
    assert apart(found, DRAFTING, PLAIN) == pytest.approx(1.8, rel=0.05)


def test_one_burst_in_eight_that_is_disturbed_hardly_matters():
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(20):
        ratios, order = StepRatios(), [PLAIN, PLAIN, DRAFTING] * 8
        disturbed = rng.uniform(size=len(order)) < 0.12
        noise = np.exp(rng.normal(0.0, 0.05, len(order)))
        run(ratios, order, noise * np.where(disturbed, 2.0, 1.0))
        found = bases(ratios)
        errors.append(abs(math.log(apart(found, DRAFTING, PLAIN) / 1.8)))
    assert np.median(errors) < 0.05


def test_what_ran_while_the_machine_jumped_is_compared_with_neither():
    ratios = StepRatios()
    run(ratios, [PLAIN, DRAFTING, PLAIN], [1.0, 1.0, math.exp(1.01 * JUMP)])
    jumped = bases(ratios)
    run(ratios, [PLAIN] * 9, [1.0] * 9)
    ratios = StepRatios()
    run(ratios, [PLAIN, DRAFTING, PLAIN], [1.0, 1.0, math.exp(0.99 * JUMP)])
    steady = bases(ratios)
    apart_by = lambda found: apart(found, DRAFTING, PLAIN)
    assert apart_by(jumped) == pytest.approx(1.0)  # nothing was told
    assert apart_by(steady) > 1.1


def test_more_measurements_leave_less_doubt():
    deviations = []
    for count in (1, 4, 8):
        ratios = StepRatios()
        run(ratios, [PLAIN, DRAFTING] * count, [1.0] * 2 * count)
        deviations.append(bases(ratios).deviation(DRAFTING, PLAIN))
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] > 2 * deviations[-1]
    assert bases(ratios).deviation(PLAIN, PLAIN) == 0.0


def test_records_of_one_run_are_compared_with_each_other():
    ratios = StepRatios()
    for bucket, seconds in TRUE.items():
        ratios.add_record(Burst(bucket, 64.0, seconds), 3)
    found = bases(ratios, tuple(TRUE))
    assert apart(found, DRAFTING, PLAIN) == pytest.approx(1.8, rel=0.01)


def test_what_buckets_share_tells_of_one_that_hardly_ran():
    """Three are a + b * K; the fourth ran once, and took twice as long."""
    depths = (0, 1, 2, 3)
    buckets = [Bucket(1, depth) for depth in depths]
    features = np.array([(1.0, depth) for depth in depths])
    ratios = StepRatios()
    order = [0, 1, 0, 2] * 6 + [3, 0, 1, 2]
    for depth in order:
        slow = 2.0 if depth == 3 else 1.0
        ratios.add(Burst(buckets[depth], 64.0, slow * (1 + 0.3 * depth)))
    found = bases(ratios, tuple(buckets), features=features)
    ratio = apart(found, buckets[3], buckets[0])
    assert ratio == pytest.approx(1.9, rel=0.3)
    for _ in range(6):
        for depth in (3, 0):
            slow = 2.0 if depth == 3 else 1.0
            ratios.add(Burst(buckets[depth], 64.0, slow * (1 + 0.3 * depth)))
    found = bases(ratios, tuple(buckets), features=features)
    assert apart(found, buckets[3], buckets[0]) == pytest.approx(3.8, rel=0.1)
    assert np.all(found.coefficients >= 0)


def test_bursts_of_one_bucket_alone_are_forgotten():
    ratios = StepRatios()
    run(ratios, [PLAIN] * 50 + [DRAFTING] + [PLAIN] * 50, [1.0] * 101)
    kept = ratios.bursts()
    assert [place for place, _ in kept] == [*range(7), 10, 11, 12]
    ratios.begin_run()
    assert len(ratios.bursts()) == 7


def test_no_more_bursts_are_remembered_than_the_limit():
    ratios = StepRatios()
    run(ratios, [PLAIN, DRAFTING] * MOST_BURSTS, [1.0] * 2 * MOST_BURSTS)
    assert len(ratios.bursts()) == MOST_BURSTS


def test_bursts_of_an_earlier_run_follow_none_of_this_one():
    earlier, ratios = StepRatios(), StepRatios()
    run(earlier, [PLAIN, DRAFTING] * 4, [1.0] * 8)
    ratios.add_bursts(earlier.bursts())
    before = apart(bases(ratios), DRAFTING, PLAIN)
    assert before == apart(bases(earlier), DRAFTING, PLAIN)
    run(ratios, [PLAIN], [100.0])
    assert apart(bases(ratios), DRAFTING, PLAIN) == before


def test_asking_changes_nothing():
    ratios = StepRatios()
    run(ratios, [PLAIN, DRAFTING] * 8, [1.0] * 16)
    first, second = bases(ratios), bases(ratios)
    assert first.logs == second.logs
    assert first.spread == second.spread < ratios.spread


def test_a_bucket_measured_often_is_known_though_one_of_its_bursts_is_left():
    ratios = StepRatios()
    run(ratios, [PLAIN, PLAIN, DRAFTING, PLAIN, PLAIN], [1.0] * 5)
    often = bases(ratios, counts=[100, 16])
    once = bases(ratios, counts=[100, 1])
    deviation = lambda found: found.deviation(DRAFTING, PLAIN)
    assert deviation(often) < 0.7 * deviation(once)
    assert apart(often, DRAFTING, PLAIN) > apart(once, DRAFTING, PLAIN)


def test_short_runs_of_one_bucket_push_nothing_out():
    ratios = StepRatios()
    run(ratios, [PLAIN, DRAFTING] * 8, [1.0] * 16)
    kept = ratios.bursts()
    for _ in range(MOST_BURSTS):
        ratios.begin_run()
        run(ratios, [PLAIN] * 3, [1.0] * 3)
    ratios.begin_run()
    assert ratios.bursts() == kept


def test_places_do_not_grow_from_run_to_run():
    ratios = StepRatios()
    for _ in range(200):
        run(ratios, [PLAIN, DRAFTING], [1.0, 1.0])
        again = StepRatios()
        again.add_bursts(ratios.bursts())
        ratios = again
    places = [place for place, _ in ratios.bursts()]
    assert places[0] == 0
    assert places == sorted(set(places))
    assert places[-1] < MOST_BURSTS * 5
    assert len(places) == MOST_BURSTS
