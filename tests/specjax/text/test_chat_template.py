"""Chat templates that would hang, take the memory or reach out: a clear error, soon.

What templates may do is in test_tokenization.py.
"""

import contextlib
import datetime
import resource
import time

import pytest

from specjax.text import chat_template

HELLO = [{"role": "user", "content": "hi"}]
TWICE = "{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"


def _start(value):
    return "{% set ns = namespace(x=" + value + ", y=" + value + ") %}"


def _render(source, messages=HELLO, **variables):
    return chat_template.render(source, messages, variables)


HOSTILE = {
    # loops and calls
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "deep loops": "{% for i in range(10) %}" * 15 + "{% endfor %}" * 15,
    "a macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "a block": "{% block a %}{{ self.a() }}{% endblock %}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "{% endcall %}" * 40,
    "generators": "{{ range(99999)" + " | select" * 40 + " | list | length }}" + "{{ range(99999) | sum }}" * 40,
    "comparisons": "{% set x = 'a' * 2000000 %}{% set y = 'a' * 1000000 ~ 'b' %}" + "{% if y in x %}{% endif %}" * 1500,
    # output
    "output": "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
    "output of one": "{{ 'a' * 2000000 }}",
    # operators
    "text": "{% set x = 'a' * 10**9 %}",
    "text from the left": "{% set x = 10**9 * 'a' %}",
    "a list": "{% set x = [1] * 10**9 %}",
    "a power": "{% set x = 10**(10**8) %}",
    "squares": _start("10") + TWICE.format("ns.x * ns.x"),
    "sums": _start("'abcdefgh'") + TWICE.format("ns.x + ns.x"),
    "tildes": _start("'abcdefgh'") + TWICE.format("ns.x ~ ns.x"),
    "shared lists": _start("[1]") + TWICE.format("[ns.x, ns.x]") + "{{ ns.x }}",
    "shared tuples": _start("(1,)") + TWICE.format("(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "shared objects": _start("{}") + TWICE.format("{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "shared by dict": _start("{}") + TWICE.format("dict(a=ns.x, b=ns.x)") + "{{ ns.x == ns.y }}",
    "shared by items": _start("(1,)") + TWICE.format("({ns.x: ns.x} | items | list)[0]"),
    # what has a width
    "center": "{{ 'a' | center(10**9) }}",
    "center()": "{{ 'a'.center(10**9) }}",
    "zfill()": "{{ '1'.zfill(10**9) }}",
    "expandtabs()": "{{ '\t'.expandtabs(10**9) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "format *": "{{ '%*d' | format(10**9, 1) }}",
    "%": "{{ '%.1000000000f' % 1.0 }}",
    "% of many": "{% set x = 'a' * 1000000 %}{{ ('%(a)s' * 99999) % {'a': x} }}",
    "format()": "{{ '{:>1000000000}'.format('a') }}",
    "format() of two": "{{ '{:>{w}}'.format('a', w=10**9) }}",
    "format() of many": "{% set x = 'a' * 1000000 %}{{ ('{0}' * 99999).format(x) }}",
    "format_map()": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "attr": "{{ ('{:>1000000000}' | attr('format'))('a') }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "indent by text": "{{ ('a\n' * 99999) | indent('b' * 9999) }}",
    "tojson": "{{ [[1]] | tojson(indent=10**9) }}",
    "tojson of many": _start("[1] * 1000") + "{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=16) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "to_bytes()": "{{ (1).to_bytes(10**9, 'big') }}",
    # what grows by its argument
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "join()": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "replace": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
    "replace()": "{% set x = 'a' * 99999 %}{{ x.replace('', x) }}",
    "translate()": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "sum": "{{ ([[1] * 4] * 9000) | sum(start=[]) | length }}",
    "strip()": "{% set x = 'a' * 2000000 %}{{ x.strip('b' * 1000000 ~ 'a') }}",
    "trim": "{% set x = 'a' * 2000000 %}{{ x | trim('b' * 1000000 ~ 'a') }}",
    "rfind()": "{% set x = 'a' * 2000000 %}{{ x.rfind('b' ~ 'a' * 1000000) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    # what is kept
    "variables": "".join(f"{{% set a{i} = 'a' * 3000000 %}}" for i in range(2900)),
    "a block that is kept": "{% set l = ['a' * 999999] %}{% set y %}{% for i in range(99999) %}{{ l }}{% endfor %}{% endset %}",
    "references that are kept": "{% set x = 'a' * 4000000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    # the source
    "parentheses": "{{ " + "(" * 50_000,
    "a long sum": "{{ " + "1+" * 60_000 + "1 }}",
    "a long source": "{{ a }}" * 10**6,
    "many branches": "{% if a %}" + "{% elif a %}" * 9000 + "{% endif %}",
    "a long number": "{{ " + "9" * 99_999 + " }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_ended(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)
    start = time.thread_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="the chat template") as caught:
        _render(HOSTILE[name])
    assert len(str(caught.value)) < 1000
    assert time.thread_time() - start < 4
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 10**6  # kB


def test_small_values_count_together(monkeypatch):
    """Each is far below the limit of one value, and none is kept."""
    source = "{% for i in range(TIMES) %}{% set x = 'a' * 1000 %}{% endfor %}"
    monkeypatch.setattr(chat_template, "MAX_TOTAL_BYTES", 100_000)
    assert _render(source.replace("TIMES", "60")) == ""
    with pytest.raises(ValueError, match="makes values of more than 100000 bytes together"):
        _render(source.replace("TIMES", "120"))


@pytest.mark.parametrize(
    "source",
    [
        # jinja2 3.1.5 and before: the environment of the process.
        "{{ ('{0.__globals__[os]}' | attr('format'))(strftime_now) }}",
        "{{ ('{0.__class__.x}' | attr('format'))(messages) }}",
        "{{ '{0.__class__.x}'.format(messages) }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}{{ messages.__class__.__base__ }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__globals__.a }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ namespace.__init__.__globals__ }}{{ namespace.__init__.__globals__.a }}",
        "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.a }}",
        "{{ dict.fromkeys(range(9)) }}",
        "{{ dict.mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ 'a'.encode().decode() }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_a_template_reaches_nothing_outside(source):
    with pytest.raises(ValueError, match="the chat template"):
        _render(source)


def test_what_is_read_from_outside_stays_outside(monkeypatch):
    monkeypatch.setenv("SPECJAX_SECRET", "xyzzy")
    for path in ("__globals__[os].environ", "__globals__", "__code__", "__self__"):
        for function in ("strftime_now", "raise_exception", "range", "namespace"):
            for source in (
                f"{{{{ {function}.{path.replace('[os]', '.os')} }}}}",
                f"{{{{ ('{{0.{path}}}' | attr('format'))({function}) }}}}",
                f"{{{{ '{{0.{path}}}'.format({function}) }}}}",
            ):
                with contextlib.suppress(ValueError):
                    assert "xyzzy" not in _render(source)


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
