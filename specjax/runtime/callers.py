"""Finds the line of a user's program that called the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def callers_level() -> int:
    """Returns the stacklevel for a warning that its caller makes: that of the line outside specjax.

    (warnings.warn has skip_file_prefixes from Python 3.12 on.)
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
