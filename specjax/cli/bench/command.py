"""`specjax bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import jax

from specjax.api.assemble import Setup
from specjax.cli.bench import calibrate, measuring, quick
from specjax.cli.bench.device_report.report import make_report
from specjax.cli.bench.device_report.sizes import SIZES
from specjax.cli.bench.widen import widen
from specjax.cli.bench.widen_heads import widen_head
from specjax.cli.parser import Parser, at_least
from specjax.config.engine import EngineConfig
from specjax.config.names import DRAFTERS
from specjax.config.sampling import SamplingParams
from specjax.configs.models import known_shape
from specjax.heads.loading import is_head, load_drafter
from specjax.models.base import Model
from specjax.models.families import family_of
from specjax.models.loading import load_model
from specjax.policy import cost_files
from specjax.policy.goodput import Goodput
from specjax.policy.step_cost import StepCosts
from specjax.runtime import compilation_cache
from specjax.runtime.progress import Progress


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark and prints its figures."""
    options = parse(argv)
    if options.device_report is not None:
        return _report(options)
    if options.calibrate:
        return _calibrate(options)
    figures = quick.run(options.rounds, lambda what: print(f"measuring: {what}", file=sys.stderr))
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:40s} {shown}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options of an argument list; None: those of the process.

    Ends the process with one line where an option does not belong to the kind of measurement.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    is_report = options.device_report is not None
    for name, default in (_OF_OTHERS if is_report else _OF_REPORT).items():
        if getattr(options, name) != default:
            option = f"--{name.replace('_', '-')}"
            relation = "is not for" if is_report else "is for"
            parser.error(f"argument {option}: {relation} --device-report")
    if options.only and options.again:
        parser.error("argument --only: not allowed with argument --again")
    if options.minutes is None:
        options.minutes = 30.0
    if options.rounds is None:
        options.rounds = 9
    return options


# Options of one kind of measurement, and what they are when they are not given.
_OF_OTHERS = {"json": False, "rounds": None}
_OF_REPORT = {"minutes": None, "size": None, "again": False, "again_failed": False, "only": None}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="specjax bench", description="measurements on this machine")
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
    report = parser.add_argument_group("of --device-report")
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
    return parser


def _report(options: argparse.Namespace) -> int:
    progress = Progress(sys.stderr.isatty())

    def say(line: str) -> None:
        progress.close()
        print(line, file=sys.stderr, flush=True)

    try:
        return make_report(
            options.device_report,
            minutes=options.minutes,
            size=options.size,
            again=options.again,
            again_failed=options.again_failed,
            only=options.only,
            say=say,
            begin=lambda what: progress.report(what, 0, 0),
        )
    finally:
        progress.close()


def _minutes(text: str) -> float:
    """Returns a number of minutes above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of minutes; expected one above 0, as 30"
        )
    return number


def _calibrate(options: argparse.Namespace) -> int:
    compilation_cache.enable()
    target = model(options.target)
    drafter = options.drafter if options.drafter in DRAFTERS else model(options.drafter)
    if options.widen is not None:
        loaded = load_model(target) if isinstance(target, str) else target
        target = widen(loaded, options.widen)
        if isinstance(drafter, str) and drafter not in DRAFTERS and is_head(drafter):
            drafter = widen_head(load_drafter(drafter, loaded), loaded.config, target.config)
    setup = Setup.of(
        target,
        drafter=drafter,
        num_speculative_tokens=options.num_speculative_tokens,
        engine=EngineConfig(max_rows=options.max_rows, max_context=options.max_context),
    )
    decoder = setup.decoder(setup.standing_sizes(), [])
    policy = setup.policy(decoder)
    if not isinstance(policy, Goodput):
        raise ValueError(
            "nothing is drafted, so there is no K to choose; pass --drafter, and a K of at least 1."
        )
    sampling = SamplingParams(temperature=options.temperature, ignore_eos=True)
    timer = calibrate.StepTimer(decoder, setup.params, sampling)
    row_buckets = _powers_of_two(options.max_rows)
    progress = Progress(True)
    found, _ = calibrate.calibrate(
        timer,
        policy.buckets(row_buckets),
        rounds=options.rounds,
        report=progress.report,
    )
    progress.close()
    costs = StepCosts()
    costs.add_records(found.records())
    kept = cost_files.Known(StepCosts())
    cost_files.load(decoder, kept)
    path = cost_files.save(decoder, cost_files.Known(costs, kept.acceptance, kept.ledgers))
    document = {
        "environment": measuring.environment(),
        "key": cost_files.key_of(decoder),
        "rounds": options.rounds,
        "catch_up_s": found.catch_up_s,
        "steps": costs.to_records(),
        "file": None if path is None else str(path),
    }
    print(json.dumps(document, indent=1) if options.json else _table(document))
    return 0


def _folder(text: str) -> str:
    """Returns the name of a folder, which is not empty as that of an unset variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; expected a folder, as out")
    return text


def parameters_of(text: str) -> float:
    """Returns the number that 300M, 1.5B or 3e8 says."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    try:
        number = factor * float(text[:-1] if factor > 1 else text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of parameters; expected one as 300M or 1.5B"
        )
    return number


def model(name: str) -> Any:
    """Returns a model with random weights where `name` is one of configs/models, else the name."""
    config = None if "/" in name else known_shape(name)
    if config is None:
        return name
    params = family_of(config).init(jax.random.key(0), config)
    return Model(config, params, name=name)


def _powers_of_two(most: int) -> list[int]:
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*powers, most]


def _table(document: dict[str, Any]) -> str:
    lines = ["rows    K  slots  context  ms per step"]
    lines += [
        f"{s['rows']:4d} {s['num_speculative_tokens']:4d} {s['max_drafts'] or '':>6} "
        f"{s['context_tokens'] / s['rows']:8.0f} {1e3 * s['step_s']:12.3f}"
        for s in document["steps"]
        if not s["num_behind"]
    ]
    lines.append(f"catching up with a token after K = 0: {1e3 * document['catch_up_s']:.3f} ms")
    lines.append(f"kept in {document['file']}")
    return "\n".join(lines)
