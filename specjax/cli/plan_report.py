"""A plan as text tables, and as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specjax.api.plots import new_figure, whole_ticks
from specjax.cli import plan_document, table
from specjax.config.batch_size_table import NAME as TABLE_NAME
from specjax.config.names import NO_DRAFTER
from specjax.planning.devices import Device
from specjax.planning.estimate import Estimate
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
        _figures(plan, document),
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
        _figures(plan, document),
        "What each step needs beside weights and pages, MB of each chip:",
        table.as_text(_buckets(document)),
        "Implementation of each op:",
        table.as_text(_kernels(plan)),
        *_by_context(plan, document),
    ]
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
    drafts = plan.request.most_drafted
    rows = [
        {
            "rows": step["rows"],
            **({"K": step["num_speculative_tokens"]} if drafts else {}),
            "ms": f"{step['step_s'] * 1e3:,.{2 if step['step_s'] < 0.1 else 0}f}",
            **({"tokens": f"{step['expected_tokens']:.2f}"} if drafts else {}),
            "tokens/s": _speed(step["tokens_per_s"]),
        }
        for step in document["steps"] or ()
    ]
    if not rows:
        return []
    title = f"A step of rows of {plan.table_context:,} tokens{_if_standing(plan)}:"
    return [title, table.as_text(rows)]


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
    if largest := document["largest_batch_by_context"]:
        rows = [{"context": "rows", **largest}]
        parts += ["Largest batch by context:", table.as_text(rows)]
    chosen = document["num_speculative_tokens_by_batch_and_context"] or {}
    if chosen and plan.request.most_drafted:
        parts += [
            f"K by rows and context, by {_seconds(plan)}{_if_standing(plan)}:",
            table.as_text({"rows": rows, **by} for rows, by in chosen.items()),
        ]
    if speeds := document["tokens_per_s_by_batch_and_context"]:
        parts += [
            f"Tokens per second of all rows, by {_seconds(plan)}, at most:",
            table.as_text(
                {"rows": rows, **{context: _speed(speed) for context, speed in by.items()}}
                for rows, by in speeds.items()
            ),
        ]
    return parts


def _kernels(plan: FullPlan) -> list[table.Row]:
    """Returns each op with its implementations; some cases of one op may need another."""
    by_op: dict[str, list[str]] = {}
    for taken in plan.kernels:
        by_op.setdefault(taken.op, []).append(taken.implementation)
    return [{"op": op, "": ", ".join(dict.fromkeys(names))} for op, names in by_op.items()]


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


def _figures(plan: PlanFigures, document: dict[str, Any]) -> str:
    """Returns the first table: what is held, what is left for pages, and what that is enough for.

    A plan of compiled steps stands below the estimate, and leaves out what is the same in both.
    """
    is_estimate, memory = isinstance(plan, Estimate), plan.memory
    tokens, of_chip = document["bytes_per_token"], document["per_chip"]
    rows = {
        "weights": _gigabytes(document["weights_bytes"]),
        "weights and state, each chip": _gigabytes(plan.resident_bytes),
    }
    if document["num_chips"] > 1 and plan.request.drafter.configs:
        shards = document["draft_tensor_parallel_size"]
        rows["drafter"] = "whole on each chip" if shards == 1 else f"split over {shards} chips"
    rows["bytes per token of context, all chips"] = (
        f"{tokens['target']:,.0f} target, {tokens['drafter']:,.0f} drafter"
    )
    if (total := of_chip["memory_bytes"]) is not None:
        if is_estimate:
            rows["memory, each chip"] = _gigabytes(total)
        rows["free memory, each chip"] = _gigabytes(total - plan.resident_bytes)
    if is_estimate:
        about = f"about {_gigabytes(of_chip['workspace_bytes'])}, maybe several times more"
        rows["workspace of the largest step"] = about
    if memory is not None:
        pages = f"{memory.num_pages:,} of {memory.page_size} tokens"
        gate = f"{memory.gate_tokens:,} tokens of a batch"
        drafts = {"speculates up to": gate} if plan.request.most_drafted else {}
        if is_estimate:
            held = f"{memory.num_pages * memory.page_size:,}"
            rows |= {"pages": pages, "tokens that pages hold": held, **drafts}
        else:
            found = document["coefficients"]
            rows |= {
                "workspace of the largest step": _gigabytes(memory.workspace_bytes),
                "coefficients, bytes per token, all chips": f"{found['next_token']:,.0f} next "
                f"token, {found['prefill_linear']:,.0f} prefill",
                "pages": pages,
                "weight limit, all chips": _gigabytes(document["weight_limit"]),
                **drafts,
                "batch safety margin": f"{memory.batch_safety_margin:g} %, recommended "
                f"{memory.recommended_batch_safety_margin} %",
            }
    if ridge := document["ridge_flops_per_byte"]:
        turns = f"{document['compute_bound_tokens']:.0f} tokens of a step (short contexts)"
        rows["ridge point"] = f"{ridge:.0f} operations per byte"
        rows["turns compute-bound at"] = turns
    return table.aligned(rows.items())


def _buckets(document: dict[str, Any]) -> list[table.Row]:
    ms = "roofline ms" if document["processor_speed"] is None else "ms"
    show = lambda value, scale=1.0: "" if value is None else f"{value * scale:.3g}"
    return [
        {
            "step": bucket["kind"],
            "rows": bucket["rows"],
            "tokens": bucket["tokens"],
            "K": bucket["num_speculative_tokens"] if bucket["kind"] == BURST else "",
            "MB": f"{bucket['workspace_bytes'] / 1e6:.2f}",
            "": bucket["source"],
            "flops/byte": show(bucket["intensity_flops_per_byte"]),
            ms: show(bucket["roofline_s"], 1e3),
        }
        for bucket in document["buckets"]
    ]


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f} GB"
