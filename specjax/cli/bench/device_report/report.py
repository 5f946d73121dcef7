"""Makes a report of the default device, or goes on with one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pallas_kernels.implementations import default_device
from specjax.cli.bench.device_report import document as documents
from specjax.cli.bench.device_report.cases import SPEED, Case, Context, Stage
from specjax.cli.bench.device_report.lock import locked
from specjax.cli.bench.device_report.page import DISAGREES
from specjax.cli.bench.device_report.random_models import RandomModels
from specjax.cli.bench.device_report.running import PAGE, Run, Say
from specjax.cli.bench.device_report.sizes import SIZES, counted, size_for
from specjax.cli.bench.device_report.stages import STAGES
from specjax.runtime import compilation_cache

ISSUES = "https://github.com/specjax/specjax/issues"
EXIT_FAILED_CASE = 1


def make_report(
    folder: str | os.PathLike[str],
    *,
    minutes: float,
    size: str | None,
    again: bool,
    again_failed: bool = False,
    only: Sequence[str] | None = None,
    say: Say,
    begin: Say = lambda what: None,
    stages: Sequence[Stage] = STAGES,
) -> int:
    """Runs the cases that the report in `folder` does not have; returns the exit code.

    It is EXIT_FAILED_CASE where any case of the report failed or disagrees, in this run or before.

    Args:
      minutes: no case begins later than this; the next run goes on.
      size: a name of `sizes.SIZES`; None: by the platform.
      again: whether all cases run once more; a later run without it goes on with this one.
      again_failed: whether those that failed do.
      only: texts; cases whose name has none of them are left for another run, but for the device's
        speed. None: all cases run.
      say: gets lines about the progress.
      begin: gets the name of each case that begins.

    Raises:
      ValueError: the folder has a report of another device or version, another process writes
        to it, or no case has one of the texts of `only` in its name.
      OSError: it cannot be written.
    """
    compilation_cache.enable()
    device = default_device()
    chosen = size_for(device.platform) if size is None else SIZES[size]
    place = Path(folder).expanduser()
    made_on = documents.environment(device, chosen.name)
    cases: dict[str, Case] = {}
    for stage in stages:
        cases |= stage.by_key(chosen, device.platform)
    if only is not None:
        cases = with_texts(cases, only)
    documents.make_folder(place)
    with locked(place):
        document = documents.open_or_new(place, made_on)
        if again:
            document["round"] = documents.round_of(document) + 1
        outcomes = document["cases"]
        failed = {key for key, outcome in outcomes.items() if "failed" in outcome}
        result = lambda key: outcomes.get(key, {}).get("result")
        run = Run(
            document=document,
            stages=stages,
            cases=cases,
            context=Context(chosen, place, device, RandomModels(), result),
            minutes=minutes,
            retried=failed if again_failed else (),
            say=say,
            begin=begin,
        )
        limit = counted(minutes, "minute")
        say(
            f"report of {device.device_kind}, size {chosen.name}, at most {limit}; "
            "kept after each case: it may be stopped, and goes on where it was."
        )
        return _finish(run, place, "the same command" + (" without --again" if again else ""))


def with_texts(cases: Mapping[str, Case], texts: Sequence[str]) -> dict[str, Case]:
    """Returns the cases whose name has one of the texts.

    The device's speed, which others are compared with, is always among them.

    Raises:
      ValueError: no case has.
    """
    asked = [key for key in cases if any(text.lower() in key.lower() for text in texts)]
    if not asked:
        last = list(cases)[-1]
        raise ValueError(
            f"--only {' '.join(texts)}: no case has such a name; expected a part of one, as "
            f"{last!r}, or the beginning, as {last.partition(': ')[0]!r}."
        )
    return {key: case for key, case in cases.items() if key == SPEED or key in asked}


def _finish(run: Run, place: Path, on: str) -> int:
    """Runs a report and says how it ended; returns the exit code.

    Args:
      on: names the command that goes on.
    """
    say = run.say
    try:
        counts = run.run()
    except KeyboardInterrupt:
        say(f"stopped; {place} has what was measured, and {on} goes on.")
        raise
    say(_summary(counts))
    if counts["not_reached"]:
        say(f"{on} reaches the rest.")
    if counts["failed"]:
        say("what failed is not tried again, but with --again-failed.")
    if not counts["unwritten"]:
        say(f"page: {place / PAGE}")
    say(f"to send in: {place / documents.NAME}, attached to an issue at {ISSUES}")
    is_wrong = counts["failed"] or counts["disagrees"] or counts["unwritten"]
    return EXIT_FAILED_CASE if is_wrong else 0


def _summary(counts: Mapping[str, int]) -> str:
    """Returns the last line of a run: all cases of the report."""
    wrong = f", {counts['disagrees']} of them {DISAGREES}" if counts["disagrees"] else ""
    return (
        f"{counts['result']} measured{wrong}, {counts['left_out']} left out, {counts['failed']} "
        f"failed, {counts['not_reached']} not reached; {counts['kept']} of all from before."
    )
