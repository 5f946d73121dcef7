"""Calls in a row: the figures that are made of the seconds of each."""

import pytest

from benchmarks import calls


def rounds(count, **seconds):
    """Returns as many rounds, all alike but for the first, which compiles."""
    names = {"plain": calls.NONE, "again": calls.AGAIN, "goodput": calls.GOODPUT, "k3": "3"}
    own = {names[name]: value for name, value in seconds.items()}
    return [{name: 10 * value for name, value in own.items()}] + [own] * (count - 1)


def test_speed_is_the_seconds_of_plain_decoding_over_ones_own():
    found = calls.figures(rounds(14, plain=2.0, again=2.5, goodput=1.6, k3=1.5))
    assert found["of_plain_by_round"] == pytest.approx([1.25] * 14)
    assert found["of_plain_from_the_second"] == pytest.approx(1.25)
    assert found["best"] == "3"
    assert found["of_best"] == pytest.approx(1.5 / 1.6)


def test_plain_decoding_again_tells_noise_and_is_never_the_best():
    found = calls.figures(rounds(14, plain=2.0, again=1.0, goodput=2.0))
    assert found["plain_again_by_round"] == pytest.approx([2.0] * 14)
    assert found["best"] == calls.NONE
    without = calls.figures(rounds(14, plain=2.0, goodput=2.0))
    assert without["plain_again_by_round"] == []


def test_a_call_of_each_contender(monkeypatch):
    """Whether a contender drafts, and with which K, is what is asked of `generate`."""
    import argparse

    options = argparse.Namespace(
        pair="embedded", drafter="ngram", batch=1, temperature=0.0, new_tokens=4
    )
    caller, asked = calls.Caller(options), []
    monkeypatch.setattr(caller, "_generate", lambda *_, **given: asked.append(given) or Said())
    for contender in (calls.NONE, calls.AGAIN, calls.GOODPUT, "3"):
        seconds, by_k = caller.call(contender)
        assert seconds >= 0
        assert by_k == {}
    none, again, goodput, fixed = asked
    assert none["drafter"] is again["drafter"] is None
    assert goodput["drafter"] is not None
    assert goodput["speculative_config"] is None
    assert fixed["speculative_config"].policy == "fixed"
    assert fixed["speculative_config"].depth == 3


class Said:
    """A generation of which nobody asks anything but its bursts by K."""

    stats = type("Stats", (), {"num_bursts_by_k": {}})
