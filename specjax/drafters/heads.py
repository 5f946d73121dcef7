"""The kinds of heads over a target, and which of them a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from specjax.drafters.base import DrafterSpec
from specjax.drafters.dflash_files import is_dflash, read_dflash
from specjax.drafters.eagle_files import is_eagle3, read_eagle3
from specjax.drafters.head_files import FoundHead
from specjax.drafters.spec import DFlashDrafter, Eagle3Drafter
from specjax.models.base import Json
from specjax.runtime.model_files import find_file, read_json


class HeadKind(NamedTuple):
    """A kind of head.

    Attributes:
      is_kind_of: whether a config.json is that of such a head.
      read: (folder, target's config, dtype, aux_layer_ids) -> FoundHead.
      spec: FoundHead.config -> the drafter's spec.
    """

    is_kind_of: Callable[[Json], bool]
    read: Callable[..., FoundHead]
    spec: Callable[[Any], DrafterSpec]


KINDS = (
    HeadKind(is_eagle3, read_eagle3, Eagle3Drafter),
    HeadKind(is_dflash, read_dflash, DFlashDrafter),
)


def kind_in(folder: Path) -> HeadKind | None:
    """Returns the kind of head that a folder holds; None for a model, or nothing."""
    config = find_file(folder, "config.json")
    raw = {} if config is None else read_json(config)
    return next((kind for kind in KINDS if kind.is_kind_of(raw)), None)
