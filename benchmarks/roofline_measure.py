"""Measures a case: bytes, collectives and operations of its step, from programs of few layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.roofline_cases import (
    CHAIN,
    CONTEXTS,
    HEADS,
    SELF,
    Case,
    Layers,
    of_first_layers,
    program,
)
from pallas_kernels.implementations import lowered_for
from specjax.heads import deferring
from specjax.heads.equations.dflash import DFlashConfig
from specjax.paged.work import ModelWork, model_work
from specjax.planning.plan_request import PlanRequest
from tools.hlo_program import Program, parse
from tools.kernel_bytes import KernelStep
from tools.program_traffic import (
    Entry,
    OrdinaryStep,
    Traffic,
    step_traffic,
)

_WEIGHTS, _DRAFT_LAYERS = "inputs[1]", "inputs[1].drafter['layers']"
SMALL = 0.005  # of the bytes of a step
MOST_NAMED = 5
_KEPT_KERNELS = "tree_attention", "write_kv", "move_kv", "read_kv"


class Figures(NamedTuple):
    """What a step of one program does, on one chip."""

    bytes: tuple[float, ...]  # per context
    operations: float
    collectives: float
    collective_bytes: float
    copied_bytes: float  # of pages and weights


def measure(case: Case, folder: Path | None = None) -> dict[str, Any]:
    """Returns the figures of a case with all layers, ready for JSON.

    Bytes are those of one chip. Programs of few layers are compiled, and what a layer adds is
    added for every further one. Few layers of a draft model may stay in fast memory from one of its
    forwards to the next; then all of its layers are compiled.

    Args:
      folder: as for `program`.

    Raises:
      NotImplementedError: libtpu is not installed.
      ValueError: a program with a loop, a branch or a kernel that no rule covers.
    """
    request = case.request()
    layers = case.compiled_layers
    measured = lambda of: _figures(case, request, parse(program(case, of, folder)))
    found: list[tuple[Figures, Traffic]] = [measured(of) for of in layers]
    keeps = any(keeps_draft_layers(case, request, of, one) for of, (_, one) in zip(layers, found))
    if keeps:
        layers[-1] = layers[0]._replace(draft=case.all_layers.draft)
        found[-1] = measured(layers[-1])
    every = [figures for figures, _ in found]
    add = lambda of: extrapolated([of(figures) for figures in every], layers, case.all_layers)
    least = [minimum_bytes(case, request, context) for context in CONTEXTS]
    total = [add(lambda figures, i=i: figures.bytes[i]) for i in range(len(CONTEXTS))]
    copied = {line: None for _, traffic in found for line in copies(traffic)[0]}
    flags = flags_of([*copied], add(lambda figures: figures.copied_bytes), total[0])
    flags += {line: None for _, one in found for line in copies_of_logits(case, one)}
    return {
        "compiled_by": f"jax {jax.__version__}, libtpu {metadata.version('libtpu')}",
        "page_size": request.engine.chosen_page_size,
        "draft_chips": request.drafter.num_shards,
        "keeps_draft_layers": keeps,
        "contexts": {
            str(context): {"bytes": all_, "minimum": low, "ratio": round(all_ / low, 4)}
            for context, all_, low in zip(CONTEXTS, map(round, total), map(round, least))
        },
        "operations": round(add(lambda figures: figures.operations)),
        "collectives": round(add(lambda figures: figures.collectives)),
        "collective_bytes": round(add(lambda figures: figures.collective_bytes)),
        "flags": flags,
        "beyond": beyond(found[0][1]),
    }


def minimum_bytes(case: Case, request: PlanRequest, context: int) -> float:
    """Returns the bytes that a step must move on one chip.

    Weights once per forward, of an embedding that is not the head nothing; keys and values of
    each row's context once, and new ones. A drafter with a model runs K forwards, a block is one.
    A head absorbs what was accepted, and lies whole on every chip but for what the target lends.
    """
    chips = request.device.count
    nodes, drafter = request.drafter.num_nodes(case.num_speculative_tokens), request.drafter
    target = model_work(request.target, jnp.dtype(request.dtype), chips)
    forward = lambda work, new: (
        work.of(case.rows, 0, context).bytes + (case.rows * new * work.context_bytes)
    )
    with lowered_for(request.device.traced_for, request.device.kind):
        drafts: Sequence[ModelWork] = drafter.work(request.target, jnp.dtype(request.dtype))
    passes = lambda work: work.num_forwards(case.num_speculative_tokens)
    total = forward(target, nodes) + sum(passes(work) * forward(work, 1) for work in drafts)
    if case.draft not in HEADS:
        return total
    head: Any = drafter
    size = jnp.dtype(request.dtype).itemsize
    if not head.config.has_head:
        lent = size * head.config.target_vocab_size * head.config.target_hidden_size
        total -= sum(map(passes, drafts)) * lent * (1 - 1 / chips)
    return total + size * _absorbed(case, head, nodes)


def _absorbed(case: Case, head: Any, nodes: int) -> int:
    """Returns the numbers moved for a head to absorb a step: weights that no draft reads, and the
    captured states of all nodes, written and read once, and what is stored of them."""
    config, own = head.config, head.config.layers
    weights = config.hidden_size * config.fc_width
    if isinstance(config, DFlashConfig):
        weights += own.num_layers * 2 * own.num_kv_heads * own.head_dim * own.hidden_size
    stored = sum(deferring.stored_widths(config, head.stores))
    return weights + case.rows * nodes * (2 * config.fc_width + stored)


def keeps_draft_layers(case: Case, request: PlanRequest, layers: Layers, traffic: Traffic) -> bool:
    """Whether a program reads less of a draft model's layers than all of them in each forward."""
    if not request.drafter.configs:
        return False
    spec_of = lambda count: of_first_layers(request.drafter, count)
    work_of = lambda count: spec_of(count).work(request.target, jnp.dtype(request.dtype))
    weights = lambda count: sum(work.weight_bytes for work in work_of(count))
    least = case.num_speculative_tokens * (weights(layers.draft) - weights(0))
    return traffic.read_of(_DRAFT_LAYERS) < (1 - SMALL) * least


def copies(traffic: Traffic) -> tuple[list[str], float]:
    """Returns the arrays of pages and weights that are laid elsewhere in main memory or exchanged
    between chips, one line each, and the bytes of that."""
    lines, total = [], 0.0
    for entry in traffic.entries:
        names = [n for n in entry.copied if n.startswith(_WEIGHTS) or "pages" in n]
        if names:
            total += max(entry.written, entry.collective_bytes)
            lines += [f"{entry.instruction.opcode} of {name}" for name in names]
    return list(dict.fromkeys(lines)), total


def copies_of_logits(case: Case, traffic: Traffic) -> list[str]:
    """Returns the copies and exchanges of logits of the whole vocabulary, one line each."""
    found = (
        f"{entry.instruction.opcode} of logits, {_place(entry)}"
        for entry in traffic.entries
        if has_logits(entry, case.target.vocab_size, case.rows, case.chips)
    )
    return list(dict.fromkeys(found))


def flags_of(copied: Sequence[str], copied_bytes: float, step_bytes: float) -> list[str]:
    """Returns the copies of weights and pages that weigh; less is the compiler's own room.

    Args:
      copied_bytes, step_bytes: of all layers.
    """
    return list(copied) if copied_bytes >= SMALL * step_bytes else []


def has_logits(entry: Entry, vocab_size: int, rows: int, chips: int) -> bool:
    """Whether an instruction copies logits of each row, or gathers them over chips."""
    is_gathered = "all-gather" in entry.instruction.opcode
    if not is_gathered and not (entry.is_mere_move and entry.written):
        return False
    slice_size = -(-vocab_size // chips)
    least = rows * (vocab_size if is_gathered else slice_size)
    return any(
        bool({vocab_size, slice_size} & set(shape.dims)) and math.prod(shape.dims) >= least
        for shape in entry.instruction.shapes
        if is_gathered or shape.main_bytes
    )


def beyond(traffic: Traffic) -> list[list[Any]]:
    """Returns the instructions that move most bytes beyond the minimum: place and bytes."""
    found: dict[str, float] = {}
    for entry in traffic.entries:
        more = entry.bytes - sum(bytes_ for name, bytes_ in entry.sources if _WEIGHTS in name)
        if not any(kernel in entry.instruction.name for kernel in _KEPT_KERNELS):
            place = f"{entry.instruction.opcode}, {_place(entry)}"
            found[place] = found.get(place, 0.0) + more
    largest = sorted(found.items(), key=lambda pair: -pair[1])[:MOST_NAMED]
    return [[place, round(bytes_)] for place, bytes_ in largest]


def _place(entry: Entry) -> str:
    """Returns the end of the path of jax's operations."""
    parts = [part for part in entry.instruction.op_name.split("/") if part]
    return "/".join(parts[-3:]) or entry.instruction.name


def _figures(case: Case, request: PlanRequest, read: Program) -> tuple[Figures, Traffic]:
    follow = functools.partial(_traffic, case, request, read)
    by_context = [follow(context) for context in CONTEXTS]
    first = by_context[0]
    figures = Figures(
        tuple(traffic.bytes for traffic in by_context),
        first.num_operations,
        first.num_collectives,
        first.collective_bytes,
        copies(first)[1],
    )
    return figures, first


def _traffic(case: Case, request: PlanRequest, read: Program, context: int) -> Traffic:
    kernels = KernelStep(
        rows=case.rows,
        nodes=request.drafter.num_nodes(case.num_speculative_tokens),
        context=context,
        layer_windows=case.target.layer_windows,
    )
    turns: tuple[int, ...] = ()
    if case.draft in HEADS:
        # Feeds all draft tokens but the last, or draws all but the first one after the other.
        turns = (case.num_speculative_tokens - 1,)
        head: Any = request.drafter
        if head.defers:
            turns = 0, *turns  # it has nothing to catch up with
    if case.draft in SELF:
        turns = (case.num_speculative_tokens - 1,)
    if request.drafter.configs:
        # After a step that drafts, the first forward takes along what the drafter has not seen:
        # the loop that catches up does not turn. A chain's other tokens have a loop.
        turns = (0,)
        if case.draft == CHAIN:
            turns = 0, case.num_speculative_tokens - 1
    return step_traffic(read, OrdinaryStep(turns=turns, kernel_bytes=kernels.bytes))


def extrapolated(figures: Sequence[float], compiled: Sequence[Layers], whole: Layers) -> float:
    """Returns a figure of all layers, `whole`, from those of the programs that were compiled.

    Args:
      compiled: as in `Case.compiled_layers`, of each figure.
    """
    (few, *others), first = compiled, figures[0]
    total = first
    for more, figure in zip(others, figures[1:], strict=True):
        added = sum(more) - sum(few)
        left = sum(all_ - low for all_, low, high in zip(whole, few, more) if high != low)
        total += (figure - first) / added * left
    return total
