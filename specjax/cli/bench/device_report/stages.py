"""The stages of a report, in order."""

from __future__ import annotations

from specjax.cli.bench.device_report import (
    embedded_pair,
    kernel_times,
    memory,
    model_steps,
    numerics,
    prefill,
    speed,
    tuning,
)
from specjax.cli.bench.device_report.cases import Stage

# Memory comes early: a device reports its highest peak only, and later stages reach others.
STAGES = (
    Stage("device", 0.03, speed.cases),
    Stage("numerics", 0.17, numerics.cases),
    Stage("memory", 0.10, memory.cases),
    Stage("block sizes", 0.10, tuning.cases),
    Stage("kernel times", 0.10, kernel_times.cases),
    Stage("embedded pair", 0.15, embedded_pair.cases),
    Stage("models", 0.25, model_steps.cases),
    Stage("prefill", 0.10, prefill.cases),
)
