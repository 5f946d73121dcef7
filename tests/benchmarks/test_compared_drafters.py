"""The comparison of drafters: every contender decodes the same, and rows say what was measured."""

import pytest
from helpers import tiny_llama

import specjax
from benchmarks import drafters
from benchmarks.drafters import Contender, Workload, compare, table

pytestmark = pytest.mark.full  # of benchmarks/, which nobody installs


@pytest.mark.slow
def test_every_contender_and_k_has_a_row():
    target = tiny_llama(0)
    sampling = specjax.SamplingParams(temperature=0, max_tokens=12, seed=0, ignore_eos=True)
    work = Workload(target, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, sampling, 2)
    contenders = {"n-gram": Contender("ngram", {}), "itself": Contender(target, {})}
    rows = compare(work, contenders, [2], rounds=2)
    assert all("of_best" not in row for row in rows)
    assert [(row["drafter"], row["k"]) for row in rows] == [("n-gram", 2), ("itself", 2)]
    # A draft model that is the target is always right.
    assert rows[1]["mean_acceptance_length"] == 3.0
    assert all(row["of_plain"] > 0 for row in rows)
    assert all(row["of_plain_interval"][0] <= row["of_plain"] for row in rows)
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert "| itself | 2 | 3.00 |" in lines[3]


class FixedSeconds:
    """A `Work` whose calls take the given seconds, in turn: by K, None as the policy chooses."""

    def __init__(self, seconds):
        self.seconds = {k: iter(several) for k, several in seconds.items()}

    def call(self, contender, k):
        seconds = next(self.seconds[0 if contender is None else k])
        return drafters.Call(seconds, 10, 30, 3.0)


def test_the_policy_is_compared_with_the_best_fixed_k():
    """Round by round; the first compiles. Plain decoding is a fixed K, too."""
    seconds = {0: [9.0, 4.0, 8.0, 4.0], 1: [9.0, 3.0, 6.0, 3.0], 3: [9.0, 5.0, 10.0, 5.0]}
    seconds[None] = [9.0, 2.0, 8.0, 4.0]
    contenders = {"n-gram": Contender("ngram", {})}
    rows = compare(FixedSeconds(seconds), contenders, [0, 1, 3], 3, has_shares=False)
    policy, *fixed = rows
    assert policy["best_k"] == 1
    assert policy["of_best"] == 0.75  # the median of 1.5, 0.75 and 0.75
    assert policy["of_best_interval"] == [0.75, 1.5]
    assert all("of_best" not in row for row in fixed)
    header, _, first, *others = table(rows).splitlines()
    assert header.endswith("| of the best K | interval |")
    assert first.endswith("| 0.75 (K = 1) | 0.75 to 1.50 |")
    assert {line.count("|") for line in others} == {first.count("|")} == {header.count("|")}

    seconds = {0: [1.0, 1.0], 1: [2.0, 2.0], None: [1.0, 1.25]}
    (policy, _) = compare(FixedSeconds(seconds), contenders, [0, 1], 1, has_shares=False)
    assert (policy["best_k"], policy["of_best"]) == (0, 0.8)


def test_a_head_must_have_a_folder(tmp_path):
    target = tiny_llama(0)
    for text in ("eagle3", f"eagle3={tmp_path}"):
        with pytest.raises(ValueError, match="must be NAME=FOLDER"):
            drafters.contenders_of([], [text], target, target)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--k", "-1"],
        ["--rounds", "0"],
        ["--temperatures", "-1"],
        ["--head", "foo"],
        ["--drafters", "nothing"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_one_line(wrong, capsys):
    options = ["--drafters", "n-gram", "--prompts", "1", "--new-tokens", "4", "--rounds", "1"]
    with pytest.raises(SystemExit) as ended:
        drafters.main([*options, "--k", "2", *wrong])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_k_are_measured_together_as_far_as_decoders_are_kept():
    grouped = drafters._together
    assert grouped([0, 1, 2, 1, 7], 1) == [[0, 1, 2, 7]]
    assert grouped([0, 1, 2, 3, 5, 7], 5) == [[0, 1, 2], [3, 5, 7]]
    assert grouped([1, 2], 20) == [[1], [2]]


@pytest.mark.slow
def test_the_command_measures_what_it_is_asked_for(monkeypatch, capsys):
    """On the embedded target: a rule above temperature 0 alone, and no free drafts."""
    asked = []
    call = Workload.call

    def noted(work, contender, k):
        asked.append((work.sampling.temperature, work.sampling.verification, contender, k))
        return call(work, contender, k)

    monkeypatch.setattr(Workload, "call", noted)
    options = [
        "--drafters",
        "n-gram",
        "--k",
        "2",
        "--prompts",
        "1",
        "--new-tokens",
        "4",
        "--rounds",
        "1",
    ]
    assert drafters.main([*options, "--no-shares", "--verification", "delta"]) == 0
    assert {each[:2] for each in asked} == {(0.0, None), (0.8, "delta")}
    names = {each and each.drafter for *_, each, _ in asked}
    assert names == {None, "ngram"}
    out = capsys.readouterr().out
    assert out.count("| n-gram | 2 |") == 2
    assert "temperature 0.8, batch 1" in out
