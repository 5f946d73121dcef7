"""The speed by which a roofline is drawn: published by the device's maker, or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.configs.devices import of_kind

PUBLISHED, MEASURED = "published", "measured here"


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Bytes and operations per second of one device, by which a roofline is drawn."""

    bytes_per_s: float
    flops_per_s: float
    source: str  # PUBLISHED or MEASURED


def published_peaks(device: Any) -> Peaks | None:
    """Returns what the maker of a device publishes; None if it is not known."""
    figures = of_kind(device.device_kind)
    if figures is None:
        return None
    one = figures.per_device()
    return Peaks(one.bytes_per_s, one.flops_per_s, PUBLISHED)


def measured_peaks(speed: Mapping[str, Any]) -> Peaks:
    """Returns peaks from the result of `measure_speed`."""
    fastest = max(speed["copy_bytes_per_s"], speed["read_bytes_per_s"] or 0.0)
    return Peaks(fastest, speed["flops_per_s"], MEASURED)
