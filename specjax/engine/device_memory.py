"""What devices say of their memory: how much there is, and how much others hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class DeviceMemory(NamedTuple):
    """Bytes of one device; None where it does not say."""

    limit_bytes: int | None
    in_use_bytes: int | None
    peak_bytes: int | None  # the most that were ever in use


def read_memory(device: Any) -> DeviceMemory:
    """Returns what a device says now; CPUs say nothing."""
    stats = device.memory_stats() or {}
    names = "bytes_limit", "bytes_in_use", "peak_bytes_in_use"
    return DeviceMemory(*(None if n not in stats else int(stats[n]) for n in names))


def available_bytes(device: Any, own_bytes: int = 0) -> int | None:
    """Returns the bytes of a device that others do not hold; None where it does not say.

    Args:
      own_bytes: held already by whoever asks, and not to be counted twice.
    """
    memory = read_memory(device)
    if memory.limit_bytes is None:
        return None
    of_others = max((memory.in_use_bytes or 0) - own_bytes, 0)
    return max(memory.limit_bytes - of_others, 1)


def bytes_on(device: Any, arrays: Any) -> int:
    """Returns the bytes that a pytree's arrays take on a device, each array once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(arrays)}.values()
    return sum(
        shard.data.nbytes
        for leaf in leaves
        if isinstance(leaf, jax.Array)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
