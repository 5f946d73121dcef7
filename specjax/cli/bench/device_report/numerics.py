"""The stage "numerics": every kernel on its example inputs against the definition."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from pallas_kernels.names import IMPLEMENTATIONS
from specjax.cli.bench.device_report import op_runs
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Results, Stage
from specjax.cli.bench.device_report.kernel_times import check_trusted, offered
from specjax.cli.bench.device_report.sizes import ReportSize
from specjax.cli.table import Row, number

INTERPRETED = "mosaic_tpu, interpreted"


def cases(size: ReportSize, platform: str) -> list[Case]:
    found = []
    for op in IMPLEMENTATIONS:
        for implementation in offered(op, platform):
            for example in _chosen(op_runs.RUNS[op].examples(implementation), size.num_examples):
                found.append(_case(op, implementation, example))
    if platform == "cpu":
        found.append(_case("tree_attention", INTERPRETED, "tree"))
    return found


def _case(op: str, implementation: str, example: str) -> Case:
    run = functools.partial(compare, op, implementation, example)
    return Case(f"{op}, {implementation}, {example}", run)


def _chosen(names: list[str], count: int | None) -> list[str]:
    """Returns so many names, spread over all of them."""
    if count is None or count >= len(names):
        return names
    return [names[index * len(names) // count] for index in range(count)]


def compare(op: str, implementation: str, example: str, context: Context) -> dict[str, Any]:
    """Returns the largest difference of an implementation from the definition.

    Raises:
      LeftOut: the implementation does not cover the example.
    """
    check_trusted(context, implementation)
    run = op_runs.RUNS[op]
    try:
        found, expected = run.both(implementation, example)
    except NotImplementedError as error:
        raise LeftOut(f"not covered: {error}") from error
    tolerance, relative = run.tolerance(implementation, example)
    return {
        "op": op,
        "implementation": implementation,
        "tolerance": tolerance,
        "relative_tolerance": relative,
        **difference(found, expected, tolerance, relative),
    }


def difference(
    found: list[np.ndarray], expected: list[np.ndarray], tolerance: float, relative: float = 0.0
) -> dict[str, Any]:
    """Returns the largest difference of arrays, None if one is not finite, and whether all agree.

    Equal numbers that are not finite agree.
    """
    largest, agrees = 0.0, True
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        agrees &= np.allclose(one, other, rtol=relative, atol=tolerance, equal_nan=True)
        is_equal = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore"):
            off = np.where(is_equal, 0.0, np.abs(one - other))
        largest = np.maximum(largest, off.max(initial=0.0))  # NaN if one is
    return {"largest_error": float(largest) if np.isfinite(largest) else None, "agrees": agrees}


def table(results: Results) -> list[Row]:
    """Returns a row for each implementation of an op."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for found in results.values():
        groups[found["op"], found["implementation"]].append(found)
    return [
        {
            "op": f"`{op}`",
            "implementation": implementation,
            "examples that agree": f"{sum(each['agrees'] for each in found)} of {len(found)}",
            "largest error, and what is allowed": _errors(found),
        }
        for (op, implementation), found in groups.items()
    ]


def _errors(results: list[Mapping[str, Any]]) -> str:
    by_tolerance: dict[str, list[float | None]] = defaultdict(list)
    for found in results:
        relative = found["relative_tolerance"]
        allowed = f"{found['tolerance']:g}" + (f" + {relative:.2g} x" if relative else "")
        by_tolerance[allowed].append(found["largest_error"])
    return "; ".join(f"{_largest(errors)}, {by}" for by, errors in by_tolerance.items())


def _largest(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return "not finite" if len(known) < len(errors) else number(max(known), 2)


STAGE = Stage(
    "numerics",
    0.17,
    cases,
    "Numerics of kernels",
    table,
    "Each example runs by the implementation and by the definition of the op.",
)
