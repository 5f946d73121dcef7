"""Loads folders with one fault each in a process of its own, and says what came of them.

The test calls `sweep` with a script that calls `serve`. The script reads `seed folder` lines, makes
and loads each folder, and writes one line of JSON per folder: what came of it, seconds, and
megabytes at the peak. What ends the process is seen by the test.
"""

from __future__ import annotations

import collections
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
MOST_SECONDS = 5.0  # of the processor, per folder
# A process that says nothing for so long hangs.
SILENCE_S = 400.0
MEMORY_LIMIT = 24 * 2**30  # of addresses; far above what is asserted


class _Child:
    """A process that loads folders one after the other."""

    def __init__(self, script: Path, folder: Path, arguments: tuple[str, ...]):
        path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "sound"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )

    def load(self, seed: int, folder: Path) -> dict | None:
        """Returns what came of a folder; None where the process ended or hangs."""
        try:
            self._process.stdin.write(f"{seed} {folder}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([self._process.stdout], [], [], SILENCE_S)[0]:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> int:
        """Ends it; returns how it ended by itself, if it did."""
        code = self._process.poll()
        self._process.kill()
        self._process.communicate()
        return -999 if code is None else code


def sweep(
    script: Path,
    seeds: Iterable[int],
    folder: Path,
    say: Callable[[str], None],
    most_megabytes: float,
    *arguments: str,
) -> None:
    """Asserts that each folder gives a clear error or loads right, soon and small.

    Args:
      script: makes and loads the folders, see `serve`.
      folder: an empty one, below which the folders are made.
      arguments: of the script, after a folder for its own use.
    """
    failures, kinds = [], collections.Counter()
    slowest = largest = (0.0, "")
    child = _Child(script, folder, arguments)
    try:
        for seed in seeds:
            answer = child.load(seed, folder / str(seed))
            if answer is None:
                failures.append(f"{seed}: the process ended ({child.close()}) or hung")
                child = _Child(script, folder, arguments)
                continue
            kinds[answer["said"].split(":")[0].split(";")[0]] += 1
            slowest = max(slowest, (answer["seconds"], answer["what"]))
            largest = max(largest, (answer["megabytes"], answer["what"]))
            is_small = answer["megabytes"] <= most_megabytes
            if not answer["is_right"] or answer["seconds"] > MOST_SECONDS or not is_small:
                failures.append(str(answer))
    finally:
        child.close()
    say(
        f"{dict(kinds)}; at most {slowest[0]:.2f} s ({slowest[1][:60]}) and "
        f"{largest[0]:.0f} MB ({largest[1][:60]})"
    )
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:20])


# In the process that loads.


def serve(
    make: Callable[[int, Path], str],
    load: Callable[[Path], tuple[str, Any]],
    check: Callable[[Any], str] = lambda loaded: "",
) -> None:
    """Answers every line of the standard input with what came of a folder.

    Args:
      make: writes the folder of a seed, and returns what is wrong with it.
      load: returns "loaded" or a message, and what was loaded, None after a message. What it
        raises is a failure. Its seconds and bytes are measured.
      check: raises AssertionError unless what was loaded is right; returns what to add to "loaded".
    """
    _limit()
    for line in sys.stdin:
        seed, path = line.split()
        what = make(int(seed), Path(path))
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_bytes()
        # Of the processor, which other processes may use meanwhile.
        start, end, after, is_right = time.process_time(), None, before, True
        try:
            said, loaded = load(Path(path))
            end, after = time.process_time(), _peak_bytes()
            if loaded is not None:
                said += check(loaded)
        except BaseException as error:
            said, is_right = f"{type(error).__name__}: {error}"[:500], False
        answer = {
            "seed": int(seed),
            "what": what,
            "said": said,
            "is_right": is_right,
            "seconds": (end or time.process_time()) - start,
            "megabytes": (max(after, before) - before) / 1e6,
        }
        shutil.rmtree(path)
        sys.__stdout__.write(json.dumps(answer) + "\n")
        sys.__stdout__.flush()


def message_of(error: Exception) -> str:
    """Returns an error's text, of which a user is to make sense."""
    message = str(error)
    assert 20 < len(message) < 4000, f"a message of {len(message)}: {message[:200]}"
    assert not message.startswith("[Errno"), message
    return f"{type(error).__name__}: {message}"


def _limit() -> None:
    import resource
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
