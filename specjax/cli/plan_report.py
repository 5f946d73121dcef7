"""A plan as a JSON document, as a table, and as a picture."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.api.plots import new_figure, whole_ticks
from specjax.config.batch_size_table import NAME as TABLE_NAME
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import Sizes
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.plan_request import Device, PlanRequest, known_shape
from specjax.planning.plans import FullPlan
from specjax.planning.workspace_fit import BURST, MIXED, BucketMemory
from specjax.policy import cost_files


def to_dict(plan: FullPlan) -> dict[str, Any]:
    """Returns the figures by name, ready for JSON; None for an unknown figure.

    Bytes are totals over all chips, except in `buckets`, `per_chip` and `device_figures`.
    """
    request, memory = plan.request, plan.memory
    chips, engine = request.device.count, request.engine
    return {
        "model": request.target_name,
        "drafter": request.drafter_name,
        "device": request.device.name,
        "num_chips": chips,
        "draft_tensor_parallel_size": request.drafter.num_shards,
        "dtype": str(request.dtype),
        "kv_cache_dtype": engine.kv_cache_dtype or str(request.dtype),
        "measured": False,
        "weights_bytes": plan.weights_bytes,
        "bytes_per_token": {
            "target": plan.target_bytes_per_token * chips,
            "drafter": plan.drafter_bytes_per_token * chips,
        },
        "coefficients": _coefficients(plan),
        "num_pages": memory.num_pages if memory else engine.num_pages,
        "page_size": engine.chosen_page_size,
        "weight_limit": memory and memory.weight_limit * chips,
        "logit_bytes": engine.logit_bytes,
        "gate": engine.gate,
        "gate_tokens": memory and memory.gate_tokens,
        "speculation_weight_fraction": engine.speculation_weight_fraction,
        "batch_safety_margin": engine.batch_safety_margin,
        "recommended_batch_safety_margin": memory and memory.recommended_batch_safety_margin,
        "largest_batch_by_context": memory
        and {
            str(context): memory.rows_of_context(context, engine.max_rows)
            for context in plan.contexts
        },
        "buckets": [_bucket(plan, bucket) for bucket in plan.compiled.buckets],
        "compiled": _compiled(plan),
        "kernels": [taken._asdict() for taken in plan.kernels],
        "ridge_flops_per_byte": request.device.figures and request.device.figures.ridge,
        "compute_bound_tokens": plan.compute_bound_tokens,
        "acceptance_rate_assumed": request.acceptance_rate,
        "num_speculative_tokens_by_batch_and_context": _choices(plan),
        "tokens_per_s_by_batch_and_context": _speeds(plan),
        TABLE_NAME: plan.batch_size_table(plan.table_context),
        "table_context": plan.table_context,
        "per_chip": {
            "memory_bytes": request.limits_memory,
            "resident_bytes": plan.resident_bytes,
            "free_bytes": memory and memory.free_bytes,
            "workspace_bytes": memory and memory.workspace_bytes,
            "bytes_per_token": plan.target_bytes_per_token + plan.drafter_bytes_per_token,
        },
        "device_figures": request.device.figures and dataclasses.asdict(request.device.figures),
        "notes": list(plan.notes) + _notes(plan),
    }


def render(plan: FullPlan) -> str:
    """Returns the plan as text tables."""
    document = to_dict(plan)
    chips = f"{document['num_chips']} chip" + "s" * (document["num_chips"] > 1)
    parts = [
        f"{document['model']} with {document['drafter']} on {document['device']}, {chips}, "
        f"{document['dtype']}; nothing was measured.",
        _table(("", ""), _figures(plan, document)),
        "What each step needs beside weights and pages, MB of each chip:",
        _table(*_bucket_rows(document)),
    ]
    parts += ["Implementation of each op:", _table(("op", ""), _kernel_rows(plan))]
    choices = document["num_speculative_tokens_by_batch_and_context"]
    if document["largest_batch_by_context"]:
        parts += ["Largest batch by context:", _table(*_batch_rows(document))]
    if choices:
        rate = document["acceptance_rate_assumed"]
        contexts = [str(context) for context in plan.contexts]
        rows = [(row, *(by[c] for c in contexts)) for row, by in choices.items()]
        parts += [
            f"K by rows and context, by roofline seconds, if {rate:.0%} of drafts stand:",
            _table(("rows", *contexts), rows),
            "Tokens per second of all rows, by the same seconds, at most:",
            _table(("rows", *contexts), _speed_rows(document, contexts)),
            f'"{TABLE_NAME}": {document[TABLE_NAME]}',
        ]
    return "\n\n".join(parts + [f"Note: {note}" for note in document["notes"]])


def _kernel_rows(plan: FullPlan) -> list[tuple[str, str]]:
    """Returns each op with its implementations; some cases of one op may need another."""
    by_op: dict[str, list[str]] = {}
    for taken in plan.kernels:
        by_op.setdefault(taken.op, []).append(taken.implementation)
    return [(op, ", ".join(dict.fromkeys(names))) for op, names in by_op.items()]


def draw(plan: FullPlan, path: str | os.PathLike[str]) -> None:
    """Draws K and the tokens per second by roofline against batch and context, as PNG.

    Raises:
      what `check_can_draw` raises.
    """
    request = plan.request
    check_can_draw(request.device, path)
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    rows = _row_counts(request.engine.max_rows)
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
        f"roofline, not measured, {request.acceptance_rate:.0%} of drafts standing"
    )
    figure.savefig(path, format="png", dpi=120)


def check_can_draw(device: Device, path: str | os.PathLike[str]) -> None:
    """Refuses a picture that `draw` could not make, before there is a plan.

    Raises:
      NotImplementedError: matplotlib is not installed.
      ValueError: no figures of the device are known, or the file's folder is absent.
    """
    if device.figures is None:
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


def _coefficients(plan: FullPlan) -> dict[str, Any]:
    """Returns bytes per token, of all chips together."""
    memory, chips = plan.memory, plan.request.device.count
    fit_error = plan.compiled.fit.error
    if memory is None:
        return {"workspace_fit_error": fit_error}
    prefill = memory.prefill
    return {
        "next_token_input": memory.next_token_input * chips,
        "next_token": memory.next_token * chips,
        "prefill_linear": prefill.linear * chips,
        "prefill_quadratic": [c * chips for c in prefill.quadratic],
        "prefill_bend_tokens": prefill.bend,
        "prefill_fit_error": prefill.error,
        "workspace_fit_error": fit_error,
    }


def _bucket(plan: FullPlan, memory: BucketMemory) -> dict[str, Any]:
    bucket, request = memory.bucket, plan.request
    compiled = {sample.bucket for sample in plan.compiled.samples}
    figures = {
        "kind": bucket.kind,
        "rows": bucket.rows,
        "tokens": bucket.tokens,
        "num_speculative_tokens": bucket.num_speculative_tokens,
        "workspace_bytes": memory.workspace_bytes,
        "scratch_bytes": memory.scratch_bytes,
        "code_bytes": memory.code_bytes,
        "source": "compiled" if bucket in compiled else "fitted",
        "intensity_flops_per_byte": None,
        "roofline_s": None,
    }
    if bucket.kind == BURST:
        place = bucket.rows, bucket.num_speculative_tokens, plan.table_context
        figures["intensity_flops_per_byte"] = plan.intensity(*place)
        if request.device.figures is not None:
            figures["roofline_s"] = plan.step_s(*place)
    return figures


def _compiled(plan: FullPlan) -> dict[str, Any]:
    """Returns which steps were compiled, and which figures are extrapolated from them."""
    compiled, request = plan.compiled, plan.request
    return {
        "num_executables": compiled.num_executables,
        "workspace_fit_error": compiled.fit.error,
        "for": request.device.name if request.device.is_compiled_for else "cpu",
        "layers_compiled": list(compiled.compiled_layers),
        "layers_extrapolated_to": request.target.num_layers,
        "scratch_bytes_per_layer": compiled.scratch_per_layer,
        "code_bytes_per_layer": compiled.code_per_layer,
        "page_bytes_compiled_over_counted": compiled.pages_ratio,
        "pool_copied_by_steps": compiled.copies.ratio,
        "bytes_copied_per_page": {
            kind: {
                "seen": compiled.copies.seen[kind],
                "whole_arrays": compiled.copies.compiled[kind],
                "all_layers": compiled.copies.of_all[kind],
            }
            for kind in compiled.copies.seen
        },
    }


def _choices(plan: FullPlan) -> dict[str, dict[str, int | None]] | None:
    if plan.request.device.figures is None:
        return None
    return {
        str(rows): {str(c): plan.choose(rows, c) for c in plan.contexts}
        for rows in _row_counts(plan.request.engine.max_rows)
    }


def _speeds(plan: FullPlan) -> dict[str, dict[str, float]] | None:
    """Returns the tokens per second of all rows by roofline, at the chosen K."""
    choices = _choices(plan)
    if choices is None:
        return None
    return {
        rows: {c: plan.tokens_per_s(int(rows), k or 0, int(c)) for c, k in by.items()}
        for rows, by in choices.items()
    }


def _row_counts(most: int) -> list[int]:
    """Returns powers of two up to the most rows, and it."""
    counts = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*counts, most]


def _notes(plan: FullPlan) -> list[str]:
    device, notes = plan.request.device, _notes_on_speed(plan)
    if not device.is_compiled_for:
        notes.append(
            f"no compiler for {device.name} is here: a CPU's stands in, with weights, pages and "
            "activations in float32. A step's activations count twice what they take in 16 bits. "
            'pip install "jax[cuda12]" compiles for the GPU; it need not be there.'
        )
    if plan.request.engine.gate == "worst_case":
        notes.append(
            "tokens of a batch, and contexts, are all that its rows may ever have, as "
            'gate="worst_case" weighs them.'
        )
    notes += _notes_on_compiled(plan)
    return notes


def _notes_on_speed(plan: FullPlan) -> list[str]:
    """Returns notes on the source of seconds and K, and on what they leave out."""
    device, dtype = plan.request.device, jnp.dtype(plan.request.dtype).name
    if device.figures is None:
        return [
            f"{device.name} has no published speed, so there is no roofline and no K; "
            "measure steps where they are to run.",
            *_notes_on_kept_costs(plan.request),
        ]
    notes = [
        "seconds and K are by roofline, a bound from the device's published peaks "
        f"({device.figures.source}); collectives, sampling and launching are left out."
    ]
    fastest = "bfloat16" if device.figures.has_bfloat16 else "float16"
    if dtype != fastest:
        notes.append(
            f"operations are counted at the peak of {fastest}: none of {dtype} is known here, "
            "whose products may take longer, so seconds may be too few and K too large."
        )
    return notes


def _notes_on_kept_costs(request: PlanRequest) -> list[str]:
    """Says whether steps of this pair were measured on this machine, and how they are."""
    if not request.most_drafted:
        return []
    names = request.target_name, request.drafter_name
    pair = [shlex.quote(known_shape(name) or name) for name in names]
    command = f"specjax bench --calibrate --target {pair[0]} --drafter {pair[1]}"
    path = cost_files.path_of(cost_files.key_of(_smallest_decoder(request)))
    if path is None or not path.is_file():
        return [f"to measure this pair's steps on this machine: {command}"]
    return [
        f"steps of this pair were measured on this machine, and an engine chooses K by them "
        f"({path}); to measure and print them: {command}"
    ]


def _smallest_decoder(request: PlanRequest) -> AbstractDecoder:
    """Returns a decoder whose step costs are those of the plan's: they know no rooms."""
    sizes = Sizes(
        rows=1,
        page_size=request.engine.chosen_page_size,
        num_pages=1,
        pages_per_row=1,
        burst_steps=1,
        dtype=jnp.dtype(request.dtype),
    )
    config = DecoderConfig(
        target=request.target,
        drafter=request.drafter,
        sizes=sizes,
        engine=request.engine,
        mesh=request.device.mesh,
    )
    return AbstractDecoder(config)


def _notes_on_compiled(plan: FullPlan) -> list[str]:
    """Returns notes on the compiled steps, the error of the fit, and copies of the pool."""
    compiled, request = plan.compiled, plan.request
    fitted = len(compiled.buckets) - len(compiled.samples)
    notes = [
        f"{compiled.num_executables} steps were compiled; the workspaces of {fitted} more "
        f"are fitted, by what misses the compiled ones by {compiled.fit.error:.1%} at most."
    ]
    copies = compiled.copies
    if copies.ratio > 0:
        kinds = ", ".join(
            f"a {kind}{' step' * (kind == MIXED)} {copied / copies.page_bytes:.0%} of it"
            for kind, copied in copies.of_all.items()
        )
        notes.append(
            f"steps copy the pool while they run ({kinds}), as compiled for two pools; the "
            "most is counted with every token."
        )
    layers = compiled.compiled_layers
    if len(layers) > 1:
        notes.append(
            f"steps were compiled for {layers[0]} layers, one also for {layers[-1]}, and "
            f"extrapolated to {request.target.num_layers}."
        )
    return notes


def _figures(plan: FullPlan, document: dict[str, Any]) -> list[tuple[str, str]]:
    memory, tokens = plan.memory, document["bytes_per_token"]
    rows = [
        ("weights", _gigabytes(document["weights_bytes"])),
        ("weights and state, each chip", _gigabytes(plan.resident_bytes)),
        *_split_row(plan),
        (
            "bytes per token of context, all chips",
            f"{tokens['target']:,.0f} target, {tokens['drafter']:,.0f} drafter",
        ),
    ]
    if memory is not None:
        name = "coefficients, bytes per token, all chips"
        found = document["coefficients"]
        rows += [
            ("free memory, each chip", _gigabytes(memory.free_bytes)),
            (
                "workspace of the largest step, code of all",
                _gigabytes(memory.workspace_bytes),
            ),
            (
                name,
                f"{found['next_token']:,.0f} next token, {found['prefill_linear']:,.0f} prefill",
            ),
            ("pages", f"{memory.num_pages:,} of {memory.page_size} tokens"),
            ("weight limit, all chips", _gigabytes(document["weight_limit"])),
            ("speculates up to", f"{memory.gate_tokens:,} tokens of a batch"),
            (
                "batch safety margin",
                f"{memory.batch_safety_margin:g} %, recommended "
                f"{memory.recommended_batch_safety_margin} %",
            ),
        ]
    if document["ridge_flops_per_byte"]:
        rows += [
            (
                "ridge point",
                f"{document['ridge_flops_per_byte']:.0f} operations per byte",
            ),
            (
                "turns compute-bound at",
                f"{document['compute_bound_tokens']:.0f} tokens of a step (short contexts)",
            ),
        ]
    return rows


def _split_row(plan: FullPlan) -> list[tuple[str, str]]:
    """Returns over how many chips a drafter with weights is split, where there are several."""
    request = plan.request
    if request.device.count == 1 or not request.drafter.configs:
        return []
    shards = request.drafter.num_shards
    where = "whole on each chip" if shards == 1 else f"split over {shards} chips"
    return [("drafter", where)]


def _bucket_rows(document: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple]]:
    head = ("step", "rows", "tokens", "K", "MB", "", "flops/byte", "roofline ms")
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
    return [(rows, *(f"{by[c]:,.0f}" for c in contexts)) for rows, by in speeds.items()]


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
