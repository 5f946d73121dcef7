"""How contenders take turns."""

from __future__ import annotations

from specjax.cli.bench import measuring


def recorded(calls):
    return {name: lambda name=name: calls.append(name) for name in "abc"}


def test_each_round_has_an_order_of_its_own():
    calls: list[str] = []
    seconds = measuring.interleaved(recorded(calls), 60)
    assert calls[:3] == [*"abc"]  # before it counts
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert {*rounds} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert [order[::-1] for order in rounds[::2]] == rounds[1::2]
    assert [*seconds] == [*"abc"]
    assert all(len(rounds) == 60 for rounds in seconds.values())


def test_orders_differ_between_calls_of_one_round():
    orders = []
    for seed in range(8):
        calls: list[str] = []
        measuring.interleaved(recorded(calls), 1, warms_up=False, seed=seed)
        assert sorted(calls) == [*"abc"]
        orders.append("".join(calls))
    assert len({*orders}) > 2
