"""Configs and specs of drafters as JSON, and back.

A frozen dataclass becomes an object with its class under "class"; tuples become lists. Only
classes that the program has imported are made: reading imports nothing and runs no code of a file.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters.base import DrafterSpec
from specjax.drafters.token_set import TokenSet
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.models.base import ModelConfig, RopeConfig
from specjax.models.config_values import MAX_LAYERS, MAX_SIZE, is_int
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape

# Classes derived from the first two are known, too.
_OPEN = ModelConfig, DrafterSpec
_CLOSED = (
    RopeConfig,
    EagleConfig,
    Eagle3Config,
    DFlashConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    TokenSet,
    TreeShape,
    Growth,
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
_CLASS, _BYTES = "class", "base64"
_DICT, _TUPLE, _LIST = "dict", "tuple", "list"


def to_json(value: Any) -> Any:
    """Returns a value that JSON can hold.

    Raises:
      ValueError: it is, or holds, something that is neither a number, text, None, a tuple, bytes
        nor a config or spec that is known here.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    name = _name(type(value))
    if _classes().get(name) is not type(value) or not dataclasses.is_dataclass(value):
        raise ValueError(
            f"{value!r:.200} of {type(value).__name__} cannot be saved; the fields of a config or "
            "a spec must be numbers, text, tuples, or frozen dataclasses derived from ModelConfig "
            "or DrafterSpec."
        )
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return {_CLASS: name} | {field: to_json(getattr(value, field)) for field in fields}


def from_json(raw: Any) -> Any:
    """Returns the value that `to_json` was given.

    Raises:
      ValueError: it names a class or a field that this version does not know, or values that its
        class refuses.
    """
    if isinstance(raw, list):
        return tuple(from_json(each) for each in raw)
    if not isinstance(raw, dict):
        return raw
    if set(raw) == {_BYTES}:
        return base64.b64decode(raw[_BYTES], validate=True)
    name = raw.get(_CLASS)
    kind = _classes().get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"it names the class {name!r:.200}, which is not known here; import the module that "
            "defines it (a family or a drafter of one's own), or use the version of specjax that "
            "saved it."
        )
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    given = {field: from_json(each) for field, each in raw.items() if field != _CLASS}
    if unknown := sorted(set(given) - known):
        raise ValueError(
            f"it gives {name} the fields {', '.join(unknown)[:200]}, which this version does not "
            "know; use the version of specjax that saved it, or a newer one."
        )
    try:
        made = kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its values ({error!s:.300})") from error
    if isinstance(made, ModelConfig):
        _check_sizes(made)
    return made


def tree_to_json(tree: Any) -> Any:
    """Returns the structure of a tree of dicts, tuples and lists of arrays, with their shapes."""
    if isinstance(tree, dict):
        return {_DICT: {str(key): tree_to_json(each) for key, each in tree.items()}}
    if isinstance(tree, tuple | list):
        kind = _TUPLE if isinstance(tree, tuple) else _LIST
        return {kind: [tree_to_json(each) for each in tree]}
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        raise ValueError(
            f"weights hold {tree!r:.100}; only arrays in dicts, tuples and lists can be saved."
        )
    return {"shape": list(tree.shape), "dtype": jnp.dtype(tree.dtype).name}


def tree_from_json(raw: Any) -> Any:
    """Returns a tree with a jax.ShapeDtypeStruct at each leaf.

    Raises:
      ValueError: it is not what `tree_to_json` returned.
    """
    try:
        if _DICT in raw:
            return {key: tree_from_json(each) for key, each in raw[_DICT].items()}
        if _TUPLE in raw:
            return tuple(tree_from_json(each) for each in raw[_TUPLE])
        if _LIST in raw:
            return [tree_from_json(each) for each in raw[_LIST]]
        return jax.ShapeDtypeStruct(tuple(raw["shape"]), jnp.dtype(raw["dtype"]))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{raw!r:.100} describes no tree of weights") from error


def difference(given: ModelConfig, saved: ModelConfig) -> str | None:
    """Returns how two configs differ, None where they do not."""
    if type(given) is not type(saved):
        return f"{type(given).__name__} for {type(saved).__name__}"
    names = [field.name for field in dataclasses.fields(saved)]
    pairs = [(name, getattr(given, name), getattr(saved, name)) for name in names]
    shown = [
        f"{name}={ours!r:.80} for {saved!r:.80}" for name, ours, saved in pairs if ours != saved
    ]
    return ", ".join(shown) or None


def _check_sizes(config: ModelConfig) -> None:
    """Raises ValueError for sizes that no model has, of which a tree would take for ever."""
    for name in _SIZES:
        value, most = getattr(config, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if not is_int(value) or not 0 <= value <= most:
            raise ValueError(f"{name}={value!r:.100} must be a whole number of at most {most}")


def _classes() -> dict[str, type]:
    """Returns the classes that may be read, by name."""
    own = {_name(kind): kind for kind in _CLOSED}
    return own | {_name(kind): kind for base in _OPEN for kind in _derived(base)}


def _derived(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _derived(each)


def _name(kind: type) -> str:
    """Returns the name of a class; those of specjax may move between its modules."""
    if kind.__module__.partition(".")[0] == "specjax":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
