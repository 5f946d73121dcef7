"""Makes a report of the default device, or goes on with one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.implementations import default_device
from specjax.bench.device_report import document as documents
from specjax.bench.device_report.cases import Context, Stage
from specjax.bench.device_report.running import PAGE, Run, Say
from specjax.bench.device_report.sizes import SIZES, size_for
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
    say: Say,
    begin: Say = lambda what: None,
    stages: Sequence[Stage] = STAGES,
) -> int:
    """Runs the cases that the report in `folder` does not have; returns the exit code.

    Args:
      minutes: no case begins later than this; the next run goes on.
      size: a name of `sizes.SIZES`; None: by the platform.
      again: whether all cases run once more.
      say: gets lines about the progress.
      begin: gets the name of each case that begins.

    Raises:
      ValueError: the folder has a report of another device or version.
      OSError: it cannot be written.
    """
    compilation_cache.enable()
    device = default_device()
    chosen = size_for(device.platform) if size is None else SIZES[size]
    place = Path(folder).expanduser()
    made_on = documents.environment(device, chosen.name)
    document = documents.open_or_new(place, made_on)
    documents.save(
        place, document
    )  # a folder that cannot be written is known before the first case
    result = lambda key: document["cases"].get(key, {}).get("result")
    run = Run(
        document=document,
        folder=place,
        stages=stages,
        context=Context(size=chosen, out=place, device=device, result=result),
        minutes=minutes,
        again=again,
        say=say,
        begin=begin,
    )
    say(
        f"report of {device.device_kind}, size {chosen.name}, at most {minutes:g} minutes; "
        "kept after each case: it may be stopped, and goes on where it was."
    )
    try:
        counts = run.run()
    except KeyboardInterrupt:
        say(f"stopped; {place} has what was measured, and the same command goes on.")
        raise
    say(
        f"{counts['result']} measured, {counts['left_out']} left out, {counts['failed']} failed, "
        f"{counts['not reached']} not reached, {counts['kept']} from before."
    )
    if counts["not reached"]:
        say("the same command reaches the rest.")
    say(f"page: {place / PAGE}")
    say(f"to send in: {place / documents.NAME}, attached to an issue at {ISSUES}")
    return EXIT_FAILED_CASE if counts["failed"] else 0
