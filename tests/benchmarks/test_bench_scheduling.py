"""The page of docs/benchmarks/scheduling.md, of costs made up and replays made short."""

import json
from pathlib import Path

import pytest

from benchmarks import scheduling, scheduling_report
from benchmarks.replay import Oracle, Replay, Workload
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed

OVERHEAD = [1.0, 0.99, 1.01]


@pytest.fixture
def costs():
    """Returns what `measure_costs` does, of a device bound by memory up to some tokens."""
    steps = [
        {
            **bucket._asdict(),
            "context_tokens": context * bucket.rows,
            "step_s": 1e-3
            + 1e-5 * bucket.rows * (1 + 2 * bucket.num_speculative_tokens)
            + 1e-8 * context * bucket.rows,
            "num_measurements": 7,
        }
        for bucket in Goodput(scheduling.MOST).buckets(scheduling.ROW_BUCKETS)
        for context in (64, 440)
    ]
    return {
        "steps": steps,
        "catch_up_s": 1e-5,
        "row_buckets": list(scheduling.ROW_BUCKETS),
        "plain_with_drafter_over_without": {"1": OVERHEAD},
    }


@pytest.fixture
def short(monkeypatch):
    for name, value in {
        "BATCHES": (1,),
        "ACCEPTANCE": (0.0, 0.8),
        "RAMP_ACCEPTANCE": (0.7,),
        "SERIES_RAMPS": 2,
        "TOKENS": 1200,
        "SHORT_BATCHES": (4,),
        "SHORT_ACCEPTANCE": (0.5,),
        "SHORT_SEEDS": 1,
        "SHORT_BURN_IN": 2,
        "SHORT_COUNTED": 2,
    }.items():
        monkeypatch.setattr(scheduling, name, value)


@pytest.mark.slow
def test_the_page_says_what_the_document_holds(costs, short, tmp_path):
    document = {"environment": {"device": "made up"}}
    recorded = RECORD["costs"]["embedded"]  # whose K are of an earlier ladder
    document |= scheduling.run({"toy pair": costs, "embedded": recorded}, tmp_path)
    document = json.loads(json.dumps(document))
    page = scheduling_report.report(document, [])
    assert "device made up" in page
    assert "(scheduling_ramp_toy_pair.png)" in page
    assert (tmp_path / "scheduling_ramp_toy_pair.png").stat().st_size > 10_000
    replay = document["replay"]["toy pair"]
    for figure in (
        replay["ramp"][0]["of_best_k"],
        replay["ramp"][0]["oracle_of_best_k"],
        replay["series"][0]["of_best_k_above_0"],
        replay["series"][-1]["of_best_k"],
        replay["steady"][0]["cold_of_best"],
        replay["short"]["runs"][0]["of_best"],
    ):
        assert f"{figure:.3f}" in page
    assert "{" not in page


def test_steps_cost_what_was_measured_and_a_line_between(costs):
    of, known = scheduling.costs_of(costs)
    for record in costs["steps"]:
        bucket = scheduling.Bucket(*(record[name] for name in scheduling.Bucket._fields))
        context = record["context_tokens"]
        assert of.step_s(bucket, context) == pytest.approx(record["step_s"])
        assert known.count(bucket) == 2  # at two contexts
    bucket = scheduling.Bucket(4, 2)
    ends = [of.step_s(bucket, 4 * context) for context in (64, 440)]
    assert of.step_s(bucket, 4 * 252) == pytest.approx(sum(ends) / 2)


def test_an_oracle_is_no_slower_than_any_k(costs):
    of, _ = scheduling.costs_of(costs)
    for batch, rate in ((1, 0.9), (32, 0.3)):
        workload = Workload(
            scheduling.np.full(batch, 500), scheduling.np.full(batch, rate), context=64
        )
        oracle = Replay(workload, of, Oracle(workload, of, scheduling.depths_of(costs))).run()
        for depth in scheduling.depths_of(costs):
            fixed = Replay(workload, of, Fixed(depth)).run()
            assert oracle.seconds < 1.01 * fixed.seconds


@pytest.mark.full
def test_batches_that_drain_take_what_each_takes(costs, monkeypatch):
    lengths, rates = next(iter(scheduling.SERIES_LENGTHS)), "half 0.05, half 0.95"
    figures = scheduling.series(costs, lengths, rates)
    fixed = {k: figures["seconds"][f"K = {k}"] for k in scheduling.depths_of(costs)}
    assert figures["best_k"] == min(fixed, key=fixed.get)
    assert figures["of_best_k"] <= figures["of_best_k_above_0"]
    monkeypatch.setattr(scheduling, "SERIES_RAMPS", 1)
    first = scheduling.series(costs, lengths, rates)["seconds"]
    assert all(0 < first[name] < figures["seconds"][name] for name in first)


# The committed record

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
RECORD = json.loads((BENCHMARKS / "scheduling.json").read_text())


def test_the_committed_page_says_what_the_record_holds():
    walls = json.loads((BENCHMARKS / "scheduling_walls.json").read_text())["walls"]
    page = (BENCHMARKS / "scheduling.md").read_text()
    assert scheduling_report.report(RECORD, walls) == page


def test_a_slice_of_the_committed_replays_comes_out_as_it_is_committed():
    """A load that stays, from its committed costs and with the K that they have.

    Where a change of the policy fails this, the whole is replayed and committed again:
    python -m benchmarks.scheduling --costs docs/benchmarks/scheduling.json --out docs/benchmarks
    """
    (wanted,) = [
        row
        for row in RECORD["replay"]["embedded"]["steady"]
        if (row["batch"], row["acceptance"]) == (1, 0.0)
    ]
    found = scheduling.steady(RECORD["costs"]["embedded"], 1, 0.0)
    # Sums in another order, of other versions of numpy, may end a burst elsewhere.
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_costs_of_an_earlier_ladder_are_replayed_with_its_k():
    of = RECORD["costs"]["embedded"]
    depths = scheduling.depths_of(of)
    assert depths == RECORD["replay"]["embedded"]["depths"]
    measured = {scheduling.Bucket(*(s[n] for n in scheduling.Bucket._fields)) for s in of["steps"]}
    asked = scheduling.goodput(of).buckets((1, 4, 16))
    assert {bucket for bucket in asked if bucket.max_drafts is None} <= measured
    assert scheduling.depths_of({"steps": of["steps"][:1]}) == [0]
