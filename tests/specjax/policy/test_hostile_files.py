"""Cost files that nobody of good will wrote: small bounds, no crash, no long wait."""

import json

import pytest

from specjax.decode.bucket import Bucket
from specjax.policy import cost_files
from specjax.policy.cost_files import MOST_KINDS, Known
from specjax.policy.ledger import Ledger
from specjax.policy.step_cost import MEMORY, MOST_BUCKETS, MOST_ROWS, StepCosts
from specjax.policy.survival import Survival
from specjax.runtime import kept_files

KEY = {"device": "made up"}


def step(rows=1, depth=0, context=9.0):
    return {
        **Bucket(rows, depth)._asdict(),
        "context_tokens": context,
        "step_s": 1e-3,
        "num_steps": 8,
        "num_behind": 0,
    }


def document(steps, **more):
    return {"steps": steps, **more}


@pytest.mark.parametrize(
    "steps",
    [
        [step(1 + n) for n in range(MOST_BUCKETS + 1)],
        [step(1 + n) for n in range(MOST_BUCKETS * MEMORY + 1)],
        [step(MOST_ROWS + 1)],
        [step(1, 2000)],
    ],
)
def test_more_than_a_run_keeps_is_refused_before_anything_is_solved(steps, monkeypatch):
    monkeypatch.setattr(StepCosts, "_update", None)
    known = Known(StepCosts())
    with pytest.raises(ValueError, match=r"more than|no measured"):
        known.add(document(steps))
    assert not known.costs.measured


@pytest.mark.full
def test_as_many_as_a_run_keeps_can_be_read_again():
    costs = StepCosts()
    for rows in range(1, MOST_BUCKETS + 9):
        costs.observe(Bucket(rows, 0), 10.0, 1e-3)
    again = StepCosts()
    again.add_records(json.loads(json.dumps(costs.to_records())))
    assert len(again.measured) == MOST_BUCKETS


def test_more_kinds_of_sampling_than_there_are_are_refused():
    ledgers = {str(n): Ledger().to_record() for n in range(MOST_KINDS + 1)}
    with pytest.raises(ValueError, match="kinds"):
        Known(StepCosts()).add(document([step()], ledgers=ledgers))


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_file_that_memory_or_the_stack_is_too_small_for_counts_as_none(
    error, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    costs = StepCosts()
    costs.observe(Bucket(1, 0), 10, 1e-3)
    assert cost_files.write(KEY, cost_files.path_of(KEY), Known(costs))

    def fails(self, document):
        raise error("too much")

    monkeypatch.setattr(Known, "add", fails)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert not cost_files.read(KEY, Known(StepCosts()))


@pytest.mark.parametrize("tried_and_stood", [[1.0, 2.0], [0.0, 1e308], [1e300, 1.0]])
def test_more_drafts_that_stood_than_were_tried_are_refused(tried_and_stood):
    record = Survival(4).to_record() | {"all": tried_and_stood}
    with pytest.raises(ValueError, match="no acceptance"):
        Survival.of_record(record, 4)


@pytest.mark.parametrize("name", ["stood", "expected", "asked", "proposed"])
@pytest.mark.parametrize("figures", [[], [1.0] * 5, [[1.0]] * 4])
def test_averages_of_unlike_depths_are_refused(name, figures):
    record = Survival(4).to_record() | {name: figures}
    with pytest.raises(ValueError, match="no acceptance"):
        Survival.of_record(record, 4)


def test_a_key_that_stands_there_twice_is_refused(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text('{"a": 1, "b": {"c": 1, "c": 2}}')
    with pytest.raises(ValueError, match="twice"):
        kept_files.read_json(path)
