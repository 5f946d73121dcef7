"""`specjax bench --quick`: measures the overhead of decoding in a few minutes.

Every figure is a ratio of medians within this run; the README gives the target of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cli.bench import bare, embedded, measuring
from specjax.cli.bench.calibrate import StepTimer
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.configs.models import SHAPES
from specjax.decode.bucket import Bucket
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.decode.state import DecodeState
from specjax.drafters.base import Draft, Drafter, DrafterContext, DrafterSpec
from specjax.drafters.spec import NoDrafter
from specjax.models import llama
from specjax.types import DecoderParams, Proposal

BURST_STEPS = 32
PAGE_SIZE = 16
WRONG_K = 4


@dataclasses.dataclass(frozen=True)
class WrongDrafter(DrafterSpec):
    """Proposes the highest token ids; under random weights they are always wrong."""

    def build(self, context: DrafterContext) -> Drafter:
        def draft(params, state, decode_state, num_tokens) -> Draft:
            del params
            rows = decode_state.history.shape[0]
            token_ids = jnp.full(
                (rows, context.num_speculative_tokens), SHAPES["bench_60m"].vocab_size - 1
            )
            return Draft(
                Proposal(token_ids=token_ids, num_tokens=num_tokens),
                state,
                decode_state.cache.lengths,
            )

        return Drafter(draft)


class Decoding:
    """Rows that decode greedily, BURST_STEPS steps per call, each from the same place."""

    def __init__(
        self,
        params: llama.Params,
        *,
        rows: int,
        context: int,
        num_pages: int | None = None,
        drafter: Any = None,  # a DrafterSpec, or anything with its build()
        num_speculative_tokens: int = 0,
    ):
        pages_per_row = -(-(context + BURST_STEPS * (1 + num_speculative_tokens) + 2) // PAGE_SIZE)
        sizes = Sizes(
            rows=rows,
            page_size=PAGE_SIZE,
            num_pages=num_pages or rows * pages_per_row,
            pages_per_row=pages_per_row,
            burst_steps=BURST_STEPS,
        )
        config = DecoderConfig(
            target=SHAPES["bench_60m"],
            drafter=drafter or NoDrafter(),
            sizes=sizes,
            engine=EngineConfig(),
        )
        sampling = SamplingParams(temperature=0, max_tokens=sizes.max_length, ignore_eos=True)
        self._timer = StepTimer(
            Decoder(config), DecoderParams(params), sampling, rule=0, num_steps=BURST_STEPS
        )
        self._bucket, self._context = Bucket(rows, num_speculative_tokens), context

    def __call__(self) -> Any:
        """Runs one burst."""
        return self._timer.run(self._bucket, self._context)

    @property
    def state(self) -> DecodeState:
        """The state that each call begins with."""
        return self._timer.at(self._context)

    @property
    def num_committed(self) -> int:
        """Returns the tokens of the last call."""
        return int(np.asarray(self._timer.reports[self._bucket].num_committed).sum())

    @property
    def temp_bytes(self) -> int:
        """Returns the bytes that XLA reports for the burst besides arguments and results."""
        burst = self._timer.decoder.compiled_burst(self._bucket.num_speculative_tokens)
        return burst.memory_analysis().temp_size_in_bytes


def run(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns all figures by name; `say` is told what is being done."""
    config = SHAPES["bench_60m"]
    params = llama.init(jax.random.key(0), config)
    figures: dict[str, Any] = {
        "environment": measuring.environment(),
        "rounds": rounds,
        "burst_steps": BURST_STEPS,
    }
    say("batch 1 against memory bandwidth")
    figures |= batch_one(params, rounds)
    say("batch 8 against its matmuls")
    figures |= batch_eight(params, rounds)
    say("size of the page pool")
    figures |= pool_size(params, rounds)
    say("a drafter that is always wrong")
    figures |= wrong_drafts(params, rounds)
    say("the embedded pair on held-out files")
    figures |= embedded.speculation(rounds)
    return figures


def batch_one(params: llama.Params, rounds: int) -> dict[str, float]:
    """Plain decoding of one row against reading the weights once per token."""
    config = SHAPES["bench_60m"]
    decoding = Decoding(params, rows=1, context=128)
    sum_bytes = 2**30
    seconds = measuring.interleaved(
        {
            "read": measuring.read_bandwidth(sum_bytes),
            "plain": bare.matmul_chain(params, 1, BURST_STEPS),
            "linear": bare.matmul_chain(params, 1, BURST_STEPS, form="linear"),
            "loop": bare.forward_loop(params, config, decoding.state, BURST_STEPS),
            "burst": decoding,
        },
        rounds,
    )
    weight_bytes = bare.matmul_bytes(params)
    by_sum = sum_bytes / measuring.median(seconds["read"])
    by_plain, by_linear = (
        BURST_STEPS * weight_bytes / measuring.median(seconds[form]) for form in ("plain", "linear")
    )
    bandwidth = max(by_sum, by_plain, by_linear)
    step_s = measuring.median(seconds["burst"]) / BURST_STEPS
    return {
        "read_bandwidth_bytes_per_s": by_sum,
        "matmul_bandwidth_bytes_per_s": by_plain,
        "linear_bandwidth_bytes_per_s": by_linear,
        "weight_bytes_per_step": weight_bytes,
        "batch_1_step_s": step_s,
        "batch_1_fraction_of_bandwidth": weight_bytes / bandwidth / step_s,
        "burst_over_bare_loop": measuring.ratio(seconds["burst"], seconds["loop"]),
    }


def batch_eight(params: llama.Params, rounds: int) -> dict[str, float]:
    """Plain decoding of eight rows at a context of 256 against their matmuls alone."""
    decoding = Decoding(params, rows=8, context=256 - BURST_STEPS // 2)
    config = SHAPES["bench_60m"]
    seconds = measuring.interleaved(
        {
            "plain": bare.matmul_chain(params, 8, BURST_STEPS),
            "linear": bare.matmul_chain(params, 8, BURST_STEPS, form="linear"),
            "burst": decoding,
            "loop": bare.forward_loop(params, config, decoding.state, BURST_STEPS),
        },
        rounds,
    )
    return {
        "batch_8_step_s": measuring.median(seconds["burst"]) / BURST_STEPS,
        "batch_8_fraction_of_matmuls": measuring.ratio(seconds["plain"], seconds["burst"]),
        "batch_8_fraction_of_linear": measuring.ratio(seconds["linear"], seconds["burst"]),
        "batch_8_burst_over_bare_loop": measuring.ratio(seconds["burst"], seconds["loop"]),
    }


def pool_size(params: llama.Params, rounds: int) -> dict[str, float]:
    """The same step over a pool of 64 and of 4,096 pages."""
    small, large = (Decoding(params, rows=1, context=128, num_pages=n) for n in (64, 4096))
    seconds = measuring.interleaved({"small": small, "large": large}, rounds)
    return {
        "pages_4096_over_64_seconds": measuring.ratio(seconds["large"], seconds["small"]),
        "pages_64_temp_bytes": small.temp_bytes,
        "pages_4096_temp_bytes": large.temp_bytes,
    }


def wrong_drafts(params: llama.Params, rounds: int) -> dict[str, float]:
    """Speculation with no accepted draft token, against its verification alone."""
    plain = Decoding(params, rows=1, context=128)
    wrong = Decoding(
        params,
        rows=1,
        context=128,
        drafter=WrongDrafter(),
        num_speculative_tokens=WRONG_K,
    )
    seconds = measuring.interleaved(
        {
            "plain": plain,
            "wrong": wrong,
            "one": bare.matmul_chain(params, 1, BURST_STEPS, form="linear"),
            "five": bare.matmul_chain(params, 1 + WRONG_K, BURST_STEPS, form="linear"),
        },
        rounds,
    )
    assert wrong.num_committed == BURST_STEPS, "a draft meant to be wrong was right"
    return {
        "wrong_drafts_over_plain": measuring.ratio(seconds["wrong"], seconds["plain"]),
        "matmuls_of_5_tokens_over_1": measuring.ratio(seconds["five"], seconds["one"]),
    }
