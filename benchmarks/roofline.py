"""Bytes of compiled steps over the bytes that must move: recorded, and compared with the record.

    python -m benchmarks.roofline --record  # what is missing in the record
    python -m benchmarks.roofline --check --only "Qwen3-0.6B, plain, 32 rows, v5e x1"

It needs the compiler of TPUs (the `tpu` extra) and no TPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import roofline_table
from benchmarks.roofline_cases import Case, cases
from benchmarks.roofline_measure import measure

RECORD = Path("docs/benchmarks/roofline.json")
TABLE = Path("docs/benchmarks/roofline.md")
# Most that a ratio may be above the recorded one.
SLACK = 0.05


def main(argv: list[str] | None = None) -> int:
    """Records or checks cases; returns the exit code, 1 where a case has become worse."""
    options = _parser().parse_args(argv)
    _use_no_device()
    asked = chosen(options.only)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.table:
        TABLE.write_text(roofline_table.page(record))
        return 0
    if options.record:
        if options.only is None and not options.again:
            asked = [case for case in asked if case.name not in record]
        for case, found in _measured(asked, options):
            record[case.name] = found
            RECORD.write_text(json.dumps(_in_order(record), indent=1) + "\n")
            TABLE.write_text(roofline_table.page(_in_order(record)))
            print(roofline_table.line(case.name, found), flush=True)
        return 0
    is_worse = False
    for case, found in _measured(asked, options):
        worse = regressions(case.name, record.get(case.name), found)
        print("\n".join(worse) or f"as recorded: {roofline_table.line(case.name, found)}")
        is_worse = is_worse or bool(worse)
    return int(is_worse)


def chosen(names: Sequence[str] | None) -> list[Case]:
    """Returns the cases whose name holds one of these texts, in their order; None: every case.

    Raises:
      ValueError: no case has such a name.
    """
    every, found = list(cases()), {}
    for name in [""] if names is None else names:
        named = [case for case in every if name in case.name]
        if not named:
            raise ValueError(f"no case is named {name!r}; one is {every[0].name!r}.")
        found |= dict.fromkeys(named)
    return list(found)


def regressions(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[str]:
    """Returns what has become worse in a case, one line each; empty if nothing has.

    Args:
      before: the recorded figures; None: the case is not recorded.
      after: as `measure` returns them.
    """
    if before is None:
        return [f"{name}: not recorded; run with --record."]
    lines = []
    for context, found in after["contexts"].items():
        was = before["contexts"][context]["ratio"]
        if found["ratio"] > was * (1 + SLACK):
            lines.append(
                f"{name}, {context} tokens: bytes over minimum {was:.3f} before, "
                f"{found['ratio']:.3f} now."
            )
    if after["operations"] > before["operations"] * (1 + SLACK):
        lines.append(
            f"{name}: {before['operations']} operations before, {after['operations']} now."
        )
    if after["collectives"] > before["collectives"]:
        were, are = before["collectives"], after["collectives"]
        lines.append(f"{name}: {were} collectives before, {are} now.")
    new = [flag for flag in after["flags"] if flag not in before["flags"]]
    lines += [f"{name}: {flag}, which was not there before." for flag in new]
    if lines and before["compiled_by"] != after["compiled_by"]:
        lines.append(
            f"  Compiled by {before['compiled_by']} before, by {after['compiled_by']} now."
        )
    if lines:
        lines.append("  Most bytes beyond the minimum, in the program of few layers:")
        lines += [f"  {bytes_ / 1e6:10.1f} MB  {place}" for place, bytes_ in after["beyond"]]
    return lines


def _measured(asked: Sequence[Case], options: argparse.Namespace) -> Any:
    """Yields cases and their figures, in order."""
    one = functools.partial(measure, folder=options.programs)
    if options.jobs == 1:
        yield from ((case, one(case)) for case in asked)
        return
    # Each process has a compiler of its own.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
        yield from zip(asked, pool.map(_in_process, [(case, options.programs) for case in asked]))


def _in_process(arguments: tuple[Case, Path | None]) -> dict[str, Any]:
    _use_no_device()
    return measure(*arguments)


def _use_no_device() -> None:
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler is used, and no TPU
    jax.config.update("jax_enable_compilation_cache", False)  # which cannot read such programs


def _in_order(record: Mapping[str, Any]) -> dict[str, Any]:
    names = [case.name for case in cases()]
    return {name: record[name] for name in names if name in record}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--record", action="store_true", help=f"measure, and write {RECORD}")
    kind.add_argument("--check", action="store_true", help="measure, and compare with the record")
    kind.add_argument("--table", action="store_true", help=f"write {TABLE} from the record")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name holds NAME")
    parser.add_argument("--again", action="store_true", help="record also what is recorded")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that compile")
    parser.add_argument(
        "--programs", type=Path, metavar="FOLDER", help="keep programs there, and use those kept"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
