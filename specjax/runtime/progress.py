"""Progress of long work: bars on stderr, or calls of the caller's function."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import TypeAlias

with warnings.catch_warnings():  # of a notebook without ipywidgets, where bars are of text
    warnings.filterwarnings("ignore", "IProgress not found")
    from tqdm.auto import tqdm

from specjax.runtime.seconds import every_second
from specjax.runtime.stack_level import of_the_caller

LOGGER = logging.getLogger("specjax")

# Report(name of the work, units done, units in total or 0 if unknown).
Report: TypeAlias = Callable[[str, int, int], None]

# Counted work that ends within this time shows no bar.
QUIET_S = 1.0


class Progress:
    """Passes reports on, or shows them as one bar at a time, or drops them.

    What is not counted, as loading and compiling, is logged with its seconds in any case.

    Args:
      show: a function to call; True for bars, False for none; None for bars where a person sees
        them: where stderr is a terminal, and in a notebook.

    A function that raises, or a bar that cannot be drawn, is dropped with one warning, and
    the work continues. A KeyboardInterrupt is passed on.
    """

    def __init__(self, show: bool | Report | None = None):
        self._report = show if callable(show) else None
        self._has_bars = show is True or (show is None and _is_watched())
        self._logged = ("", 0.0)  # the uncounted work under way, and when it began
        self._bar: tqdm | None = None
        self._what = ""
        self._end_seconds: Callable[[], None] = lambda: None

    def report(self, what: str, done: int, total: int) -> None:
        """Reports that `done` of `total` units of `what` are done."""
        self._log("" if total else what)
        try:
            if self._report is not None:
                self._report(what, done, total)
            elif self._has_bars:
                self._show(what, done, total)
        except Exception as error:
            self._drop(error)

    def close(self) -> None:
        """Removes the bar."""
        self._log("")
        try:
            self._remove_bar()
        except Exception as error:
            self._drop(error)

    def _log(self, what: str) -> None:
        """Logs the end of the work under way, and the beginning of this one."""
        (before, begun_at), now = self._logged, time.perf_counter()
        if what == before:
            return
        if before:
            LOGGER.info("%s: %.2f s", before, now - begun_at)
        if what:
            LOGGER.debug("%s ...", what)
        self._logged = what, now

    def _drop(self, error: Exception) -> None:
        """Stops reporting, with a warning that gives the error."""
        self._end_seconds()
        what = "progress bars" if self._has_bars else "the progress function"
        self._report, self._has_bars, self._bar = None, False, None
        warnings.warn(
            f"{what} raised {error!r}: no more progress is reported, and all else goes on.",
            stacklevel=of_the_caller(),
        )

    def _remove_bar(self) -> None:
        self._end_seconds()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _show(self, what: str, done: int, total: int) -> None:
        if what != self._what or self._bar is None:
            self._remove_bar()
            self._what = what
            width = _width()
            if total:
                self._bar = tqdm(
                    total=total, desc=what, delay=QUIET_S, leave=False, mininterval=0.2, ncols=width
                )
            else:
                self._bar = bar = tqdm(
                    desc=f"{what} ...", bar_format="{desc}", leave=False, ncols=width
                )
                self._end_seconds = every_second(
                    lambda seconds: bar.set_description_str(f"{what} ... {seconds:.0f} s")
                )
        self._bar.total = total
        self._bar.update(done - self._bar.n)


def _width() -> int | None:
    """Returns the columns of a bar on a terminal that says it has none, as one inside another
    program may; None elsewhere: the bar finds them itself."""
    try:
        return None if os.get_terminal_size(sys.stderr.fileno()).columns else 80
    except (OSError, ValueError, AttributeError):  # no terminal, or no file
        return None


def _is_watched() -> bool:
    """Returns whether a person sees stderr: on a terminal, or under a cell of a notebook."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
