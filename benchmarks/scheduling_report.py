"""The page of docs/benchmarks/scheduling.md, from what the two benchmarks wrote.

    python -m benchmarks.scheduling_report docs/benchmarks/scheduling.json \\
        docs/benchmarks/scheduling_walls.json > docs/benchmarks/scheduling.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HEAD = """# Which K: what it brings

`python -m benchmarks.scheduling` measures the steps of a pair, every bucket in every round, and
replays them through the real
policy{replayed}; `python -m benchmarks.walls` runs whole generations. {environment}. The 60M pair has random weights and made-up acceptance, and
pays a real draft model.
"""
STEADY = """## Never slower, replayed

{name} pair. Batches that stay, {tokens} tokens per row after a prompt of {context}; what a step costs is a line
between what was measured at two contexts, and the seconds that the policy sees scatter by 5 %
around that. Speed after 200 steps against the best of
K = {depths}, of a policy that knows nothing at first (cold) and of one that read a
calibration; and the seconds by which its first 200 steps
took longer than the best K for as many tokens, of how many in all. At the least {least:.3f}; at acceptance 0, against K = 0, {least_at_0:.3f}.
"""
SHORT = """## Short generations, replayed

{name} pair. One policy that knows nothing at first runs {runs} generations of {tokens} tokens per row, a few bursts each; its clock is that of a shared machine: seconds
scatter by {noise:.0%}, wander by {wander:.0%}, and {disturbed:.0%} of the bursts take 1.2 to 2.2 times as long besides. Speed of the last {counted} generations against the best
fixed K, the mean and the least of {seeds} runs.

| batch | {acceptances} |
|---|{columns}|
{rows}
"""
RAMP = """## A batch that drains

![{name}: rows and K of a batch that drains, and the seconds of every K]({picture})

{name} pair, 32 rows, heavy-tailed lengths, no refills, replayed: speed against fixed K (drawn: the last line). The oracle is told costs and
acceptance, and takes the best K of the next burst: about what choosing K can bring on these costs,
but for slots handed out by rank.

| drafts that stand | goodput against the best K above 0 | the oracle | goodput against the best K | the oracle |
|---|---|---|---|---|
{rows}
"""
SERIES = """## Batches that drain, one after the other

{name} pair, {ramps} batches of 32 rows that drain, one after the other as in a training loop, under one policy; each request has its own
share of drafts that stand, drawn by a law like that. Replayed: the seconds of all batches, against
the one K that is best for all of them.

| lengths | drafts that stand | best K | goodput against the best K above 0 | against the best K |
|---|---|---|---|---|
{rows}
"""
MIXED = """## Rows that differ, {name}

{name} pair, 32 rows, half of which have 90 % of their drafts accepted and half 10 %, replayed: tokens per second with slots by rank against one K
for all rows chosen by the same policy, and against the best fixed K.

| tokens of context, each row | against one K for all | against the best fixed K |
|---|---|---|
{rows}
"""
WALLS = """## Wall time

Whole generations, contenders in turn, medians of the ratios within a round with the 95 % interval
of the sign test. Above 1: goodput is faster. The last
line, where there is one, is a batch that drains: 32 requests of heavy-tailed lengths, no refills.

| pair | batch | acceptance | best | goodput against the best | against the best K above 0 | against
no drafter | K = 0 with the drafter loaded, time against no drafter |
|---|---|---|---|---|---|---|---|"""


def report(document: dict[str, Any], walls: Sequence[dict[str, Any]]) -> str:
    """Returns the page."""
    known = document["environment"]
    environment = ", ".join(f"{name} {value}" for name, value in known.items())
    with_what = document.get("replayed_with", {})
    versions = ", ".join(f"{name} {value}" for name, value in with_what.items())
    replayed = f" (replayed with {versions})" if versions else ""
    parts = [HEAD.format(environment=environment, replayed=replayed)]
    parts += [f"{note}\n" for note in document.get("notes", [])]
    for name, figures in document["replay"].items():
        parts += _replays(name, figures)
    parts.append(_overheads(document["costs"]))
    if walls:
        parts.append("\n".join([WALLS, *map(_wall_row, walls)]))
    return "\n".join(parts) + "\n"


def _replays(name: str, figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {one['context']} | {one['ranked_over_one_k']:.2f} | {one['ranked_over_best_fixed_k']:.2f} |"
        for one in figures["mixed"]
    ]
    mixed = MIXED.format(name=name, rows="\n".join(rows))
    if "steady" not in figures:
        return [mixed]
    steady, ramp = figures["steady"], figures["ramp"]
    shares = [row[f"{how}_of_best"] for row in steady for how in ("cold", "calibrated")]
    at_0 = [
        row[f"{how}_of_none"]
        for row in steady
        for how in ("cold", "calibrated")
        if row["acceptance"] == 0
    ]
    table = [
        "| batch | acceptance | best K | cold | lost at first, s | calibrated | lost at first, s | all, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| {row['batch']} | {row['acceptance']} | {row['best_k']} | {row['cold_of_best']:.3f} | "
        f"{row['cold_lost_in_burn_in_s']:.2f} | {row['calibrated_of_best']:.3f} | "
        f"{row['calibrated_lost_in_burn_in_s']:.2f} | {row['best_s']:.0f} |"
        for row in steady
    ]
    return [
        STEADY.format(
            name=name,
            tokens=figures["tokens"],
            context=figures["context"],
            depths=", ".join(map(str, figures["depths"])),
            least=min(shares),
            least_at_0=min(at_0),
        ),
        "\n".join(table) + "\n",
        _short(name, figures["short"]),
        RAMP.format(
            name=name,
            picture=f"scheduling_ramp_{name.replace(' ', '_')}.png",
            rows="\n".join(
                f"| {one['acceptance']:.0%} | {one['of_best_k_above_0']:.3f} | "
                f"{one['oracle_of_best_k_above_0']:.3f} | {one['of_best_k']:.3f} | "
                f"{one['oracle_of_best_k']:.3f} |"
                for one in ramp
            ),
        ),
        SERIES.format(
            name=name,
            ramps=figures["series_ramps"],
            rows="\n".join(
                f"| {one['lengths']} | {one['acceptance']} | {one['best_k']} | "
                f"{one['of_best_k_above_0']:.3f} | {one['of_best_k']:.3f} |"
                for one in figures["series"]
            ),
        ),
        mixed,
    ]


def _short(name: str, figures: dict[str, Any]) -> str:
    runs = figures["runs"]
    rates = sorted({one["acceptance"] for one in runs})
    rows = []
    for batch in sorted({one["batch"] for one in runs}):
        own = {one["acceptance"]: one for one in runs if one["batch"] == batch}
        cells = [
            f"{own[r]['of_best']:.3f}, {own[r]['of_best_at_least']:.3f} (K = {own[r]['best_k']})"
            for r in rates
        ]
        rows.append(f"| {batch} | {' | '.join(cells)} |")
    return SHORT.format(
        name=name,
        runs=figures["burn_in"] + figures["counted"],
        acceptances=" | ".join(f"{rate:.0%} accepted" for rate in rates),
        columns="|".join(["---"] * len(rates)),
        rows="\n".join(rows),
        **{key: figures[key] for key in ("tokens", "counted", "seeds")},
        **figures["clock"],
    )


def _overheads(costs: dict[str, Any]) -> str:
    lines = [
        "## A drafter that is loaded and not used",
        "",
        "Steps of K = 0 with the drafter loaded against those without any, 8 steps per burst:",
        "",
        "| pair | rows | time against no drafter | interval |",
        "|---|---|---|---|",
    ]
    for name, measured in costs.items():
        for rows, figures in measured["plain_with_drafter_over_without"].items():
            lines.append(f"| {name} | {rows} | {_interval(figures, ' | ')} |")
    return "\n".join(lines) + "\n"


def _wall_row(row: dict[str, Any]) -> str:
    cells: Iterable[Any] = (
        row["pair"],
        row["batch"],
        "its own" if row["acceptance"] is None else row["acceptance"],
        row["best"],
        _interval(row["goodput_of_best"]),
        _interval(row["goodput_of_best_above_0"]),
        _interval(row["goodput_of_no_drafter"]),
        _interval(row["k_0_over_no_drafter"]),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _interval(figures: Sequence[float], between: str = " ") -> str:
    median, low, high = figures
    return f"{median:.3f}{between}[{low:.3f}, {high:.3f}]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling_report")
    parser.add_argument("scheduling", type=Path)
    parser.add_argument("walls", type=Path, nargs="*")
    options = parser.parse_args(argv)
    walls = [
        row
        for path in options.walls
        for row in json.loads(path.read_text(encoding="utf-8"))["walls"]
    ]
    document = json.loads(options.scheduling.read_text(encoding="utf-8"))
    print(report(document, walls), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
