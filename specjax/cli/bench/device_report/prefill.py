"""The stage "prefill": tokens per second of prompts, against the device's products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from specjax.cli.bench import measuring
from specjax.cli.bench.calibrate import StepTimer
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Results, Stage
from specjax.cli.bench.device_report.random_models import config_of, setup_of
from specjax.cli.bench.device_report.sizes import NO_DRAFTS, Pair, ReportSize
from specjax.cli.table import Row, number, percent
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.decoder import Decoder
from specjax.models.loading import default_dtype
from specjax.paged.kv_cache import own_pages
from specjax.paged.work import model_work
from specjax.types import DecoderParams


def cases(size: ReportSize, platform: str) -> list[Case]:
    del platform
    targets = dict.fromkeys(pair.target for pair in size.pairs)
    return [
        Case(f"{target}, {tokens} tokens", functools.partial(measure, target, tokens))
        for target in targets
        for tokens in size.prompts
    ]


def measure(target: str, tokens: int, context: Context) -> dict[str, Any]:
    """Returns tokens per second of one prompt, its pieces in turn, and its share of the peak."""
    peaks = context.peaks  # without them nothing need be timed
    most = config_of(target).max_position_embeddings
    if tokens > most:
        raise LeftOut(f"{target} takes {most} tokens.")
    pair = Pair(target, NO_DRAFTS)
    engine = EngineConfig(max_rows=1, max_context=tokens + 2)
    setup = setup_of(context, pair, engine, 0)
    decoder = setup.decoder(setup.standing_sizes(), [])
    prompt = Prompt(decoder, setup.params, tokens)
    seconds = measuring.interleaved({"prompt": prompt}, context.size.rounds)["prompt"]
    took, flops = measuring.median(seconds), _flops(target, prompt.counts)
    return {
        "target": target,
        "tokens": tokens,
        "pieces": len(prompt.counts),
        "piece_tokens": prompt.counts[0],
        "dtype": default_dtype().name,
        "seconds": took,
        "tokens_per_s": tokens / took,
        "flops_per_s": flops / took,
        "of_peak": flops / took / peaks.flops_per_s,
        "peak": peaks.source,
    }


class Prompt:
    """A prompt that is fed in the largest pieces of its decoder, from an empty row each time."""

    def __init__(self, decoder: Decoder, params: DecoderParams, tokens: int):
        self.params = params
        self.bucket = decoder.prompt_sizes.best(tokens)
        starts = range(0, tokens, self.bucket)
        self.counts = [min(self.bucket, tokens - start) for start in starts]
        sampling = SamplingParams(temperature=1.0, ignore_eos=True)
        self.timer = StepTimer(decoder, params, sampling)

    def __call__(self) -> Any:
        decoder, state = self.timer.decoder, self.timer.at(0)
        table = own_pages(decoder.sizes.rows, decoder.sizes.pages_per_row)
        row_ids = np.zeros(1, np.int32)
        done: jax.Array | None = None
        for count in self.counts:
            state, done = decoder.prefill(
                self.params,
                state,
                table,
                row_ids,
                np.full(1, count, np.int32),
                num_tokens=self.bucket,
            )
        self.timer.state = state
        return done


def _flops(target: str, counts: list[int]) -> float:
    """Returns the operations of all pieces, of which each sees those before it."""
    work, total, before = model_work(config_of(target), default_dtype(), 1), 0.0, 0
    for count in counts:
        total += work.of(1, count, before + count // 2).flops
        before += count
    return total


def table(results: Results) -> list[Row]:
    return [
        {
            "model": found["target"],
            "tokens": found["tokens"],
            "pieces": f"{found['pieces']} of {found['piece_tokens']}",
            "seconds": number(found["seconds"]),
            "tokens/s": number(found["tokens_per_s"], 4),
            "TFLOP/s": number(found["flops_per_s"] / 1e12),
            "of the products": percent(found["of_peak"]),
        }
        for found in results.values()
    ]


STAGE = Stage(
    "prefill",
    0.10,
    cases,
    "Prefill",
    table,
    "One prompt, in the largest pieces that the engine feeds. Above 100 % its products are "
    "faster than those of the square matrices that were timed.",
)
