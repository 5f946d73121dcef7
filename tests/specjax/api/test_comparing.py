"""compare(): who runs when, what is measured, and one small run."""

import types

import pytest
from helpers import ENGINE, tiny_llama

import specjax
from specjax.api import comparing, generation

PROMPTS = [[1, 2, 3, 1, 2, 3], [4, 5]]


class _Run(list):
    """What `generate` returns, of one text."""

    def __init__(self, run_s, token_ids, reasons=()):
        super().__init__([types.SimpleNamespace(token_ids=token_ids, error=None)])
        self.stats = types.SimpleNamespace(
            run_s=run_s,
            num_output_tokens=2,
            mean_acceptance_length=1.5,
            acceptance_rate=0.5,
            acceptance=types.SimpleNamespace(num_drafted=2 if reasons else 0),
            why="K = ..." if reasons else "",
            decisions=[types.SimpleNamespace(reason=reason) for reason in reasons],
        )


def test_first_runs_are_left_out_and_who_begins_changes(monkeypatch):
    ran, seeds, reports = [], set(), []
    seconds = {"none": iter([9.0, 4.0, 8.0, 4.0]), "ngram": iter([7.0, 2.0, 1.0, 2.0])}

    def generate(target, prompts, *, sampling, drafter, progress, engine, verification=None):
        name = getattr(drafter, "name", drafter)
        ran.append(name)
        seeds.add(sampling[0].seed)
        # Without drafts a prompt's own number of them means nothing, and would be warned of.
        assert sampling[0].num_speculative_tokens == (None if name == "none" else 3)
        assert verification == (None if name == "none" else "seeded")
        progress("prefill", 1, 2)
        return _Run(next(seconds[name]), [1, 2] if name == "none" else [1, 3])

    monkeypatch.setattr(generation, "generate", generate)
    told = specjax.compare(
        tiny_llama(0),
        PROMPTS[:1],
        ["ngram"],
        sampling={"num_speculative_tokens": 3},
        engine=ENGINE,
        verification="seeded",
        progress=lambda *of: reports.append(of),
    )
    assert reports[:2] == [
        ("comparing, run 1 of 8 (none), prefill", 1, 2),
        ("comparing, run 2 of 8 (ngram), prefill", 1, 2),
    ]
    assert ran == ["none", "ngram", "ngram", "none"] * 2
    assert len(seeds) == 1
    plain, drafted = told.rows
    assert (plain.run_s, plain.tokens_per_second, plain.speedup) == (4.0, 0.5, 1.0)
    assert (drafted.run_s, drafted.tokens_per_second, drafted.speedup) == (2.0, 1.0, 2.0)
    assert plain.is_equal
    assert (drafted.num_equal, drafted.num_tokens, drafted.is_equal) == (1, 2, False)
    lines = repr(told).splitlines()
    assert lines[2].split() == ["ngram", "1.0", "2.00", "1.50", "-", "1", "of", "2", "tokens"]
    assert lines[-1] == "medians of 3 runs each, in turn"


def test_a_drafter_runs_again_before_until_its_policy_has_chosen(monkeypatch):
    settles_after, num_runs = 3, 0

    def generate(target, prompts, *, drafter, **_):
        nonlocal num_runs
        name = getattr(drafter, "name", drafter)
        if name == "none":
            return _Run(1.0, [1, 2])
        num_runs += 1
        return _Run(1.0, [1, 2], ["goodput" if num_runs > settles_after else "probe"])

    monkeypatch.setattr(generation, "generate", generate)
    compared = lambda: specjax.compare(tiny_llama(0), PROMPTS[:1], repeats=2, engine=ENGINE)
    told = compared()
    assert num_runs == settles_after + 1 + 2
    assert told.rows[1].why == "K = ..."
    assert repr(told).splitlines()[2].split()[-2:] == ["50%", "yes"]
    # A policy that never chooses is said to have chosen nothing.
    settles_after, num_runs = 10**6, 0
    told = compared()
    assert num_runs == comparing.MOST_WARM + 2
    assert "Too short a text to choose a K" in repr(told)


def test_a_k_that_is_expected_to_be_faster_is_waited_for_a_while(monkeypatch):
    """As that of a step on disk, which is read once it pays."""
    reasons, num_runs = [], 0

    def generate(target, prompts, *, drafter, **_):
        nonlocal num_runs
        is_plain = getattr(drafter, "name", drafter) == "none"
        num_runs += not is_plain
        reason = reasons[min(num_runs, len(reasons)) - 1]
        return _Run(1.0, [1, 2], [] if is_plain else [reason])

    monkeypatch.setattr(generation, "generate", generate)
    for own, num_warm in (
        (["unproven"] * 3 + ["goodput"], 4),
        (["unproven"], comparing.MOST_UNPROVEN),
    ):
        reasons, num_runs = own, 0
        told = specjax.compare(tiny_llama(0), PROMPTS[:1], repeats=2, engine=ENGINE)
        assert num_runs == num_warm + 2
        assert "Too short" not in repr(told)


def test_what_cannot_be_compared_is_refused():
    model = tiny_llama(0)
    refused = {
        "drafters='ngram' must be a list": {"drafters": "ngram"},
        "must be a list, as": {"drafters": []},
        "drafts nothing; leave it out": {"drafters": ["none"]},
        "repeats=0 must be": {"repeats": 0},
        "which is no field of SamplingParams": {"sampling": {"max_new_tokens": 3}},
    }
    for said, given in refused.items():
        with pytest.raises(ValueError, match=said):
            specjax.compare(model, PROMPTS, engine=ENGINE, **given)
    with pytest.raises(TypeError, match=r"write sampling=.'max_tokens': 3"):
        specjax.compare(model, PROMPTS, max_new_tokens=3)


@pytest.mark.full
def test_a_small_run():
    told = specjax.compare(
        tiny_llama(0),
        PROMPTS,
        ["ngram", "history"],
        sampling={"max_tokens": 8, "temperature": 0.7},
        repeats=1,
        engine=ENGINE,
    )
    assert [row.drafter for row in told.rows] == ["none", "ngram", "history"]
    assert all(row.is_equal and row.tokens_per_second > 0 for row in told.rows)
    assert told.rows[0].speedup == 1.0
