"""How buckets compare, on a machine that changes its speed."""

import math

import numpy as np
import pytest

from specjax.bucket import Bucket
from specjax.engine.step_ratios import JUMP, Burst, StepRatios

PLAIN, DRAFTING, OTHER = Bucket(1, 0), Bucket(1, 3), Bucket(1, 1)
TRUE = {PLAIN: 1.0, DRAFTING: 1.8, OTHER: 1.5}


def bases(ratios, buckets=(PLAIN, DRAFTING), wander=0.5):
    log = lambda burst: math.log(burst.seconds)
    usual = dict.fromkeys(buckets, 0.0)  # nothing is known of them
    return ratios.bases(log, usual, wander, lambda context: 1.0)


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
    assert not any(ratios._differences.values())


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
