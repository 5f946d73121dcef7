"""Small JSON files that one process keeps for the next: read with care, written whole."""

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
    """Returns what a file holds.

    Raises:
      OSError: it cannot be read, or is no file: a pipe, a device, a folder.
      ValueError: it is too large, too deep, no JSON, or has a key twice.
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
    """Writes a file that others find old or new, and whole; returns whether it could.

    Threads and processes may write the same one: the last one stays.
    """
    text = json.dumps(document, indent=1)
    new = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A name of its own in the same folder: moving it within one is atomic.
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
