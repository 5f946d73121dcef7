"""The stage "memory": bytes that a plan predicts against those that are seen.

A device that reports its memory is watched while an engine runs. Elsewhere a step of the whole
model is compiled, and XLA says what it needs.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import specjax
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, Results, Stage
from specjax.cli.bench.device_report.random_models import check_fits, plan_request
from specjax.cli.bench.device_report.sizes import Pair, ReportSize
from specjax.cli.table import Row, number
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.planning import device_memory
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import compile_bucket
from specjax.planning.plans import make_plan
from specjax.planning.workspace_fit import MIXED
from specjax.runtime.amounts import amount

DEVICE, COMPILER = "the device's peak", "XLA's figures of the compiled step"
NEW_TOKENS = 40


def cases(size: ReportSize, platform: str) -> list[Case]:
    del platform
    return [Case(str(pair), functools.partial(measure, pair)) for pair in size.pairs]


def measure(pair: Pair, context: Context) -> dict[str, Any]:
    """Returns the bytes of steps beside weights and pages, planned and seen."""
    size = context.size
    rows, depth = max(size.model_batches), max(size.depths)
    most = size.step_context + NEW_TOKENS
    engine = EngineConfig(max_rows=rows, max_context=most)
    check_fits(pair, context.device, engine)
    reports = device_memory.read_memory(context.device).limit_bytes is not None
    see = seen_on_device if reports else seen_by_compiler
    found = see(pair, context, engine, depth)
    planned, seen = found["planned_bytes"], found["seen_bytes"]
    found["planned_over_seen"] = planned / seen if seen else None
    return {"rows": rows, "max_context": most, "k": depth, **found}


def seen_on_device(
    pair: Pair, context: Context, engine: EngineConfig, depth: int
) -> dict[str, Any]:
    """Runs an engine; returns its plan beside the peak that the device reports."""
    target, drafter = context.models.pair(pair)
    rng = np.random.default_rng(0)
    length = context.size.step_context
    vocabulary = target.config.vocab_size
    with specjax.Engine(
        target,
        drafter=drafter,
        num_speculative_tokens=depth,
        speculative_config={"policy": "fixed", "num_speculative_tokens": depth},
        engine=engine,
    ) as running:
        sampling = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for _ in range(engine.max_rows):
            running.add(rng.integers(0, vocabulary, length - 2).tolist(), sampling)
        while running.has_work:
            running.step()
        memory = running.memory
    if memory is None:
        raise LeftOut("this device reports no memory, so nothing is planned for it.")
    return {
        "seen_by": DEVICE,
        "step": "all steps of an engine",
        "num_pages": memory.num_pages,
        "planned_bytes": memory.planned_workspace(memory.num_pages),
        # None: an earlier peak of this process is higher, and hides that of the steps.
        "seen_bytes": memory.measured_workspace,
    }


def seen_by_compiler(
    pair: Pair, context: Context, engine: EngineConfig, depth: int
) -> dict[str, Any]:
    """Plans for a memory of the report's size; returns the largest step beside XLA's figures."""
    limited = EngineConfig(
        max_rows=engine.max_rows,
        max_context=engine.max_context,
        memory_bytes=context.size.memory_bytes,
    )
    request = plan_request(pair, depth, limited)
    plan = make_plan(request)
    assert plan.memory is not None
    steps = [memory for memory in plan.compiled.buckets if memory.bucket.kind != MIXED]
    largest = max(steps, key=lambda memory: memory.workspace_bytes)
    config = request.decoder_config(request.target.num_layers, plan.memory.num_pages)
    seen = compile_bucket(AbstractDecoder(config), largest.bucket)
    tokens = plan.memory.num_pages * plan.memory.page_size
    return {
        "seen_by": COMPILER,
        "step": f"{largest.bucket.kind} of {largest.bucket.tokens} tokens",
        "num_pages": plan.memory.num_pages,
        "planned_bytes": largest.workspace_bytes + int(plan.memory.copied_per_token * tokens),
        "seen_bytes": seen.workspace_bytes,
    }


def table(results: Results) -> list[Row]:
    return [
        {
            "models": name,
            "rows": found["rows"],
            "context": found["max_context"],
            "K": found["k"],
            "step": found["step"],
            "planned": amount(found["planned_bytes"]),
            "seen": "hidden by an earlier peak"
            if found["seen_bytes"] is None
            else amount(found["seen_bytes"]),
            "planned / seen": number(found["planned_over_seen"]),
            "seen by": found["seen_by"],
        }
        for name, found in results.items()
    ]


STAGE = Stage(
    "memory",
    0.10,
    cases,
    "Memory",
    table,
    "Bytes of steps beside weights and pages, by the plan and as seen.",
)
