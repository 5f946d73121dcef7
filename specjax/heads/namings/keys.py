"""Keys of config.json as tables that are read both ways: each has a field of a head's config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.heads.namings.head_files import Tensors, stored_flag
from specjax.models.base import Json
from specjax.models.config_values import flag


class Key(NamedTuple):
    """A key of config.json.

    Attributes:
      field: of the head's config, which it says.
      read: (config.json, name, default) -> the value; raises ValueError where it is impossible.
      default: where nothing is said; None: KeyError is raised.
      tensor: tells a flag by being there; config.json may not say true without it.
    """

    name: str
    field: str
    read: Callable[[Json, str, Any], Any] = flag
    default: Any = False
    tensor: str | None = None


def parse(keys: Sequence[Key], raw: Json, tensors: Tensors | None = None) -> dict[str, Any]:
    """Returns what a config.json and tensors say, by field."""

    def value(key: Key) -> Any:
        if key.tensor is None:
            return key.read(raw, key.name, key.default)
        return stored_flag(raw, key.name, tensors or {}, key.tensor)

    return {key.field: value(key) for key in keys}


def unparse(keys: Sequence[Key], config: Any) -> Json:
    """Returns what a config.json has to say of a head's config."""
    return {key.name: getattr(config, key.field) for key in keys}
