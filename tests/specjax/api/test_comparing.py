"""compare(): who runs when, what is measured, and one small run."""

import types

import pytest
from helpers import ENGINE, tiny_llama

import specjax
from specjax.api import generation

PROMPTS = [[1, 2, 3, 1, 2, 3], [4, 5]]


class _Run(list):
    """What `generate` returns, of one text."""

    def __init__(self, run_s, token_ids):
        super().__init__([types.SimpleNamespace(token_ids=token_ids, error=None)])
        self.stats = types.SimpleNamespace(
            run_s=run_s,
            num_output_tokens=2,
            mean_acceptance_length=1.5,
            acceptance_rate=0.5,
            why="",
        )


def test_first_runs_are_left_out_and_who_begins_changes(monkeypatch):
    ran, seeds = [], set()
    seconds = {"none": iter([9.0, 4.0, 8.0, 4.0]), "ngram": iter([7.0, 2.0, 1.0, 2.0])}

    def generate(target, prompts, *, sampling, drafter, progress, engine, verification=None):
        name = getattr(drafter, "name", drafter)
        ran.append(name)
        seeds.add(sampling[0].seed)
        # Without drafts a prompt's own number of them means nothing, and would be warned of.
        assert sampling[0].num_speculative_tokens == (None if name == "none" else 3)
        assert verification == (None if name == "none" else "seeded")
        assert progress is False
        return _Run(next(seconds[name]), [1, 2] if name == "none" else [1, 3])

    monkeypatch.setattr(generation, "generate", generate)
    told = specjax.compare(
        tiny_llama(0),
        PROMPTS[:1],
        ["ngram"],
        sampling={"num_speculative_tokens": 3},
        engine=ENGINE,
        verification="seeded",
    )
    assert ran == ["none", "ngram", "ngram", "none"] * 2
    assert len(seeds) == 1
    plain, drafted = told.rows
    assert (plain.run_s, plain.tokens_per_second, plain.speedup) == (4.0, 0.5, 1.0)
    assert (drafted.run_s, drafted.tokens_per_second, drafted.speedup) == (2.0, 1.0, 2.0)
    assert plain.is_equal
    assert (drafted.num_equal, drafted.num_tokens, drafted.is_equal) == (1, 2, False)
    lines = repr(told).splitlines()
    assert lines[2].split() == ["ngram", "1.0", "2.00", "1.50", "50%", "1", "of", "2", "tokens"]
    assert lines[-1] == "medians of 3 runs each, in turn"


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
