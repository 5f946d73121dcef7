"""Options that steps are compiled with, beside those of the user's XLA_FLAGS."""

from __future__ import annotations

import os
from typing import Any

import jax

_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
# XLA's default, and loops and conditionals: a burst becomes one graph, which the GPU runs by
# itself. With the default, the host launches each kernel that stands around an attention.
_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def burst_options(device: Any, mesh: Any) -> dict[str, Any] | None:
    """Returns the options that a burst is compiled with; None where XLA's own are kept.

    They are kept over several GPUs, where graphs were not measured, and where XLA_FLAGS says
    which commands a graph takes.
    """
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    # A mesh of one device is what a plan compiles for, where the decoder that runs has no mesh.
    has_several = mesh is not None and mesh.size > 1
    if not is_cuda or has_several or _COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_COMMAND_BUFFERS: _COMMANDS}


def compile_with(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> Any:
    """Returns the executable; options that this version of XLA does not know are left out."""
    if options:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if not any(name in str(error) for name in options):
                raise
    return lowered.compile()
