"""Converts weights only where the arrays differ from those of the last call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

Arrays = Mapping[str, Any]  # by path


class Once:
    """A function of weights that keeps its last result while it is called with the same arrays.

    It holds weak references to the arrays. The result is dropped when one of them is, or before
    other arrays are converted, so that two results never exist at a time.
    """

    def __init__(self, function: Callable[[Arrays], Any]):
        """Takes a function of arrays by path."""
        self._function = function
        self._names: tuple[str, ...] = ()
        self._seen: tuple[weakref.ref[Any], ...] = ()
        self.result: Any = None
        self.num_conversions = 0

    def __call__(self, arrays: Arrays) -> Any:
        """Returns function(arrays).

        Raises:
          ValueError: an array was deleted.
        """
        check_alive(arrays)
        if not self.has(arrays):
            self.drop()
            result = self._function(arrays)
            self.num_conversions += 1
            # Numpy arrays may change in place, so they always count as new.
            if not all(isinstance(array, jax.Array) for array in arrays.values()):
                return result
            self._names, self.result = tuple(arrays), result
            self._seen = tuple(weakref.ref(x, self._on_death()) for x in arrays.values())
        return self.result

    def has(self, arrays: Arrays) -> bool:
        """Returns whether the kept result is of these arrays."""
        is_same_tree = bool(self._seen) and self._names == tuple(arrays)
        return is_same_tree and all(
            ref() is array for ref, array in zip(self._seen, arrays.values())
        )

    def drop(self) -> None:
        """Frees the result."""
        self._names, self._seen, self.result = (), (), None

    def _on_death(self) -> Callable[[Any], None]:
        """Returns what drops the result when an array ends; it does not keep this object."""
        own = weakref.ref(self)

        def drop(_: Any) -> None:
            if (once := own()) is not None:
                once.drop()

        return drop


def check_alive(arrays: Arrays) -> None:
    """Raises ValueError where an array was donated."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(
                f"weight {name} was deleted, as donating it to another function does; pass the "
                "weights that came out of that function."
            )
