"""What reports progress is never why work stops."""

import io
import logging
import threading
import types

import pytest

from specjax.runtime import progress
from specjax.runtime import seconds as seconds_module
from specjax.runtime.progress import Progress


def test_a_function_that_raises_is_dropped_with_one_warning():
    told = []

    def report(*what):
        told.append(what)
        if len(told) == 2:
            raise OSError("disk full")

    shown = Progress(report)
    shown.report("one", 1, 2)
    with pytest.warns(UserWarning, match=r"progress function raised OSError.'disk"):
        shown.report("two", 2, 2)
    shown.report("three", 3, 3)
    shown.close()
    assert [what for what, _, _ in told] == ["one", "two"]


def test_an_interrupt_is_passed_on():
    def report(*what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Progress(report).report("one", 1, 2)


class Bar:
    """A bar on a stream that nobody reads."""

    n = 0
    fails_in = ""

    def __init__(self, **arguments):
        self.drawn = []

    def set_description_str(self, text):
        self.drawn.append(text)

    def update(self, count):
        if self.fails_in == "update":
            raise BrokenPipeError("nobody reads")

    def close(self):
        if self.fails_in == "close":
            raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("where", ["update", "close"])
def test_a_bar_that_cannot_be_drawn_is_dropped(monkeypatch, where):
    monkeypatch.setattr(progress, "tqdm", Bar)
    shown = Progress(True)
    shown.report("one", 0, 2)
    monkeypatch.setattr(Bar, "fails_in", where)
    with pytest.warns(UserWarning, match="progress bars raised BrokenPipe"):
        shown.report("two", 1, 2)
    shown.report("three", 2, 2)
    shown.close()


def test_a_bar_that_cannot_be_removed_at_the_end_says_so(monkeypatch):
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(Bar, "fails_in", "close")
    shown = Progress(True)
    shown.report("one", 0, 2)
    with pytest.warns(UserWarning, match="progress bars raised BrokenPipe"):
        shown.close()
    shown.close()


@pytest.mark.parametrize("ended_by", ["another", "close", "failure"])
def test_what_is_not_counted_shows_its_seconds_until_it_ends(monkeypatch, ended_by):
    seconds, ended, bar = [], [], Bar()

    def every_second(show):
        seconds.append(show)
        return lambda: ended.append(show)

    monkeypatch.setattr(progress, "every_second", every_second)
    monkeypatch.setattr(progress, "tqdm", lambda **_: bar)
    shown = Progress(True)
    shown.report("compiling the burst", 0, 0)
    shown.report("compiling the burst", 0, 0)
    seconds[0](1.0)
    seconds[0](12.3)
    assert bar.drawn == ["compiling the burst ... 1 s", "compiling the burst ... 12 s"]
    assert not ended
    if ended_by == "another":
        shown.report("tokens", 1, 9)
    elif ended_by == "close":
        shown.close()
    else:
        monkeypatch.setattr(Bar, "fails_in", "update")
        with pytest.warns(UserWarning, match="progress bars raised"):
            shown.report("compiling the burst", 0, 0)
    assert ended == seconds
    assert len(seconds) == 1


class Clock:
    """An event that is waited for in vain so many times, and the time that passed."""

    def __init__(self, waits):
        self.now, self._waits, self._over = 5.0, waits, threading.Event()

    def wait(self, timeout):
        if self._waits == 0:
            self._over.wait()  # for `set`, as by the end of the work
            return True
        self._waits -= 1
        self.now += timeout
        return False

    def set(self):
        self._over.set()


@pytest.mark.parametrize("fails", [False, True])
def test_seconds_are_told_until_the_end_or_a_failure(monkeypatch, fails):
    clock, told, enough = Clock(3), [], threading.Event()

    def show(passed):
        told.append(passed)
        if fails or len(told) == 3:
            enough.set()
        if fails:
            raise BrokenPipeError("nobody reads")

    now = types.SimpleNamespace(perf_counter=lambda: clock.now)
    new = types.SimpleNamespace(
        Event=lambda: clock, Thread=threading.Thread, main_thread=threading.main_thread
    )
    monkeypatch.setattr(seconds_module, "time", now)
    monkeypatch.setattr(seconds_module, "threading", new)
    end = seconds_module.every_second(show)
    assert enough.wait(60)
    end()
    end()
    assert told == ([1.0] if fails else [1.0, 2.0, 3.0])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _notebook(name):
    return types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(config={name: {}}))


def test_bars_are_shown_by_default_where_a_person_sees_them(monkeypatch):
    cases = [
        (None, io.StringIO(), None, False),
        (None, Terminal(), None, True),
        (None, None, None, False),  # a closed stderr
        (None, io.StringIO(), _notebook("IPKernelApp"), True),
        (None, io.StringIO(), _notebook("TerminalIPythonApp"), False),
        (False, Terminal(), _notebook("IPKernelApp"), False),
        (True, io.StringIO(), None, True),
    ]
    monkeypatch.setattr(progress, "every_second", lambda show: show(1.0))
    for show, stderr, ipython, has_bars in cases:
        made = []
        monkeypatch.setattr(
            progress, "tqdm", lambda *, made=made, **_: made.append(Bar()) or made[-1]
        )
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setitem(progress.sys.modules, "IPython", ipython)
        Progress(show).report("loading", 0, 0)
        drawn = [bar.drawn for bar in made]
        assert drawn == [["loading ... 1 s"]] * has_bars, (show, stderr, ipython)


def test_what_is_not_counted_is_logged_with_its_seconds(caplog):
    caplog.set_level(logging.DEBUG, logger="specjax")
    shown = Progress(False)
    shown.report("compiling a burst", 0, 0)
    shown.report("compiling a burst", 0, 0)
    shown.report("tokens", 1, 9)
    shown.report("tokens", 2, 9)
    shown.report("reading", 0, 0)
    shown.close()
    shown.close()
    told = [(record.levelname, record.message.split(":")[0]) for record in caplog.records]
    assert told == [
        ("DEBUG", "compiling a burst ..."),
        ("INFO", "compiling a burst"),
        ("DEBUG", "reading ..."),
        ("INFO", "reading"),
    ]
    assert caplog.records[1].message.endswith(" s")


@pytest.mark.parametrize(("columns", "expected"), [(0, 80), (120, None)])
def test_a_terminal_without_columns_shows_bars(monkeypatch, columns, expected):
    monkeypatch.setattr(progress.sys, "stderr", types.SimpleNamespace(fileno=lambda: 2))
    size = types.SimpleNamespace(columns=columns)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda number: size)
    assert progress._width() == expected
    monkeypatch.setattr(progress.sys, "stderr", None)
    assert progress._width() is None
