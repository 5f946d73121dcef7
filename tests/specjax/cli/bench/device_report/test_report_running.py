"""Cases run once, are kept one by one, and what one raises stops no other."""

import json
import os
import subprocess
import sys

import jax
import pytest

from specjax.cli.bench.device_report import document as documents
from specjax.cli.bench.device_report import lock, report
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Stage
from specjax.cli.bench.device_report.random_models import RandomModels
from specjax.cli.bench.device_report.running import Run
from specjax.cli.bench.device_report.sizes import TINY

SPEED = {
    "copy_bytes_per_s": 4e9,
    "read_bytes_per_s": None,
    "flops_per_s": 1e12,
    "product_dtype": "float32",
    "published": None,
}


@pytest.fixture(autouse=True)
def tidied(monkeypatch):
    """Counts what would free memory. It looks through all objects, and these cases leave none."""
    calls = []
    monkeypatch.setattr(Run, "_tidy", lambda self: calls.append(self))
    return calls


class Ran(list):
    """Names of the cases that ran, in order."""

    def case(self, name, does=lambda: {"figure": 1.5}):
        def run(context):
            self.append(name)
            return does()

        return Case(name, run)


def raises(error):
    def run():
        raise error

    return run


def stages_of(*cases_by_stage, shares=None):
    shares = shares or [1 / len(cases_by_stage)] * len(cases_by_stage)
    return [
        stage_of(f"stage {index}", share, cases)
        for index, (cases, share) in enumerate(zip(cases_by_stage, shares, strict=True))
    ]


def stage_of(name, share, cases):
    return Stage(name, share, lambda size, platform: cases, name, lambda results: [])


def make(folder, stages, *, minutes=30.0, again=False, again_failed=False, only=None):
    lines = []
    code = report.make_report(
        folder,
        minutes=minutes,
        size="tiny",
        again=again,
        again_failed=again_failed,
        only=only,
        say=lines.append,
        stages=stages,
    )
    return code, lines


def kept(folder):
    return json.loads((folder / documents.NAME).read_text())["cases"]


def test_a_second_run_does_what_is_left(tmp_path):
    ran = Ran()
    first = stages_of([ran.case("a"), ran.case("b")])
    assert make(tmp_path, first)[0] == 0
    more = stages_of([ran.case("a"), ran.case("b"), ran.case("c")])
    code, lines = make(tmp_path, more)
    assert (code, ran) == (0, ["a", "b", "c"])
    assert "2 of 3 cases are there from an earlier run." in lines
    assert "3 measured, 0 left out, 0 failed, 0 not reached; 2 of all from before." in lines
    assert any(line.startswith("   3/3  stage 0: c") for line in lines)
    make(tmp_path, more, again=True)
    assert ran == ["a", "b", "c"] * 2
    assert len(kept(tmp_path)) == 3


def test_a_run_of_some_cases_is_gone_on_with_by_others(tmp_path):
    ran = Ran()
    speed = stage_of("device", 0.1, [ran.case("speed")])
    stages = [speed, *stages_of([ran.case("one a"), ran.case("two a")], [ran.case("one b")])]
    code, lines = make(tmp_path, stages, only=["ONE"])
    assert (code, ran) == (0, ["speed", "one a", "one b"])
    assert "3 measured, 0 left out, 0 failed, 0 not reached; 0 of all from before." in lines
    make(tmp_path, stages, only=["stage 0"])
    assert ran == ["speed", "one a", "one b", "two a"]
    with pytest.raises(ValueError, match="'stage 1: one b', or the beginning, as 'stage 1'"):
        make(tmp_path, stages, only=["three"])
    make(tmp_path, stages)
    assert len(ran) == 4
    assert len(kept(tmp_path)) == 4


def test_what_a_case_raises_is_kept_and_the_others_run(tmp_path, tidied):
    ran = Ran()
    stages = stages_of(
        [
            ran.case("full", raises(MemoryError("RESOURCE_EXHAUSTED:\n  9 bytes"))),
            ran.case("none", raises(LeftOut("no such chip."))),
        ],
        [ran.case("fine")],
    )
    code, lines = make(tmp_path, stages)
    found = kept(tmp_path)
    assert code == report.EXIT_FAILED_CASE
    assert len(tidied) == 3  # after each stage, and what failed
    assert found["stage 0: full"]["failed"] == "RESOURCE_EXHAUSTED: 9 bytes"
    assert found["stage 0: full"]["error"] == "MemoryError"
    assert found["stage 0: none"]["left_out"] == "no such chip."
    assert found["stage 1: fine"]["result"] == {"figure": 1.5}
    assert any("failed: RESOURCE_EXHAUSTED" in line for line in lines)
    # What failed is not tried again unasked, and is still said.
    code, lines = make(tmp_path, stages)
    assert code == report.EXIT_FAILED_CASE
    assert "1 measured, 1 left out, 1 failed, 0 not reached; 3 of all from before." in lines
    assert ran == ["full", "none", "fine"]


def test_what_failed_is_tried_again_when_asked(tmp_path):
    ran = Ran()
    broken = stages_of([ran.case("a"), ran.case("b", raises(ValueError("broken")))])
    mended = stages_of([ran.case("a"), ran.case("b")])
    make(tmp_path, broken)
    assert make(tmp_path, broken, again_failed=True)[0] == report.EXIT_FAILED_CASE
    assert ran == ["a", "b", "b"]
    stopped = stages_of([ran.case("a"), Case("b", lambda _: raises(KeyboardInterrupt())())])
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, stopped, again_failed=True)
    assert kept(tmp_path)["stage 0: b"]["failed"] == "broken"  # kept until there is another
    assert make(tmp_path, mended, again_failed=True)[0] == 0
    assert ran == ["a", "b", "b", "b"]


def test_a_kernel_that_disagrees_is_said_and_ends_with_an_error(tmp_path):
    ran = Ran()
    stages = stages_of(
        [ran.case("a", lambda: {"agrees": False}), ran.case("b", lambda: {"agrees": True})]
    )
    code, lines = make(tmp_path, stages)
    assert code == report.EXIT_FAILED_CASE
    assert [line.endswith("DISAGREES") for line in lines if "stage 0:" in line] == [True, False]
    (last,) = [line for line in lines if "measured" in line and "not reached" in line]
    assert last.startswith("2 measured, 1 of them DISAGREES, 0 left out")
    assert make(tmp_path, stages)[0] == report.EXIT_FAILED_CASE
    assert "1 kernel example DISAGREES" in (tmp_path / "report.md").read_text()


def test_again_keeps_what_was_found_until_it_is_found_anew(tmp_path):
    figures = iter(range(10))
    number = lambda: {"figure": next(figures)}
    ran = Ran()
    cases = [ran.case(name, number) for name in "abc"]
    make(tmp_path, stages_of(cases))
    stopped = stages_of([cases[0], ran.case("b", raises(KeyboardInterrupt())), cases[2]])
    lines = []
    with pytest.raises(KeyboardInterrupt):
        report.make_report(
            tmp_path, minutes=1, size="tiny", again=True, say=lines.append, stages=stopped
        )
    assert "the same command without --again goes on" in lines[-1]
    results = lambda: [case["result"]["figure"] for case in kept(tmp_path).values()]
    assert results() == [3, 1, 2]
    assert "2 results of before the last --again" in (tmp_path / "report.md").read_text()
    del ran[:]
    _, lines = make(tmp_path, stages_of(cases))  # goes on with what was not measured since
    assert ran == ["b", "c"]
    assert results() == [3, 4, 5]
    assert "1 of 3 cases are there from an earlier run." in lines
    assert "--again" not in (tmp_path / "report.md").read_text()


def test_again_without_time_for_all_keeps_the_rest_and_says_how_to_go_on(tmp_path):
    stages = stages_of([Ran().case("a")])
    make(tmp_path, stages)
    _, lines = make(tmp_path, stages, again=True, minutes=1e-12)
    assert "the same command without --again reaches the rest." in lines
    assert kept(tmp_path)["stage 0: a"]["result"] == {"figure": 1.5}
    assert "not_reached" not in kept(tmp_path)["stage 0: a"]


def test_cases_wait_for_the_speed_of_the_device(tmp_path):
    ran = Ran()

    def needs_speed(context):
        ran.append("b")
        return {"speed": context.copy_bytes_per_s}

    def stages(does):
        return [
            stage_of("device", 0.5, [ran.case("speed", does)]),
            stage_of("x", 0.5, [Case("b", needs_speed)]),
        ]

    code, _ = make(tmp_path, stages(raises(MemoryError("full"))))
    assert code == report.EXIT_FAILED_CASE
    assert "speed of the device was not measured" in kept(tmp_path)["x: b"]["not_reached"]
    assert ran == ["speed", "b"]  # once in a run
    fine = stages(lambda: SPEED)
    assert make(tmp_path, fine, again_failed=True)[0] == 0
    assert kept(tmp_path)["x: b"]["result"] == {"speed": 4e9}


def test_each_case_is_on_disk_before_the_next(tmp_path):
    seen = {}

    def look():
        seen.update(kept(tmp_path))
        return {}

    make(tmp_path, stages_of([Case("a", lambda context: {"x": 1}), Case("b", lambda _: look())]))
    assert seen["stage 0: a"]["result"] == {"x": 1}
    assert seen["stage 0: b"] == {"attempts": 1}


def test_an_interrupt_is_answered_with_a_line(tmp_path):
    lines = []
    with pytest.raises(KeyboardInterrupt):
        report.make_report(
            tmp_path,
            minutes=1,
            size="tiny",
            again=False,
            say=lines.append,
            stages=stages_of([Ran().case("a", raises(KeyboardInterrupt()))]),
        )
    assert "the same command goes on" in lines[-1]


def test_an_interrupt_ends_the_run_and_the_case_begins_anew(tmp_path):
    ran = Ran()
    for _ in range(documents.MOST_ATTEMPTS + 1):
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, stages_of([ran.case("a"), ran.case("b", raises(KeyboardInterrupt()))]))
    assert (tmp_path / "report.md").exists()
    assert make(tmp_path, stages_of([ran.case("a"), ran.case("b")]))[0] == 0
    assert ran == ["a", "b", "b", "b", "b"]


def test_what_cannot_be_written_hides_no_interrupt(tmp_path, monkeypatch):
    def stop(context):
        monkeypatch.setattr(documents, "save", raising_save)
        raise KeyboardInterrupt

    def raising_save(folder, document):
        raise OSError("no space")

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, stages_of([Case("a", stop)]))


def test_a_page_that_cannot_be_written_is_known_at_the_start(tmp_path):
    (tmp_path / "report.md").mkdir()
    ran = Ran()
    with pytest.raises(OSError, match=r"report\.md cannot be written"):
        make(tmp_path, stages_of([ran.case("a")]))
    assert ran == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_a_page_that_cannot_be_written_at_the_end_is_one_line(tmp_path):
    def replace_page(context):
        (tmp_path / "report.md").unlink()
        (tmp_path / "report.md").mkdir()
        return {}

    code, lines = make(tmp_path, stages_of([Case("a", replace_page)]))
    assert code == report.EXIT_FAILED_CASE
    assert any("report.md cannot be written" in line for line in lines)
    assert not any(line.startswith("page:") for line in lines)


def test_a_page_is_there_while_cases_run(tmp_path):
    seen = []
    look = lambda context: seen.append((tmp_path / "report.md").read_text()) or {}
    make(tmp_path, stages_of([Case("a", look)]))
    assert seen[0].startswith("# CPU")


def test_two_runs_do_not_share_a_folder(tmp_path):
    ran = Ran()
    stages = stages_of([ran.case("a")])
    path = tmp_path / lock.NAME
    path.write_text(str(os.getppid()))  # a living process
    with pytest.raises(ValueError, match=f"process {os.getppid()} makes a report in .*remove"):
        make(tmp_path, stages)
    assert ran == []
    assert path.exists()


@pytest.mark.parametrize("holder", ["gone", "", str(2**40), "0"])
def test_a_lock_that_nobody_holds_is_taken_over(tmp_path, holder):
    if holder == "gone":
        done = subprocess.Popen([sys.executable, "-c", ""])
        done.wait()
        holder = str(done.pid)
    (tmp_path / lock.NAME).write_text(holder)
    seen = []
    look = lambda context: seen.append((tmp_path / lock.NAME).read_text()) or {}
    assert make(tmp_path, stages_of([Case("a", look)]))[0] == 0
    assert seen == [str(os.getpid())]
    assert not (tmp_path / lock.NAME).exists()


class Killed(BaseException):
    """The end of the process, which nothing of it survives."""


@pytest.fixture
def killed(monkeypatch):
    """Runs stages until one raises Killed; nothing is written afterwards."""

    def run(folder, stages):
        with monkeypatch.context() as patched:
            patched.setattr(Run, "_save", lambda self: None)
            with pytest.raises(Killed):
                make(folder, stages)

    return run


def test_a_case_that_ends_its_process_twice_has_failed(tmp_path, killed):
    ran = Ran()
    stages = stages_of([ran.case("a"), ran.case("bad", raises(Killed())), ran.case("c")])
    killed(tmp_path, stages)
    killed(tmp_path, stages)
    code, _ = make(tmp_path, stages)
    assert (code, ran) == (report.EXIT_FAILED_CASE, ["a", "bad", "bad", "c"])
    assert "its process ended 2 times" in kept(tmp_path)["stage 0: bad"]["failed"]
    assert kept(tmp_path)["stage 0: c"]["result"]


def test_a_run_killed_once_goes_on(tmp_path, killed):
    ran = Ran()
    killed(tmp_path, stages_of([ran.case("a"), ran.case("b", raises(Killed()))]))
    assert kept(tmp_path)["stage 0: b"] == {"attempts": 1}
    assert make(tmp_path, stages_of([ran.case("a"), ran.case("b")]))[0] == 0
    assert ran == ["a", "b", "b"]


def test_a_run_killed_under_again_loses_no_result(tmp_path):
    make(tmp_path, stages_of([Ran().case("a")]))
    seen = []

    def look_and_die(context):
        seen.append(kept(tmp_path)["stage 0: a"])
        raise Killed

    with pytest.raises(Killed):
        make(tmp_path, stages_of([Case("a", look_and_die)]), again=True)
    (while_running,) = seen
    assert while_running["result"] == {"figure": 1.5}
    assert while_running["attempts"] == 1
    assert kept(tmp_path)["stage 0: a"] == while_running
    ran = Ran()
    make(tmp_path, stages_of([ran.case("a", lambda: {"figure": 2.5})]))
    assert ran == ["a"]
    assert kept(tmp_path)["stage 0: a"]["result"] == {"figure": 2.5}


class Clock:
    """Seconds, which only cases let pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def case(self, name, seconds):
        def run(context):
            self.now += seconds
            return {}

        return Case(name, run)


def run_by(clock, folder, stages, minutes):
    document = documents.open_or_new(folder, documents.environment(jax.devices()[0], "tiny"))
    context = Context(TINY, folder, jax.devices()[0], RandomModels(), lambda key: None)
    cases = {key: case for stage in stages for key, case in stage.by_key(TINY, "cpu").items()}
    run = Run(document, stages, cases, context, minutes, lambda line: None, clock=clock)
    return run.run(), kept(folder)


def test_no_case_begins_after_the_limit_and_the_next_run_reaches_it(tmp_path):
    clock = Clock()
    stages = stages_of([clock.case("a", 50), clock.case("b", 50), clock.case("c", 50)])
    counts, cases = run_by(clock, tmp_path, stages, minutes=1)
    assert counts["result"] == 2
    assert counts["not_reached"] == 1
    assert cases["stage 0: c"] == {"not_reached": "the limit of 1 minute came first"}
    counts, cases = run_by(clock, tmp_path, stages, minutes=1)
    assert counts["result"] == 3
    assert counts["kept"] == 2
    assert counts["not_reached"] == 0
    assert "result" in cases["stage 0: c"]


def test_a_stage_ends_with_its_share_and_takes_what_others_leave(tmp_path):
    clock = Clock()
    long = [clock.case(name, 20) for name in "abcde"]
    stages = stages_of(long, [clock.case("x", 10)], shares=[0.5, 0.5])
    # Half of 100 s ends after c; then x; then d in the time that is left, until 90 s, and e.
    counts, cases = run_by(clock, tmp_path, stages, minutes=100 / 60)
    assert [name[-1] for name in cases] == ["a", "b", "c", "x", "d", "e"]
    assert counts["result"] == 6


def test_results_of_earlier_cases_are_at_hand(tmp_path):
    seen = []
    first = Case("a", lambda context: {"x": float("nan"), "y": (1, 2)})
    second = Case("b", lambda context: seen.append(context.result("stage 0: a")) or {})
    make(tmp_path, stages_of([first, second]))
    assert seen == [{"x": None, "y": [1, 2]}]
