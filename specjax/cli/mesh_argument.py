"""The option --mesh: sizes of mesh axes, as tensor=4 or data=2,tensor=4."""

from __future__ import annotations

import argparse
import math
from typing import Any

AXES = ("data", "tensor")


def add_option(group: Any) -> None:
    """Adds --mesh to a parser or a group of its options."""
    group.add_argument(
        "--mesh",
        type=sizes,
        metavar="AXIS=N,...",
        help="devices to split over: tensor=N splits the models, data=N the prompts; as tensor=4 "
        "or data=2,tensor=4 (default: one device)",
    )


def sizes(text: str) -> dict[str, int]:
    """Returns the size of each axis in "data=2,tensor=4"; an axis that is left out has none.

    Raises:
      argparse.ArgumentTypeError: the text has another form, another axis, or one twice.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in found or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} must give sizes of at least 1 to the axes data and tensor, each at "
                "most once, as tensor=4 or data=2,tensor=4"
            )
        found[name] = int(size)
    return {name: found[name] for name in AXES if name in found}


def mesh_of(sizes: dict[str, int] | None) -> Any:
    """Returns the mesh of some sizes over the first devices; None for no sizes.

    Raises:
      ValueError: there are fewer devices.
    """
    if sizes is None:
        return None
    import jax

    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = (
                ", or set the environment variable "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        raise ValueError(
            f"--mesh {','.join(f'{name}={size}' for name, size in sizes.items())} needs {needed} "
            f"devices, and jax sees {len(devices)} ({devices[0].device_kind}); the product of the "
            f"sizes may be at most {len(devices)}. Lower them{hint}."
        )
    return jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices[:needed])
