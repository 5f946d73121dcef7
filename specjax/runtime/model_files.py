"""Finds and reads files of a model's folder, which may be untrusted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Limits of JSON, which becomes Python objects of many times its size: bytes of the text, its
# objects and lists, and the values in them.
MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_CONTAINERS = 4_000_000
MAX_JSON_VALUES = 8_000_000


def find_file(folder: Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, or None if there is none.

    A symbolic link may lead anywhere below the folder and, in a snapshot of the Hugging
    Face cache, anywhere below the folder of its repository (which holds `blobs`). The
    folder itself may be a link.

    Raises:
      ValueError: it is a link that leads elsewhere or is broken, or it is not a file.
    """
    path = folder / name
    try:
        if not os.path.lexists(path):
            return None
        is_file = path.is_file()
    except OSError as error:
        raise ValueError(
            f"{str(path)[:200]} cannot be read ({error.strerror}); check the name and "
            "the folder's permissions."
        ) from error
    if not is_file:
        raise ValueError(
            f"{path} is no file that can be read (a folder, a pipe, or a link to "
            "nothing); fetch it again, or take it away."
        )
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent)
    target = path.resolve()
    if not any(target.is_relative_to(each) for each in allowed):
        raise ValueError(
            f"{path} is a symbolic link out of its folder, to {target}; copy the file "
            "into the folder, or give the folder that it lies in."
        )
    return path


def is_of_orbax(folder: Path) -> bool:
    """Returns whether a folder holds a checkpoint that Orbax wrote, or several by step."""
    names = ("_METADATA", "_CHECKPOINT_METADATA")
    try:
        inner = [path for path in folder.iterdir() if path.is_dir()]
        return any((each / name).is_file() for each in (folder, *inner) for name in names)
    except OSError:
        return False


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file; ValueError if it is unreadable or above max_bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from error
    if len(content) > max_bytes:
        raise ValueError(
            f"{path} has more than {max_bytes} bytes, the most that is read of such a "
            "file; fetch the file again."
        )
    return content


def check_no_pointer(path: Path, beginning: bytes) -> None:
    """Raises ValueError where a file begins as the text that stands for it in Git LFS."""
    if beginning.startswith(b"version "):
        raise ValueError(
            f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`, or fetch the file "
            "itself."
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: it is too large, not JSON, or holds anything but an object.
    """
    return parse_object(read_bytes(path, MAX_JSON_BYTES), str(path))


def read_optional_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the object in a folder's JSON file, {} where it has none; raises as `read_json`."""
    path = find_file(folder, name)
    return {} if path is None else read_json(path)


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Returns the object that JSON text holds; messages begin with `source`.

    Raises:
      ValueError: it is not JSON, holds anything but an object, is too large or too
        deep, or gives a key twice.
    """
    if (
        text.count(b"[") + text.count(b"{") > MAX_JSON_CONTAINERS
        or text.count(b",") > MAX_JSON_VALUES
    ):
        raise ValueError(
            f"{source} is JSON of more than {MAX_JSON_CONTAINERS} objects and lists or "
            f"{MAX_JSON_VALUES} values, the most that is read; fetch the file again."
        )
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        # Not chained: the traceback of a thousand lines adds no information.
        raise ValueError(
            f"{source} is JSON that is nested too deep; fetch the file again."
        ) from None
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{source} holds a {type(value).__name__}, expected an object; fetch the file again."
        )
    return value


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict; ValueError for a duplicate key, which JSON readers treat
    differently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:100]!r} is given twice")
    return value
