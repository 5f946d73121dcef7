"""What runs save up and miss, kept."""

import dataclasses
import json

import pytest

from specjax.decode.bucket import Bucket
from specjax.policy.ledger import MOST_S, Ledger


def written():
    ledger = Ledger(budget_s=0.1, since_s=(3.0, 4.0))
    ledger.note(Bucket(8, 0))
    ledger.miss(Bucket(8, 4, 16), 0.5)
    ledger.miss(Bucket(8, 4, 16), 0.25)
    return ledger


def test_what_is_kept_comes_back():
    bucket = Bucket(8, 4, 16)
    kept = Ledger.of_record(json.loads(json.dumps(written().to_record())))
    assert kept == dataclasses.replace(written(), ran={}, missed_before_s={bucket: 0.75})
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


def test_a_bucket_that_runs_ends_what_was_missed():
    ledger = written()
    ledger.note(Bucket(8, 0))
    assert ledger.missed_s
    ledger.note(Bucket(8, 4, 16))
    assert not ledger.missed_s
    ledger.miss(Bucket(8, 4, 16), 1.0)  # its executable was not kept
    ledger.note(Bucket(8, 4, 16))
    assert not ledger.missed_s


def test_what_others_would_have_saved_beyond_what_runs_now_stands():
    """Of its rows; what ran in bursts of other rows was lost apart from it."""
    ledger = Ledger()
    for rows, depth, seconds in ((1, 1, 1.0), (1, 2, 3.0), (1, 4, 3.5), (2, 1, 0.5)):
        ledger.miss(Bucket(rows, depth), seconds)
    ledger.note(Bucket(1, 2))
    assert ledger.missed_s == {Bucket(1, 4): 0.5, Bucket(2, 1): 0.5}
    again = Ledger.of_record(ledger.to_record())
    # In the next process it is read again, and lost so much until then.
    again.miss(Bucket(1, 2), 3.0)
    again.miss(Bucket(1, 4), 3.5)
    again.note(Bucket(1, 2))
    assert again.missed_s == {Bucket(1, 4): 1.0, Bucket(2, 1): 0.5}
    assert again.lost_s(Bucket(1, 4), is_kept=True) == 0.5


def test_what_is_written_can_be_read_however_long_it_was_added_to():
    ledger = Ledger()
    for _ in range(3):
        ledger.pass_(0.9 * MOST_S, is_drafting=False)
        for rows in range(1, 700):
            ledger.miss(Bucket(rows, 1), 0.9 * MOST_S)
    kept = Ledger.of_record(json.loads(json.dumps(ledger.to_record())))
    assert kept.since_s == (MOST_S, 0.0)
    assert set(kept.missed_s.values()) == {MOST_S}
    record = Ledger().to_record() | {"missed": [[1, 2, None, 3 * MOST_S]]}
    assert Ledger.of_record(record).missed_s == {Bucket(1, 2): MOST_S}


def test_a_budget_that_was_overdrawn_is_written_as_empty():
    assert Ledger.of_record(Ledger(budget_s=-0.3).to_record()).budget_s == 0
    assert Ledger.of_record(Ledger().to_record()).budget_s is None


def test_how_long_ago_a_burst_drafted_and_one_was_plain():
    ledger = Ledger()
    ledger.pass_(2.0, is_drafting=False)
    ledger.pass_(3.0, is_drafting=False)
    assert ledger.since_s == (5.0, 0.0)
    ledger.pass_(1.0, is_drafting=True)
    assert ledger.since_s == (0.0, 1.0)
    assert ledger.lived_s == 6.0


@pytest.mark.parametrize(
    "change",
    [
        {"budget_s": -1.0},
        {"budget_s": float("nan")},
        {"since_s": [1.0]},
        {"since_s": [1.0, -1.0]},
        {"life_s": float("inf")},
        {"missed": [[1, 2, None, float("inf")]]},
        {"missed": [[1]]},
        {"missed": 3},
        {"missed": [["x", "y", None, 1.0]]},
        {"missed": [[1e400, 1, None, 1.0]]},
        {"missed": [[rows, 1, None, 1.0] for rows in range(1, 999)]},
    ],
)
def test_figures_that_mean_nothing_are_refused(change):
    with pytest.raises(ValueError, match="no ledger"):
        Ledger.of_record(written().to_record() | change)


def test_what_is_left_is_as_much_as_the_last_process_ran_or_this_one():
    ledger = Ledger()
    ledger.pass_(2.0, is_drafting=False)
    assert ledger.left_s > 1e5  # there was no process before
    ledger = Ledger.of_record(ledger.to_record())
    assert (ledger.lived_s, ledger.life_s, ledger.left_s) == (0.0, 2.0, 2.0)
    ledger.pass_(0.5, is_drafting=True)
    assert ledger.left_s == 1.5
    ledger.pass_(5.0, is_drafting=True)
    assert ledger.left_s == 5.5
    assert Ledger.of_record(ledger.to_record()).life_s == 5.5
    # A process in which nothing was timed does not count.
    assert Ledger.of_record(Ledger.of_record(ledger.to_record()).to_record()).life_s == 5.5
    # A short process after a long one does not make all processes short.
    ledger = Ledger.of_record(ledger.to_record())
    ledger.pass_(0.1, is_drafting=True)
    assert Ledger.of_record(ledger.to_record()).life_s == 5.5 / 4
