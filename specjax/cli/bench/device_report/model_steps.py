"""The stage "models": steps of models with random weights against the roofline.

Acceptance depends on trained weights, which random ones have not: tokens per second are computed
from measured seconds and an assumed rate, and marked so. Only steps that drafted K tokens in every
row have such a figure.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from specjax.cli.bench import measuring
from specjax.cli.bench.calibrate import StepTimer
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut
from specjax.cli.bench.device_report.random_models import misfit, setup_of
from specjax.cli.bench.device_report.sizes import Pair, ReportSize
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.decode.decoder import Decoder
from specjax.models.loading import default_dtype
from specjax.paged.work import model_work
from specjax.planning.roofline import expected_tokens, roofline_step_s

SYNTHETIC_RATES = (0.6, 0.8)  # a draft token is accepted with this probability


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
    problem = misfit(pair, context.device, engine)
    if problem is not None:
        raise LeftOut(problem)
    setup = setup_of(context.models, pair, context.device, engine, deepest)
    decoder = NotedBursts(setup.decoder(setup.standing_sizes(), []))
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    timer = StepTimer(cast(Decoder, decoder), setup.params, sampling, num_steps=size.num_steps)
    for depth in size.depths:  # compiled at the same time
        timer.prepare(Bucket(rows, depth))
    tokens = min(size.step_context, timer.longest_context(deepest))
    contenders = {
        depth: functools.partial(timer.run, Bucket(rows, depth), tokens) for depth in size.depths
    }
    seconds = measuring.interleaved(contenders, size.rounds)
    works = _works(pair, setup)
    sizes = decoder.sizes
    return {
        "target": pair.target,
        "drafter": pair.drafter,
        "rows": rows,
        "context": tokens,
        "dtype": default_dtype().name,
        "page_size": sizes.page_size,
        # Rows share pages where those of all do not fit: their reads may then be cached.
        "shares_pages": sizes.num_pages < rows * sizes.pages_per_row,
        "peak": peaks.source,
        "steps": [
            _step(
                depth,
                measuring.median(seconds[depth]) / timer.num_steps,
                rows,
                tokens,
                works,
                context,
                drafted=decoder.drafted_per_row(depth),
            )
            for depth in size.depths
        ],
    }


class NotedBursts:
    """A decoder that keeps what its last burst of each K drafted."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._last: dict[int, tuple[Any, Any]] = {}  # by K: num_drafted, steps that ran

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def burst(self, *arguments: Any, num_speculative_tokens: int, **options: Any) -> Any:
        state, info, num_steps = self._decoder.burst(
            *arguments, num_speculative_tokens=num_speculative_tokens, **options
        )
        self._last[num_speculative_tokens] = info.num_drafted, num_steps
        return state, info, num_steps

    def drafted_per_row(self, num_speculative_tokens: int) -> float:
        """Returns the mean of draft tokens per row and step, of the last burst of this K."""
        num_drafted, num_steps = self._last[num_speculative_tokens]
        return float(num_drafted[: int(num_steps)].mean())


def _works(pair: Pair, setup: Any) -> tuple[Any, list[Any]]:
    """Returns the work of the target and of each model that drafts."""
    config, dtype = setup.target.config, default_dtype()
    return model_work(config, dtype, 1), list(setup.drafter.work(config, dtype))


def _step(
    depth: int,
    step_s: float,
    rows: int,
    tokens: int,
    works: tuple[Any, list[Any]],
    context: Context,
    *,
    drafted: float,
) -> dict[str, Any]:
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
