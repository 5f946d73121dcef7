"""Kernels that are used by default where their self-test passes on the device, once.

The attention kernel for Hopper GPUs was run on one kind of them with one version of jax. So the
first process on a Hopper GPU tests it against the definition, in a process of its own and within
minutes, and keeps the result in the user's cache directory: one per kind of device, version of
jax, version of specjax and source of the kernel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import pallas_kernels
from specjax.config.engine import EngineConfig
from specjax.runtime import compilation_cache, kept_files
from specjax.runtime.stack_level import of_the_caller
from specjax.runtime.version import __version__

FOLDER = "self_tests"
MODULE = "pallas_kernels.tree_attention.self_test"
OP, KERNEL = "tree_attention", "mosaic_gpu"
HOPPER = "9."  # beginning of its compute capabilities
TIMEOUT_S = 300.0
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # says nothing about a kernel


class Verdict(NamedTuple):
    """The result of a self-test."""

    fault: str | None  # None: it passed
    is_kept: bool  # whether a later process may rely on it


def trusted_kernels(
    engine: EngineConfig, devices: Sequence[Any], dtype: Any
) -> tuple[tuple[str, str], ...]:
    """Returns pairs of an op and a kernel that passed its self-test on these devices.

    The test runs once; later processes read its result. It is not run, and nothing is returned,
    where the kernel would not be used: on other devices, with another dtype than bfloat16 or
    quantised pages, under invariant numerics, where `engine.kernels` names the op, and in
    programs of several processes, which must all compile the same.

    Args:
      dtype: of the weights.
    """
    is_hopper = all(
        device.platform == "gpu"
        and str(getattr(device, "compute_capability", "")).startswith(HOPPER)
        for device in devices
    )
    is_covered = (
        jax.numpy.dtype(dtype) == jax.numpy.bfloat16
        and engine.kv_cache_dtype is None
        and engine.numerics == "fast"
        and OP not in dict(engine.kernels)
    )
    if not is_hopper or not is_covered or jax.process_count() > 1:
        return ()
    return ((OP, KERNEL),) if _passes(devices[0].device_kind) else ()


@functools.cache
def _passes(device_kind: str) -> bool:
    """Returns whether the kernel passes, or passed before; warns once where it does not."""
    key = {
        "device": device_kind,
        "jax": jax.__version__,
        "specjax": __version__,
        "source": _digest_of_source(),
    }
    path = _path_of(key)
    verdict = _read(path, key)
    if verdict is None:
        verdict = run_test()
        if path is not None and verdict.is_kept:
            kept_files.write_json(path, key | {"fault": verdict.fault})
    if verdict.fault is not None:
        kept = f" The result is kept in {path}." if path and verdict.is_kept else ""
        warnings.warn(
            f"{OP} by {KERNEL!r} did not pass its self-test on {device_kind} "
            f"({verdict.fault}), so XLA computes it, which is slower. "
            f'EngineConfig(kernels={{"{OP}": "xla"}}) does so without a test.{kept}',
            stacklevel=of_the_caller(),
        )
    return verdict.fault is None


def run_test() -> Verdict:
    """Runs the self-test in a process of its own."""
    environment = os.environ | {
        # This process may hold most of the device's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Verdict(f"no result after {TIMEOUT_S:.0f} s", is_kept=True)
    except OSError as error:
        return Verdict(f"its process did not start: {error}", is_kept=False)
    try:
        fault = json.loads(done.stdout.splitlines()[-1])["fault"]
    except (IndexError, KeyError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        return Verdict(f"its process ended with code {done.returncode}: {last}", is_kept=False)
    return Verdict(fault, is_kept=OUT_OF_MEMORY not in (fault or ""))


def _path_of(key: dict[str, str]) -> Path | None:
    folder = compilation_cache.own_folder(FOLDER)
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:16]}.json"


def _read(path: Path | None, key: dict[str, str]) -> Verdict | None:
    """Returns a kept result, or None where there is none for this key that can be read."""
    if path is None:
        return None
    try:
        kept = kept_files.read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or "fault" not in kept:
        return None
    fault = kept.pop("fault")
    if kept != key or not (fault is None or isinstance(fault, str)):
        return None
    return Verdict(fault, is_kept=True)


def _digest_of_source() -> str:
    """Returns a digest of the op's folder, so that a changed kernel is tested anew."""
    (package,) = pallas_kernels.__path__
    digest = hashlib.sha256()
    for path in sorted((Path(package) / OP).glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
