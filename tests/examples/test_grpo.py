"""The worked examples: the task, the run that drafts do not change, the replay."""

from __future__ import annotations

import grpo
import grpo_replay as replay
import numpy as np
import pytest
import running_sums
from running_sums import BASE, END, MOST_DIGITS, Problem


def test_a_problem_by_hand():
    problem = Problem((3, 1, 4, 2))
    assert running_sums.decode(problem.prompt_ids) == "a3b1c4d2="
    assert problem.sums == [3, 4, 3, 0]
    assert problem.answer == "a33b14c43d20."
    rng = np.random.default_rng(0)
    right = problem.demonstration(rng, slips=0.0)
    assert running_sums.decode(right) == problem.answer
    assert right[-1] == END
    assert running_sums.reward(problem, right) == 1
    assert running_sums.reward(problem, []) == 0
    half = running_sums.encode("a33b14c")
    assert running_sums.reward(problem, half) == 7 / 13
    late = running_sums.encode("a33b10c43d20.")
    assert running_sums.reward(problem, late) == 5 / 13


def test_slips_are_as_frequent_as_they_are_said_to_be_and_are_gone_on_from():
    rng = np.random.default_rng(0)
    problems = running_sums.draw(rng, 400)
    sizes = [len(problem.digits) for problem in problems]
    assert min(sizes) == 3
    assert max(sizes) == MOST_DIGITS
    steps = slips = 0
    for problem in problems:
        text = running_sums.decode(problem.demonstration(rng, 0.1))
        written = [int(digit) for digit in text[2::3]]
        before = 0
        for digit, total in zip(problem.digits, written, strict=True):
            off = (total - before - digit) % BASE
            assert off in (0, 1, BASE - 1)
            steps, slips, before = steps + 1, slips + (off != 0), total
    assert slips / steps == pytest.approx(0.1, abs=0.02)


def test_everything_fits_into_the_widths():
    longest = Problem((BASE - 1,) * MOST_DIGITS)
    assert len(longest.prompt_ids) <= grpo.PROMPT_WIDTH
    demonstrated = longest.demonstration(np.random.default_rng(0), 0.1)
    assert len(demonstrated) <= grpo.MAX_TOKENS
    assert max(running_sums.SYMBOLS.values()) < running_sums.VOCAB_SIZE


def test_advantages_are_within_groups():
    rewards = np.array([0.0, 1.0, 0.5, 0.5], np.float32)
    found = grpo.advantages(rewards, 2)
    np.testing.assert_allclose(found, [-0.5, 0.5, 0.0, 0.0])


def test_speedups_are_of_the_median_rounds_of_all_checkpoints():
    def one(step, drafter, seconds, tail_s):
        bursts = [(8, 70.0, seconds - tail_s), (2, 10.0, tail_s)]
        return replay.Replay(step, drafter, 100, seconds, bursts, 1.0, {})

    rounds = [one(0, "none", s, 4) for s in (9, 10, 50)]
    rounds += [one(0, "history", s, 2) for s in (4, 5, 6)]
    rounds += [one(7, "none", 20, 0), one(7, "history", 5, 1)]
    assert replay.rates(rounds)["none"]["whole"] == 200 / 30
    # At step 7 plain decoding had no tail: that of the other stands against nothing.
    assert replay.speedups(rounds) == {
        "history": {"whole": 3.0, "tail of 4 rows": 2.0, "tail of 2 rows": 2.0}
    }
    assert rounds[0].part(1) == (0, 0)  # nobody was ever alone


@pytest.mark.slow
# So little trained a draft model is near what the alarm is for.
@pytest.mark.filterwarnings("ignore:.*no longer fits the policy")
def test_drafts_change_neither_rewards_nor_weights():
    start = grpo.pretrained(grpo.CONFIG, 0, num_steps=60)
    draft_weights = {
        "draft": grpo.pretrained(grpo.DRAFT_CONFIG, 1, num_steps=60),
        "eagle3": grpo.new_head(start, 0),
    }
    runs = {
        name: grpo.train_with(name, start, draft_weights, fixed_k=4, num_steps=4)
        for name in grpo.DRAFTERS
    }
    for name, run in runs.items():
        assert len(run.adapted) == (4 if name.endswith(grpo.ADAPTED) else 0)
        assert len(set(run.traces[1:])) == 1  # new weights compile nothing
    plain = runs.pop("none")
    for run in runs.values():
        assert set(grpo.difference(plain, run).values()) == {0}
        assert sum(each["num_drafted"] for each in run.metrics) > 0
