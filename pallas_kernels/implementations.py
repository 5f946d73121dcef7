"""How an op picks among its implementations."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax

Result = TypeVar("Result")

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "platform", default=None
)


@contextlib.contextmanager
def lowered_for(platform: str) -> Iterator[None]:
    """Ops traced within are for a platform, "cpu", "gpu" or "tpu", whatever this process runs on.

    For compiling ahead of time: an op picks its implementation when it is traced.
    """
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def needs_platform(platform: str, call: Callable[[], Result]) -> Callable[[], Result]:
    """Returns a call that raises NotImplementedError unless it is traced for a platform."""

    def checked() -> Result:
        own = _platform.get() or jax.default_backend()
        if own != platform:
            raise NotImplementedError(f"runs on {platform}, and this is {own}.")
        return call()

    return checked


def call_best(
    implementations: Mapping[str, Callable[[], Result]], name: str | None
) -> Result:
    """Calls the named implementation, or the first that covers the case.

    Args:
      implementations: by name, best first; each raises NotImplementedError for a case
        it does not cover.
      name: the one to call; None tries all in order.

    Raises:
      ValueError: no implementation has this name.
      NotImplementedError: none covers the case; the message has every reason.
    """
    if name is not None:
        if name not in implementations:
            raise ValueError(f"implementation={name!r}; have {list(implementations)}.")
        return implementations[name]()
    reasons = []
    for candidate, call in implementations.items():
        try:
            return call()
        except NotImplementedError as error:
            reasons.append(f"{candidate}: {error}")
    raise NotImplementedError("No implementation covers this. " + " ".join(reasons))
