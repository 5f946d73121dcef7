"""Which tests a run asks for, and how far it says it is."""

import re
import tomllib
import types
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from asked_for import ON_DEMAND, deselect, is_asked_for, quick, share_of
from progress import Progress


@pytest.mark.parametrize(
    ("markers", "asked", "not_asked"),
    [
        # What -m is given; a file that is named asks for its full tests too.
        ((), ["", "full or not full", "file"], []),
        (("full",), ["full", "full or not full", "file"], ["", "slow"]),
        (("slow",), ["slow", "slow or tunix"], ["", "full", "full or not full", "file"]),
        (("full", "slow"), ["slow"], ["", "full", "full or not full", "file"]),
        (("tunix",), ["tunix"], ["", "slow", "notebook", "file"]),
    ],
)
def test_what_is_asked_for(markers, asked, not_asked):
    def runs(how):
        return is_asked_for(set(markers), "" if how == "file" else how, how == "file")

    assert [how for how in (*asked, *not_asked) if runs(how)] == asked


class Config:
    """Of a run of pytest; it notes what is deselected."""

    args = ()

    def __init__(self, markexpr, share):
        self.option = types.SimpleNamespace(markexpr=markexpr, share=share)
        self.hook, self.dropped = self, []

    def pytest_deselected(self, items):
        self.dropped += items


class Item:
    def __init__(self, *markers):
        self.markers = [types.SimpleNamespace(name=name) for name in markers]

    def iter_markers(self):
        return self.markers


def test_shares_together_are_what_is_asked_for():
    whole = [Item("slow"), *(Item() for _ in range(9)), Item("full")]
    shares = []
    for k in range(4):
        items, config = list(whole), Config("", share_of(f"{k}/4"))
        deselect(config, items)
        assert {*items, *config.dropped} == {*whole}
        assert len(items) + len(config.dropped) == len(whole)
        shares.append(items)
    assert shares[1] == [whole[2], whole[6]]
    run = [item for share in shares for item in share]
    assert sorted(run, key=whole.index) == whole[1:-1]


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "1/", "a/b", "0/0"])
def test_a_share_is_named_as_one_of_several(text):
    with pytest.raises(ArgumentTypeError, match="expected K/N"):
        share_of(text)


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("marker", ON_DEMAND)
def test_a_job_runs_what_is_run_on_demand(marker):
    jobs = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"run: pytest -m {marker} -n 0\n" in jobs


def test_every_marker_marks_a_test():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    listed = {line.partition(":")[0] for line in options["markers"]}
    used = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        used |= set(re.findall(r"pytest\.mark\.(\w+)", path.read_text(encoding="utf-8")))
    assert listed <= used


def test_cases_of_a_test_are_quick_full_or_slow():
    def marks(case):
        return {mark.name for mark in getattr(case, "marks", ())}

    cases = quick(["a", "b", "c"], "a", slow=["c"])
    assert [marks(case) for case in cases] == [set(), {"full"}, {"slow"}]
    for unknown in ({"slow": ["d"]}, {}):
        with pytest.raises(ValueError, match="'d'"):
            quick(["a"], *(() if unknown else "d"), **unknown)


class Terminal:
    def __init__(self):
        self.lines = []

    def write_line(self, line, **markup):
        self.lines.append(line)


class Report:
    failed, nodeid, when = True, "b.py::test_2", "call"


def test_files_are_named_as_they_begin():
    terminal = Terminal()
    progress = Progress(terminal)
    for _ in range(2):  # once per process
        progress.pytest_xdist_node_collection_finished(
            None, ["a.py::test_1", "b.py::test_1", "b.py::test_2", "b.py::test_3"]
        )
    for nodeid in ("a.py::test_1", "b.py::test_1", "b.py::test_2"):
        progress.pytest_runtest_logstart(nodeid)
        progress.pytest_runtest_logfinish()
    progress.pytest_runtest_logreport(Report())
    assert terminal.lines == [
        "[  0%] a.py (1 test)",
        "[ 25%] b.py (3 tests)",
        "FAILED b.py::test_2 (call)",
    ]
