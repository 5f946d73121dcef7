"""Writes a folder as a whole: its name stands for the old content until all of the new is there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CURRENT_FOLDER = -100  # AT_FDCWD of Linux
_EXCHANGE = 2  # RENAME_EXCHANGE


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Context that yields an empty folder, which takes the name `folder` at its end.

    What had the name before is deleted then. On an error nothing changes. A process that is killed
    leaves the old content under the name, and beside it a folder `.<name>.saving-...`, which may
    be deleted.

    Raises:
      OSError: it cannot be written.
    """
    folder = Path(os.path.realpath(folder))  # a link stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.saving-", dir=folder.parent))
    try:
        yield new
        os.chmod(new, 0o777 & ~_umask())  # mkdtemp's own is for this user alone
        _take_place(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _take_place(new: Path, folder: Path) -> None:
    """Gives a folder the name of another, which gets the first one's in exchange."""
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        # Two steps: killed between them, a process leaves the old folder under this name.
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.before-", dir=folder.parent))
        folder.rename(old / folder.name)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; returns whether the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return rename(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE) == 0


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
