"""Reads arrays of a tree that Orbax saved, by name and by slice.

A folder of a tree holds `_METADATA`, a JSON object that names every array and says how they are
stored, and the arrays themselves: in a database (OCDBT) or a folder each, as zarr of version 2 or
3. TensorStore, which Orbax writes them with, reads them here. Nothing is asked of the tree's
structure: its lists may have been tuples, and its dicts any pytree.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from specjax.models.layouts.operations import Bounds
from specjax.runtime.host_memory import aligned_empty
from specjax.runtime.model_files import MAX_JSON_BYTES, parse_object

METADATA = "_METADATA"
_ARRAYS = ("jax.Array", "np.ndarray", "scalar", "")  # kinds of values; "" is of early versions
_REMOTE = re.compile(r"^(gs|s3)://")
# What flax wraps a leaf in when its state is saved as it is.
_BOX = "value"


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a folder. Nothing of its values is read until `read`."""

    name: str  # in the tree, its keys joined by dots
    folder: str
    store: Any = dataclasses.field(repr=False)  # a tensorstore.TensorStore

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.store.dtype.numpy_dtype)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def read(self, bounds: Bounds | None = None) -> np.ndarray:
        """Returns a part of the array, a new one in host memory.

        Args:
          bounds: first and past the last per axis; None: the whole.

        Raises:
          ValueError: it cannot be read, because files are missing or corrupt.
        """
        bounds = tuple((0, size) for size in self.shape) if bounds is None else bounds
        part = aligned_empty(tuple(end - first for first, end in bounds), self.dtype)
        index = tuple(slice(*bound) for bound in bounds)
        try:
            # Straight into the buffer that jax may keep.
            source = self.store[index].translate_to[(0,) * len(bounds)] if bounds else self.store
            tensorstore.array(part).write(source).result()
            return part
        except ValueError as error:
            raise ValueError(_unreadable(self.folder, self.name, error)) from error


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """The names in a folder of a tree.

    Attributes:
      keys: of every array, from the root of the tree on.
    """

    folder: epath.Path
    keys: tuple[tuple[str, ...], ...]
    is_ocdbt: bool
    driver: str
    fills_missing: bool  # whether numbers that equal the fill value were not stored

    def paths_below(self, root: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
        """Returns the keys of every array below a node, by path from there, without boxes."""
        below = (keys for keys in self.keys if keys[: len(root)] == root and len(keys) > len(root))
        return {".".join(unboxed(keys[len(root) :])): keys for keys in below}

    def open(self, keys_by_path: Mapping[str, tuple[str, ...]]) -> dict[str, StoredArray]:
        """Returns arrays by path: shapes and dtypes are read, values are not.

        Raises:
          ValueError: an array is not in the folder, or what describes it is corrupt.
        """
        context = tensorstore.Context({"file_io_concurrency": {"limit": 16}})
        names = {path: ".".join(keys) for path, keys in keys_by_path.items()}
        for name in names.values():
            if not self.is_ocdbt and "/" in name:
                raise ValueError(f"{self.folder}: the name of array {name[:200]!r} holds a slash.")
        start = lambda spec: tensorstore.open(spec, open=True, read=True, context=context)
        opening = {path: start(self._spec(name)) for path, name in names.items()}
        found = {}
        for path, name in names.items():
            try:
                found[path] = StoredArray(name, str(self.folder), opening[path].result())
            except ValueError as error:
                raise ValueError(_unreadable(str(self.folder), name, error)) from error
        return found

    def _spec(self, name: str) -> dict[str, Any]:
        """Returns what TensorStore opens."""
        store: Any = store_of(self.folder, "" if self.is_ocdbt else f"{name}/")
        if self.is_ocdbt:
            store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
        return {
            "driver": self.driver,
            "kvstore": store,
            # A part of an array whose file is missing would otherwise be read as zeros.
            "fill_missing_data_reads": self.fills_missing,
        }


def is_tree(folder: epath.Path) -> bool:
    """Returns whether a folder holds a tree that Orbax saved."""
    return (folder / METADATA).is_file()


def open_tree(folder: epath.Path) -> StoredTree:
    """Returns the names in a folder of a tree.

    Raises:
      ValueError: its `_METADATA` is absent or corrupt.
    """
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {METADATA}: the checkpoint is not whole, as after a copy that was "
            "broken off. Copy it again, or load another step."
        )
    raw = parse_object(read_bytes(path), str(path))
    entries = raw.get("tree_metadata")
    if not isinstance(entries, dict):
        raise ValueError(f"{path} has no tree_metadata, an object; the folder is corrupt.")
    keys = tuple(each for entry in entries.values() if (each := _keys_of(entry, path)))
    return StoredTree(
        folder,
        keys,
        is_ocdbt=bool(raw.get("use_ocdbt", (folder / "manifest.ocdbt").exists())),
        driver="zarr3" if raw.get("use_zarr3") else "zarr",
        fills_missing=not raw.get("store_array_data_equal_to_fill_value", False),
    )


def is_remote(folder: str | epath.Path) -> bool:
    """Returns whether a folder lies in a bucket."""
    return _REMOTE.match(str(folder)) is not None


def store_of(folder: epath.Path, inner: str = "") -> str | dict[str, str]:
    """Returns what TensorStore opens a folder as, or one in it, whose name ends with a slash."""
    text = str(folder).rstrip("/")
    if is_remote(folder):
        return f"{text}/{inner}"
    return {"driver": "file", "path": f"{os.path.abspath(text)}/{inner}"}


def _keys_of(entry: Any, path: epath.Path) -> tuple[str, ...]:
    """Returns the keys of an entry; () for what is no array."""
    entry = entry if isinstance(entry, dict) else {}
    keys, value = entry.get("key_metadata"), entry.get("value_metadata", {})
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise ValueError(f"{path}: key_metadata is {keys!r:.100}; the folder is corrupt.")
    kind = value.get("value_type", "") if isinstance(value, dict) else ""
    return tuple(str(key.get("key")) for key in keys) if kind in _ARRAYS else ()


def unboxed(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the keys of an array without that of the box that flax keeps it in."""
    return keys[:-1] if len(keys) > 1 and keys[-1] == _BOX else keys


def read_bytes(path: epath.Path) -> bytes:
    """Returns the content of a file of JSON; ValueError if it is too large."""
    if path.stat().length > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES} bytes, the most that is read.")
    return path.read_bytes()


def _unreadable(folder: str, name: str, error: Exception) -> str:
    reason = str(error).partition(" [")[0]
    return (
        f"{folder}: array {name!r} cannot be read ({reason:.300}). Files of the checkpoint are "
        "missing or corrupt, as after a copy that was broken off: copy it again, or load "
        "another step."
    )


def listed(names: Iterable[str], most: int = 10) -> str:
    """Returns the first names, for messages."""
    names = list(names)
    shown = ", ".join(name[:200] for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
