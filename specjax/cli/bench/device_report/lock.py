"""One run per folder: a file with the id of the process that writes there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "report.lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which is there. A lock of a process that ended is taken over.

    Raises:
      ValueError: another process holds it.
      OSError: it cannot be written.
    """
    path = folder / NAME
    while not _take(path):
        holder = _holder(path)
        if holder is not None and _lives(holder):
            raise ValueError(
                f"process {holder} makes a report in {folder}; wait for it, or give another "
                f"folder. If there is no such run, remove {path}."
            )
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _take(path: Path) -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _holder(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _lives(process: int) -> bool:
    """Returns whether a process other than this one runs; False where the system does not say."""
    if os.name != "posix" or process <= 0 or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
