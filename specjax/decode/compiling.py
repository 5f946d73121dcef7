"""Reports that a step is being compiled, to the caller whose call waits for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_on_compile: contextvars.ContextVar[Callable[[str], None]]
_on_compile = contextvars.ContextVar("on_compile", default=lambda what: None)


@contextlib.contextmanager
def telling(on_compile: Callable[[str], None]) -> Iterator[None]:
    """Calls on_compile with the kind of each step whose compilation this context waits for.

    Loops share decoders, and each loop reports to its own caller.
    """
    token = _on_compile.set(on_compile)
    try:
        yield
    finally:
        _on_compile.reset(token)


def tell(what: str) -> None:
    """Reports that a step is being compiled: "burst", "prefill", "mixed", ..."""
    _on_compile.get()(what)
