"""vLLM's table of K by batch size: what it accepts, and what it means between its entries."""

import itertools
import json

import pytest

from specjax.config.batch_size_table import NAME, look_up, most, parse
from specjax.config.speculation import SpeculationConfig
from specjax.policy.interface import Load, Table

# Of vLLM's documentation.
THREE = [[1, 64, 3], [65, 128, 1], [129, 512, 0]]
FIVE = [[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (THREE, {1: 3, 64: 3, 65: 1, 128: 1, 129: 0, 512: 0, 513: 0}),
        (FIVE, {1: 5, 16: 5, 17: 4, 32: 4, 33: 3, 64: 3, 65: 1, 128: 1, 129: 0}),
        # A gap takes the K before it; the tail the last one.
        ([(1, 16, 3), (32, 128, 2)], {16: 3, 17: 3, 31: 3, 32: 2, 128: 2, 9999: 2}),
        ([[17, 32, 4], [1, 16, 5]], {1: 5, 17: 4}),  # in any order
        ([["1", "2", 3.0]], {1: 3}),  # whole numbers in whatever form
        ([[1, 1, 0], [2, 2, 7]], {1: 0, 2: 7, 3: 7}),
    ],
)
def test_look_up(table, expected):
    parsed = parse(table)
    assert {size: look_up(parsed, size) for size in expected} == expected
    assert parse(parsed) == parsed
    assert most(parsed) == max(int(k) for *_, k in table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "must be a list"),
        ([], "one entry at least"),
        ("1,2,3", "must be a list"),
        ({1: 3}, "must be a list"),
        ([[1, 2]], r"must be \[first, last, K\]"),
        ([[1, 2, 3, 4]], r"must be \[first, last, K\]"),
        ([7], r"must be \[first, last, K\]"),
        ([[1, "two", 3]], "three whole numbers"),
        ([[1, None, 3]], "three whole numbers"),
        ([[0, 4, 1]], "1 <= first"),
        ([[-3, 4, 1]], "1 <= first"),
        ([[1, 0, 1]], "1 <= first"),
        ([[5, 4, 1]], "1 <= first"),
        ([[1, 4, -1]], "a K of at least 0"),
        ([[2, 4, 1]], "must begin at batch size 1, got 2"),
        ([[1, 4, 1], [4, 8, 0]], "overlap"),
        ([[1, 9, 1], [3, 4, 0]], "overlap"),
    ],
)
def test_refused(table, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(table)
    assert NAME in str(caught.value)


def test_the_whole_json_of_vllm():
    config = SpeculationConfig.from_json(
        json.dumps({"method": "ngram", "num_speculative_tokens": 5, NAME: FIVE})
    )
    assert config.depth == 5
    assert look_up(config.num_speculative_tokens_per_batch_size, 40) == 3
    # Without a maximum it is the table's.
    assert SpeculationConfig.from_json({"method": "ngram", NAME: THREE}).depth == 3
    with pytest.raises(ValueError, match="overlap"):
        SpeculationConfig.from_json({NAME: [[1, 4, 1], [4, 8, 0]]})


def test_a_k_above_the_maximum_warns():
    given = {"method": "ngram", "num_speculative_tokens": 3, NAME: FIVE}
    with pytest.warns(UserWarning, match="asks for K = 5, and num_speculative_tokens=3"):
        config = SpeculationConfig.from_json(given)
    assert look_up(config.num_speculative_tokens_per_batch_size, 1) == 3


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def load(rows):
    return Load(num_decoding_rows=rows, num_waiting=0)


def test_the_policy_follows_the_decoding_rows():
    clock = Clock()
    policy = Table(parse(THREE), 3, clock=clock)
    chosen = []
    for rows in (1, 64, 65, 200, 128, 64, 0):
        clock.now += 1.0
        chosen.append(policy.choose(load(rows)).num_speculative_tokens)
    assert chosen == [3, 3, 1, 0, 1, 3, 3]


def test_no_more_than_one_change_per_dwell_time():
    clock = Clock()
    policy = Table(parse(THREE), 3, dwell_s=0.5, clock=clock)
    changes, before = [], policy.choose(load(64))
    for step in range(400):
        clock.now = step * 0.01
        now = policy.choose(load(64 + step % 2))
        if now != before:
            changes.append(clock.now)
        before = now
    assert changes
    assert all(b - a >= 0.5 for a, b in itertools.pairwise(changes))
    assert len(changes) <= 8  # in four seconds


def test_a_k_the_engine_cannot_have_becomes_its_most():
    policy = Table(parse(FIVE), 2)
    decision = policy.choose(load(1))
    assert decision.num_speculative_tokens == 2
    assert decision.reason == "table"
