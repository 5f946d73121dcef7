"""What a plan adds to its figures: where seconds come from, what was left out, what to do."""

from __future__ import annotations

import shlex

import jax.numpy as jnp

from specjax.planning.plan_figures import PlanFigures
from specjax.planning.plan_request import PlanRequest
from specjax.planning.plans import FullPlan, decoder_of
from specjax.planning.workspace_fit import MIXED
from specjax.policy import cost_files


def of_estimate(plan: PlanFigures) -> list[str]:
    """Returns the notes on a plan by formulas."""
    return [*_on_memory(plan), *_on_speed(plan), *_on_gate(plan)]


def of_plan(plan: FullPlan) -> list[str]:
    """Returns the notes on a plan of compiled steps, beside those that it holds."""
    device, notes = plan.request.device, _on_speed(plan)
    if not device.is_compiled_for:
        notes.append(
            f"no compiler for {device.name} is here: a CPU's stands in, with weights, pages and "
            "activations in float32. A step's activations count twice what they take in 16 bits. "
            'pip install "jax[cuda12]" compiles for the GPU; it need not be there.'
        )
    return [*notes, *_on_gate(plan), *_on_compiled(plan)]


def _on_memory(plan: PlanFigures) -> list[str]:
    if plan.request.limits_memory is not None:
        return []
    return [
        f"{plan.request.device.name} has no memory figure, so there are no pages, weight limit "
        "or gate; give --memory-bytes."
    ]


def _on_gate(plan: PlanFigures) -> list[str]:
    if plan.request.engine.gate != "worst_case":
        return []
    return [
        "tokens of a batch, and contexts, are all that its rows may ever have, as "
        'gate="worst_case" weighs them.'
    ]


def _on_speed(plan: PlanFigures) -> list[str]:
    """Returns notes on the source of seconds and K, and on what they leave out."""
    device, dtype = plan.request.device, jnp.dtype(plan.request.dtype).name
    what = "seconds and K" if plan.request.most_drafted else "seconds"
    if device.speed is not None:
        return [
            f"{what} follow from the speed of this machine's products and launches, which "
            f"was measured ({device.speed.bytes_per_s / 1e9:.1f} GB/s of float32 weights); no "
            "step was.",
            *_on_kept_costs(plan.request),
        ]
    if device.figures is None:
        return [
            f"{device.name} has no published speed, so there is no roofline and no K; "
            "measure steps where they are to run.",
            *_on_kept_costs(plan.request),
        ]
    notes = [
        f"{what} are by roofline, a bound from the device's published peaks "
        f"({device.figures.source}); collectives, sampling and launching are left out."
    ]
    fastest = "bfloat16" if device.figures.has_bfloat16 else "float16"
    if dtype != fastest:
        notes.append(
            f"operations are counted at the peak of {fastest}: none of {dtype} is known here, "
            "whose products may take longer, so seconds may be too few and K too large."
        )
    return notes


def _on_kept_costs(request: PlanRequest) -> list[str]:
    """Says whether steps of this pair were measured on this machine, and how they are."""
    if not request.most_drafted:
        return []
    names = request.target_name, request.drafter_name
    pair = [shlex.quote(name) for name in names]
    command = f"specjax bench --calibrate --target {pair[0]} --drafter {pair[1]}"
    decoder = decoder_of(request, request.target.num_layers, num_pages=1)
    path = cost_files.path_of(cost_files.key_of(decoder))
    if path is None or not path.is_file():
        return [f"to measure this pair's steps on this machine: {command}"]
    return [
        f"steps of this pair were measured on this machine, and an engine chooses K by them "
        f"({path}); to measure and print them: {command}"
    ]


def _on_compiled(plan: FullPlan) -> list[str]:
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
