"""Limits of chat templates, and what they may do.

What templates may do is in test_tokenization.py.
"""

import datetime

import pytest

from specjax.text import chat_template

HELLO = [{"role": "user", "content": "hi"}]


def _render(source, messages=HELLO, **variables):
    return chat_template.render(source, messages, variables)


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("MAX_SOURCE_CHARS", 20, "at most 20 are compiled"),
        ("MAX_OUTPUT_CHARS", 20, "writes more than 20 characters"),
        ("MAX_CPU_S", -1, "computes for more than -1 s"),
        ("MAX_TOTAL_BYTES", 2000, "values of more than 2000 bytes together"),
        ("MAX_VALUE_BYTES", -30_000, "makes a value of"),
        ("_MAX_CALL_DEPTH", 0, "nested 0 deep"),
    ],
)
def test_a_template_that_takes_more_than_a_limit_is_stopped(limit, most, message, monkeypatch):
    source = "{% macro m(x) %}{{ x * 500 }}{% endmacro %}{% for i in range(9) %}{{ m('abcdefghij') }}{% endfor %}"
    assert _render(source) == "abcdefghij" * 4500
    monkeypatch.setattr(chat_template, limit, most)
    with pytest.raises(ValueError, match=f"the chat template .*{message}"):
        _render(source)


def test_small_values_count_together(monkeypatch):
    """Each is far below the limit of one value, and none is kept."""
    source = "{% for i in range(TIMES) %}{% set x = 'a' * 1000 %}{% endfor %}"
    monkeypatch.setattr(chat_template, "MAX_TOTAL_BYTES", 100_000)
    assert _render(source.replace("TIMES", "60")) == ""
    with pytest.raises(ValueError, match="makes values of more than 100000 bytes together"):
        _render(source.replace("TIMES", "120"))


class Marked:
    """An object with an attribute that is nobody else's."""

    def __init__(self):
        self.open, self._kept = "open", "kept"


@pytest.mark.parametrize(
    "source",
    [
        "{{ marked._kept + 'a' }}",
        "{{ marked['_kept'] + 'a' }}",
        "{{ (marked | attr('_kept')) + 'a' }}",
        "{% include 'a file' %}",
        "{% import 'a file' as a %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reads_no_private_attribute_and_no_file(source):
    assert _render("{{ marked.open }}", marked=Marked()) == "open"
    with pytest.raises(ValueError, match="the chat template"):
        _render(source, marked=Marked())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% endfor %}", "1/1"),
        ("{% for m in messages if m.role == 'x' %}a{% else %}b{% endfor %}", "b"),
        ("{% for i in range(3) %}{{ loop.previtem }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}", "aba"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for i in [1, [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "12"),
        ("{{ messages[::-1][0].content[1:] ~ 1 ~ none }}", "i1None"),
        ("{{ 'a,b'.split(',') | map('upper') | join('-') }}", "A-B"),
        ("{{ '{:>3}{}'.format(1, 'x') }}{{ '%02d' % 3 }}{{ '%s' | format('y') }}", "  1x03y"),
        ("{{ 'abab'.replace('ab', 'c', 1) }}{{ 'ab' | replace('a', 'x') }}", "cabxb"),
        ("{{ '-' * 3 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}", "---[1, 2]102433"),
        ("{{ [3, 1] | sort | sum }}{{ [[1], [2]] | sum(start=[]) }}", "4[1, 2]"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) ~ m(2) }}", "<1><2>"),
        ("{% set x %}a{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "aB"),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "<namespace>"),
        ("{{ own(2) }}{{ when.isoformat() }}", "32026-01-02"),
    ],
)  # fmt: skip
def test_what_templates_do_is_left_to_them(source, text):
    own = lambda number: number + 1
    assert _render(source, own=own, when=datetime.date(2026, 1, 2)) == text


def test_a_long_conversation_fits():
    """What the caller passes is not held against the template."""
    messages = [{"role": "user", "content": "some words " * 60} for _ in range(1000)]
    messages[0]["image"] = "a" * 20_000_000
    source = (
        "{% set ns = namespace(text='', all=[]) %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content %}{% endfor %}"
        "{% set copied = messages + [] %}{{ copied | length }}{{ ns.text }}"
    )
    assert len(_render(source, messages)) == 4 + 1000 * 660


def test_a_template_is_compiled_once(monkeypatch):
    source = "{{ messages[0].content }} once"
    assert _render(source) == "hi once"
    monkeypatch.setattr(chat_template, "_environment", None)
    assert _render(source) == "hi once"


def test_the_error_of_a_template_is_that_of_its_messages():
    with pytest.raises(ValueError, match=r"failed to compile: .*No filter named 'x'"):
        _render("{{ 1 | x }}")
    with pytest.raises(ValueError, match=r"failed on 1 messages: .*UndefinedError"):
        _render("{{ messages[0].a.b }}")
    with pytest.raises(ValueError, match=r"roles must alternate\. Change the messages"):
        _render("{{ raise_exception('roles must alternate.') }}")
