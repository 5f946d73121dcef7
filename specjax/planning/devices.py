"""The devices of plans, by the names that users write."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.gpu_targets import described_devices
from pallas_kernels.implementations import default_device
from specjax.config.names import suggestion
from specjax.configs.devices import DEVICES, GOOGLE, NVIDIA, DeviceFigures
from specjax.models import sharding
from specjax.planning.step_prior import ProcessorSpeed

CPU, GPU, TPU = "cpu", "gpu", "tpu"
HERE = "here"  # the device that this process runs on
_PLATFORMS = {GOOGLE: TPU, NVIDIA: GPU}
_SAME = {"a100-80gb": "a100", "v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}
_TOPOLOGY = re.compile("[1-9][0-9]*(x[1-9][0-9]*){1,2}")  # chips along two or three axes
_THREE_AXES = ("v4", "v5p", "tpu7x")  # whose topologies have three; others have two


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of a plan: `count` chips of one kind, on the tensor axis."""

    name: str  # with its platform: "cpu", "gpu:h100", "tpu:v5e", "tpu:v5e:2x2"
    count: int
    figures: DeviceFigures | None  # of one device; None if unknown
    mesh: Mesh | None  # to compile for; None for one CPU
    is_compiled_for: bool = True  # otherwise the steps are compiled for CPU
    speed: ProcessorSpeed | None = None  # of a CPU, if it was measured

    @property
    def platform(self) -> str:
        """The platform that steps are compiled for: "cpu", "gpu" or "tpu"."""
        if self.mesh is not None:
            return self.mesh.devices.flat[0].platform
        return default_device().platform if self.name == HERE else CPU

    @property
    def kind(self) -> str | None:
        """What jax calls the devices that steps are compiled for; None for a CPU."""
        if self.mesh is not None:
            return self.mesh.devices.flat[0].device_kind
        return default_device().device_kind if self.name == HERE else None

    @property
    def traced_for(self) -> str:
        """The platform whose implementations of ops steps use: the device's own also where the
        CPU's compiler stands in."""
        return self.platform if self.is_compiled_for else self.name.partition(":")[0]

    @property
    def has_seconds(self) -> bool:
        """Whether figures are known that seconds follow from."""
        return self.figures is not None or self.speed is not None


def described(name: str, num_chips: int | None = None) -> Device:
    """Returns the device of a name with its published figures, for formulas alone.

    Args:
      name: "cpu"; a GPU, as "h100" or "gpu:h100"; a TPU, as "v5e", "v5e:2x2" or "tpu:v5e:2x2".
        One without a topology is one host's, of which one chip is used unless num_chips says more.
      num_chips: over which the target is split; by default all of a topology that is named, else 1.

    Raises:
      ValueError: the name is unknown, or the chips are fewer than 1.
    """
    if num_chips is not None and num_chips < 1:
        raise ValueError(
            f"a target cannot be split over {num_chips} chips; expected at least 1. Raise the "
            "tensor parallelism or leave it out."
        )
    kind, generation, shape = _parts(name)
    if kind == CPU:
        return Device(CPU, num_chips or 1, None, None)
    figures = DEVICES[generation]
    if kind == GPU or not shape:
        count = num_chips or 1
    else:
        count = num_chips or math.prod(map(int, shape.split("x"))) * figures.devices_per_chip
    full = ":".join(filter(None, (kind, generation, shape)))
    return Device(full, count, figures.per_device(), None, is_compiled_for=False)


def find_device(name: str, num_chips: int | None = None) -> Device:
    """Returns the device of a name as `described`, with what its steps are compiled for.

    Raises:
      ValueError: as `described`, or the topology is unknown or has fewer chips.
      NotImplementedError: the device is a TPU, and its compiler is not installed.
    """
    device = described(name, num_chips)
    kind, _, rest = device.name.partition(":")
    if kind == TPU:
        # Imported where it is needed: formulas need no decoder.
        from specjax.planning.abstract_decoder import described_mesh

        if ":" not in rest:
            rest += ":2x2x1" if rest in _THREE_AXES else ":2x2"
        mesh = described_mesh(rest, device.count)
        return dataclasses.replace(device, mesh=mesh, is_compiled_for=True)
    if kind == GPU and (devices := described_devices(rest, device.count)) is not None:
        mesh = Mesh(np.array(devices), (sharding.TENSOR,))
        return dataclasses.replace(device, mesh=mesh, is_compiled_for=True)
    return dataclasses.replace(device, mesh=_local_mesh(device.count))


def _parts(name: str) -> tuple[str, str, str]:
    """Returns the platform, the chip and the topology of a name, "" where it has none.

    Raises:
      ValueError: it names no device.
    """
    parts = name.lower().split(":")
    if parts == [CPU]:
        return CPU, "", ""
    prefix = parts.pop(0) if parts[0] in (GPU, TPU) else None
    generation, shape = (*parts, "", "")[:2]
    generation = _SAME.get(generation, generation)
    figures = DEVICES.get(generation)
    kind = None if figures is None else _PLATFORMS[figures.vendor]
    if kind is None or prefix not in (None, kind) or len(parts) > 1 + (kind == TPU):
        full = [f"{_PLATFORMS[chip.vendor]}:{own}" for own, chip in DEVICES.items()]
        raise ValueError(
            f"device={name!r} is unknown{suggestion(name.lower(), [CPU, *DEVICES, *full])}; "
            f"expected cpu, a GPU of {_names_of(NVIDIA)}, or a TPU of {_names_of(GOOGLE)}, with "
            "or without gpu: or tpu: before it, and of a TPU the topology behind it, as v5e:2x2. "
            "Several GPUs are --tensor-parallel N."
        )
    if len(parts) > 1 and not _TOPOLOGY.fullmatch(shape):
        raise ValueError(
            f"device={name!r} has the topology {shape!r}; expected chips along two or three "
            f"axes, as tpu:{generation}:2x2."
        )
    return kind, generation, shape


def _names_of(vendor: str) -> str:
    return ", ".join(name for name, chip in DEVICES.items() if chip.vendor == vendor)


def _local_mesh(count: int) -> Mesh | None:
    """Returns a mesh of `count` CPU devices; None for one."""
    if count == 1:
        return None
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"{count} chips are asked for and jax sees {len(devices)} CPU devices to compile "
            "for; set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return Mesh(np.array(devices[:count]), (sharding.TENSOR,))
