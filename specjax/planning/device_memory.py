"""Memory that devices report: in total, available, and used by steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.runtime.stack_level import of_the_caller

# Of a plan: allocations are rounded up, and arguments of steps are not planned. The first engine on
# a GPU was seen 0.2 % above (docs/benchmarks/h200.md).
TOLERANCE = 0.01
LEADING_BITS = 7  # of the bytes that are left; the rest is rounded down
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of Linux


class DeviceMemory(NamedTuple):
    """Bytes of one device; None for figures that it does not report."""

    limit_bytes: int | None
    in_use_bytes: int | None
    peak_bytes: int | None  # most that was ever in use


def read_memory(device: Any) -> DeviceMemory:
    """Returns the figures that a device reports now; CPUs report none."""
    stats = device.memory_stats() or {}
    names = "bytes_limit", "bytes_in_use", "peak_bytes_in_use"
    return DeviceMemory(*(None if n not in stats else int(stats[n]) for n in names))


def total_bytes(device: Any) -> int | None:
    """Returns the bytes that a device has; None if it does not report them.

    For a CPU they are those of its machine, or of the program's container if less.
    """
    if getattr(device, "platform", None) != "cpu":
        return read_memory(device).limit_bytes
    try:
        of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not everywhere known
        return None
    try:
        return min(of_machine, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # none, or "max"
        return of_machine


def available_bytes(device: Any, own_bytes: int = 0) -> int | None:
    """Returns the bytes of a device that other programs and arrays do not hold.

    None if the device does not report them. What they leave beside the caller's own is rounded
    down by less than 1/64: pages are sized by it, and compiled steps by pages, so that a few bytes
    more or less in another process would mostly compile every step again.

    Args:
      own_bytes: bytes in use that the caller holds, which count as available.
    """
    memory = read_memory(device)
    if memory.limit_bytes is None:
        return None
    of_others = max((memory.in_use_bytes or 0) - own_bytes, 0)
    left = max(memory.limit_bytes - of_others - own_bytes, 0)
    unit = 1 << max(left.bit_length() - LEADING_BITS, 0)
    return max(own_bytes + left // unit * unit, 1)


def bytes_on(device: Any, arrays: Any) -> int:
    """Returns the bytes that a pytree's arrays take on a device, each array once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(arrays)}.values()
    return sum(
        shard.data.nbytes
        for leaf in leaves
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
        for shard in leaf.addressable_shards
        if shard.device == device
    )


class MemoryWatch:
    """Measures the memory of steps on devices that report it, and warns a TOLERANCE above the plan.

    Memory that compiling or other code allocates meanwhile is included: the device reports
    only their sum.

    Args:
      devices: devices that already hold weights and state.
      planned_workspace: bytes of one device that steps may take beside them.
    """

    def __init__(self, devices: Sequence[Any], planned_workspace: float):
        self.planned_workspace = planned_workspace
        self.measured_workspace: int | None = None  # largest so far; None before any
        self._placed = [(device, read_memory(device)) for device in devices]
        self._has_warned = False

    def look(self) -> int | None:
        """Returns the most bytes that steps took beside weights and state so far.

        None until the peak in use exceeds that of loading: a device reports only its peak.
        """
        for device, placed in self._placed:
            peak = read_memory(device).peak_bytes
            if peak is None or placed.peak_bytes is None or placed.in_use_bytes is None:
                continue
            if peak > placed.peak_bytes:
                seen = peak - placed.in_use_bytes
                self.measured_workspace = max(seen, self.measured_workspace or 0)
        self._warn()
        return self.measured_workspace

    def _warn(self) -> None:
        measured, planned = self.measured_workspace, self.planned_workspace
        if self._has_warned or measured is None or measured <= planned * (1 + TOLERANCE):
            return
        self._has_warned = True
        warnings.warn(
            f"steps were seen to take {measured / 1e6:.1f} MB of a device beside weights and "
            f"pages, {planned / 1e6:.1f} MB were planned; raise batch_safety_margin, or lower "
            "num_pages or max_rows.",
            stacklevel=of_the_caller(),
        )
