"""Chat templates: what they may do, where they are rendered, and what ends them."""

import concurrent.futures
import dataclasses
import datetime
import os
import pathlib
import signal
import subprocess
import sys
import threading
import types

import jinja2.sandbox
import numpy as np
import pytest

from specjax.text import chat_template, template_process, template_worker
from specjax.text.template_process import _Worker

HELLO = [{"role": "user", "content": "hi"}]


def _render(source, messages=HELLO, **variables):
    return chat_template.render(source, messages, variables)


def test_what_templates_do_is_left_to_them():
    written = {
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% endfor %}": "1/1",
        "{% for m in messages if m.role == 'x' %}a{% else %}b{% endfor %}": "b",
        "{% for i in range(3) %}{{ loop.previtem }}{% endfor %}": "01",
        "{% for i in range(9) %}{% if i %}{% break %}{% endif %}.{% endfor %}": ".",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}": "a1",
        "{% for i in [1, [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}": "12",
        "{{ messages[::-1][0].content[1:] ~ 1 ~ none }}": "i1None",
        "{{ 'a,b'.split(',') | map('upper') | join('-') }}": "A-B",
        "{{ '{:>3}{}'.format(1, 'x') }}{{ '%02d' % 3 }}{{ '%s' | format('y') }}": "  1x03y",
        "{{ '-' * 3 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 // 2 }}": "---[1, 2]10243",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) ~ m(2) }}": "<1><2>",
        "{% set x %}a{% endset %}{{ x }}{% filter upper %}b{% endfilter %}": "aB",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.b = 3 %}{{ ns.a + ns.self + ns.b }}": "6",
        "{{ dict(a=1) }}{{ dict.fromkeys('a', 1) }}": "{'a': 1}{'a': 1}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!": "hi!",
        "{{ {'b': '<&\u4f60>', 'a': 1} | tojson }}": '{"b": "<&\u4f60>", "a": 1}',
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}": '{"a": 2, "b": 1}',
        "{{ {'a': [1]} | tojson(indent=2) }}": '{\n  "a": [\n    1\n  ]\n}',
        "{{ [1, 2] | tojson(separators=(',', ':'), ensure_ascii=true) }}": "[1,2]",
        "  {% if true %}\nyes\n  {% endif %}\nno\n": "yes\nno",
        "{{ 'a\\nb' | wordwrap }}{{ [1, 2] | pprint }}": "a\nb[1, 2]",
        "{{ '\ud800' }}": "\ud800",
    }
    found = {source: _render(source) for source in written}
    assert found == written


def test_every_filter_runs_where_no_file_can_be_opened():
    values = ("'a <b>c</b> &amp; d'", "[1, 2]", "{'a': 1}")
    given = ("", "(1)", "('a')", "('a', 'b')")
    failures, ran = [], set()
    for name in jinja2.sandbox.ImmutableSandboxedEnvironment().filters:
        for value in values:
            for arguments in given:
                source = f"{{{{ {value} | {name}{arguments} }}}}"
                try:
                    _render(source)
                    ran.add(name)
                except ValueError as error:
                    if any(kind in str(error) for kind in ("OSError", "ImportError", "NotFound")):
                        failures.append((source, str(error)))
    assert not failures
    assert {"striptags", "urlize", "pprint", "wordwrap", "tojson", "random"} <= ran
    assert _render(r"{{ '\N{BULLET}' }}") == "\u2022"


def test_an_error_of_the_system_is_told_without_its_path():
    for error in (FileNotFoundError(2, "No such file", "/a/b"), OSError(24, "Too many", "/a/b")):
        told = template_worker._failure("render", error).decode()
        assert error.strerror in told
        assert "/a/b" not in told


def test_the_date_is_that_of_the_program():
    before = datetime.datetime.now()
    said = _render("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert before.strftime("%Y-%m-%d %H:%M") <= said <= f"{datetime.datetime.now():%Y-%m-%d %H:%M}"


class Text(str):
    """A text with an attribute of its own."""

    kept = "kept"


@dataclasses.dataclass
class Point:
    x: int


def test_a_template_sees_plain_values():
    given = {
        "text": Text("a"),
        "count": np.int64(3),
        "flag": np.bool_(False),
        "share": np.float32(0.5),
        "point": Point(x=1),
        "pair": (1, 2),
        "keys": {1: 2},
        "array": np.zeros(2),
        "call": print,
    }
    source = "{{ text }}{{ text.kept }} " + " ".join(f"{{{{ {key} }}}}" for key in [*given][1:])
    expected = "a 3 False 0.5 {'x': 1} (1, 2) {1: 2} <ndarray> <builtin_function_or_method>"
    assert _render(source, **given) == expected
    assert _render(Text("{{ messages[0].content }}")) == "hi"


def _nested(levels, inside=()):
    for _ in range(levels):
        inside = [inside]
    return inside


def test_what_is_nested_too_deep_is_refused():
    most = chat_template.MAX_DEPTH
    endless = {"role": "user"}
    endless["content"] = endless
    deep = _nested(5_000)
    assert _render("{{ a | length }}", a=_nested(most - 1)) == "1"
    for messages, arguments in (
        ([{"role": "user", "content": _nested(most + 1)}], {}),
        ([{"role": "user", "content": deep}], {}),
        ([endless], {}),
        (HELLO, {"a": _nested(most + 1)}),
        (HELLO, {"a": {"b": (deep,)}}),
    ):
        with pytest.raises(ValueError, match="nested too deep; at most 100 lists"):
            _render("{{ a }}", messages, **arguments)
    for name in ("tools", "documents"):
        with pytest.raises(ValueError, match="nested too deep"):
            chat_template.render(f"{{{{ {name} }}}}", HELLO, {}, **{name: [{"a": deep}]})
    with pytest.raises(ValueError, match="tools holds "):
        chat_template.render("{{ tools }}", HELLO, {}, tools=[deep])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages.append(1) }}", "is unsafe and was stopped: SecurityError: .*append"),
        ("{{ messages[0].update({}) }}", "is unsafe and was stopped"),
        ("{{ namespace(_a=1) }}", "is unsafe and was stopped: .* cannot hold '_a'"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "is unsafe and was stopped"),
        ("{% include 'a file' %}", "failed on 1 messages: TypeError: no loader"),
        ("{% import 'a file' as a %}", "failed on 1 messages: TypeError: no loader"),
        ("{{ 1 | x }}", "failed to compile: .*No filter named 'x'"),
        ("{% if %}", "failed to compile: TemplateSyntaxError"),
        ("{{ messages[0].a.b }}", "failed on 1 messages: UndefinedError"),
        (
            "{{ raise_exception('roles must alternate.') }}",
            r"failed on 1 messages: TemplateError: roles must alternate\. Change",
        ),
        (
            "{{ raise_exception('a' * 9999) }}",
            r"failed on 1 messages: TemplateError: a{500}\.\.\.",
        ),
    ],
)
def test_a_template_that_fails_says_why(source, message):
    with pytest.raises(ValueError, match=f"the chat template {message}"):
        _render(source)
    assert _render("{{ messages[0].content }}") == "hi"


class _AtOnce(threading.Timer):
    """A timer without time: it has run out when it starts."""

    def start(self):
        self.function()


@pytest.mark.parametrize(
    ("module", "limit", "most", "message"),
    [
        (chat_template, "MAX_SOURCE_CHARS", 20, "has 43 characters, and at most 20 are compiled"),
        (template_process, "MAX_OUTPUT_CHARS", 20, "stopped: it writes more than 20 characters"),
        (template_process.threading, "Timer", _AtOnce, "stopped: it does not end within 60 s"),
        pytest.param(
            template_process,
            "MAX_MEMORY_BYTES",
            2**20,
            "stopped: it takes more than 1048576 bytes of memory",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="limited on Linux"),
        ),
    ],
)
def test_a_template_that_takes_more_than_a_limit_is_stopped(
    module, limit, most, message, monkeypatch
):
    source = "{{ (messages[0].content * 20000000)[:99] }}"
    assert len(_render(source)) == 99
    with monkeypatch.context() as lowered:
        lowered.setattr(module, limit, most)
        with pytest.raises(ValueError, match=f"the chat template .*{message}"):
            _render(source)
    assert len(_render(source)) == 99


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no prlimit")
def test_the_process_has_limits(monkeypatch):
    import resource

    monkeypatch.setattr(template_process._pool, "_idle", [])
    _render("")
    (worker,) = template_process._pool._idle
    limits = {
        name: resource.prlimit(worker._process.pid, getattr(resource, f"RLIMIT_{name}"))
        for name in ("AS", "CPU", "CORE", "FSIZE", "NOFILE", "NPROC")
    }
    worker.end()
    assert limits["AS"][0] == template_process.MAX_MEMORY_BYTES
    assert template_process.MAX_CPU_S < limits["CPU"][0] <= template_process.MAX_CPU_S + 3
    assert [limits[name] for name in ("CORE", "FSIZE", "NOFILE", "NPROC")] == [
        (0, 0), (0, 0), (3, 3), (0, 0),
    ]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (getattr(signal, "SIGXCPU", 0), "it computes for more than 5 s"),
        (getattr(signal, "SIGKILL", 0), "it ends the process that renders it .exit code -9"),
    ],
)
def test_a_process_that_ends_is_an_error_of_its_template(number, message):
    worker = _Worker()
    os.kill(worker._process.pid, number)
    worker._process.wait()
    with pytest.raises(template_process.Stopped, match=message):
        worker.ask(b"a request")


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
def test_an_interrupt_from_the_keyboard_is_not_for_the_process(monkeypatch):
    monkeypatch.setattr(template_process._pool, "_idle", [_Worker()])
    (worker,) = template_process._pool._idle
    os.kill(worker._process.pid, signal.SIGINT)
    assert _render("{{ messages[0].content }}") == "hi"
    assert template_process._pool._idle == [worker]
    worker.end()


def test_a_process_that_has_ended_is_replaced():
    _render("")
    for worker in template_process._pool._idle:
        worker._process.kill()
        worker._process.wait()
    assert _render("{{ messages[0].content }}") == "hi"


def test_threads_share_a_few_processes():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: _render("{{ i }}", i=i), range(64)))
    assert texts == list(map(str, range(64)))
    assert 1 <= len(template_process._pool._idle) <= template_process.MAX_PROCESSES


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_no_variables_of_the_program(monkeypatch):
    monkeypatch.setenv("SPECJAX_SECRET", "xyzzy")
    worker = _Worker()
    environment = pathlib.Path(f"/proc/{worker._process.pid}/environ").read_text()
    worker.end()
    assert "xyzzy" not in environment


def test_a_package_that_the_process_needs_and_is_not_there_is_named(monkeypatch):
    assert pathlib.Path(template_process._folder_of("jinja2"), "jinja2").is_dir()
    # None, and what is found where only a folder of that name lies.
    for found in (None, types.SimpleNamespace(origin=None)):
        monkeypatch.setattr("importlib.util.find_spec", lambda module, found=found: found)
        with pytest.raises(OSError, match=r"^jinja2 is not installed, which renders"):
            template_process._folder_of("jinja2")


def test_a_python_that_cannot_be_started_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(OSError, match="a process of '/no/python', which renders chat templ"):
        _Worker()
    monkeypatch.undo()
    monkeypatch.setattr(template_process, "_START", "raise SystemExit(3)")
    with pytest.raises(OSError, match=r"did not start \(exit code 3\)"):
        _Worker()


PROGRAM = """
import os
from specjax.text import chat_template, template_process
render = lambda: chat_template.render("{{ messages[0].content }}", [{"content": "hi"}], {})
assert render() == "hi"
child = os.fork()
assert len(template_process._pool._idle) == bool(child)
assert render() == "hi"
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_program_that_forks_and_ends_leaves_nothing_behind():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_long_conversation_fits():
    messages = [{"role": "user", "content": "some words " * 60} for _ in range(1000)]
    messages[0]["attached"] = "a" * 20_000_000
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content %}{% endfor %}{{ ns.text }}"
    )
    assert len(_render(source, messages)) == 1000 * 660
