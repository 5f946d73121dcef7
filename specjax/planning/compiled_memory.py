"""Estimates the memory of every step by compiling a few and extrapolating."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from pallas_kernels.tree_attention import pieces
from specjax.config.engine import EngineConfig
from specjax.decode.bucket import BURST, MIXED, PREFILL, standing_row_buckets
from specjax.decode.sizes import PromptShape
from specjax.models.base import ModelConfig
from specjax.models.layers import MOST_TOKENS_FROM_THE_LEFT
from specjax.paged.token_buckets import equal_chunk, round_up
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.layer_pattern import LayerCounts, layers_to_compile
from specjax.planning.memory_model import bytes_per_token, pages_ratio
from specjax.planning.pool_copies import (
    PLAIN,
    SPECULATING,
    PoolCopies,
    kinds_to_compile_twice,
    pool_copies,
    seen_per_page,
    step_kind,
    whole_arrays,
)
from specjax.planning.workspace_fit import (
    BucketMemory,
    StepShape,
    WorkspaceFit,
    fit_workspaces,
)

# Tokens of the pools that steps are compiled for: too many to fit into a chip's fast memory,
# where the compiler would produce other steps.
FEW_TOKENS, MORE_TOKENS = 65_536, 131_072


def burst_bucket(
    decoder: AbstractDecoder, num_speculative_tokens: int, num_rows: int | None = None
) -> StepShape:
    """Returns the sizes of a burst, by default of all rows."""
    sizes, engine = decoder.sizes, decoder.engine_config
    rows = num_rows or sizes.rows
    num_nodes = decoder.drafter.num_nodes(num_speculative_tokens)
    tokens = rows * num_nodes
    if decoder.config.max_drafts_per_shard is not None:
        tokens = min(rows + decoder.config.max_drafts_per_shard, tokens)
    vocab_size = decoder.target.vocab_size
    law_tokens = 0
    logit_tokens = _logit_tokens(tokens, vocab_size, engine)
    if decoder.config.rules and num_speculative_tokens:
        law_tokens = _law_tokens(rows, num_nodes, vocab_size, engine)
        logit_tokens = min(tokens, law_tokens)
    return StepShape(
        kind=BURST,
        rows=rows,
        tokens=_forward_tokens(tokens, engine),
        logit_tokens=logit_tokens,
        law_tokens=law_tokens,
        copied_rows=rows if rows < sizes.rows else 0,
        num_speculative_tokens=num_speculative_tokens,
    )


def prefill_bucket(decoder: AbstractDecoder, num_places: int, num_tokens: int) -> StepShape:
    """Returns the sizes of a prefill of num_tokens tokens of at most `num_places` prompts."""
    tokens = _forward_tokens(num_tokens, decoder.engine_config)
    return StepShape(kind=PREFILL, rows=num_places, tokens=tokens)


def mixed_bucket(
    decoder: AbstractDecoder, beside: PromptShape, num_speculative_tokens: int = 0
) -> StepShape:
    """Returns the sizes of a step of all rows at a K with prompts beside it."""
    decoding = burst_bucket(decoder, num_speculative_tokens)
    return dataclasses.replace(
        decoding,
        kind=MIXED,
        tokens=decoding.tokens + beside.num_tokens,
        prompt_tokens=beside.num_tokens,
        prompt_places=beside.places,
    )


def engine_buckets(
    decoder: AbstractDecoder, depths: Sequence[int], *, chooses_rows: bool = False
) -> list[StepShape]:
    """Returns every step that an engine may run.

    Args:
      depths: each K that its policy may choose, 0 included.
      chooses_rows: whether its policy chooses row buckets where none are named.
    """
    rows, engine = decoder.sizes.rows, decoder.engine_config
    named = engine.row_buckets
    if named is None:
        named = standing_row_buckets(rows) if chooses_rows else ()
    smaller = (b for b in named if b < rows)
    row_buckets = sorted({rows, *smaller})
    bursts = [burst_bucket(decoder, k, b) for b in row_buckets for k in depths]
    shapes = decoder.prompt_sizes.shapes(rows)
    prefills = [prefill_bucket(decoder, *shape) for shape in shapes]
    if not engine.mixed_prefill or engine.numerics == "invariant":
        return bursts + prefills
    return bursts + prefills + [mixed_bucket(decoder, s, k) for k in depths for s in shapes]


def sampled_buckets(buckets: Sequence[StepShape]) -> list[StepShape]:
    """Returns the buckets to compile.

    They are: bursts with the fewest and the most rows, at the smallest and the largest K (not
    those of one row, whose layout differs); every prefill, because they compile quickly and
    differ by more than their tokens; the largest mixed step.
    """
    bursts = [b for b in buckets if b.kind == BURST]
    ends = lambda values: {min(values), max(values)}
    rows = ends([b.rows for b in bursts if b.rows > 1] or [1])
    depths = ends([b.num_speculative_tokens for b in bursts])
    chosen = [b for b in bursts if b.rows in rows and b.num_speculative_tokens in depths]
    chosen += [b for b in buckets if b.kind == PREFILL]
    mixed = [b for b in buckets if b.kind == MIXED]
    largest = max(mixed, key=lambda b: (b.num_speculative_tokens, b.tokens), default=None)
    return chosen if largest is None else [*chosen, largest]


def compile_bucket(decoder: AbstractDecoder, bucket: StepShape) -> BucketMemory:
    """Compiles one step and returns its memory."""
    return BucketMemory.of(bucket, compiled(decoder, bucket).memory_analysis())


def compiled(decoder: AbstractDecoder, bucket: StepShape) -> jax.stages.Compiled:
    """Returns the executable of a bucket."""
    if bucket.kind == BURST:
        rows = bucket.rows if bucket.copied_rows else None
        return decoder.compile_burst(bucket.num_speculative_tokens, rows)
    if bucket.kind == PREFILL:
        return decoder.compile_prefill(bucket.rows, bucket.tokens)
    return decoder.compile_mixed(
        bucket.prompt_places, bucket.prompt_tokens, bucket.num_speculative_tokens
    )


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of a decoder's steps, in bytes of one chip.

    Attributes:
      samples: steps as compiled, with `compiled_layers` layers of the target
        and pages of FEW_TOKENS in all.
      buckets: every step, predicted for all layers, without copies of the pool.
      pages_ratio: bytes of pages as compiled / as counted, at least 1.
      copies: bytes of the pool that steps copy while they run.
      scratch_per_layer: most bytes that a layer adds to a step.
      code_per_layer: bytes that a layer adds to every step.
    """

    samples: tuple[BucketMemory, ...]
    buckets: tuple[BucketMemory, ...]
    fit: WorkspaceFit
    pages_ratio: float
    copies: PoolCopies
    compiled_layers: tuple[int, ...]
    num_executables: int
    scratch_per_layer: float
    code_per_layer: float
    warnings: tuple[str, ...] = ()


def compile_memory(
    make_decoder: Callable[[int, int], AbstractDecoder],
    target: ModelConfig,
    page_bytes: tuple[float, float],
    depths: Sequence[int],
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    *,
    chooses_rows: bool = False,
) -> CompiledMemory:
    """Compiles some steps of few layers, and extrapolates to every step with all layers.

    Args:
      make_decoder: (layers of the target, pages) to a decoder.
      target: the whole model. A step's bytes beside its arguments grow linearly with the periods
        of its layers' pattern (`layers_to_compile`).
      page_bytes: bytes of a page on one chip as counted: of one layer of the target, and of
        the whole drafter.
      depths: every K that may be chosen, 0 included.
      chooses_rows: as of `engine_buckets`.
    """
    num_layers, counts = target.num_layers, layers_to_compile(target)
    layers, is_few = counts.few, counts.few == target.num_layers
    page_size = make_decoder(layers, 1).sizes.page_size
    few_pages, most_pages = FEW_TOKENS // page_size, MORE_TOKENS // page_size
    decoder, larger = make_decoder(layers, few_pages), make_decoder(layers, most_pages)
    buckets = engine_buckets(decoder, depths, chooses_rows=chooses_rows)
    chosen = sampled_buckets(buckets)
    done, total = 0, len(chosen) + (1 if is_few else 3)

    def compile_one(decoder: AbstractDecoder, bucket: StepShape, why: str) -> BucketMemory:
        nonlocal done
        on_progress(f"compiling a {step_kind(bucket)}{why}", done, max(total, done + 1))
        done += 1
        return compile_bucket(decoder, bucket)

    samples = [compile_one(decoder, bucket, "") for bucket in chosen]
    # A burst of K = 0 compiles quickly, and passes the drafter's pages through.
    first = samples[0]
    again = compile_one(larger, first.bucket, " for a larger pool")
    more_pages = most_pages - few_pages
    found = bytes_per_token(first, again, more_tokens=more_pages * page_size)
    of_layer, of_drafter = page_bytes
    warnings: list[str] = []
    ratio = pages_ratio(found * page_size, of_layer * layers + of_drafter, warnings)
    seen = {PLAIN: seen_per_page(first, again, more_pages)}
    array_bytes = of_layer * ratio / 2  # a page's keys, or its values, of one layer
    copied = whole_arrays(seen[PLAIN], array_bytes)
    for few in kinds_to_compile_twice(samples):
        # On CPU all steps update the pool in place, or none does; elsewhere bursts may differ.
        is_first_look = step_kind(few.bucket) == SPECULATING and not _is_cpu(decoder)
        if is_first_look or any(whole_arrays(s, array_bytes) for s in seen.values()):
            many = compile_one(larger, few.bucket, " for a larger pool")
            seen[step_kind(few.bucket)] = seen_per_page(few, many, more_pages)
    layer = _Layer()
    if not is_few:
        compile_deeper = lambda bucket, num_pages, why: compile_one(
            make_decoder(counts.more, num_pages), bucket, f" of more layers{why}"
        )
        pools = few_pages, most_pages
        # The largest prompt step, because it compiles quickly.
        prefills = [sample for sample in samples if sample.bucket.kind == PREFILL]
        ends = first, max(prefills, key=lambda sample: sample.bucket.tokens)
        layer = _added_by_layer(compile_deeper, counts, pools, ends, copied, array_bytes)
    copies = pool_copies(
        seen,
        layer_bytes=of_layer * ratio,
        drafter_bytes=of_drafter * ratio,
        compiled_layers=layers,
        num_layers=num_layers,
        added_by_layer=layer.copied,
    )
    on_progress("compiled", done, done)
    beside = [copies.without(sample, few_pages) for sample in samples]
    fit = fit_workspaces(to_fit(beside), known_bend=_known_bend(decoder))
    by_bucket = {sample.bucket: sample for sample in beside}
    more_layers = num_layers - layers
    predicted = [
        _predicted(b, by_bucket.get(b), fit, layer.of(b) * more_layers, layer.code * more_layers)
        for b in buckets
    ]
    return CompiledMemory(
        samples=tuple(samples),
        buckets=tuple(never_below_smaller(predicted)),
        fit=fit,
        pages_ratio=ratio,
        copies=copies,
        compiled_layers=(layers,) if is_few else tuple(counts),
        num_executables=done,
        scratch_per_layer=max(map(layer.of, buckets)),
        code_per_layer=layer.code,
        warnings=tuple(warnings),
    )


class _Layer(NamedTuple):
    """Bytes that one more layer adds to a step."""

    scratch: float = 0.0  # without copies of the pool, in a step of `tokens`
    per_token: float = 0.0  # and for each token above them
    tokens: int = 0
    code: float = 0.0
    copied: float | None = None  # per page; None if not measured

    def of(self, bucket: StepShape) -> float:
        """Returns the bytes of scratch that one more layer adds to a step."""
        return self.scratch + self.per_token * max(bucket.tokens - self.tokens, 0)


def _added_by_layer(
    compile_deeper: Callable[[StepShape, int, str], BucketMemory],
    counts: LayerCounts,
    pools: tuple[int, int],
    ends: tuple[BucketMemory, BucketMemory],
    copied: float,
    array_bytes: float,
) -> _Layer:
    """Compiles two steps of more layers, and returns what each layer beyond the few added.

    Args:
      compile_deeper: (step, pages, suffix of the progress message) to the bytes of a step.
      counts: the layers of these steps, `more`, and of `ends`, `few`.
      pools: pages of the smaller pool, that of `ends`, and of the larger one.
      ends: steps of few and of many tokens with few layers.
      copied: bytes per page that these steps copy of the pool.
      array_bytes: bytes of a page in one array.
    """
    more = counts.more - counts.few
    few, many = pools
    first, largest = ends
    deeper, deep_copied = compile_deeper(first.bucket, few, ""), 0.0
    deeper_largest = compile_deeper(largest.bucket, few, "")
    if copied:
        larger = compile_deeper(first.bucket, many, " and a larger pool")
        per_page = seen_per_page(deeper, larger, many - few)
        deep_copied = whole_arrays(per_page, array_bytes)
    added = max(deep_copied - copied, 0.0) / more
    grown = (deeper.scratch_bytes - first.scratch_bytes) / more
    grown_largest = (deeper_largest.scratch_bytes - largest.scratch_bytes) / more
    more_tokens = largest.bucket.tokens - first.bucket.tokens
    return _Layer(
        scratch=max(grown - added * few, 0.0),
        per_token=max(grown_largest - grown, 0.0) / more_tokens if more_tokens > 0 else 0.0,
        tokens=first.bucket.tokens,
        code=max(deeper.code_bytes - first.code_bytes, 0) / more,
        copied=added,
    )


def to_fit(samples: Sequence[BucketMemory]) -> list[BucketMemory]:
    """Returns the samples that one line fits: without short prompts where longer ones are cut.

    Attention over prompts in pieces keeps scores of a few pieces, and over shorter prompts those
    of all rows, so that 63 tokens may take more than 1,024. Every prompt step is compiled: the fit
    is of other steps.
    """
    is_cut = lambda sample: pieces.pays(sample.bucket.rows, sample.bucket.tokens)
    prefills = [sample for sample in samples if sample.bucket.kind == PREFILL]
    if not any(map(is_cut, prefills)):
        return list(samples)
    return [one for one in samples if one.bucket.kind != PREFILL or is_cut(one)]


def never_below_smaller(memories: Sequence[BucketMemory]) -> list[BucketMemory]:
    """Returns the steps, each raised to the largest smaller step of its kind.

    A larger step needs at least the bytes of a smaller one; less is an error of the fit.
    """
    raised = []
    for memory in memories:
        smaller = [m.temp_bytes for m in memories if _is_within(m.bucket, memory.bucket)]
        raised.append(dataclasses.replace(memory, temp_bytes=max(smaller)))
    return raised


def _is_within(small: StepShape, large: StepShape) -> bool:
    """Returns whether a step is of the same kind as another and no larger in any size."""
    sizes = lambda b: (
        b.rows,
        b.tokens,
        b.logit_tokens,
        b.law_tokens,
        b.copied_rows,
        b.num_speculative_tokens,
    )
    pairs = zip(sizes(small), sizes(large))
    return small.kind == large.kind and all(own <= other for own, other in pairs)


def _predicted(
    bucket: StepShape,
    sample: BucketMemory | None,
    fit: WorkspaceFit,
    more_scratch: float,
    more_code: float,
) -> BucketMemory:
    """Returns a bucket's bytes, as compiled if it was, else predicted by the fit."""
    scratch = fit.scratch(bucket) if sample is None else sample.scratch_bytes
    code = fit.code_bytes.get(bucket.kind, 0) if sample is None else sample.code_bytes
    return BucketMemory(
        bucket=bucket,
        argument_bytes=0,
        output_bytes=0,
        temp_bytes=round(scratch + more_scratch),
        alias_bytes=0,
        code_bytes=round(code + more_code),
    )


def _known_bend(decoder: AbstractDecoder) -> float | None:
    """Returns the number of tokens up to which products have another layout, if known."""
    return MOST_TOKENS_FROM_THE_LEFT if _is_cpu(decoder) else None


def _is_cpu(decoder: AbstractDecoder) -> bool:
    """Whether steps are compiled for CPU."""
    return decoder.device.platform == "cpu"


def _forward_tokens(tokens: int, engine: EngineConfig) -> int:
    is_invariant = engine.numerics == "invariant"
    return round_up(tokens, engine.token_bucket if is_invariant else None)


def _logit_tokens(tokens: int, vocab_size: int, engine: EngineConfig) -> int:
    if engine.numerics == "invariant":
        return engine.token_bucket
    return equal_chunk(tokens, engine.logit_bytes // (4 * vocab_size))


def _law_tokens(rows: int, num_nodes: int, vocab_size: int, engine: EngineConfig) -> int:
    """Returns the number of nodes that rules decide at once, a multiple of those of a row."""
    at_once = max(engine.logit_bytes // (4 * vocab_size * num_nodes), 1)
    return equal_chunk(rows, at_once) * num_nodes
