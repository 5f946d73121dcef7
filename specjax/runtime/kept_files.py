"""Small JSON files that persist between processes: checked when read, written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

MOST_BYTES = 8 * 2**20


def read_json(path: Path | Traversable) -> Any:
    """Returns the content of a JSON file.

    Raises:
      OSError: it cannot be read, or is a pipe, a device or a folder.
      ValueError: it is too large, nested too deep, not JSON, or has a duplicate key.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file.")
    if isinstance(path, Path) and path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("there is no memory for it") from None


def write_json(path: Path, document: Any) -> bool:
    """Writes a JSON file atomically; returns whether it succeeded.

    Threads and processes may write the same file: the last write wins.
    """
    text = json.dumps(document, indent=1)
    new = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A unique name in the same folder: a rename within a folder is atomic.
        handle, new = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".new", dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except OSError:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found
