"""A plan as text tables, and as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.api.plots import new_figure, whole_ticks
from specjax.cli import plan_document
from specjax.config.batch_size_table import NAME as TABLE_NAME
from specjax.config.names import NO_DRAFTER
from specjax.planning.devices import Device
from specjax.planning.estimate import Estimate
from specjax.planning.memory_model import MemoryPlan
from specjax.planning.plan_figures import PlanFigures
from specjax.planning.plans import FullPlan
from specjax.planning.workspace_fit import BURST

# What each figure is, by its name in the tables; docs/planning.md has the same.
WORDS = {
    "weights": "bytes of all weights of model and drafter, each counted once over all chips",
    "weights and state, each chip": "what one chip holds before the first page: its weights, and "
    "per row the ids of its tokens and its sampling parameters",
    "drafter": "whether each chip holds the whole drafter or a part of it",
    "bytes per token of context, all chips": "keys and values of one token in every layer, of the "
    "model and of the drafter",
    "memory, each chip": "what the device has, or --memory-bytes",
    "free memory, each chip": "the memory less weights and state: for pages and for steps",
    "workspace of the largest step": "bytes that a step takes while it runs, beside weights and "
    "pages: logits, activations, compiled code",
    "coefficients, bytes per token, all chips": "what one more token of a batch costs: its keys "
    "and values, and its share of the workspace of a decoding step, or of a prefill",
    "pages": "how many pages of keys and values fit; a row takes whole pages",
    "tokens that pages hold": "pages times the tokens of a page: all rows share them",
    "weight limit, all chips": "the bytes that a batch may weigh: the free memory less the margin",
    "speculates up to": "tokens of a batch up to which it drafts; above, memory is for more rows",
    "batch safety margin": "percent of the free memory that batches leave free, and what page ends "
    "and the largest prefill ask for",
    "ridge point": "operations per byte at which arithmetic takes as long as reading memory",
    "turns compute-bound at": "tokens of a step from which arithmetic, not reading the weights, "
    "takes the time",
    "K": "draft tokens of a row and step; 0 is plain decoding",
    "rows": "requests that decode at the same time",
    "context": "tokens of a row, prompt and output together",
    "ms": "the least milliseconds of a step by roofline: the longer of reading bytes and "
    "computing; of a CPU those that the measured speed of this one gives",
    "tokens": "expected tokens of a row and step, if drafts stand as often as is assumed",
    "tokens/s": "rows times expected tokens by the seconds of a step: at most, not measured",
    "burst": "several decoding steps in one compiled call",
    "prefill": "a step over tokens of prompts",
    "mixed": "a decoding step with prompts beside it",
    "flops/byte": "operations per byte of a step; below the ridge point memory takes the time",
    "compiled, fitted": "whether a step was compiled, or its bytes follow from those that were",
}


def explained() -> str:
    """Returns the meaning of every word of the tables, a line each."""
    return "\n".join(["Words:", *(f"  {word}: {meaning}." for word, meaning in WORDS.items())])


def render_estimate(plan: Estimate) -> str:
    """Returns an estimate as text tables."""
    document = plan_document.of_estimate(plan)
    parts = [
        f"{_title(document)}: estimate, from formulas; nothing was compiled or measured.",
        _table(("", ""), _estimated(plan, document)),
    ]
    if plan.misfit is None:
        parts += [*_steps(plan, document), *_by_context(plan, document)]
        parts += [f"Note: {note}" for note in document["notes"]]
    return "\n\n".join(parts)


def render(plan: FullPlan) -> str:
    """Returns the plan as text tables."""
    document = plan_document.to_dict(plan)
    parts = [
        f"{_title(document)}; nothing was measured.",
        _table(("", ""), _figures(plan, document)),
        "What each step needs beside weights and pages, MB of each chip:",
        _table(*_bucket_rows(document)),
    ]
    parts += ["Implementation of each op:", _table(("op", ""), _kernel_rows(plan))]
    parts += _by_context(plan, document)
    if document[TABLE_NAME] and plan.request.most_drafted:
        parts.append(f'"{TABLE_NAME}": {document[TABLE_NAME]}')
    return "\n\n".join(parts + [f"Note: {note}" for note in document["notes"]])


def _title(document: dict[str, Any]) -> str:
    chips = f"{document['num_chips']} chip" + "s" * (document["num_chips"] > 1)
    drafter = document["drafter"]
    drafter = "without a drafter" if drafter == NO_DRAFTER else f"with {drafter}"
    return f"{document['model']} {drafter} on {document['device']}, {chips}, {document['dtype']}"


def _steps(plan: Estimate, document: dict[str, Any]) -> list[str]:
    """Returns the table of a step's seconds at each K."""
    if not document["steps"]:
        return []
    heads = ("rows", "K", "ms", "tokens", "tokens/s")
    rows = [dict(zip(heads, row)) for row in _step_rows(document)]
    if not plan.request.most_drafted:
        heads = ("rows", "ms", "tokens/s")
    return [
        f"A step of rows of {plan.table_context:,} tokens{_if_standing(plan)}:",
        _table(heads, [[row[head] for head in heads] for row in rows]),
    ]


def _if_standing(plan: PlanFigures) -> str:
    """Returns what is assumed of drafts, where there are any."""
    request = plan.request
    return f", if {request.acceptance_rate:.0%} of drafts stand" if request.most_drafted else ""


def _seconds(plan: PlanFigures) -> str:
    """Returns what seconds follow from: published peaks, or the measured speed of this machine."""
    is_published = plan.request.device.speed is None
    return "roofline seconds" if is_published else "seconds of this processor's measured speed"


def _by_context(plan: PlanFigures, document: dict[str, Any]) -> list[str]:
    """Returns the tables whose columns are contexts: rows that fit, K, tokens per second."""
    parts = []
    choices = document["num_speculative_tokens_by_batch_and_context"]
    if document["largest_batch_by_context"]:
        parts += ["Largest batch by context:", _table(*_batch_rows(document))]
    if choices:
        contexts = [str(context) for context in plan.contexts]
        rows = [(row, *(by[c] for c in contexts)) for row, by in choices.items()]
        if plan.request.most_drafted:
            parts += [
                f"K by rows and context, by {_seconds(plan)}{_if_standing(plan)}:",
                _table(("rows", *contexts), rows),
            ]
        parts += [
            f"Tokens per second of all rows, by {_seconds(plan)}, at most:",
            _table(("rows", *contexts), _speed_rows(document, contexts)),
        ]
    return parts


def _estimated(plan: Estimate, document: dict[str, Any]) -> list[tuple[str, str]]:
    rows = _held(plan, document)
    total = document["per_chip"]["memory_bytes"]
    if total is not None:
        free = total - plan.resident_bytes
        rows += [("memory, each chip", _gigabytes(total))]
        rows += [("free memory, each chip", _gigabytes(free))]
    workspace = f"about {_gigabytes(plan.workspace_bytes)}, maybe several times more"
    rows.append(("workspace of the largest step", workspace))
    if plan.memory is not None:
        pages, size = plan.memory.num_pages, plan.memory.page_size
        rows += [
            ("pages", f"{pages:,} of {size} tokens"),
            ("tokens that pages hold", f"{pages * size:,}"),
            *_gate_row(plan.memory, plan),
        ]
    return rows + _ridge_rows(document)


def _step_rows(document: dict[str, Any]) -> list[tuple]:
    return [
        (
            step["rows"],
            step["num_speculative_tokens"],
            f"{step['step_s'] * 1e3:,.{2 if step['step_s'] < 0.1 else 0}f}",
            f"{step['expected_tokens']:.2f}",
            _speed(step["tokens_per_s"]),
        )
        for step in document["steps"]
    ]


def _kernel_rows(plan: FullPlan) -> list[tuple[str, str]]:
    """Returns each op with its implementations; some cases of one op may need another."""
    by_op: dict[str, list[str]] = {}
    for taken in plan.kernels:
        by_op.setdefault(taken.op, []).append(taken.implementation)
    return [(op, ", ".join(dict.fromkeys(names))) for op, names in by_op.items()]


def draw(plan: PlanFigures, path: str | os.PathLike[str]) -> None:
    """Draws K and the tokens per second against batch and context, as PNG.

    Raises:
      what `check_can_draw` raises.
    """
    request = plan.request
    check_can_draw(request.device, path)
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    rows = plan_document.row_counts(request.engine.max_rows)
    for place, context in enumerate(plan.contexts):
        chosen = [plan.choose(n, context) or 0 for n in rows]
        speeds = [plan.tokens_per_s(n, k, context) for n, k in zip(rows, chosen)]
        # Another K is chosen at a number of rows, not on the way to it.
        # Where contexts have the same, the wide line of the first shows beside the last's.
        width = 1.5 + 1.2 * (len(plan.contexts) - 1 - place)
        style = {"linewidth": width, "drawstyle": "steps-post"}
        left.plot(rows, chosen, label=f"{context} tokens", **style)
        right.plot(rows, speeds, marker="o", markersize=4)
    left.set(xscale="log", xlabel="rows", ylabel="K")
    left.set_ylim(bottom=-0.2)
    whole_ticks(left.yaxis)
    right.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens / s")
    figure.legend(title="context of a row", fontsize="small", loc="outside right center")
    figure.suptitle(
        f"{request.target_name} with {request.drafter_name} on {request.device.name}: "
        f"by {_seconds(plan)}, no step measured, {request.acceptance_rate:.0%} of drafts standing"
    )
    figure.savefig(path, format="png", dpi=120)


def check_can_draw(device: Device, path: str | os.PathLike[str]) -> None:
    """Refuses a picture that `draw` could not make, before there is a plan.

    Raises:
      NotImplementedError: matplotlib is not installed.
      ValueError: no figures of the device are known, or the file's folder is absent.
    """
    if not device.has_seconds:
        raise ValueError(
            f"{device.name} has no figures to draw seconds from; name an accelerator, as "
            "--device gpu:h100, or leave the picture out."
        )
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(
            f"{os.fspath(path)!r} cannot be drawn: there is no folder {folder}; make it or "
            "name another."
        )
    new_figure(1, 1)


def _figures(plan: FullPlan, document: dict[str, Any]) -> list[tuple[str, str]]:
    memory, rows = plan.memory, _held(plan, document)
    if memory is not None:
        name = "coefficients, bytes per token, all chips"
        found = document["coefficients"]
        rows += [
            ("free memory, each chip", _gigabytes(memory.free_bytes)),
            ("workspace of the largest step", _gigabytes(memory.workspace_bytes)),
            (
                name,
                f"{found['next_token']:,.0f} next token, {found['prefill_linear']:,.0f} prefill",
            ),
            ("pages", f"{memory.num_pages:,} of {memory.page_size} tokens"),
            ("weight limit, all chips", _gigabytes(document["weight_limit"])),
            *_gate_row(memory, plan),
            (
                "batch safety margin",
                f"{memory.batch_safety_margin:g} %, recommended "
                f"{memory.recommended_batch_safety_margin} %",
            ),
        ]
    return rows + _ridge_rows(document)


def _gate_row(memory: MemoryPlan, plan: PlanFigures) -> list[tuple[str, str]]:
    if not plan.request.most_drafted:
        return []
    return [("speculates up to", f"{memory.gate_tokens:,} tokens of a batch")]


def _held(plan: PlanFigures, document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows on weights, state and bytes per token."""
    tokens = document["bytes_per_token"]
    return [
        ("weights", _gigabytes(document["weights_bytes"])),
        ("weights and state, each chip", _gigabytes(plan.resident_bytes)),
        *_split_row(plan),
        (
            "bytes per token of context, all chips",
            f"{tokens['target']:,.0f} target, {tokens['drafter']:,.0f} drafter",
        ),
    ]


def _ridge_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    if not document["ridge_flops_per_byte"]:
        return []
    return [
        ("ridge point", f"{document['ridge_flops_per_byte']:.0f} operations per byte"),
        (
            "turns compute-bound at",
            f"{document['compute_bound_tokens']:.0f} tokens of a step (short contexts)",
        ),
    ]


def _split_row(plan: PlanFigures) -> list[tuple[str, str]]:
    """Returns over how many chips a drafter with weights is split, where there are several."""
    request = plan.request
    if request.device.count == 1 or not request.drafter.configs:
        return []
    shards = request.drafter.num_shards
    where = "whole on each chip" if shards == 1 else f"split over {shards} chips"
    return [("drafter", where)]


def _bucket_rows(document: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple]]:
    ms = "roofline ms" if document["processor_speed"] is None else "ms"
    head = ("step", "rows", "tokens", "K", "MB", "", "flops/byte", ms)
    show = lambda value, scale=1.0: "" if value is None else f"{value * scale:.3g}"
    rows = [
        (
            b["kind"],
            b["rows"],
            b["tokens"],
            b["num_speculative_tokens"] if b["kind"] == BURST else "",
            f"{b['workspace_bytes'] / 1e6:.2f}",
            b["source"],
            show(b["intensity_flops_per_byte"]),
            show(b["roofline_s"], 1e3),
        )
        for b in document["buckets"]
    ]
    return head, rows


def _speed_rows(document: dict[str, Any], contexts: Sequence[str]) -> list[tuple]:
    speeds = document["tokens_per_s_by_batch_and_context"]
    return [(rows, *(_speed(by[c]) for c in contexts)) for rows, by in speeds.items()]


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"


def _batch_rows(document: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple]]:
    largest = document["largest_batch_by_context"]
    return ("context", *largest), [("rows", *largest.values())]


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f} GB"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Returns columns as wide as they must be, the first to the left."""
    lines = [list(map(str, row)) for row in ([head] if any(head) else [])]
    lines += [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    shown = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(shown)
