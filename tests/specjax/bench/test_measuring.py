"""How contenders take turns."""

from __future__ import annotations

from specjax.bench import measuring


def test_each_round_begins_with_another_contender():
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = measuring.interleaved(contenders, 4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [*seconds] == [*"abc"]
    assert all(len(rounds) == 4 for rounds in seconds.values())
