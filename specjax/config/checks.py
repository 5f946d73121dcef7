"""Checks of the type of a user's value, and its text for a message."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, TypeGuard

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
CAPTURED = "captured"  # a value of store_features: see SpeculationConfig


def shown(value: Any, most: int = 100) -> str:
    """Returns the repr of any object of a user's, cut to so many characters, for a message."""
    try:
        return repr(value)[:most]
    except Exception:  # a user's own repr may raise anything
        return f"an object of {type(value).__name__} whose repr fails"


def is_int(value: Any) -> TypeGuard[int]:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_store_features(value: Any) -> None:
    """Raises ValueError for a store_features that means nothing."""
    if not (isinstance(value, bool | None) or (isinstance(value, str) and value == CAPTURED)):
        raise ValueError(
            f"store_features={shown(value)} must be True, False, {CAPTURED!r} or None."
        )


def is_sized(value: Any) -> bool:
    """Whether a value can be read more than once: a list, a set, an array, ..."""
    try:
        len(value)
        iter(value)
    except TypeError:
        return False
    return True


def is_bias(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and (value == -math.inf or -FLOAT32_MAX <= value <= FLOAT32_MAX)
