"""How much a report measures: everything on an accelerator, less on a CPU."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

NGRAM, NO_DRAFTS = "ngram", "none"
MODES = ("K = 0", "K = 2", "K = 4", "goodput")  # the first is plain decoding


def counted(count: float, noun: str) -> str:
    """Returns a count and its noun, as "1 token" and "2 tokens"."""
    return f"{count:g} {noun}" + ("" if count == 1 else "s")


class Pair(NamedTuple):
    """A target and its drafter, by names of `specjax.configs.models`, or "tiny"."""

    target: str
    drafter: str  # or NGRAM, or NO_DRAFTS

    def __str__(self) -> str:
        return f"{self.target} + {self.drafter}"


class Heads(NamedTuple):
    """The attention of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


HEADS_1B = Heads("llama_3_2_1b", 32, 8, 64)
HEADS_8B = Heads("llama_3_1_8b", 32, 8, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSize:
    """The shapes of a report.

    Attributes:
      num_examples: examples of each op and implementation to compare; None for all.
      rounds: repetitions of each measurement, beside the one that compiles.
      heads, kernel_rows, kernel_contexts, kernel_nodes: shapes of attention to time; tokens of
        context per row, and nodes per row.
      page_size: tokens of a page for the kernels' times.
      batches: rows of the embedded pair.
      modes: names of `MODES`.
      new_tokens: of each of its texts.
      learning_calls: after which the goodput policy is measured.
      pairs: models with random weights.
      planned: those whose memory is planned.
      model_batches: rows of their steps.
      depths: K of their steps.
      step_context: tokens of each row in their steps.
      num_steps: steps that are timed at once; their dispatch is spread over them.
      prompts: tokens of prompts to prefill.
      memory_bytes: of a device that does not report its memory, for its plan.
    """

    name: str
    num_examples: int | None
    rounds: int
    heads: tuple[Heads, ...]
    kernel_rows: tuple[int, ...]
    kernel_contexts: tuple[int, ...]
    kernel_nodes: tuple[int, ...]
    page_size: int
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    new_tokens: int
    learning_calls: int
    pairs: tuple[Pair, ...]
    planned: tuple[Pair, ...]
    model_batches: tuple[int, ...]
    depths: tuple[int, ...]
    step_context: int
    num_steps: int
    prompts: tuple[int, ...]
    memory_bytes: int
    product_size: int  # of square matrices whose product is timed, beside those twice as large
    copied_bytes: int  # of the array whose copy is timed
    read_bytes: int  # read at once to measure a CPU's memory


FULL = ReportSize(
    name="full",
    num_examples=12,  # a kernel compiles for seconds
    rounds=5,
    heads=(HEADS_1B, HEADS_8B),
    kernel_rows=(1, 32),
    kernel_contexts=(2048, 8192),
    kernel_nodes=(1, 5),
    page_size=128,
    batches=(1, 8, 32, 64),
    modes=MODES,
    new_tokens=128,
    learning_calls=8,
    pairs=(Pair("llama_3_2_1b", NGRAM), Pair("llama_3_1_8b", "llama_3_2_1b")),
    planned=(Pair("llama_3_2_1b", NGRAM), Pair("llama_3_1_8b", "llama_3_2_1b")),
    model_batches=(1, 64, 8, 32),  # the ends first: time may run out
    depths=(0, 1, 2, 4),
    step_context=2048,
    num_steps=32,
    prompts=(512, 2048, 8192),
    memory_bytes=8 * 10**9,
    product_size=4096,
    copied_bytes=2**28,
    read_bytes=2**30,
)
SMALL = ReportSize(
    name="small",
    num_examples=4,
    rounds=2,
    heads=(HEADS_1B,),
    kernel_rows=(1, 8),
    kernel_contexts=(512,),
    kernel_nodes=(1, 5),
    page_size=16,
    batches=(1, 8),
    modes=MODES,
    new_tokens=64,
    learning_calls=6,
    pairs=(Pair("bench_60m", "bench_60m_draft"),),
    planned=(Pair("bench_60m", "bench_60m_draft"),),
    model_batches=(1, 8),
    depths=(0, 4),
    step_context=256,
    num_steps=8,
    prompts=(256, 1024),
    memory_bytes=2 * 10**9,
    product_size=1024,
    copied_bytes=2**27,
    read_bytes=2**28,
)
TINY = ReportSize(
    name="tiny",
    num_examples=1,
    rounds=1,
    heads=(Heads("tiny", 4, 2, 64),),
    kernel_rows=(2,),
    kernel_contexts=(64,),
    kernel_nodes=(1,),
    page_size=16,
    batches=(2,),
    modes=("K = 0", "K = 2"),
    new_tokens=8,
    learning_calls=1,
    pairs=(Pair("tiny", NGRAM),),
    planned=(Pair("tiny", NGRAM),),
    model_batches=(2,),
    depths=(0, 2),
    step_context=64,
    num_steps=4,
    prompts=(64,),
    memory_bytes=10**9,
    product_size=256,
    copied_bytes=2**22,
    read_bytes=2**24,
)
SIZES = {size.name: size for size in (TINY, SMALL, FULL)}


def size_for(platform: str) -> ReportSize:
    """Returns the size that a platform can finish in the time of a report."""
    return SMALL if platform == "cpu" else FULL
