"""What tests cost: CPU seconds and programs compiled. With --bounds, what costs too much fails.

A test's cost is that of its own call. What a fixture sets up is shown with the file: it belongs
to whichever test needs it first. Seconds are of CPU, so that a busy machine fails no run; they
count all threads, and children that were waited for.
"""

import collections
import os

import jax
import pytest

MAX_TEST_CPU_S = 3.0
MAX_RUN_CPU_S = 12 * 60.0
MISS = "/jax/compilation_cache/cache_misses"

# Tests of the quick set that may cost more, each with its reason.
DEAR: dict[str, str] = {}


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bounds",
        action="store_true",
        help=f"fail if a test takes over {MAX_TEST_CPU_S:g} CPU s, or all over {MAX_RUN_CPU_S:g}",
    )


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "costs")


class Costs:
    """Measures each test where it runs, and adds up where the run is reported."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.num_misses = 0
        self.workers_cpu_s = 0.0
        self.tests: list[tuple[float, str]] = []  # seconds of the call, name
        self.files: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
        self.too_dear: list[str] = []
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_) -> None:
        self.num_misses += event == MISS

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item):
        yield from self._measured(item, "setup")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        yield from self._measured(item, "call")

    def _measured(self, item, phase: str):
        seconds, misses = cpu_s(), self.num_misses
        yield
        cost = cpu_s() - seconds, self.num_misses - misses
        item.user_properties.append((f"cost of {phase}", cost))

    def pytest_runtest_logreport(self, report):
        """Takes a report; on the controller, those of all workers."""
        cost = dict(report.user_properties).get(f"cost of {report.when}")
        if cost is None:
            return
        of_file = self.files[report.nodeid.partition("::")[0]]
        of_file[0] += cost[0]
        of_file[1] += cost[1]
        if report.when == "call":
            self.tests.append((cost[0], report.nodeid))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.workers_cpu_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workeroutput"):  # of a worker, which reports to the controller
            self.config.workeroutput["cpu_s"] = cpu_s()
            return
        if not self.config.option.bounds:
            return
        self.too_dear = [
            f"{name} took {seconds:.1f} CPU seconds of {MAX_TEST_CPU_S:g}: share what it compiles "
            "(tests/helpers.py), mark it full, or say in tests/costs.py why it may"
            for seconds, name in self.tests
            if seconds > MAX_TEST_CPU_S and name.partition("[")[0] not in DEAR
        ]
        if self.run_cpu_s > MAX_RUN_CPU_S:
            self.too_dear.append(
                f"the run took {self.run_cpu_s:.0f} CPU seconds of {MAX_RUN_CPU_S:g}"
            )
        if self.too_dear and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def run_cpu_s(self) -> float:
        own = os.times()
        return self.workers_cpu_s + own.user + own.system

    def pytest_terminal_summary(self, terminalreporter):
        if not self.config.option.bounds:
            return
        say = terminalreporter.write_line
        terminalreporter.section("what the tests cost")
        by_misses = sorted(self.files.items(), key=lambda entry: -entry[1][1])
        for file, (seconds, misses) in by_misses:
            if misses:
                say(f"{misses:5d} compile misses, {seconds:6.1f} CPU s: {file}")
        for seconds, name in sorted(self.tests, reverse=True)[:25]:
            say(f"{seconds:6.1f} CPU s: {name}")
        say(f"{self.run_cpu_s / 60:.1f} CPU minutes in all")
        for line in self.too_dear:
            say(line, red=True)


def cpu_s() -> float:
    """Returns the CPU seconds of this process, its threads, and children that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
