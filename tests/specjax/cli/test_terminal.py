"""What a person sees: colours, control characters, the summary."""

import dataclasses
import io
import json

import pytest

from specjax.api.results import Completion, GenerationStats
from specjax.cli import json_document, terminal
from specjax.engine.metrics import BurstRecord
from specjax.engine.request import AcceptanceCounts, TextPiece


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stats(**changes):
    counts = AcceptanceCounts(num_steps=50, num_drafted=100, num_accepted=71)
    values = dict(
        num_prompts=1,
        num_prompt_tokens=4,
        num_output_tokens=128,
        acceptance=counts,
        run_s=0.64,
        compile_s=3.2,
        time_to_first_token_s=3.5,
        num_speculative_tokens=2,
        drafter="draft",
        verification="seeded",
    )
    return GenerationStats(**(values | changes))


@pytest.mark.parametrize(
    "choice, stream, environment, expected",
    [
        ("auto", Terminal(), {}, True),
        ("auto", Terminal(), {"NO_COLOR": "1"}, False),
        ("auto", Terminal(), {"NO_COLOR": ""}, True),
        ("auto", Terminal(), {"TERM": "dumb"}, False),
        ("auto", io.StringIO(), {}, False),
        ("always", io.StringIO(), {"NO_COLOR": "1"}, True),
        ("never", Terminal(), {}, False),
    ],
)
def test_when_to_color(choice, stream, environment, expected):
    assert terminal.use_color(choice, stream, environment) is expected


def test_accepted_drafts_are_told_apart():
    stream = Terminal()
    writer = terminal.TextWriter(stream, has_color=True)
    writer.prompt("a")
    writer.pieces([TextPiece("b", True), TextPiece("c", True), TextPiece("d", False)])
    writer.end()
    assert stream.getvalue() == "\x1b[2ma\x1b[0m\x1b[32mbc\x1b[0md\n"


def test_plain_text_in_a_file():
    stream = io.StringIO()
    writer = terminal.TextWriter(stream, has_color=False)
    writer.prompt("a")
    writer.pieces([TextPiece("b", True), TextPiece("c\n", False)])
    writer.end()
    assert stream.getvalue() == "bc\n"


def test_terminal_does_not_obey_the_model():
    stream = Terminal()
    writer = terminal.TextWriter(stream, has_color=False)
    writer.pieces([TextPiece("a\x1b[2Jb\tc\n", False)])
    assert stream.getvalue() == "a\N{REPLACEMENT CHARACTER}[2Jb\tc\n"


def test_summary_of_speculation():
    assert terminal.summary(stats()) == (
        "128 tokens in 0.64 s (200 tokens/s) · 2.42 tokens per target step, "
        "71 % of drafts accepted · first token after 3.50 s · compile 3.20 s"
    )


def test_summary_without_speculation():
    none = AcceptanceCounts(num_steps=128)
    assert "no speculation" in terminal.summary(stats(drafter="none", acceptance=none))
    assert "no speculation" in terminal.summary(stats(num_speculative_tokens=0, acceptance=none))
    assert "proposed nothing" in terminal.summary(stats(acceptance=none))


@pytest.mark.parametrize(
    ("depths", "reason", "expected"),
    [
        ((0, 0), "goodput", "· no drafts: K = 0 in 2 of 2 bursts: plain decoding is faster here ·"),
        (
            (0,),
            "nothing measured yet",
            "· no drafts: K = 0 in 1 of 1 bursts: the step that drafts was not yet compiled and",
        ),
        ((0,), "memory gate", "K = 0 in 1 of 1 bursts: the batch is above speculation_weight_fra"),
        ((3, 0), "goodput", "proposed nothing"),
    ],
)
def test_summary_says_why_nothing_was_drafted(depths, reason, expected):
    figures = dict.fromkeys((field.name for field in dataclasses.fields(BurstRecord)), 0)
    decisions = tuple(
        BurstRecord(**(figures | {"num_speculative_tokens": depth, "reason": reason, "why": ""}))
        for depth in depths
    )
    none = AcceptanceCounts(num_steps=128)
    assert expected in terminal.summary(stats(acceptance=none, decisions=decisions))


def test_status_is_silent_away_from_a_terminal():
    stream = io.StringIO()
    status = terminal.Status(stream)
    status.show("loading")
    status.clear()
    assert stream.getvalue() == ""


def test_status_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    status = terminal.Status(stream)
    status.show("loading")
    status.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_status_reports_until_text_follows(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    status = terminal.Status(stream)
    status.report("compiling the burst", 0, 0)
    status.report("prefill", 64, 500)
    assert "compiling the burst ..." in stream.getvalue()
    assert "prefill: 64 of 500 ..." in stream.getvalue()
    status.end()
    written = stream.getvalue()
    status.report("tokens", 1, 16)
    assert stream.getvalue() == written


def test_status_says_for_how_long_nothing_else_came(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seconds, ended = [], []

    def every_second(show):
        seconds.append(show)
        return lambda: ended.append(show)

    monkeypatch.setattr(terminal, "every_second", every_second)
    stream = Terminal()
    status = terminal.Status(stream)
    status.report("compiling the burst", 0, 0)
    seconds[0](1.0)
    seconds[0](12.3)
    assert stream.getvalue().endswith("\r\x1b[K\x1b[2mcompiling the burst ... 12 s\x1b[0m")
    status.report("prefill", 64, 500)
    assert ended == seconds[:1]
    assert stream.getvalue().endswith("prefill: 64 of 500 ...\x1b[0m")
    status.end()
    assert ended == seconds


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("one\n two", "one two"),
        ([1, 2], "1 2"),
        ([{"role": "user", "content": "hi"}], "hi"),
        ("x" * 100, "x" * 57 + "..."),
    ],
)
def test_first_line(prompt, expected):
    assert terminal.first_line(prompt) == expected


def test_json_has_no_numbers_that_json_lacks():
    assert json_document.plain({"a": (float("-inf"), 1.5)}) == {"a": [None, 1.5]}


def test_lines_of_json_hold_the_prompt_as_it_was_given():
    prompts = ["text", [1, 2], [{"role": "user", "content": "hi"}]]
    of = lambda index: Completion(
        prompt_index=index,
        sample_index=0,
        text="é",
        token_ids=[3],
        finish_reason="length",
        error=None,
        logprobs=None,
        seed=1,
        acceptance=AcceptanceCounts(),
        pieces=[],
        prompt_token_ids=[1],
    )
    lines = json_document.lines([of(0), of(1), of(2), of(0)], prompts).splitlines()
    read = list(map(json.loads, lines))
    assert [each.get("prompt") for each in read] == ["text", [1, 2], None, "text"]
    assert read[2]["messages"] == prompts[2]
    assert {(each["text"], each["finish_reason"]) for each in read} == {("é", "length")}
