"""Replays the candidate and today's policy over measured step costs, and prints both.

    python -m benchmarks.one_belief docs/benchmarks/scheduling.json

Shares are of the best fixed K; the clock and the luck of both are the same. Minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import scheduling
from benchmarks.one_belief.policy import OneBelief
from benchmarks.one_belief.seconds import Seconds
from specjax.decode.bucket import Bucket

SEEDS = 2  # of short generations
ROUNDS = 2  # measurements of each bucket that a calibrated policy begins with


def candidate(measured: dict[str, Any], known: Any = None, **options: Any) -> OneBelief:
    """Returns the candidate in place of `scheduling.goodput`."""
    costs, depths = Seconds(), scheduling.depths_of(measured)
    for step in measured["steps"] * ROUNDS if known is not None else ():
        bucket = Bucket(*(step[name] for name in Bucket._fields))
        costs.observe(bucket, step["context_tokens"], step["step_s"])
    return OneBelief(depths[-1], costs, depths=depths[1:], **options)


def shares(measured: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields each replay's name and its share of the best fixed K."""
    for rows, rate in itertools.product(scheduling.BATCHES, scheduling.ACCEPTANCE):
        row = scheduling.steady(measured, rows, rate)
        for name in ("cold_of_best", "calibrated_of_best", "cold_whole_of_best"):
            yield f"steady, {rows} rows at {rate}, {name}", row[name]
    for rows, rate in itertools.product(scheduling.SHORT_BATCHES, scheduling.SHORT_ACCEPTANCE):
        row = scheduling.short_generations(measured, rows, rate, SEEDS)
        yield f"short calls, {rows} rows at {rate}", row["of_best"]
    for rate in scheduling.RAMP_ACCEPTANCE:
        yield f"draining batch at {rate}", scheduling.ramp(measured, rate)[0]["of_best_k"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_belief")
    parser.add_argument("costs", type=Path)
    parser.add_argument("--pairs", nargs="+", default=["embedded", "60M", "60M n-gram"])
    options = parser.parse_args()
    costs = json.loads(options.costs.read_text(encoding="utf-8"))["costs"]
    for pair in options.pairs:
        today = dict(shares(costs[pair]))
        with mock.patch.object(scheduling, "goodput", candidate):
            for name, share in shares(costs[pair]):
                print(f"{pair}, {name}: {today[name]:.3f} today, {share:.3f} the candidate")


if __name__ == "__main__":
    main()
