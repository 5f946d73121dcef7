"""Names the files that run, and how far the run is, where several processes run tests."""

from __future__ import annotations

import pytest


class Progress:
    """One line when a file begins and one when a test fails, in place of a dot per test."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal
        self.sizes: dict[str, int] = {}  # file -> its tests, in the order of the run
        self.begun: set[str] = set()
        self.num_finished = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids: list[str]) -> None:
        """Counts the tests of each file; every process collects the same ones."""
        self.sizes = {}
        for nodeid in ids:
            file = nodeid.split("::")[0]
            self.sizes[file] = self.sizes.get(file, 0) + 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.split("::")[0]
        if file in self.begun:
            return
        self.begun.add(file)
        percent = 100 * self.num_finished // max(1, sum(self.sizes.values()))
        size = self.sizes.get(file, 0)
        self.terminal.write_line(f"[{percent:3d}%] {file} ({size} test{'s' * (size != 1)})")

    def pytest_runtest_logfinish(self) -> None:
        self.num_finished += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport):
        """Counts outcomes without a letter; the summary at the end has the words of failures."""
        category, _, word = yield
        return category, "", word if report.failed else ""


def register(config: pytest.Config) -> None:
    """Shows files in place of dots, where other processes run the tests and nobody said -v or -q.

    In one process pytest names each file itself.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    has_processes = bool(config.getoption("numprocesses", 0))
    if terminal is not None and has_processes and terminal.verbosity == 0:
        config.pluginmanager.register(Progress(terminal), "specjax-progress")
