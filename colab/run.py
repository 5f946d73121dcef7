"""Runs notebooks in fresh kernels and keeps what they print.

    pip install ".[notebooks]" && python colab/run.py             # all, in place
    python colab/run.py --out FOLDER quickstart                   # one, elsewhere

A kernel works in an empty folder and compiles anew: nothing of earlier runs is shown. It finds the
programs of examples/.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent
NAMES = ("quickstart", "tree_drafts", "choosing_k", "train_a_drafter", "rl_rollouts")
CELL_TIMEOUT_S = 600
STORED_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def is_cleared_bar(output: nbformat.NotebookNode) -> bool:
    """Returns whether an output is a progress bar that wrote over itself and ended blank."""
    if output.get("name") != "stderr":
        return False
    *_, last = re.split(r"\r|\n", output.text.rstrip("\r\n"))
    return not last.replace("\x1b[A", "").strip() and "Warning" not in output.text


def run(name: str, out: Path) -> float:
    """Executes a notebook and writes it, outputs included; returns the seconds it took.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; nothing is written.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        paths = [str(FOLDER.parent / "examples"), os.environ.get("PYTHONPATH")]
        settings = {
            "SPECJAX_CACHE_DIR": str(Path(scratch, "cache")),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        work = Path(scratch, "work")
        work.mkdir()
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(work)}},
            record_timing=False,
            coalesce_streams=True,
        )
        begun_at = time.perf_counter()
        client.execute(env=os.environ | settings)
        seconds = time.perf_counter() - begun_at
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not is_cleared_bar(each)]
    notebook.metadata = nbformat.from_dict(STORED_METADATA)
    nbformat.write(notebook, out / f"{name}.ipynb")
    return seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python colab/run.py")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    options = parser.parse_args(argv)
    for name in options.names:
        print(f"{name}: {run(name, options.out):.0f} s", flush=True)


if __name__ == "__main__":
    main()
