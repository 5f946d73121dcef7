"""Makes a report of the default device, or goes on with one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pallas_kernels.implementations import default_device
from specjax.bench.device_report import document as documents
from specjax.bench.device_report.cases import Context, Stage
from specjax.bench.device_report.lock import locked
from specjax.bench.device_report.page import DISAGREES
from specjax.bench.device_report.running import PAGE, Run, Say
from specjax.bench.device_report.sizes import SIZES, counted, size_for
from specjax.bench.device_report.stages import STAGES
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
      say: gets lines about the progress.
      begin: gets the name of each case that begins.

    Raises:
      ValueError: the folder has a report of another device or version, or another process writes
        to it.
      OSError: it cannot be written.
    """
    compilation_cache.enable()
    device = default_device()
    chosen = size_for(device.platform) if size is None else SIZES[size]
    place = Path(folder).expanduser()
    made_on = documents.environment(device, chosen.name)
    documents.make_folder(place)
    with locked(place):
        document = documents.open_or_new(place, made_on)
        result = lambda key: document["cases"].get(key, {}).get("result")
        run = Run(
            document=document,
            folder=place,
            stages=stages,
            context=Context(size=chosen, out=place, device=device, result=result),
            minutes=minutes,
            again=again,
            again_failed=again_failed,
            say=say,
            begin=begin,
        )
        limit = counted(minutes, "minute")
        say(
            f"report of {device.device_kind}, size {chosen.name}, at most {limit}; "
            "kept after each case: it may be stopped, and goes on where it was."
        )
        return _finish(run, place, "the same command" + (" without --again" if again else ""))


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
