"""A plan as a document: figures by name, ready for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.cli import plan_notes
from specjax.config.batch_size_table import NAME as TABLE_NAME
from specjax.planning.estimate import Estimate
from specjax.planning.plan_figures import PlanFigures
from specjax.planning.plans import FullPlan
from specjax.planning.roofline import expected_tokens
from specjax.planning.workspace_fit import BURST, BucketMemory


def of_estimate(plan: Estimate) -> dict[str, Any]:
    """Returns the figures of an estimate by name, as `to_dict`; None for an unknown one."""
    document = {"source": "formulas", "fits": plan.fits, "misfit": plan.misfit} | _figures(plan)
    document["per_chip"]["workspace_bytes"] = plan.workspace_bytes
    document["notes"] = [*plan.notes, *plan_notes.of_estimate(plan)]
    return document


def to_dict(plan: FullPlan, estimate: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the figures by name, ready for JSON; None for an unknown figure.

    Bytes are totals over all chips, except in `buckets`, `per_chip` and `device_figures`.

    Args:
      estimate: the document of the estimate before it.
    """
    return _figures(plan) | {
        "coefficients": _coefficients(plan),
        "buckets": [_bucket(plan, bucket) for bucket in plan.compiled.buckets],
        "compiled": _compiled(plan),
        "kernels": [taken._asdict() for taken in plan.kernels],
        "estimate": estimate,
        "notes": [*plan.notes, *plan_notes.of_plan(plan)],
    }


def _figures(plan: PlanFigures) -> dict[str, Any]:
    """Returns what every plan says, of compiled steps or of formulas."""
    request, memory = plan.request, plan.memory
    chips, engine, figures = request.device.count, request.engine, request.device.figures
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
        "ridge_flops_per_byte": figures and figures.ridge,
        "compute_bound_tokens": plan.compute_bound_tokens,
        "acceptance_rate_assumed": request.acceptance_rate,
        "steps": _steps(plan),
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
        "device_figures": figures and dataclasses.asdict(figures),
        "processor_speed": request.device.speed and dataclasses.asdict(request.device.speed),
    }


def _steps(plan: PlanFigures) -> list[dict[str, Any]] | None:
    """Returns seconds and tokens of a step at each K: of one row, and of as many as fit."""
    request, context = plan.request, plan.table_context
    if not request.device.has_seconds:
        return None
    most = request.engine.max_rows
    if plan.memory is not None:
        most = plan.memory.rows_of_context(context, most)
    return [
        {
            "rows": rows,
            "context": context,
            "num_speculative_tokens": k,
            "step_s": plan.step_s(rows, k, context),
            "expected_tokens": expected_tokens(request.acceptance_rate, k),
            "tokens_per_s": plan.tokens_per_s(rows, k, context),
        }
        for rows in sorted({1, max(most, 1)})
        for k in range(request.most_drafted + 1)
    ]


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
        if request.device.has_seconds:
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


def _choices(plan: PlanFigures) -> dict[str, dict[str, int | None]] | None:
    if not plan.request.device.has_seconds:
        return None
    return {
        str(rows): {str(c): plan.choose(rows, c) for c in plan.contexts}
        for rows in row_counts(plan.request.engine.max_rows)
    }


def _speeds(plan: PlanFigures) -> dict[str, dict[str, float]] | None:
    """Returns the tokens per second of all rows by roofline, at the chosen K."""
    choices = _choices(plan)
    if choices is None:
        return None
    return {
        rows: {c: plan.tokens_per_s(int(rows), k or 0, int(c)) for c, k in by.items()}
        for rows, by in choices.items()
    }


def row_counts(most: int) -> list[int]:
    """Returns powers of two up to the most rows, and it."""
    counts = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*counts, most]
