"""The kinds of drafters that can be trained, by name."""

from __future__ import annotations

from typing import Any

from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import HybridDrafter
from specjax.training import dflash, draft_model, eagle, eagle3, medusa, mlp_speculator
from specjax.training.drafts import Kind

_ALL = (
    eagle3.KIND,
    eagle3.KIND_OF_MASKS,
    eagle.KIND,
    eagle.KIND_OF_MTP,
    dflash.KIND,
    dflash.KIND_OF_DSPARK,
    medusa.KIND,
    mlp_speculator.KIND,
    draft_model.KIND,
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_of(name: str) -> Kind:
    """Returns a kind by its name.

    Raises:
      ValueError: there is no such kind.
    """
    if name not in KINDS:
        raise ValueError(f"kind={name!r} cannot be trained; expected one of {', '.join(KINDS)}.")
    return KINDS[name]


def kind_of_spec(spec: DrafterSpec) -> tuple[Kind, Any]:
    """Returns the kind that a drafter can be trained as, and its config.

    Raises:
      NotImplementedError: there is none.
    """
    own: Any = spec.model if isinstance(spec, HybridDrafter) else spec
    for kind in KINDS.values():
        if kind.is_kind_of(own):
            return kind, own.config
    what = type(own).__name__
    config = getattr(own, "config", None)
    if getattr(own, "takes_masks", False):
        what += " with a mask token (PARD)"
    elif config is not None:
        what += f" with {type(config).__name__}"
    raise NotImplementedError(f"{what} cannot be trained; expected one of {', '.join(KINDS)}.")
