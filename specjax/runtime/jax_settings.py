"""What the program around specjax has set in jax, and what holds while specjax runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

Function = TypeVar("Function", bound=Callable[..., Any])


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """The context in which steps are traced, called and read back, in this thread.

    A program may ask jax for 64-bit numbers, for strict promotion, for calls that are not
    compiled, for arrays over a mesh, or to stop at a transfer or at a NaN. That is about the
    program's own arrays: steps are 32-bit, lie over the mesh that specjax is given, mean their
    transfers, and report NaN by request. Settings that leave a step what it is, as
    jax_default_matmul_precision, stay the program's.

    Not inside a transformation.
    """
    with (
        own_arithmetic(),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.set_mesh(None),
    ):
        yield


@contextlib.contextmanager
def own_arithmetic() -> Iterator[None]:
    """The part of `own_settings` that a few operations need, inside a transformation too."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield


def in_own_settings(function: Function) -> Function:
    """Returns a function that runs under `own_settings`."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with own_settings():
            return function(*arguments, **options)

    return run  # pyright: ignore[reportReturnType]


def entrance(name: str) -> Callable[[Function], Function]:
    """Makes of a function one that users may call from any program.

    Args:
      name: of what they call, for messages.

    Returns:
      A decorator: under `own_settings`, and RuntimeError inside a jax transformation.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            check_not_traced(name)
            with own_settings():
                return function(*arguments, **options)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def check_not_traced(name: str) -> None:
    """Raises RuntimeError inside jit, grad, vmap, scan or another transformation of jax.

    Args:
      name: of what was called.
    """
    if get_opaque_trace_state(convention="flax") != _state_outside():
        raise RuntimeError(
            f"{name} was called inside a jax transformation (jit, grad, vmap, scan or the "
            "like), and it reads results back from the device, which tracing cannot; call it "
            "outside, and pass its results in as arguments."
        )


@functools.cache
def _state_outside() -> Any:
    """Returns the trace state outside every transformation."""
    # Each thread begins outside. This one may be inside when it is first asked.
    found: list[Any] = []
    look = lambda: found.append(get_opaque_trace_state(convention="flax"))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]
