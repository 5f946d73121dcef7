"""What is believed of a single measurement, and of a bucket that was never measured."""

import pytest
from test_goodput import load

from specjax.decode.bucket import Bucket
from specjax.policy.goodput import OPTIMISM, Goodput
from specjax.policy.step_cost import LEAST_DOUBT, MUCH_DOUBT, OUTLIER, StepCosts


@pytest.mark.parametrize(("seconds", "believed"), [(1.0, OUTLIER), (1e-6, 1 / OUTLIER)])
def test_one_measurement_far_from_what_was_expected_counts_in_part(seconds, believed):
    costs, bucket, elsewhere = StepCosts(), Bucket(2, 0), 10**6
    for _ in range(9):
        costs.observe(bucket, 100, 1e-3)
    costs.observe(bucket, elsewhere, seconds)
    (sample,) = (s for s in costs._samples[bucket].values() if s.context == elsewhere)
    assert sample.seconds == pytest.approx(believed * 1e-3, rel=1e-3)
    assert costs.seconds(bucket, 100) == pytest.approx(1e-3, rel=0.01)


def test_what_was_never_measured_is_taken_for_faster():
    policy, now = Goodput(4, ranks=False), load(1)
    for depth in (0, 4):
        for _ in range(9):
            policy.costs.observe(Bucket(1, depth), 100, 1e-3 * (1 + depth))
    share = {}
    for candidate in policy._candidates(now, [1]):
        said = policy.costs.seconds(candidate.bucket, 100)
        assert said is not None
        depth = candidate.bucket.num_speculative_tokens
        share[depth] = candidate.seconds / said
    expected = {0: 1.0, 1: 1 - OPTIMISM, 2: 1 - OPTIMISM, 4: 1.0}
    assert {depth: share[depth] for depth in expected} == pytest.approx(expected)


def test_what_a_file_says_is_doubted_beside_plain_decoding():
    """Nothing ran yet: a bucket compared with itself would be beyond doubt."""
    before = StepCosts()
    for depth in (0, 4):
        before.observe(Bucket(1, depth), 100, 1e-3 * (1 + depth))
    costs = StepCosts()
    costs.add_records(before.to_records())
    doubt = costs.doubt(Bucket(1, 4), 100)
    assert doubt > 2 * LEAST_DOUBT
    assert costs.doubt(Bucket(1, 0), 100) == LEAST_DOUBT
    costs.observe(Bucket(1, 0), 100, 1e-3)
    assert costs.doubt(Bucket(1, 4), 100) == pytest.approx(doubt, rel=0.5)
    # Of rows for which plain decoding was never measured.
    costs = StepCosts()
    costs.add_records(
        [record | {"rows": 2 + record["num_speculative_tokens"]} for record in before.to_records()]
    )
    assert costs.doubt(Bucket(6, 4), 100) == MUCH_DOUBT
