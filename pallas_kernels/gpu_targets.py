"""GPUs as XLA describes them, to compile for one that is not there.

It needs jax's CUDA plugin, and no driver: pip install "jax[cuda12]".
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """What XLA asks of a GPU."""

    kind: str  # jax's device_kind
    capability: tuple[int, int]
    multiprocessors: int
    fpus: int  # float32 units of a multiprocessor
    clock_ghz: float
    bytes_per_s: float  # of its memory
    memory_bytes: int
    l2_bytes: int
    shared_kib: int  # memory of a multiprocessor that its thread blocks share
    threads: int = 2048  # of a multiprocessor

    @property
    def text(self) -> str:
        """Returns the target as XLA's GpuTargetConfigProto, in text."""
        major, minor = self.capability
        # One KiB of it is the system's, except on Turing.
        optin = self.shared_kib - (self.capability >= (8, 0))
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.kind}"
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.multiprocessors}
              fpus_per_core: {self.fpus}
              clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {self.bytes_per_s:.0f}
              device_memory_size: {self.memory_bytes}
              l2_cache_size: {self.l2_bytes}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: {self.threads}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_core: {self.shared_kib << 10}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {optin << 10}
            }}
        """


_MIB, _GB = 1 << 20, 10**9
# Multiprocessors, clocks, memory and L2: NVIDIA's datasheets and architecture whitepapers of
# each; shared memory and threads: "Technical Specifications per Compute Capability" in the CUDA
# programming guide.
TARGETS = {
    "t4": Target("Tesla T4", (7, 5), 40, 64, 1.59, 320e9, 16 * _GB, 4 * _MIB, 64, 1024),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2039e9, 80 * _GB, 40 * _MIB, 164
    ),
    "l4": Target("NVIDIA L4", (8, 9), 58, 128, 2.04, 300e9, 24 * _GB, 48 * _MIB, 100, 1536),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3350e9, 80 * _GB, 50 * _MIB, 228
    ),
    "a100-40gb": Target(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41, 1555e9, 40 * _GB, 40 * _MIB, 164
    ),
    "b200": Target("NVIDIA B200", (10, 0), 148, 128, 1.965, 8000e9, 180 * _GB, 126 * _MIB, 228),
    "h200": Target("NVIDIA H200", (9, 0), 132, 128, 1.98, 4800e9, 141 * _GB, 50 * _MIB, 228),
}


@functools.cache
def described_devices(name: str, count: int = 1) -> Sequence[Any] | None:
    """Returns devices of a kind for jax to compile for, or None without the CUDA plugin.

    Args:
      name: a key of `TARGETS`.
      count: GPUs of one host.
    """
    from jax.experimental import topologies

    # The plugin for CUDA 13 is refused without the driver's libraries, which a compiler needs not.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        described = topologies.get_topology_desc(
            name,
            platform="cuda",
            target_config=TARGETS[name].text,
            topology=f"1x1x{count}",
        )
    except NotImplementedError:
        return None
    return described.devices
