"""Small JSON files that one process keeps for the next: read with care, written whole."""

from __future__ import annotations

import json
import os
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

MOST_BYTES = 8 * 2**20


def read_json(path: Path | Traversable) -> Any:
    """Returns what a file holds.

    Raises:
      OSError: it cannot be read, or is no file: a pipe, a device, a folder.
      ValueError: it is too large, too deep, or no JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file.")
    if isinstance(path, Path) and path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_json(path: Path, document: Any) -> bool:
    """Writes a file that others find old or new, and whole; returns whether it could."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(document, indent=1), encoding="utf-8")
        new.replace(path)
    except OSError:
        return False
    return True
