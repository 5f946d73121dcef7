"""The names that `specjax.models.families` had before; kept for programs that use them."""

from __future__ import annotations

from specjax.models.families import FAMILIES as ARCHITECTURES
from specjax.models.families import family_of as architecture_of

__all__ = ["ARCHITECTURES", "architecture_of"]
