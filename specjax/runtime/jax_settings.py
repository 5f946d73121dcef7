"""Isolates specjax from jax settings of the surrounding program."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

Function = TypeVar("Function", bound=Callable[..., Any])
Check: TypeAlias = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Context in which steps are traced, called and read back, in this thread.

    A program may set jax to 64-bit numbers, strict promotion, disabled jit, a mesh, or errors
    at transfers or NaN. These settings are for the program's own arrays: steps are 32-bit, use
    the mesh that specjax is given, transfer on purpose, and report NaN by request. Other
    settings, such as jax_default_matmul_precision, apply to steps too.

    It cannot be used inside a jax transformation.
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
    """Context with the part of `own_settings` that also works inside a jax transformation."""
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


def entrance(
    name: str, keyword_check: Callable[[Function], Check] | None = None
) -> Callable[[Function], Function]:
    """Returns a decorator for public functions, which may be called from any program.

    The function runs under `own_settings`, and raises RuntimeError inside a jax
    transformation.

    Args:
      name: public name of the function, for messages.
      keyword_check: from the function to what raises for keywords that it does not take.
    """

    def decorate(function: Function) -> Function:
        check = keyword_check(function) if keyword_check else lambda options: None

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            check(options)
            check_not_traced(name)
            with own_settings():
                return function(*arguments, **options)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def check_not_traced(name: str) -> None:
    """Raises RuntimeError inside jit, grad, vmap, scan or another transformation of jax.

    Args:
      name: public name of the called function, for the message.
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
    # A new thread is outside every transformation; the calling thread may be inside one.
    found: list[Any] = []
    look = lambda: found.append(get_opaque_trace_state(convention="flax"))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]
