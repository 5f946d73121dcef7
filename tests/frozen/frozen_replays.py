"""Replays of the policy that chooses K over measured step costs: shares of the best fixed K.

Nothing is timed: the costs are those of docs/benchmarks/scheduling.json, and luck and clocks have
seeds.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

# All that this part takes of the benchmark.
from benchmarks.replay import Clock, Compiler, Replay, Workload
from benchmarks.scheduling import (
    ACCEPTANCE,
    BATCHES,
    CONTEXT,
    RAMP_ACCEPTANCE,
    SERIES_LENGTHS,
    SERIES_RATES,
    SHORT_ACCEPTANCE,
    SHORT_BATCHES,
    costs_of,
    goodput,
    mixed,
    ramp,
    series,
    short_generations,
    steady,
)
from specjax.policy.interface import Fixed

COSTS_FILE = "docs/benchmarks/scheduling.json"
PAIRS = "embedded", "60M", "60M n-gram"
SHORT_SEEDS = 2
COMPILING = 0.0, 0.5, 0.8
CALLS, CALL_TOKENS, CALL_ROWS, COMPILE_S = 30, 128, 4, 3.0


def contents() -> dict[str, Any]:
    from freeze import FOLDER

    text = (FOLDER.parents[1] / COSTS_FILE).read_text()
    costs = json.loads(text)["costs"]
    found: dict[str, Any] = {"step costs": json.dumps(costs)}
    for pair in PAIRS:
        found |= {f"{pair}, {name}": share for name, share in shares(costs[pair]).items()}
    return found


def shares(measured: dict[str, Any]) -> dict[str, float]:
    """Returns the tokens per second of the policy, as shares of another's."""
    found = {}
    for rows, rate in itertools.product(BATCHES, ACCEPTANCE):
        row, of = steady(measured, rows, rate), f"steady, {rows} rows at {rate}"
        for name in ("cold_of_best", "calibrated_of_best", "cold_whole_of_best"):
            found[f"{of}, {name}"] = row[name]
    for rows, rate in itertools.product(SHORT_BATCHES, SHORT_ACCEPTANCE):
        row = short_generations(measured, rows, rate, SHORT_SEEDS)
        found[f"short calls, {rows} rows at {rate}, of_best"] = row["of_best"]
    for rate in RAMP_ACCEPTANCE:
        row, _ = ramp(measured, rate)
        found[f"draining batch at {rate}, of_best_k"] = row["of_best_k"]
    for lengths, rates in zip(SERIES_LENGTHS, SERIES_RATES, strict=True):
        row = series(measured, lengths, rates)
        found[f"draining batches, {lengths}, {rates}, of_best_k"] = row["of_best_k"]
    row = mixed(measured, CONTEXT)
    found["rows that differ, ranked_over_one_k"] = row["ranked_over_one_k"]
    for rate in COMPILING:
        found[f"calls that compile at {rate}, of_plain"] = calls_that_compile(measured, rate)
    return found


def calls_that_compile(measured: dict[str, Any], rate: float) -> float:
    """Returns the speed of a process's calls but the first, over that of plain decoding.

    Every bucket is compiled beside the calls, which take twice as long meanwhile.
    """
    costs, _ = costs_of(measured)
    compiler, clock = Compiler(COMPILE_S), Clock(0, noise=0.06)
    policy = goodput(measured, clock=lambda: compiler.at_s)
    seconds, plain = [], []
    for call in range(CALLS):
        rows = CALL_ROWS
        text = Workload(np.full(rows, CALL_TOKENS), np.full(rows, rate), context=CONTEXT, seed=call)
        first = call * rows
        ran = Replay(text, costs, policy, clock=clock, first_request=first, compiler=compiler)
        seconds.append(ran.run().seconds)
        plain.append(Replay(text, costs, Fixed(0)).run().seconds)
    return sum(plain[1:]) / sum(seconds[1:])
