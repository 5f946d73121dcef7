"""What runs save up and miss, kept."""

import dataclasses
import json

import pytest

from specjax.decode.bucket import Bucket
from specjax.policy.ledger import Ledger


def written():
    ledger = Ledger(routine_s=0.1, hope_s=0.2, plain_s=3.0, drafting_s=4.0)
    ledger.note(Bucket(8, 0))
    ledger.miss(Bucket(8, 4, 16), 0.5)
    ledger.miss(Bucket(8, 4, 16), 0.25)
    return ledger


def test_what_is_kept_comes_back():
    bucket = Bucket(8, 4, 16)
    kept = Ledger.of_record(json.loads(json.dumps(written().to_record())))
    assert kept == dataclasses.replace(written(), missed_before_s={bucket: 0.75})
    assert kept.missed_s == {bucket: 0.75}


def test_a_process_counts_what_it_lost_itself():
    bucket = Bucket(8, 4, 16)
    ledger = Ledger.of_record(written().to_record())
    assert ledger.lost_s(bucket, is_kept=False) == 0.75
    assert ledger.lost_s(bucket, is_kept=True) == 0.0
    ledger.miss(bucket, 0.5)
    assert ledger.copy().lost_s(bucket, is_kept=False) == 1.25
    assert ledger.copy().lost_s(bucket, is_kept=True) == 0.5
    ledger.note(bucket)
    ledger.miss(bucket, 0.5)
    assert ledger.lost_s(bucket, is_kept=True) == 0.5


def test_a_bucket_that_runs_for_the_first_time_ends_what_was_missed():
    ledger = written()
    ledger.note(Bucket(8, 0))
    assert ledger.missed_s
    ledger.note(Bucket(8, 4, 16))
    assert not ledger.missed_s


def test_a_bucket_that_an_earlier_run_ran_is_missed_anew():
    """Its executable was not kept: what is lost without it counts again, until it runs again."""
    ledger = written()
    ledger.note(Bucket(8, 4, 16))
    ledger.miss(Bucket(8, 4, 16), 1.0)
    ledger.note(Bucket(8, 4, 16))
    assert not ledger.missed_s


@pytest.mark.parametrize(
    "change",
    [
        {"routine_s": -1.0},
        {"hope_s": float("nan")},
        {"missed": [[1, 2, None, float("inf")]]},
        {"missed": [[1]]},
        {"ran": 3},
        {"ran": [["x", "y", None]]},
        {"ran": [[1e400, 1, None]]},
    ],
)
def test_figures_that_mean_nothing_are_refused(change):
    with pytest.raises(ValueError, match="no ledger"):
        Ledger.of_record(written().to_record() | change)
