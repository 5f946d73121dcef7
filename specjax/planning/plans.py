"""Plans the memory and speed of a model, a drafter and a device without loading them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.implementations import Taken, lowered_for, recorded
from specjax.models import sharding
from specjax.models.quantised import num_bytes
from specjax.paged import kv_cache
from specjax.paged.work import model_work
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import (
    CompiledMemory,
    compile_memory,
    engine_buckets,
)
from specjax.planning.layer_pattern import layers_to_compile
from specjax.planning.memory_model import MemoryLimits, MemoryPlan, plan_memory
from specjax.planning.plan_figures import PlanFigures
from specjax.planning.plan_request import PlanRequest
from specjax.runtime.amounts import amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullPlan(PlanFigures):
    """A plan whose memory follows from compiled steps."""

    compiled: CompiledMemory
    kernels: tuple[Taken, ...]  # the implementation of each op in the compiled steps


def make_plan(
    request: PlanRequest,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> FullPlan:
    """Compiles a few steps from shapes and returns the plan that follows from them.

    No weights are read and no step is run.

    Raises:
      ValueError: the model cannot be split over the device's chips, or does not fit. Where
        shapes alone show it, this is raised before the first compilation.
      DrafterError: a step with the drafter cannot be traced; see `PlanRequest.without_drafter`.
    """
    device = request.device
    if device.mesh is not None:
        sharding.validate(request.target, device.mesh)
    with lowered_for(device.traced_for, device.kind, device.platform):
        check_memory(request)
        return _plan(request, on_progress)


def check_memory(request: PlanRequest) -> None:
    """Raises if memory cannot hold weights, state, one page and the least bytes of a step.

    It uses shapes alone: compiling takes a minute and would not tell more.

    Raises:
      ValueError: memory is too small; the message names the bytes that are needed.
      DrafterError: as `make_plan`.
    """
    total = request.limits_memory
    if total is None:
        return
    whole = decoder_of(request, request.target.num_layers, 1)
    resident, page = resident_bytes(whole), sum(page_bytes(request))
    step = _least_step_bytes(request, whole)
    beside = request.learner_bytes
    if total >= resident + beside + page + step:
        return
    raise ValueError(
        f"weights and state take {amount(resident)} of the {amount(total)} of each chip, "
        f"{_of_learner(beside)}a "
        f"page {amount(page)} and a step at least {amount(step)}; use more chips, a "
        "smaller dtype, max_rows or max_context, or raise memory_bytes."
    )


def resident_bytes(whole: AbstractDecoder) -> int:
    """Returns the bytes of weights and state of one chip, pages left out."""
    state = whole.abstract_state
    cache = dataclasses.replace(state.cache, pages=())
    drafter = jax.tree.map(_without_pages, state.drafter, whole.drafter_axes(state))
    state = dataclasses.replace(state, drafter=drafter, cache=cache)
    return _chip_bytes(whole, whole.abstract_params, state)


def _without_pages(leaf: Any, axes: Any) -> Any:
    """Returns the shape of a leaf of a drafter's state with no pages."""
    names = [*axes, *[None] * (len(leaf.shape) - len(axes))]
    sizes = zip(leaf.shape, names)
    return leaf.update(shape=tuple(0 if name == "pages" else size for size, name in sizes))


def _least_step_bytes(request: PlanRequest, whole: AbstractDecoder) -> int:
    """Returns a lower bound of the largest step's bytes on one chip.

    It is the larger of its float32 logits and its activations inside a layer.
    """
    depths = range(request.most_drafted + 1)
    buckets = engine_buckets(whole, depths, chooses_rows=request.chooses_rows)
    config, itemsize = request.target, jnp.dtype(request.dtype).itemsize
    logits = max(4 * config.vocab_size * bucket.logit_tokens for bucket in buckets)
    inner = max(config.intermediate_size * itemsize * b.tokens for b in buckets)
    if request.engine.numerics == "invariant":  # a few tokens at a time
        logits = inner = 0
    return max(inner, logits) // request.device.count


def _plan(request: PlanRequest, on_progress: Callable[[str, int, int], None]) -> FullPlan:
    engine = request.engine
    depths = range(request.most_drafted + 1)
    as_compiled = request.as_compiled()
    of_target, of_drafter = page_bytes(as_compiled)
    layers = request.target.num_layers
    with recorded() as taken:
        compiled = compile_memory(
            functools.partial(decoder_of, as_compiled),
            request.target,
            (of_target / layers, of_drafter),
            depths,
            on_progress,
            chooses_rows=request.chooses_rows,
        )
    kernels = tuple(sorted(taken))
    per_page = compiled.pages_ratio / engine.chosen_page_size
    target_c, drafter_c = (page * per_page for page in page_bytes(request))
    whole = decoder_of(request, layers, 1)
    weights, resident = whole.abstract_params, resident_bytes(whole)
    memory, notes = _memory(request, target_c + drafter_c, compiled, resident)
    if memory is not None:
        memory = dataclasses.replace(memory, kernels=kernels)
    return FullPlan(
        request=request,
        weights_bytes=sum(bytes_of(leaf) for leaf in jax.tree.leaves(weights)),
        resident_bytes=resident,
        target_bytes_per_token=target_c,
        drafter_bytes_per_token=drafter_c,
        compiled=compiled,
        memory=memory,
        **works_of(request),
        kernels=kernels,
        notes=(*_context_notes(request), *_kernel_notes(kernels), *compiled.warnings, *notes),
    )


def works_of(request: PlanRequest) -> dict[str, Any]:
    """Returns the work of a forward of the target and of each model that drafts, on one chip."""
    kept, own = _kept_dtype(request), request.drafter_dtype or request.dtype
    return {
        "target_work": model_work(
            request.target, request.dtype, request.device.count, kv_dtype=kept
        ),
        "drafter_works": tuple(request.drafter.work(request.target, own)),
    }


def kernels_in_use(request: PlanRequest) -> tuple[Taken, ...]:
    """Returns the implementation of each op in plain, speculative and prompt steps.

    It traces the steps of the first layers from shapes, and compiles none.

    Raises:
      DrafterError: as `make_plan`.
    """
    device = request.device
    with lowered_for(device.traced_for, device.kind, device.platform), recorded() as taken:
        decoder = decoder_of(request, layers_to_compile(request.target).few, 1)
        for depth in sorted({0, request.most_drafted}):
            decoder.lower_burst(depth)
        prompts = decoder.prompt_sizes.shapes(decoder.sizes.rows)[-1]
        decoder.lower_prefill(prompts.places, prompts.num_tokens)
    return tuple(sorted(taken))


def _kernel_notes(kernels: tuple[Taken, ...]) -> list[str]:
    """Returns a note for each op that the platform's kernel does not cover."""
    return [
        f"{taken.op} runs as {taken.implementation}, which is slower here: "
        f"{'; '.join(taken.reasons)} Raise EngineConfig.page_size, or lower max_rows or "
        "max_context."
        for taken in kernels
        if taken.reasons
    ]


def _context_notes(request: PlanRequest) -> list[str]:
    """Returns a note if max_context is above the model's own limit."""
    asked, most = request.engine.max_context, request.max_context
    if asked is None or asked <= most:
        return []
    return [
        f"max_context={asked} is more than the {most} tokens that the model was made for; {most} "
        "are planned for."
    ]


def decoder_of(request: PlanRequest, num_layers: int, num_pages: int) -> AbstractDecoder:
    """Returns a decoder of the first layers of the target."""
    config = request.decoder_config(num_layers, num_pages)
    return AbstractDecoder(
        config, drafter_dtype=request.drafter_dtype, drafter_params=request.drafter_params
    )


def _kept_dtype(request: PlanRequest) -> np.dtype:
    """Returns the dtype of the target's pages."""
    return kv_cache.pages_dtype(request.engine.kv_cache_dtype, request.dtype)


def page_bytes(request: PlanRequest) -> tuple[int, int]:
    """Returns the bytes of a page on one chip, of target and of drafter, as counted."""
    scale = _kept_dtype(request).itemsize * request.engine.chosen_page_size
    count = request.device.count
    numbers = kv_cache.numbers_per_token(request.target, kv_shards=count) // count
    drafted = request.drafter.bytes_per_token(request.target, request.dtype)
    return numbers * scale, drafted * request.engine.chosen_page_size


def _chip_bytes(decoder: AbstractDecoder, params: Any, state: Any) -> int:
    """Returns the bytes of weights and state on each chip."""
    mesh = decoder.mesh
    trees = [params, state]
    if mesh is None:
        return sum(bytes_of(leaf) for leaf in jax.tree.leaves(trees))
    specs = [decoder.param_specs(params), decoder.state_specs(state)]
    places = jax.tree.map(
        lambda leaf, place: bytes_of(leaf.update(shape=place.shard_shape(leaf.shape))),
        trees,
        sharding.shardings(specs, mesh),
    )
    return sum(jax.tree.leaves(places))


def bytes_of(leaf: Any) -> int:
    """Returns the bytes of a weight of this shape and dtype."""
    return math.ceil(num_bytes(leaf))


def _memory(
    request: PlanRequest, c: float, compiled: CompiledMemory, resident: int
) -> tuple[MemoryPlan | None, list[str]]:
    """Returns the memory plan, None if the device's memory is unknown; and notes for the user."""
    total = request.limits_memory
    if total is None:
        return None, [
            f"{request.device.name} has no memory figure, so there are no pages, weight limit "
            "or gate; give --memory-bytes."
        ]
    memory = plan_memory(
        memory_limits(request, total - resident - request.learner_bytes),
        c,
        compiled.buckets,
        copied_per_token=compiled.copies.ratio * c,
    )
    memory = dataclasses.replace(
        memory, kept_bytes=_kept_bytes(request), learner_bytes=request.learner_bytes
    )
    return memory, list(memory.warnings)


def memory_limits(request: PlanRequest, free_bytes: int) -> MemoryLimits:
    """Returns the limits of a plan whose weights and state leave so many bytes of a chip."""
    engine = request.engine
    return MemoryLimits(
        free_bytes=free_bytes,
        page_size=engine.chosen_page_size,
        rows=engine.max_rows,
        max_context=request.max_context,
        batch_safety_margin=engine.batch_safety_margin,
        speculation_weight_fraction=engine.speculation_weight_fraction,
        num_pages=engine.num_pages,
        tree_slots=request.tree_slots,
    )


def _kept_bytes(request: PlanRequest) -> int:
    """Returns the bytes of the hidden states that are kept, on one chip."""
    if request.kept is None:
        return 0
    kept: Any = decoder_of(request, request.target.num_layers, 1).abstract_state.kept
    return sum(map(bytes_of, kept.states))


def _of_learner(num_bytes: int) -> str:
    """Returns a clause on a drafter that learns, for a list of what takes memory."""
    return f"a drafter that learns {amount(num_bytes)}, " if num_bytes else ""
