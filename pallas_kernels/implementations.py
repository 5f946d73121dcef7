"""How an op picks among its implementations."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


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
