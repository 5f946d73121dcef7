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
      fits: whether weights, state, a step and one page fit; None if the memory is unknown.
    """

    workspace_bytes: int
    fits: bool | None


def estimate(request: PlanRequest) -> Estimate:
    """Returns the plan of a request by formulas; nothing is compiled.

    A mesh of the device is not looked at: weights count as if chips shared them evenly.

    Raises:
      ValueError: the model cannot be split over the device's chips.
    """
    check_divides(request.target, request.device.count)
    device = dataclasses.replace(request.device, mesh=None)
    request = dataclasses.replace(request, device=device)
    # Without a mesh a drafter cannot be split; its shards are counted below.
    whole = dataclasses.replace(request, drafter=request.drafter.split(1))
    decoder = decoder_of(whole, request.target.num_layers, 1)
    depths = range(request.most_drafted + 1)
    shapes = engine_buckets(decoder, depths, chooses_rows=request.chooses_rows)
    steps = [_memory_of(shape, request) for shape in shapes]
    resident = _resident(decoder, request, device.count)
    of_pages = page_bytes(request)
    per_page = request.engine.chosen_page_size
    workspace = max(step.temp_bytes for step in steps)
    fits, notes = _fits(decoder, request, workspace + sum(of_pages))
    memory = None
    if fits:
        limits = memory_limits(request, (request.limits_memory or 0) - resident)
        memory = plan_memory(limits, sum(of_pages) / per_page, steps)
    return Estimate(
        request=request,
        weights_bytes=sum(map(bytes_of, jax.tree.leaves(decoder.abstract_params))),
        resident_bytes=resident,
        target_bytes_per_token=of_pages[0] / per_page,
        drafter_bytes_per_token=of_pages[1] / per_page,
        memory=memory,
        **works_of(request),
        notes=notes,
        workspace_bytes=workspace,
        fits=fits,
    )


def _resident(decoder: AbstractDecoder, request: PlanRequest, chips: int) -> int:
    """Returns the bytes of weights and state of one chip."""
    params: Any = decoder.abstract_params
    target, drafter = (
        sum(map(bytes_of, jax.tree.leaves(part))) for part in (params.target, params.drafter)
    )
    state = resident_bytes(decoder) - target - drafter
    return state + target // chips + drafter // min(request.drafter.num_shards, chips)


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


def _fits(
    decoder: AbstractDecoder, request: PlanRequest, beside: int
) -> tuple[bool | None, tuple[str, ...]]:
    """Returns whether memory holds weights, state and `beside`, and what to do if it does not."""
    total, chips = request.limits_memory, request.device.count
    if total is None:
        return None, ()
    needed = lambda count: _resident(decoder, request, count) + beside * chips // count
    if needed(chips) <= total:
        return True, ()
    more = range(chips + 1, request.target.num_kv_heads + 1)
    possible = (n for n in more if undivided(request.target, n) is None)
    count = next((n for n in possible if needed(n) <= total), None)
    hint = "use a smaller dtype, max_rows or max_context"
    if count is not None:
        hint = f"{count} chips would hold it, with --tensor-parallel {count}; or {hint}"
    else:
        hint = f"no split of this model over more chips would; {hint}"
    return False, (
        f"it does not fit: weights, state and a step take {amount(needed(chips))} of each chip, "
        f"which has {amount(total)}; {hint}.",
    )
