"""The candidate policy of docs/decisions/0015-one-belief.md."""

import numpy as np
import pytest

from benchmarks.one_belief.policy import OneBelief
from benchmarks.one_belief.seconds import Seconds
from benchmarks.replay import Clock, Costs, Replay, Workload
from specjax.decode.bucket import Bucket
from specjax.policy.interface import Fixed

ROW_BUCKETS = (1, 4)


def step_s(bucket, context):
    """A step that is bound by memory, its context too, and drafts that take a tenth each."""
    drafts = bucket.num_slots
    return 4e-3 + 5e-5 * drafts + 4e-4 * bucket.num_speculative_tokens + 1e-6 * context


def test_seconds_of_buckets_that_never_ran_follow_from_others():
    costs, clock = Seconds(), Clock(0, 0.05)
    ran = [Bucket(1, 0), Bucket(1, 1), Bucket(4, 0), Bucket(4, 2)]
    for place in range(400):
        bucket, context = ran[place % 4], 50.0 * (1 + place % 16)
        costs.observe(bucket, context, clock() * step_s(bucket, context), 16)
    other, plain = Bucket(4, 4), Bucket(4, 0)
    logs, deviations = costs.estimates([plain, other], [400.0] * 2, [16] * 2, reference=0)
    off = logs[1] - logs[0] - np.log(step_s(other, 400.0) / step_s(plain, 400.0))
    assert abs(off) < deviations[1] < 0.3


def test_two_buckets_are_compared_though_the_machine_slows_down():
    costs = Seconds()
    pair = [Bucket(1, 0), Bucket(1, 3)]
    for place in range(200):
        bucket = pair[place % 2]
        costs.observe(bucket, 100.0, 1.01**place * step_s(bucket, 100.0), 16)
    logs, deviations = costs.estimates(pair, [100.0] * 2, [16] * 2, reference=0)
    ratio = np.exp(logs[1] - logs[0])
    assert ratio == pytest.approx(step_s(pair[1], 100.0) / step_s(pair[0], 100.0), rel=0.02)
    assert deviations[0] == 0 < deviations[1] < 0.05


@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_a_load_that_stays_runs_nearly_as_fast_as_the_best_k(rate):
    workload = Workload(np.full(4, 1500), np.full(4, rate), context=64)
    costs = Costs(step_s, catch_up_s=2e-5, row_buckets=ROW_BUCKETS)
    best = min(Replay(workload, costs, Fixed(k)).run().seconds for k in (0, 1, 2, 3, 5, 7))
    own = Replay(workload, costs, OneBelief(7), clock=Clock(1, 0.05)).run().seconds
    assert own < 1.05 * best
