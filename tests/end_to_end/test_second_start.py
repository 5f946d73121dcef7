"""A second start compiles nothing: what the first compiled lies on disk."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

COMMAND = [sys.executable, "-m", "specjax", "generate"]
ARGUMENTS = ["def f(", "--max-tokens", "8", "--json"]


def start(folder):
    """Returns the statistics of a fresh process that keeps its executables in folder."""
    # This process's own settings of jax's cache would win over the folder.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    done = subprocess.run(
        [*COMMAND, *ARGUMENTS],
        env=environment | {"SPECJAX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["stats"]


def executables(folder):
    """Returns the files of jax's cache but those that say when one was last used."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name for path in files if not path.name.endswith("-atime")}


def test_second_start_compiles_nothing(tmp_path, say):
    first = start(tmp_path)
    kept = executables(tmp_path)
    assert len(kept) > 3
    second = start(tmp_path)
    assert executables(tmp_path) == kept
    for name, stats in (("first", first), ("second", second)):
        say(
            f"{name} start: {stats['time_to_first_token_s']:.1f} s to the first "
            f"token, {stats['compile_s']:.1f} s of them compiling"
        )
    # Tracing and loading are left; how long they take is the machine's affair.
    assert second["compile_s"] < first["compile_s"]
