"""What a process keeps between calls: of several runs, and beside other processes."""

import os
import threading

import numpy as np
import pytest

from specjax.decode.bucket import Bucket
from specjax.policy import cost_files, shelf
from specjax.policy.cost_files import Known
from specjax.policy.goodput import Goodput
from specjax.policy.shelf import Shelf
from specjax.policy.step_cost import MEMORY, StepCosts
from specjax.runtime import kept_files

KEY = {"device": "made up"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shelf, "SAVE_EVERY_S", 0.0)
    return tmp_path


def begin(own, kind="greedy"):
    known = own.known()
    return Goodput(4, known.costs, ledger=known.ledgers.get(kind))


def measure(policy, bucket, seconds=1e-3, times=3):
    for _ in range(times):
        policy.costs.observe(bucket, 10, seconds)


def in_file():
    known = Known(StepCosts())
    assert cost_files.read(KEY, known)
    return known


def test_of_two_runs_at_once_the_next_knows_both():
    own = Shelf(KEY)
    one, other = begin(own), begin(own)
    measure(one, Bucket(1, 0))
    measure(one, Bucket(1, 2))
    one.ledger.miss(Bucket(1, 1), 4.0)
    measure(other, Bucket(8, 0))
    other.ledger.miss(Bucket(1, 1), 0.5)
    own.keep(one, "greedy")
    own.keep(other, "greedy")
    own.keep(other, "greedy")  # as it does after every call: nothing counts twice
    for known in (own.known(), in_file()):
        assert set(known.costs.measured) == {Bucket(1, 0), Bucket(1, 2), Bucket(8, 0)}
        assert known.ledgers["greedy"].missed_s == {Bucket(1, 1): 4.5}


def test_what_another_process_wrote_meanwhile_stays():
    first, second = Shelf(KEY), Shelf(KEY)
    long, short = begin(first), begin(second, "sampled")
    measure(short, Bucket(1, 0))
    measure(short, Bucket(1, 2), 2e-3)
    short.ledger.miss(Bucket(1, 1), 4.0)
    second.keep(short, "sampled")
    measure(long, Bucket(8, 0))
    first.keep(long, "greedy")
    known = in_file()
    assert set(known.costs.measured) == {Bucket(1, 0), Bucket(1, 2), Bucket(8, 0)}
    assert known.ledgers["sampled"].missed_s == {Bucket(1, 1): 4.0}
    assert known.costs.seconds(Bucket(1, 2), 10) == pytest.approx(2e-3, rel=0.1)
    assert "greedy" in known.ledgers


def test_a_kind_of_sampling_is_known_as_the_last_process_left_it_that_ran_it():
    before, other, own = Shelf(KEY), Shelf(KEY), Shelf(KEY)

    def run(process, kind, accepted):
        policy = begin(process, kind)
        measure(policy, Bucket(1, 0))
        asked, stood = np.full((40, 1), 3), np.full((40, 1), accepted)
        policy.survival.observe(np.arange(1), stood + 1, stood, asked, asked, asked[0])
        policy.ledger.miss(Bucket(1, 1), 1.0)
        process.keep(policy, kind)
        return policy.survival.to_record()

    old = run(before, "greedy", 0)
    run(own, "sampled", 1)  # it has read what is known of greedy sampling, and runs none
    assert own.known().acceptance["greedy"] == old
    new = run(other, "greedy", 3)
    assert new != old
    sampled = run(own, "sampled", 2)
    for known in (own.known(), in_file()):
        assert known.acceptance == {"greedy": new, "sampled": sampled}
        assert known.ledgers["greedy"].missed_s == {Bucket(1, 1): 2.0}


def test_of_what_two_processes_lost_none_is_lost_or_counts_twice():
    first, second = Shelf(KEY), Shelf(KEY)
    one, other = begin(first), begin(second)
    for policy, own in ((one, first), (other, second), (one, first), (other, second)):
        measure(policy, Bucket(1, 0))
        policy.ledger.miss(Bucket(1, 1), 1.0)
        own.keep(policy, "greedy")
    assert in_file().ledgers["greedy"].missed_s == {Bucket(1, 1): 4.0}
    one.ledger.note(Bucket(1, 1))  # compiled, and on disk from now on
    first.keep(one, "greedy")
    first.keep(one, "greedy")
    # What the other process lost is its own to end.
    assert in_file().ledgers["greedy"].missed_s == {Bucket(1, 1): 2.0}


def test_what_was_measured_here_is_not_replaced_by_what_lay_in_the_file():
    before = Shelf(KEY)
    policy = begin(before)
    measure(policy, Bucket(1, 0), 1e-3, MEMORY)
    before.keep(policy, "greedy")
    own = Shelf(KEY)
    policy = begin(own)
    measure(policy, Bucket(1, 0), 1.5e-3, 4)
    own.keep(policy, "greedy")
    assert own.known().costs.seconds(Bucket(1, 0), 10) == policy.costs.seconds(Bucket(1, 0), 10)


def test_a_shelf_that_cannot_be_saved_stops_no_other(monkeypatch):
    shelves = [Shelf({"device": name}) for name in "ab"]
    monkeypatch.setattr(shelf, "_SHELVES", dict(zip("ab", shelves)))
    monkeypatch.setattr(shelf, "SAVE_EVERY_S", 1e9)
    for own in shelves:
        own._saved_at = 1e9
        policy = begin(own)
        measure(policy, Bucket(1, 0))
        own.keep(policy, "greedy")
    read, broken = cost_files.read, shelves[0]._key

    def fails(key, known):
        if key == broken:
            raise RuntimeError("no such thing")
        return read(key, known)

    monkeypatch.setattr(cost_files, "read", fails)
    with pytest.warns(UserWarning, match="not kept"):
        shelf.save_all()
    assert cost_files.path_of(shelves[1]._key).exists()


def test_threads_that_write_one_file_leave_it_whole(tmp_path, monkeypatch):
    """Each writes a file of its own name, and moves it: here both are written before either
    moves."""
    path, replace = tmp_path / "kept.json", os.replace
    both = threading.Barrier(2, timeout=10)

    def moves_late(source, target):
        both.wait()
        replace(source, target)

    monkeypatch.setattr(os, "replace", moves_late)
    documents = [[number] * size for number, size in ((1, 4000), (2, 10))]
    threads = [
        threading.Thread(target=kept_files.write_json, args=(path, document))
        for document in documents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept_files.read_json(path) in documents
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]


def test_what_cannot_be_moved_leaves_nothing_behind(tmp_path):
    (tmp_path / "kept.json").mkdir()
    assert not kept_files.write_json(tmp_path / "kept.json", [1])
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
