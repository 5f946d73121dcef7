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

# Memory comes early: a device reports its highest peak only, and later stages reach others.
STAGES = (
    speed.STAGE,
    numerics.STAGE,
    memory.STAGE,
    tuning.STAGE,
    kernel_times.STAGE,
    embedded_pair.STAGE,
    model_steps.STAGE,
    prefill.STAGE,
)
