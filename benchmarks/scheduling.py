"""Measures the gain of choosing K: replays of measured step costs, and wall time beside them.

    python -m benchmarks.scheduling --out docs/benchmarks

writes scheduling.json and the picture of a draining batch. Every figure is a ratio within
this run. With `--costs FILE` the costs of pairs that were measured before are read instead; they
are replayed with the K that they have, which may be those of an earlier ladder.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay import Clock, Costs, Oracle, Replay, Workload
from specjax.api.assemble import Setup
from specjax.api.plots import new_figure, whole_ticks
from specjax.cli.bench import calibrate, measuring
from specjax.cli.bench.calibrate import model
from specjax.cli.bench.device_report.document import commit
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed
from specjax.policy.step_cost import StepCosts
from specjax.runtime import compilation_cache
from specjax.runtime.progress import Progress

ROW_BUCKETS = (1, 4, 8, 16, 32)
# Target, drafter, and numbers of rows; where those are few only rows that differ are replayed.
PAIRS = {
    "embedded": ("demo", "demo", ROW_BUCKETS),
    "60M": ("bench_60m", "bench_60m_draft", ROW_BUCKETS),
    "n-gram": ("demo", "ngram", (32,)),
    "60M n-gram": ("bench_60m", "ngram", ROW_BUCKETS),
}
RANKED_ROWS = (8, 32)  # numbers of rows for which slots by rank are measured
BATCHES = (1, 2, 4, 8, 16, 32)
MOST = 7  # draft tokens of a step that is measured
ACCEPTANCE = (0.0, 0.5, 0.8)
RAMP_ACCEPTANCE = (0.2, 0.3, 0.5, 0.7)
# Batches that drain one after the other, as in a training loop, of requests that differ: by
# what law their lengths are drawn, and how often their drafts stand.
SERIES_RAMPS = 8
SERIES_LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "log-normal, median 300, sigma 1": lambda rng, rows: 300 * np.exp(rng.normal(size=rows)),
    "Pareto, least 150, alpha 2": lambda rng, rows: 150 * (1 + rng.pareto(2, rows)),
}
SERIES_RATES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "Beta(0.3, 0.7)": lambda rng, rows: rng.beta(0.3, 0.7, rows),
    "half 0.05, half 0.95": lambda rng, rows: rng.choice((0.05, 0.95), rows),
}
BURN_IN_STEPS = 200
TOKENS = 4000  # of each row of a steady load
NOISE = 0.05  # of a burst's seconds, as a policy sees them
# Generations of a few bursts each, of one policy, whose clock is that of a shared machine.
SHORT_BATCHES = (1, 4, 16, 32)
SHORT_ACCEPTANCE = (0.0, 0.5, 0.7, 0.8)
SHORT_TOKENS, SHORT_BURN_IN, SHORT_COUNTED, SHORT_SEEDS = 96, 20, 30, 6
SHORT_CLOCK = {"noise": 0.06, "wander": 0.06, "disturbed": 0.12}
CONTEXT = 64
LONG_CONTEXT = 440  # within what is measured


def measure_costs(
    target: Any, drafter: Any, row_buckets: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Returns the step costs of a pair, and of plain decoding with no drafter loaded."""
    config = EngineConfig(max_rows=row_buckets[-1], max_context=512)
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    timers = {}
    for name in (drafter, None):
        setup = Setup.of(target, drafter=name, num_speculative_tokens=MOST, engine=config)
        decoder = setup.decoder(setup.standing_sizes(), [])
        timers[name is None] = calibrate.StepTimer(decoder, setup.params, sampling)
    bare, progress = timers[True], Progress(True)
    beside: dict[Any, Callable[[], Any]] = {
        ("bare", rows): lambda rows=rows: bare.run(Bucket(rows, 0), CONTEXT) for rows in row_buckets
    }
    found, plain = calibrate.calibrate(
        timers[False],
        [
            bucket
            for bucket in Goodput(MOST).buckets(row_buckets)
            if bucket.max_drafts is None or bucket.rows in RANKED_ROWS
        ],
        rounds=rounds,
        beside=beside,
        report=progress.report,
    )
    progress.close()
    overhead = {
        rows: measuring.ratio_interval(
            found.seconds[Bucket(rows, 0), CONTEXT, 0], plain["bare", rows]
        )
        for rows in row_buckets
    }
    return {
        "rounds": rounds,
        "row_buckets": list(row_buckets),
        "steps": found.records(),
        "catch_up_s": found.catch_up_s,
        "no_drafter_step_s": {rows: measuring.median(plain["bare", rows]) for rows in row_buckets},
        "plain_with_drafter_over_without": overhead,
    }


def costs_of(measured: dict[str, Any], most_context: int | None = None) -> tuple[Costs, StepCosts]:
    """Returns the costs of a replay, and the same costs as a policy knows them beforehand.

    Args:
      most_context: tokens of a row beyond which more context costs nothing; None: the longest
        context that was measured.
    """
    lines: dict[Bucket, Any] = {}
    for record in measured["steps"]:
        if record.get("num_behind"):
            continue
        bucket = Bucket(*(record[name] for name in Bucket._fields))
        lines.setdefault(bucket, []).append((record["context_tokens"], record["step_s"]))

    def step_s(bucket: Bucket, context: float) -> float:
        # A line through what was measured, beyond it too.
        (short, short_s), (long, long_s) = sorted(lines[bucket])
        slope = (long_s - short_s) / (long - short)
        return max(short_s + slope * (context - short), short_s / 2)

    policy_knows = StepCosts()
    policy_knows.add_records(measured["steps"])
    has = lambda bucket: bucket in lines
    contexts = {step["context_tokens"] / step["rows"] for step in measured["steps"]}
    longest = most_context or max(contexts)
    catch_up_s = measured["catch_up_s"]
    row_buckets = measured.get("row_buckets", ROW_BUCKETS)
    costs = Costs(step_s, catch_up_s, row_buckets, has, int(longest))
    return costs, policy_knows


def depths_of(measured: dict[str, Any]) -> list[int]:
    """Returns the values of K whose steps were measured, ascending, 0 among them."""
    return sorted({step["num_speculative_tokens"] for step in measured["steps"]})


def goodput(measured: dict[str, Any], known: StepCosts | None = None, **options: Any) -> Goodput:
    """Returns the policy over the values of K that were measured."""
    depths = depths_of(measured)
    return Goodput(depths[-1], known, depths=depths[1:], **options)


def steady(measured: dict[str, Any], batch: int, rate: float) -> dict[str, Any]:
    """Replays a load that stays: the policy against every K, learning cold and calibrated."""
    workload = Workload(np.full(batch, TOKENS), np.full(batch, rate), context=CONTEXT)
    costs, known = costs_of(measured)
    fixed = {k: Replay(workload, costs, Fixed(k)).run() for k in depths_of(measured)}
    best = min(fixed, key=lambda k: fixed[k].seconds)
    own = {"batch": batch, "acceptance": rate, "best_k": best}
    own["best_s"] = fixed[best].seconds
    for name, policy in (("cold", goodput(measured)), ("calibrated", goodput(measured, known))):
        ran = Replay(workload, costs, policy, clock=Clock(1, NOISE)).run()
        speed = ran.tokens_per_second(BURN_IN_STEPS)
        own |= {
            f"{name}_of_best": speed / fixed[best].tokens_per_second(BURN_IN_STEPS),
            f"{name}_of_none": speed / fixed[0].tokens_per_second(BURN_IN_STEPS),
            f"{name}_lost_in_burn_in_s": _burn_in_loss(ran, fixed[best]),
            f"{name}_whole_of_best": fixed[best].seconds / ran.seconds,
        }
    return own


def short_generations(
    measured: dict[str, Any], batch: int, rate: float, seeds: int = SHORT_SEEDS
) -> dict[str, Any]:
    """Replays many short generations under a policy that learns cold, on a disturbed clock."""
    costs, _ = costs_of(measured)
    texts = [
        Workload(np.full(batch, SHORT_TOKENS), np.full(batch, rate), CONTEXT, seed=seed)
        for seed in range(3)
    ]
    fixed = {
        k: sum(Replay(text, costs, Fixed(k)).run().seconds for text in texts)
        for k in depths_of(measured)
    }
    best = min(fixed, key=lambda k: fixed[k])
    shares = []
    for seed in range(seeds):
        policy, clock = goodput(measured), Clock(seed, **SHORT_CLOCK)
        seconds = []
        for number in range(SHORT_BURN_IN + SHORT_COUNTED):
            text = texts[number % len(texts)]
            run = Replay(text, costs, policy, clock=clock, first_request=number * batch).run()
            seconds.append(run.seconds)
        counted = sum(seconds[SHORT_BURN_IN:]) / SHORT_COUNTED
        shares.append(fixed[best] / len(texts) / counted)
    return {
        "batch": batch,
        "acceptance": rate,
        "best_k": best,
        "of_best": float(np.mean(shares)),
        "of_best_at_least": float(min(shares)),
    }


def _burn_in_loss(ran: Replay, best: Replay) -> float:
    """Returns the seconds by which the first steps took longer than the best K for as many
    tokens."""
    steps = np.cumsum([burst.num_steps for burst in ran.bursts])
    first = ran.bursts[: int(np.searchsorted(steps, BURN_IN_STEPS)) + 1]
    seconds, tokens = (
        sum(getattr(burst, name) for burst in first) for name in ("seconds", "num_tokens")
    )
    ends = np.cumsum([[burst.num_tokens, burst.seconds] for burst in best.bursts], axis=0)
    with_start = np.concatenate([np.zeros((1, 2)), ends])
    return seconds - float(np.interp(tokens, with_start[:, 0], with_start[:, 1]))


def heavy_tailed(rows: int = 32, seed: int = 0) -> np.ndarray:
    """Returns output lengths like those of a rollout: most short, a few very long."""
    rng = np.random.default_rng(seed)
    lengths = 150 * (1 + rng.pareto(1.1, rows))
    return np.sort(lengths.astype(int).clip(max=8000))


def ramp(measured: dict[str, Any], rate: float) -> tuple[dict[str, Any], dict[str, Replay]]:
    """Replays a batch that drains and is not refilled."""
    lengths = heavy_tailed()
    workload = Workload(lengths, np.full(len(lengths), rate), context=CONTEXT)
    costs, known = costs_of(measured)
    depths = depths_of(measured)
    runs = {f"K = {k}": Replay(workload, costs, Fixed(k)).run() for k in depths}
    policy = goodput(measured, known)
    runs["goodput"] = Replay(workload, costs, policy, clock=Clock(1, NOISE)).run()
    oracle = Oracle(workload, costs, depths)
    runs["oracle"] = Replay(workload, costs, oracle).run()
    seconds = {name: run.seconds for name, run in runs.items()}
    best = min(seconds[f"K = {k}"] for k in depths)
    best_drafting = min(seconds[f"K = {k}"] for k in depths if k)
    figures = {
        "acceptance": rate,
        "seconds": seconds,
        "of_best_k": best / seconds["goodput"],
        "of_best_k_above_0": best_drafting / seconds["goodput"],
        "oracle_of_best_k": best / seconds["oracle"],
        "oracle_of_best_k_above_0": best_drafting / seconds["oracle"],
    }
    return figures, runs


def series(measured: dict[str, Any], lengths: str, rates: str) -> dict[str, Any]:
    """Replays batches that drain, one after the other, under one policy and under every K."""
    costs, known = costs_of(measured)
    policy, clock = goodput(measured, known), Clock(1, NOISE)
    depths = depths_of(measured)
    seconds = dict.fromkeys(["goodput", *(f"K = {k}" for k in depths)], 0.0)
    for number in range(SERIES_RAMPS):
        rng = np.random.default_rng(number)
        drawn = SERIES_LENGTHS[lengths](rng, 32).astype(int).clip(16, 8000)
        workload = Workload(drawn, SERIES_RATES[rates](rng, 32), CONTEXT, number)
        first = number * workload.rows
        ran = Replay(workload, costs, policy, clock=clock, first_request=first).run()
        seconds["goodput"] += ran.seconds
        for k in depths:
            seconds[f"K = {k}"] += Replay(workload, costs, Fixed(k)).run().seconds
    fixed = {k: seconds[f"K = {k}"] for k in depths}
    return {
        "lengths": lengths,
        "acceptance": rates,
        "seconds": seconds,
        "best_k": min(depths, key=fixed.__getitem__),
        "of_best_k": min(fixed.values()) / seconds["goodput"],
        "of_best_k_above_0": min(fixed[k] for k in depths if k) / seconds["goodput"],
    }


def mixed(measured: dict[str, Any], context: int, batch: int = 32) -> dict[str, Any]:
    """Replays a batch of which half copies and half is random, rows of `context` tokens each."""
    rates = np.where(np.arange(batch) % 2, 0.9, 0.1)
    workload = Workload(np.full(batch, TOKENS), rates, context=CONTEXT)
    speeds = {}
    for name in ("ranked", "one K for all"):
        costs, known = costs_of(measured, context)
        policy = goodput(measured, known, ranks=name == "ranked")
        run = Replay(workload, costs, policy, clock=Clock(1, NOISE)).run()
        speeds[name] = _full_batch_speed(run)
    depths = depths_of(measured)
    for k in depths:
        run = Replay(workload, costs_of(measured, context)[0], Fixed(k)).run()
        speeds[f"K = {k}"] = _full_batch_speed(run)
    best = max(speeds[f"K = {k}"] for k in depths)
    return {
        "batch": batch,
        "context": context,
        "tokens_per_second": speeds,
        "ranked_over_one_k": speeds["ranked"] / speeds["one K for all"],
        "ranked_over_best_fixed_k": speeds["ranked"] / best,
    }


def _full_batch_speed(run: Replay) -> float:
    """Returns the tokens per second while all rows ran."""
    full = [b for b in run.bursts if b.num_rows == run.workload.rows]
    return sum(b.num_tokens for b in full) / sum(b.seconds for b in full)


def draw_ramp(runs: dict[str, Replay], path: Path) -> None:
    """Draws rows and K of a batch that drains, and when each policy is done."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    bursts = runs["goodput"].bursts
    at = [burst.at_s for burst in bursts]
    left.step(at, [b.num_rows for b in bursts], where="post", color="tab:gray")
    left.set(xlabel="seconds, replayed", ylabel="rows that decode", ylim=(0, None))
    other = left.twinx()
    depths = [b.decision.num_speculative_tokens for b in bursts]
    other.step(at, depths, where="post", color="tab:blue")
    other.set_ylabel("K", color="tab:blue")
    whole_ticks(other.yaxis)
    left.set_title("goodput: K rises as rows drain")
    names = list(runs)
    colors = ["tab:blue" if name == "goodput" else "tab:gray" for name in names]
    right.barh(names, [runs[name].seconds for name in names], color=colors)
    right.set(xlabel="seconds until the last row is done", title="against every K")
    right.invert_yaxis()
    figure.savefig(path, dpi=120)


def run(costs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the figures of all replays, and draws."""
    document: dict[str, Any] = {"costs": costs, "replay": {}}
    for name, measured in costs.items():
        document["replay"][name] = {
            "mixed": [mixed(measured, context) for context in (CONTEXT, LONG_CONTEXT)]
        }
        if len(measured.get("row_buckets", ROW_BUCKETS)) < len(ROW_BUCKETS):
            continue
        ramps = [ramp(measured, rate) for rate in RAMP_ACCEPTANCE]
        draw_ramp(ramps[-1][1], folder / f"scheduling_ramp_{name.replace(' ', '_')}.png")
        document["replay"][name] |= {
            "tokens": TOKENS,
            "context": CONTEXT,
            "depths": depths_of(measured),
            "steady": [steady(measured, batch, rate) for batch in BATCHES for rate in ACCEPTANCE],
            "short": {
                "tokens": SHORT_TOKENS,
                "burn_in": SHORT_BURN_IN,
                "counted": SHORT_COUNTED,
                "seeds": SHORT_SEEDS,
                "clock": SHORT_CLOCK,
                "runs": [
                    short_generations(measured, batch, rate)
                    for batch in SHORT_BATCHES
                    for rate in SHORT_ACCEPTANCE
                ],
            },
            "ramp": [figures for figures, _ in ramps],
            "series_ramps": SERIES_RAMPS,
            "series": [
                series(measured, lengths, rates)
                for lengths in SERIES_LENGTHS
                for rates in SERIES_RATES
            ],
        }
    return document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling")
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder, made where it is missing"
    )
    parser.add_argument("--costs", type=Path, help="a scheduling.json of before")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    environment, costs = measuring.environment(), {}
    if options.costs:
        before = json.loads(options.costs.read_text())
        environment, costs = before["environment"], before["costs"]
    compilation_cache.enable()
    for name in options.pairs:
        if name in costs:
            continue
        print(f"measuring the steps of the {name} pair", file=sys.stderr)
        target, drafter, row_buckets = PAIRS[name]
        if drafter not in ("demo", "ngram"):
            drafter = model(drafter)
        costs[name] = measure_costs(model(target), drafter, row_buckets, options.rounds)
        costs[name]["environment"] = measuring.environment()
    replayed_with = {
        "commit": commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    document = {"environment": environment, "replayed_with": replayed_with}
    document |= run(costs, options.out)
    path = options.out / "scheduling.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
