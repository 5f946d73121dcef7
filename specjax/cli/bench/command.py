"""specjax bench: measurements on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from typing import Any

from specjax.cli.bench.device_report.sizes import SIZES
from specjax.cli.parser import at_least, checked

# Options of one kind of measurement, and what they are when they are not given.
_OF_REPORT = {"minutes": 30.0, "size": None, "again": False, "again_failed": False, "only": None}
_OF_OTHERS = {"json": False, "rounds": 9}


_minutes = checked(
    float,
    lambda minutes: 0 < minutes < math.inf,
    "is no number of minutes; expected one above 0, as 30",
)
# Not empty, as that of an unset variable.
_folder = checked(str, lambda name: bool(name.strip()), "is no name; expected a folder, as out")


def _parameters(text: str) -> float:
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    return factor * float(text[:-1] if factor > 1 else text)


# The number that 300M, 1.5B or 3e8 says.
parameters_of = checked(
    _parameters,
    lambda number: 1 <= number < math.inf,
    "is no number of parameters; expected one as 300M or 1.5B",
)


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `specjax`."""
    parser = commands.add_parser(
        "bench",
        help="measure what speculation gains on this machine",
        description="measurements on this machine",
    )
    parser.set_defaults(run=run, command_parser=parser)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--quick",
        action="store_true",
        help="what decoding costs beyond what it cannot avoid; the default",
    )
    kinds.add_argument(
        "--calibrate",
        action="store_true",
        help="what the steps of a pair cost, for the choice of K: kept for later runs",
    )
    kinds.add_argument(
        "--device-report",
        type=_folder,
        metavar="FOLDER",
        help="kernels, speed and memory on this device, as a page and a JSON document in FOLDER; "
        "the same command goes on with a report that was stopped",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        help="rounds of each measurement (default 9)",
    )
    _add_report_options(parser.add_argument_group("of --device-report"))
    pair = parser.add_argument_group("of --calibrate")
    pair.add_argument(
        "--target",
        default="demo",
        metavar="MODEL",
        help='a folder, a hub name, "demo" (the default), or a name of configs/models, '
        "which gets random weights",
    )
    pair.add_argument("--drafter", default="demo", metavar="MODEL", help='likewise, or "ngram"')
    pair.add_argument("--num-speculative-tokens", "-k", type=at_least(1), default=4, metavar="K")
    pair.add_argument(
        "--widen",
        type=parameters_of,
        metavar="N",
        help="pad the target's weights with zeros to about N parameters, as 300M: the same "
        "text at the cost of a model of that size; a head over it is padded likewise",
    )
    pair.add_argument("--max-rows", type=at_least(1), default=8, metavar="N")
    pair.add_argument("--max-context", type=at_least(1), default=512, metavar="TOKENS")
    pair.add_argument("--temperature", type=float, default=1.0)


def _add_report_options(report: Any) -> None:
    report.add_argument(
        "--minutes",
        type=_minutes,
        metavar="N",
        help="begin nothing after so many minutes (default 30); the same command does the rest",
    )
    report.add_argument(
        "--size",
        choices=list(SIZES),
        help="how much to measure; by default small on a CPU and full elsewhere",
    )
    report.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="measure cases whose name has one of these texts, and the device's speed; a later "
        "command measures others, so that rented minutes go to what matters",
    )
    anew = report.add_mutually_exclusive_group()
    anew.add_argument(
        "--again",
        action="store_true",
        help="measure everything once more; leave it out to go on with that",
    )
    anew.add_argument("--again-failed", action="store_true", help="try what failed once more")


def run(options: argparse.Namespace) -> int:
    """Measures and prints figures, or makes a report; returns the exit code."""
    complete(options)
    # Not before: these import jax.
    if options.device_report is not None:
        return _report(options)
    if options.calibrate:
        from specjax.cli.bench import calibrate

        document = calibrate.of_pair(options)
        print(json.dumps(document, indent=1) if options.json else calibrate.as_text(document))
        return 0
    from specjax.cli.bench import quick
    from specjax.runtime.progress import Progress

    with contextlib.closing(Progress(sys.stderr.isatty())) as progress:

        def begin(what: str) -> None:
            progress.close()
            print(f"measuring: {what}", file=sys.stderr, flush=True)
            progress.report(what, 0, 0)

        figures = quick.run(options.rounds, begin)
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:40s} {shown}")
    return 0


def complete(options: argparse.Namespace) -> None:
    """Sets what was not given; ends the process where an option is of another measurement."""
    own, others = _OF_OTHERS, _OF_REPORT
    relation = "is for"
    if options.device_report is not None:
        own, others, relation = others, own, "is not for"
    fail = options.command_parser.error
    for name in others:
        if getattr(options, name) not in (None, False):
            fail(f"argument --{name.replace('_', '-')}: {relation} --device-report")
    if options.only and options.again:
        fail("argument --only: not allowed with argument --again")
    for name, default in own.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def _report(options: argparse.Namespace) -> int:
    from specjax.cli.bench.device_report.report import make_report
    from specjax.runtime.progress import Progress

    progress = Progress(sys.stderr.isatty())

    def say(line: str) -> None:
        progress.close()
        print(line, file=sys.stderr, flush=True)

    try:
        return make_report(
            options.device_report,
            **{name: getattr(options, name) for name in _OF_REPORT},
            say=say,
            begin=lambda what: progress.report(what, 0, 0),
        )
    finally:
        progress.close()
