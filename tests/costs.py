"""What tests cost: CPU seconds and programs compiled. With --bounds, what costs too much fails.

A test's cost is that of its own call. What a fixture sets up is shown with the file: it belongs
to whichever test needs it first. Seconds are of CPU, so that a busy machine fails no run; they
count all threads, and children that were waited for.
"""

import collections
import os
import time

import jax
import jax.numpy as jnp
import pytest

MAX_TEST_CPU_S = 3.0
MAX_RUN_CPU_S = 12 * 60.0
# CPU seconds of `yardstick` on the two x86-64 cores that the limits are for, where the quick set of
# commit 1de12e7 took 22 CPU minutes: by its ratio to that set, jax 0.10.2. On a processor that is
# slower, or shared with others, limits are as many times higher as it takes longer: of a test that
# took long also as many as it takes right behind that test, as neighbours come and go.
YARDSTICK_S = 0.22
MISS = "/jax/compilation_cache/cache_misses"

# Tests of the quick set that may cost more, by file. Those of STEPS compile, as the first of
# their file, what the tests behind them share; the others are whole runs of their kind.
STEPS = {
    "end_to_end/test_engine.py": (
        "test_chunks_of_a_stream",
        "test_streams_of_asyncio",
        "test_whoever_reads_token_by_token_gets_two_at_a_time",
    ),
    "end_to_end/test_generation.py": (
        "test_more_prompts_than_rows_are_queued",
        "test_stream_yields_everything_once",
    ),
    "end_to_end/test_update_params.py": (
        "test_a_burst_in_flight_ends_under_the_weights_it_was_sent_with",
    ),
    "specjax/cli/test_generate_command.py": ("test_colors_on_request", "test_json_document"),
    "specjax/decode/test_burst.py": ("test_when_a_burst_ends",),
    "specjax/heads/test_head_goldens.py": ("test_drafts_are_those_of_the_golden_file",),
    "specjax/heads/test_dflash.py": ("test_what_it_says_is_what_its_equations_say",),
    "specjax/drafters/test_draws.py": ("test_what_is_drawn_is_verified_exactly",),
    "specjax/rl/test_dialogues.py": ("test_tokens_are_those_of_the_whole_text_fed_anew",),
    "specjax/rl/test_given_trees.py": ("test_the_copy_goes_with_the_trainers_arrays",),
    "specjax/rl/test_rollout.py": (
        "test_drafts_change_nothing",
        "test_neither_metrics_nor_the_seed_compile_a_loss_anew",
    ),
    "specjax/rl/test_policy.py": ("test_what_it_refuses",),
    "specjax/rl/test_rollout_stream.py": ("test_the_samples_are_those_of_one_rollout",),
    "specjax/sampling/test_sampling.py": ("test_logprobs",),
    "specjax/sampling/test_vocabulary.py": (
        "test_logprobs_of_slices",
        "test_processed_logits_and_choices_are_equal_to_the_bit",
    ),
}
WHOLE_RUNS = {
    "docs/test_code_blocks.py": ("test_python_blocks_run",),
    "end_to_end/test_generation.py": ("test_scripted_drafts_change_nothing",),
    "end_to_end/test_trees.py": ("test_several_ngram_matches_make_a_tree",),
    "pallas_kernels/test_mosaic_tpu.py": ("test_attention_is_that_of_the_reference",),
    "specjax/heads/test_eagle.py": ("test_tokens_are_those_of_plain_decoding",),
    "specjax/engine/test_pages.py": ("test_random_scripts",),
    "specjax/training/test_trainer.py": ("test_it_learns_text_that_the_target_repeats",),
}
MAY_COST_MORE = {
    f"tests/{file}::{test}"
    for listed in (STEPS, WHOLE_RUNS)
    for file, tests in listed.items()
    for test in tests
}


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
        self.slowness: list[float] = []  # of each process that ran tests, at its begin and end
        self.tests: list[tuple[float, str]] = []  # seconds of the call, name
        self.slowness_behind: dict[str, float] = {}  # of the processor, right behind the test
        self.files: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
        self.too_dear: list[str] = []
        self.limits = ""
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_) -> None:
        self.num_misses += event == MISS

    def pytest_collection_finish(self):
        self._compare()

    def _compare(self) -> None:
        if self.config.option.bounds:
            self.slowness.append(yardstick() / YARDSTICK_S)

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
        slowness = 1.0
        if self.config.option.bounds and phase == "call" and cost[0] > MAX_TEST_CPU_S:
            slowness = yardstick() / YARDSTICK_S
        item.user_properties.append((f"cost of {phase}", (*cost, slowness)))

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
            self.slowness_behind[report.nodeid] = cost[2]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        output = getattr(node, "workeroutput", {})
        self.workers_cpu_s += output.get("cpu_s", 0.0)
        self.slowness += output.get("slowness", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self._compare()
        if hasattr(self.config, "workeroutput"):  # of a worker, which reports to the controller
            self.config.workeroutput |= {"cpu_s": cpu_s(), "slowness": self.slowness}
            return
        if not self.config.option.bounds:
            return
        factor = max(1.0, sum(self.slowness) / len(self.slowness))
        most_run = factor * MAX_RUN_CPU_S
        most_test = {
            name: max(factor, behind) * MAX_TEST_CPU_S
            for name, behind in self.slowness_behind.items()
        }
        self.limits = (
            f"this processor is taken to be {factor:.2f} times slower than limits are meant for"
        )
        self.too_dear = [
            f"{name} took {seconds:.1f} CPU seconds of {most_test[name]:.1f}: share what it "
            "compiles (tests/helpers.py), mark it full, or say in tests/costs.py why it may"
            for seconds, name in self.tests
            if seconds > most_test[name] and name.partition("[")[0] not in MAY_COST_MORE
        ]
        if self.run_cpu_s > most_run:
            self.too_dear.append(f"the run took {self.run_cpu_s:.0f} CPU seconds of {most_run:.0f}")
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
        say(f"{self.run_cpu_s / 60:.1f} CPU minutes in all; {self.limits}")
        for line in self.too_dear:
            say(line, red=True)


def yardstick() -> float:
    """Returns the CPU seconds of compiling a program of some size, each time another."""
    first = time.time_ns() % 10**6  # a constant that no cache has seen

    def work(x):
        for n in range(60):
            x = jnp.sort(jnp.tanh(x @ x) + (first + n), axis=0)
        return x

    begin = cpu_s()
    jax.jit(work).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
    return cpu_s() - begin


def cpu_s() -> float:
    """Returns the CPU seconds of this process, its threads, and children that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
