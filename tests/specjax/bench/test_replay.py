"""Goodput on a machine, and on text, that change: replayed."""

import dataclasses

import numpy as np
import pytest

from specjax.bench.replay import Clock, Costs, Replay, Workload
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed


def step_s(bucket, context):
    drafts = bucket.num_slots
    drafting = bucket.num_speculative_tokens * (4e-4 + 3e-5 * bucket.rows)
    return 3e-3 + 2e-4 * (bucket.rows + drafts) + drafting + 1e-9 * context


COSTS = Costs(step_s, catch_up_s=2e-5, row_buckets=(1, 2, 4, 8))
flips = lambda now_s: 0.9 if int(now_s // 30) % 2 else 0.03
MACHINES = {
    "steady": lambda now_s: 1.0,
    "every second": lambda now_s: 2.0 if int(now_s) % 2 else 1.0,
    "every 20 s": lambda now_s: 2.0 if int(now_s // 20) % 2 else 1.0,
}


@pytest.mark.parametrize(
    ("rows", "machine"),
    [
        (1, "steady"),
        *(
            pytest.param(rows, machine, marks=pytest.mark.full)
            for rows, machine in [
                (8, "steady"),
                (1, "every second"),
                (8, "every second"),
                (1, "every 20 s"),
                (8, "every 20 s"),
            ]
        ),
    ],
)
def test_what_any_half_minute_loses_and_how_long_good_drafts_wait(rows, machine):
    """Endless rows, drafts worth nothing for half a minute and much for the next."""
    workload = Workload(np.full(rows, 10**5), np.zeros(rows), context=64)
    options = {"slow_at": MACHINES[machine], "until_s": 100.0}
    plain = Replay(workload, COSTS, Fixed(0), **options).run()
    policy, clock = Goodput(4), Clock(1, 0.05)
    ran = Replay(workload, COSTS, policy, clock=clock, rate_at=flips, **options).run()
    # Bursts are as short as a machine that changes every second is steady.
    assert ran.least_of(plain, 30.0) > (0.9 if machine == "every second" else 0.965)
    for begins_at in (30.0, 90.0):
        drafting = [
            burst.at_s
            for burst in ran.bursts
            if burst.at_s >= begins_at and burst.decision.num_speculative_tokens
            if burst.decision.reason == "goodput"
        ]
        assert drafting[0] < begins_at + (10 if machine == "steady" else 15)


class Stalled(Goodput):
    """Sees the first bursts that draft take ten times as long."""

    def __init__(self, most, num_stalled):
        super().__init__(most)
        self.num_stalled = num_stalled

    def observe(self, outcome):
        if outcome.bucket.num_speculative_tokens and self.num_stalled:
            self.num_stalled -= 1
            outcome = dataclasses.replace(outcome, seconds=10 * outcome.seconds)
        super().observe(outcome)


@pytest.mark.parametrize(("num_stalled", "begins_by"), [(1, 2.0), (3, 22.0)])
def test_first_bursts_that_were_disturbed_do_not_end_drafting(num_stalled, begins_by):
    """One endless row: each burst that drafts after plain decoding has much to catch up with."""
    workload = Workload(np.full(1, 10**5), np.full(1, 0.9), context=64)
    policy = Stalled(4, num_stalled)
    ran = Replay(workload, COSTS, policy, clock=Clock(1, 0.05), until_s=begins_by + 4).run()
    late = [burst for burst in ran.bursts if burst.at_s > begins_by]
    drafting = [b.decision.num_speculative_tokens > 0 for b in late]
    assert np.mean(drafting) > 0.9
