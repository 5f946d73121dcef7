"""Models: configs, weights, and the families that run them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.models.base import Family as Family
    from specjax.models.base import ForwardWork as ForwardWork
    from specjax.models.families import register as register

# Imported on first use, so that importing one submodule does not import the others.
_HOME = {
    "Family": "specjax.models.base",
    "ForwardWork": "specjax.models.base",
    "register": "specjax.models.families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
