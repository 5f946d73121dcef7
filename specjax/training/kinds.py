"""The kinds of drafters that can be trained, by name."""

from __future__ import annotations

from specjax.training import eagle3
from specjax.training.drafts import Kind

KINDS: dict[str, Kind] = {kind.name: kind for kind in (eagle3.KIND,)}


def kind_of(name: str) -> Kind:
    """Returns a kind by its name.

    Raises:
      ValueError: there is no such kind.
    """
    if name not in KINDS:
        raise ValueError(f"kind={name!r} cannot be trained; expected one of {', '.join(KINDS)}.")
    return KINDS[name]
