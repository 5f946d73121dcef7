"""1,500 model folders with one thing wrong: a clear error or a right load, soon and small."""

import collections
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")

TESTS = Path(__file__).resolve().parents[2]
MOST_SECONDS = 5.0
MOST_MEGABYTES = 1000.0
# A process that says nothing for so long hangs.
SILENCE_S = 120.0


class _Child:
    """A process that loads folders one after the other."""

    def __init__(self, folder: Path):
        path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        script = Path(__file__).with_name("folder_mutations.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "sound")],
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


def _sweep(seeds, tmp_path, say) -> None:
    failures, kinds = [], collections.Counter()
    slowest = largest = (0.0, "")
    child = _Child(tmp_path)
    try:
        for seed in seeds:
            answer = child.load(seed, tmp_path / str(seed))
            if answer is None:
                failures.append(f"{seed}: the process ended ({child.close()}) or hung")
                child = _Child(tmp_path)
                continue
            kinds[answer["said"].split(":")[0].split(";")[0]] += 1
            slowest = max(slowest, (answer["seconds"], answer["what"]))
            largest = max(largest, (answer["megabytes"], answer["what"]))
            is_small = answer["megabytes"] <= MOST_MEGABYTES
            if not answer["is_right"] or answer["seconds"] > MOST_SECONDS or not is_small:
                failures.append(str(answer))
    finally:
        child.close()
    say(
        f"{dict(kinds)}; at most {slowest[0]:.2f} s ({slowest[1][:60]}) and "
        f"{largest[0]:.0f} MB ({largest[1][:60]})"
    )
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:20])


def test_sixty_folders_with_one_thing_wrong(tmp_path, say):
    _sweep(range(60), tmp_path, say)


@pytest.mark.slow
def test_1500_folders_with_one_thing_wrong(tmp_path, say):
    _sweep(range(1500), tmp_path, say)
