"""Estimates a plan by formulas alone: in a second, where compiling takes minutes.

Weights, state and bytes per token are those that compiled plans count. What steps take beside
them is not: that is taken as a number of arrays of logits, or of activations, as they were seen in
compiled steps (docs/benchmarks/planning.md, the compiler for H100).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.partition import check_divides, undivided
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import engine_buckets
from specjax.planning.memory_model import plan_memory
from specjax.planning.plan_figures import PlanFigures
from specjax.planning.plan_request import PlanRequest
from specjax.planning.plans import (
    bytes_of,
    decoder_of,
    memory_limits,
    page_bytes,
    resident_bytes,
    works_of,
)
from specjax.planning.workspace_fit import BucketMemory, StepShape
from specjax.runtime.amounts import amount

# float32 arrays of [tokens, vocabulary] that a step holds at once while tokens are chosen, and
# arrays of [tokens, intermediate_size] in the dtype of the weights inside a layer.
LOGIT_ARRAYS, INNER_ARRAYS = 5, 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(PlanFigures):
    """A plan by formulas.

    Attributes:
      workspace_bytes: of the largest step, on one chip.
      misfit: what weights, state, a step and one page take more than there is, and what to change;
        None if they fit, or the memory is unknown.
    """

    workspace_bytes: int
    misfit: str | None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the memory is unknown."""
        return None if self.request.limits_memory is None else self.misfit is None


def estimate(request: PlanRequest) -> Estimate:
    """Returns the plan of a request by formulas; nothing is compiled.

    A mesh of the device is not looked at: weights count as if chips shared them evenly.

    Raises:
      ValueError: the model cannot be split over the device's chips.
    """
    check_divides(request.target, request.device.count)
    device = dataclasses.replace(request.device, mesh=None)
    request = dataclasses.replace(request, device=device)
    decoder, steps = _steps_of(request)
    resident = _resident(decoder, request, device.count)
    of_pages = page_bytes(request)
    per_page = request.engine.chosen_page_size
    workspace = max(step.temp_bytes for step in steps)
    misfit = _misfit(decoder, request, workspace + sum(of_pages))
    memory = None
    if request.limits_memory is not None and misfit is None:
        limits = memory_limits(request, request.limits_memory - resident)
        memory = plan_memory(limits, sum(of_pages) / per_page, steps)
    return Estimate(
        request=request,
        weights_bytes=sum(map(bytes_of, jax.tree.leaves(decoder.abstract_params))),
        resident_bytes=resident,
        target_bytes_per_token=of_pages[0] / per_page,
        drafter_bytes_per_token=of_pages[1] / per_page,
        memory=memory,
        **works_of(request),
        workspace_bytes=workspace,
        misfit=misfit,
    )


def _steps_of(request: PlanRequest) -> tuple[AbstractDecoder, list[BucketMemory]]:
    """Returns the decoder without a mesh, and the memory of each of its steps on one chip."""
    # Without a mesh a drafter cannot be split; its shards are counted apart.
    whole = dataclasses.replace(request, drafter=request.drafter.split(1))
    decoder = decoder_of(whole, request.target.num_layers, 1)
    depths = range(request.most_drafted + 1)
    shapes = engine_buckets(decoder, depths, chooses_rows=request.chooses_rows)
    return decoder, [_memory_of(shape, request) for shape in shapes]


def _needed(request: PlanRequest) -> int:
    """Returns the bytes of one chip that weights, state, a step and one page take."""
    decoder, steps = _steps_of(request)
    beside = max(step.temp_bytes for step in steps) + sum(page_bytes(request))
    return _resident(decoder, request, request.device.count) + beside


def _resident(decoder: AbstractDecoder, request: PlanRequest, chips: int) -> int:
    """Returns the bytes of weights and state of one chip."""
    state = resident_bytes(decoder) - sum(_weights(decoder, request, 1))
    return state + sum(_weights(decoder, request, chips))


def _weights(decoder: AbstractDecoder, request: PlanRequest, chips: int) -> tuple[int, int]:
    """Returns the bytes that one of some chips holds of the target's and the drafter's weights."""
    params: Any = decoder.abstract_params
    target, drafter = (
        sum(map(bytes_of, jax.tree.leaves(part))) for part in (params.target, params.drafter)
    )
    return target // chips, drafter // min(request.drafter.num_shards, chips)


def _memory_of(shape: StepShape, request: PlanRequest) -> BucketMemory:
    """Returns the memory of a step: the larger of its logits and its activations."""
    target, chips = request.target, request.device.count
    logits = LOGIT_ARRAYS * 4 * target.vocab_size * shape.logit_tokens
    itemsize = jnp.dtype(request.dtype).itemsize
    inner = INNER_ARRAYS * itemsize * target.intermediate_size * shape.tokens
    return BucketMemory(
        bucket=shape,
        argument_bytes=0,
        output_bytes=0,
        temp_bytes=max(logits, inner) // chips,
        alias_bytes=0,
        code_bytes=0,
    )


def _misfit(decoder: AbstractDecoder, request: PlanRequest, beside: int) -> str | None:
    """Returns what memory lacks for weights, state and `beside`, and what to change, if it does."""
    total, chips = request.limits_memory, request.device.count
    needed = lambda count: _resident(decoder, request, count) + beside * chips // count
    if total is None or needed(chips) <= total:
        return None
    more = range(chips + 1, request.target.num_kv_heads + 1)
    possible = (n for n in more if undivided(request.target, n) is None)
    count = next((n for n in possible if needed(n) <= total), None)
    split = f"{count} chips would hold it, with --tensor-parallel {count}; or "
    if count is None:
        split = "no split of this model over more chips would; "
    return (
        f"it does not fit: weights, state and a step take {amount(needed(chips))} of each chip, "
        f"which has {amount(total)}; {split}{_what_fits(request, total)}."
    )


def _what_fits(request: PlanRequest, total: int) -> str:
    """Returns what to change for the same model to fit on the same chips, by estimates of it."""
    engine = request.engine
    row = dataclasses.replace(
        engine, max_rows=1, row_buckets=(), max_context=2 * engine.chosen_page_size
    )
    half = dataclasses.replace(request, dtype="bfloat16")
    smaller = "--max-rows and --max-context"
    changes = {f"lower {smaller}": dataclasses.replace(request, engine=row)}
    both = f"use --dtype bfloat16 and lower {smaller}"
    if jnp.dtype(request.dtype).itemsize > 2:
        changes["use --dtype bfloat16"] = half
        changes[both] = dataclasses.replace(half, engine=row)
    fitting = [change for change, other in changes.items() if _needed(other) <= total]
    enough = [change for change in fitting if change != both] or fitting
    return " or ".join(enough) or "take a device of more memory or a smaller model"
