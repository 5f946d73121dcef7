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
from specjax import sharding
from specjax.config import batch_size_table
from specjax.models.quantised import num_bytes
from specjax.paged import kv_cache
from specjax.paged.work import ModelWork, model_work
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import (
    CompiledMemory,
    compile_memory,
    engine_buckets,
)
from specjax.planning.drafter_split import TABLE_CONTEXT
from specjax.planning.layer_pattern import layers_to_compile
from specjax.planning.memory_model import MemoryLimits, MemoryPlan, plan_memory
from specjax.planning.plan_request import PlanRequest
from specjax.planning.roofline import (
    choose_num_speculative_tokens,
    compute_bound_tokens,
    expected_tokens,
    roofline_step_s,
    verify_work,
)
from specjax.runtime.amounts import amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullPlan:
    """All figures of a plan; bytes are of one chip unless noted otherwise."""

    request: PlanRequest
    weights_bytes: int  # of target and drafter, each parameter once
    resident_bytes: int  # weights and state of one chip, pages left out
    target_bytes_per_token: float
    drafter_bytes_per_token: float
    compiled: CompiledMemory
    memory: MemoryPlan | None  # None if the device's memory is unknown
    target_work: ModelWork
    drafter_works: tuple[ModelWork, ...]  # of each model that the drafter runs
    kernels: tuple[Taken, ...]  # the implementation of each op in the compiled steps
    notes: tuple[str, ...] = ()

    def step_s(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the least seconds of a step, by the device's peak figures.

        Raises:
          ValueError: the device's figures are not known.
        """
        device = self.request.device
        if device.figures is None:
            raise ValueError(f"no figures are known for {device.name}.")
        return roofline_step_s(
            self.target_work,
            self.drafter_works,
            device.figures,
            rows=rows,
            num_speculative_tokens=num_speculative_tokens,
            context=context,
        )

    def tokens_per_s(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the expected tokens per second of all rows by `step_s`, an upper bound.

        Raises:
          ValueError: the device's figures are not known.
        """
        k = num_speculative_tokens
        expected = expected_tokens(self.request.acceptance_rate, k)
        return rows * expected / self.step_s(rows, k, context)

    def choose(self, rows: int, context: int) -> int | None:
        """Returns the K with the most expected tokens per second, 0 above the gate.

        None if the device's figures are unknown.
        """
        request = self.request
        if request.device.figures is None:
            return None
        if self.memory is not None and not self.memory.may_speculate(rows * context):
            return 0
        depths = range(request.most_drafted + 1)
        seconds = [self.step_s(rows, k, context) for k in depths]
        return choose_num_speculative_tokens(seconds, request.acceptance_rate)

    def batch_size_table(self, context: int) -> list[list[int]] | None:
        """Returns K by batch size in vLLM's format, for rows of `context` tokens each."""
        entries: list[list[int]] = []
        for rows in range(1, self.request.engine.max_rows + 1):
            k = self.choose(rows, context)
            if k is None:
                return None
            if entries and entries[-1][2] == k:
                entries[-1][1] = rows
            else:
                entries.append([rows, rows, k])
        batch_size_table.parse(entries)
        return entries

    @property
    def contexts(self) -> list[int]:
        """Tokens per row for which to tabulate: 512 times powers of 4, and the most."""
        most = self.request.max_context
        return [c for c in (4**i * 512 for i in range(12)) if c < most] + [most]

    @property
    def table_context(self) -> int:
        return min(TABLE_CONTEXT, self.request.max_context)

    @property
    def compute_bound_tokens(self) -> float | None:
        """Tokens of a step from which on arithmetic takes longer than reading the weights."""
        figures = self.request.device.figures
        return None if figures is None else compute_bound_tokens(self.target_work, figures)

    def intensity(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the operations per byte of verification."""
        work = verify_work(self.target_work, rows, num_speculative_tokens, context)
        return work.intensity


Plan = FullPlan  # its name until 0.1


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
    whole = _decoder(request, request.target.num_layers, 1)
    resident, page = _resident_bytes(whole), sum(_page_bytes(request))
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


def _resident_bytes(whole: AbstractDecoder) -> int:
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
    device, engine = request.device, request.engine
    depths = range(request.most_drafted + 1)
    as_compiled = request.as_compiled()
    of_target, of_drafter = _page_bytes(as_compiled)
    layers = request.target.num_layers
    with recorded() as taken:
        compiled = compile_memory(
            functools.partial(_decoder, as_compiled),
            request.target,
            (of_target / layers, of_drafter),
            depths,
            on_progress,
            chooses_rows=request.chooses_rows,
        )
    kernels = tuple(sorted(taken))
    per_page = compiled.pages_ratio / engine.chosen_page_size
    target_c, drafter_c = (page * per_page for page in _page_bytes(request))
    whole = _decoder(request, layers, 1)
    weights, resident = whole.abstract_params, _resident_bytes(whole)
    memory, notes = _memory(request, target_c + drafter_c, compiled, resident)
    if memory is not None:
        memory = dataclasses.replace(memory, kernels=kernels)
    return FullPlan(
        request=request,
        weights_bytes=sum(_bytes(leaf) for leaf in jax.tree.leaves(weights)),
        resident_bytes=resident,
        target_bytes_per_token=target_c,
        drafter_bytes_per_token=drafter_c,
        compiled=compiled,
        memory=memory,
        target_work=model_work(
            request.target, request.dtype, device.count, kv_dtype=_kept_dtype(request)
        ),
        drafter_works=tuple(
            request.drafter.work(request.target, request.drafter_dtype or request.dtype)
        ),
        kernels=kernels,
        notes=(*_context_notes(request), *_kernel_notes(kernels), *compiled.warnings, *notes),
    )


def kernels_in_use(request: PlanRequest) -> tuple[Taken, ...]:
    """Returns the implementation of each op in plain, speculative and prompt steps.

    It traces the steps of the first layers from shapes, and compiles none.

    Raises:
      DrafterError: as `make_plan`.
    """
    device = request.device
    with lowered_for(device.traced_for, device.kind, device.platform), recorded() as taken:
        decoder = _decoder(request, layers_to_compile(request.target).few, 1)
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


def _decoder(request: PlanRequest, num_layers: int, num_pages: int) -> AbstractDecoder:
    """Returns a decoder of the first layers of the target."""
    config = request.decoder_config(num_layers, num_pages)
    return AbstractDecoder(
        config, drafter_dtype=request.drafter_dtype, drafter_params=request.drafter_params
    )


def _kept_dtype(request: PlanRequest) -> np.dtype:
    """Returns the dtype of the target's pages."""
    return kv_cache.pages_dtype(request.engine.kv_cache_dtype, request.dtype)


def _page_bytes(request: PlanRequest) -> tuple[int, int]:
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
        return sum(_bytes(leaf) for leaf in jax.tree.leaves(trees))
    specs = [decoder._param_specs(params), decoder._state_specs(state)]
    places = jax.tree.map(
        lambda leaf, place: _bytes(leaf.update(shape=place.shard_shape(leaf.shape))),
        trees,
        sharding.shardings(specs, mesh),
    )
    return sum(jax.tree.leaves(places))


def _bytes(leaf: Any) -> int:
    return math.ceil(num_bytes(leaf))


def _memory(
    request: PlanRequest, c: float, compiled: CompiledMemory, resident: int
) -> tuple[MemoryPlan | None, list[str]]:
    """Returns the memory plan, None if the device's memory is unknown; and notes for the user."""
    total, engine = request.limits_memory, request.engine
    if total is None:
        return None, [
            f"{request.device.name} has no memory figure, so there are no pages, weight limit "
            "or gate; give --memory-bytes."
        ]
    limits = MemoryLimits(
        free_bytes=total - resident - request.learner_bytes,
        page_size=engine.chosen_page_size,
        rows=engine.max_rows,
        max_context=request.max_context,
        batch_safety_margin=engine.batch_safety_margin,
        speculation_weight_fraction=engine.speculation_weight_fraction,
        num_pages=engine.num_pages,
        tree_slots=request.tree_slots,
    )
    memory = plan_memory(
        limits,
        c,
        compiled.buckets,
        copied_per_token=compiled.copies.ratio * c,
    )
    memory = dataclasses.replace(
        memory, kept_bytes=_kept_bytes(request), learner_bytes=request.learner_bytes
    )
    return memory, list(memory.warnings)


def _kept_bytes(request: PlanRequest) -> int:
    """Returns the bytes of the hidden states that are kept, on one chip."""
    if request.kept is None:
        return 0
    kept: Any = _decoder(request, request.target.num_layers, 1).abstract_state.kept
    return sum(map(_bytes, kept.states))


def _of_learner(num_bytes: int) -> str:
    """Returns a clause on a drafter that learns, for a list of what takes memory."""
    return f"a drafter that learns {amount(num_bytes)}, " if num_bytes else ""
