"""The stage "models": steps of models with random weights against the roofline.

Acceptance depends on trained weights, which random ones have not: tokens per second are computed
from measured seconds and an assumed rate, and marked so. Only steps that drafted K tokens in every
row have such a figure.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from specjax.cli.bench import measuring
from specjax.cli.bench.calibrate import StepTimer
from specjax.cli.bench.device_report.cases import Case, Context, Results, Stage
from specjax.cli.bench.device_report.random_models import setup_of
from specjax.cli.bench.device_report.sizes import NGRAM, Pair, ReportSize
from specjax.cli.table import Row, number, percent
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.models.loading import default_dtype
from specjax.paged.work import model_work
from specjax.planning.roofline import expected_tokens, roofline_step_s

SYNTHETIC_RATES = (0.6, 0.8)  # a draft token is accepted with this probability
SYNTHETIC = "(synthetic acceptance)"


def cases(size: ReportSize, platform: str) -> list[Case]:
    del platform
    return [
        Case(f"{pair}, batch {rows}", functools.partial(measure, pair, rows))
        for pair in size.pairs
        for rows in size.model_batches
    ]


def measure(pair: Pair, rows: int, context: Context) -> dict[str, Any]:
    """Returns seconds of a step at each K, measured and by the roofline."""
    peaks = context.peaks  # without them nothing need be timed
    size = context.size
    deepest = max(size.depths)
    room = size.num_steps * (1 + deepest) + 2
    engine = EngineConfig(
        max_rows=rows, max_context=size.step_context + room, burst_steps=size.num_steps
    )
    setup = setup_of(context, pair, engine, deepest)
    decoder = setup.decoder(setup.standing_sizes(), [])
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    timer = StepTimer(decoder, setup.params, sampling, num_steps=size.num_steps)
    buckets = [Bucket(rows, depth) for depth in size.depths]
    for bucket in buckets:  # compiled at the same time
        timer.prepare(bucket)
    tokens = min(size.step_context, timer.longest_context(deepest))
    contenders = {bucket: functools.partial(timer.run, bucket, tokens) for bucket in buckets}
    seconds = measuring.interleaved(contenders, size.rounds)
    config, dtype, sizes = setup.target.config, default_dtype(), decoder.sizes
    works = model_work(config, dtype, 1), list(setup.drafter.work(config, dtype))
    return {
        "target": pair.target,
        "drafter": pair.drafter,
        "rows": rows,
        "context": tokens,
        "dtype": dtype.name,
        "page_size": sizes.page_size,
        # Rows share pages where those of all do not fit: their reads may then be cached.
        "shares_pages": sizes.num_pages < rows * sizes.pages_per_row,
        "peak": peaks.source,
        "steps": [
            _step(
                bucket,
                measuring.median(seconds[bucket]) / timer.num_steps,
                tokens,
                works,
                context,
                drafted=float(timer.reports[bucket].num_drafted[: timer.num_steps].mean()),
            )
            for bucket in buckets
        ],
    }


def _step(
    bucket: Bucket,
    step_s: float,
    tokens: int,
    works: tuple[Any, list[Any]],
    context: Context,
    *,
    drafted: float,
) -> dict[str, Any]:
    """Returns the figures of a step.

    Args:
      tokens: of context of each row.
      works: of the target and of each model that drafts.
      drafted: tokens per row and step.
    """
    rows, depth = bucket.rows, bucket.num_speculative_tokens
    target, drafters = works
    least_s = roofline_step_s(
        target, drafters, context.peaks, rows=rows, num_speculative_tokens=depth, context=tokens
    )
    rates = SYNTHETIC_RATES if depth and drafted == depth else ()
    return {
        "num_speculative_tokens": depth,
        "drafted_per_row": drafted,
        "step_s": step_s,
        "roofline_s": least_s,
        "of_roofline": least_s / step_s,
        "plain_tokens_per_s": None if depth else rows / step_s,
        "synthetic_acceptance_tokens_per_s": {
            str(rate): rows * expected_tokens(rate, depth) / step_s for rate in rates
        },
    }


def table(results: Results) -> list[Row]:
    return [_row(found, step) for found in results.values() for step in found["steps"]]


def _row(found: Mapping[str, Any], step: Mapping[str, Any]) -> Row:
    depth, drafted = step["num_speculative_tokens"], step["drafted_per_row"]
    return {
        "models": f"{found['target']} + {found['drafter']}",
        "rows": f"{found['rows']}" + (", sharing pages" if found["shares_pages"] else ""),
        "context": found["context"],
        "K": f"{depth}" if drafted == depth else f"{depth} ({drafted:.2f} drafted)",
        "ms per step": number(1e3 * step["step_s"], 4),
        "roofline, ms": number(1e3 * step["roofline_s"]),
        "of the roofline": percent(step["of_roofline"]),
        "plain tokens/s": number(step["plain_tokens_per_s"], 4),
    } | {
        f"tokens/s at rate {rate} {SYNTHETIC}": number(speed, 4)
        for rate, speed in step["synthetic_acceptance_tokens_per_s"].items()
    }


STAGE = Stage(
    "models",
    0.25,
    cases,
    "Models with random weights",
    table,
    "Seconds of a step are measured. Random weights have no acceptance of their own: tokens "
    "per second of drafts follow from these seconds and an assumed rate for every draft "
    f"token, and are marked {SYNTHETIC}. Random text repeats nothing: beside {NGRAM}, rows "
    "draft K tokens of their text whether or not something matches.",
)
