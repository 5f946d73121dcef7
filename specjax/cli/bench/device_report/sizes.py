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
    """The shapes of a report; by default those of an accelerator."""

    name: str
    # Examples of each op and implementation to compare, of which a kernel compiles for seconds;
    # None for all.
    num_examples: int | None = 12
    rounds: int = 5  # repetitions of each measurement, beside the one that compiles
    # Shapes of attention to time: heads, rows, tokens of context per row, nodes per row.
    heads: tuple[Heads, ...] = (HEADS_1B, HEADS_8B)
    kernel_rows: tuple[int, ...] = (1, 32)
    kernel_contexts: tuple[int, ...] = (2048, 8192)
    kernel_nodes: tuple[int, ...] = (1, 5)
    page_size: int = 128  # tokens of a page for the kernels' times
    # The embedded pair: rows, names of MODES, tokens of each text, and the calls after which the
    # goodput policy is measured.
    batches: tuple[int, ...] = (1, 8, 32, 64)
    modes: tuple[str, ...] = MODES
    new_tokens: int = 128
    learning_calls: int = 8
    # Models with random weights: rows and K of their steps, tokens of context of each row, and the
    # steps that are timed at once, which their dispatch is spread over.
    pairs: tuple[Pair, ...] = (
        Pair("llama_3_2_1b", NGRAM),
        Pair("llama_3_1_8b", "llama_3_2_1b"),
    )
    model_batches: tuple[int, ...] = (1, 64, 8, 32)  # the ends first: time may run out
    depths: tuple[int, ...] = (0, 1, 2, 4)
    step_context: int = 2048
    num_steps: int = 32
    prompts: tuple[int, ...] = (512, 2048, 8192)  # tokens of prompts to prefill
    memory_bytes: int = 8 * 10**9  # of a device that does not report its memory, for its plan
    product_size: int = 4096  # of square matrices whose product is timed, and of twice that
    copied_bytes: int = 2**28  # of the array whose copy is timed
    read_bytes: int = 2**30  # read at once to measure a CPU's memory


FULL = ReportSize(name="full")
SMALL = ReportSize(
    name="small",
    num_examples=4,
    rounds=2,
    heads=(HEADS_1B,),
    kernel_rows=(1, 8),
    kernel_contexts=(512,),
    page_size=16,
    batches=(1, 8),
    new_tokens=64,
    learning_calls=6,
    pairs=(Pair("bench_60m", "bench_60m_draft"),),
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
