"""Seconds of work that says nothing itself, as compiling, for a line on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def every_second(show: Callable[[float], object]) -> Callable[[], None]:
    """Calls `show` once a second with the seconds since now, in a thread of its own.

    Returns what ends that: `show` does not run any more once it has returned. Where `show` raises,
    it is not called again.
    """
    over, began = threading.Event(), time.perf_counter()

    def tick() -> None:
        # At its end the interpreter closes streams beside threads that still run.
        while not over.wait(1.0) and threading.main_thread().is_alive():
            try:
                show(time.perf_counter() - began)
            except Exception:  # any, of a widget or a stream; the next report meets it and warns
                return

    thread = threading.Thread(target=tick, name="specjax seconds", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
