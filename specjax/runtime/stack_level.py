"""Where a warning points."""

from __future__ import annotations

import sys


def of_the_caller() -> int:
    """Returns the stacklevel of the first frame outside specjax, for a warning given here."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "specjax":
        frame, level = frame.f_back, level + 1
    return level
