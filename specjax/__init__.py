"""specjax: lossless speculative decoding for JAX."""

import importlib
import re
from pathlib import Path
from typing import Any

from specjax.runtime.version import __version__ as __version__

# The public names stand in __init__.pyi, which type checkers read too. They are imported on first
# use, so that `specjax --help` does not wait for jax.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_FOUND = re.findall(r"^from (specjax\.\S+) import (\w+) as", _STUB, re.MULTILINE)
_HOME = {name: home for home, name in _FOUND}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("testing", "training"):  # modules with names of their own
        return importlib.import_module(f"specjax.{name}")
    if name not in _HOME:
        from specjax.config.names import suggestion

        hint = "" if name.startswith("_") else suggestion(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, without modules that are imported for them."""
    return __all__
