"""The text of the embedded models: the standard library's own source, as beside any Python.

The text is under the PSF-2.0 licence. Tables of code points, the reference manual as
one string and files written by the build are left out; a file of the library is
held out whole when a hash of its path says so.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 3
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "__phello__"),
}
_TEST_FOLDERS = {"test", "tests", "idle_test"}


class SourceFile(NamedTuple):
    path: str  # relative to the standard library, with forward slashes
    text: str
    sha256: str

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Returns whether a file is kept from training; depends on its path alone."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def source_files(root: Path | None = None) -> list[SourceFile]:
    """Returns the library's readable source files in order of their paths, without tests."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    return read_files(root, [path for path in root.rglob("*.py") if not is_test(root, path)])


def is_test(root: Path, path: Path) -> bool:
    """Returns whether a file below a library's folder is one of its tests."""
    return bool(_TEST_FOLDERS & set(path.relative_to(root).parts))


def read_files(root: Path, paths: list[Path]) -> list[SourceFile]:
    """Returns what is text among files, in order of their paths."""
    files = []
    for path in paths:
        relative = path.relative_to(root)
        # The build writes _sysconfigdata_* and config-*/ with paths of one machine.
        is_written_by_build = any(
            part.startswith(("_sysconfigdata", "config-")) for part in relative.parts
        )
        if is_written_by_build or _SKIPPED_FOLDERS & set(relative.parts):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            sha256 = hashlib.sha256(data).hexdigest()
            files.append(SourceFile(relative.as_posix(), text, sha256))
    return sorted(files)
