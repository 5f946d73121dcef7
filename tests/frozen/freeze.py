"""Freezes what a change of structure must not change, and names what did.

    python tests/frozen/freeze.py                  compares all with frozen.json; ends with 1 if
                                                   an entry changed, came or went
    python tests/frozen/freeze.py steps plans      only these parts
    python tests/frozen/freeze.py --keep FOLDER    and writes what is hashed, for `diff -r`
    python tests/frozen/freeze.py --write          freezes what is there now

An entry is the sha256 of its content, or a figure. Lowered text, rounding and plans depend on what
they are made with (`made_with`), so nothing is compared with entries of another version.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

FOLDER = Path(__file__).resolve().parent
FROZEN = FOLDER / "frozen.json"
PARTS = "steps", "tokens", "folders", "plans", "replays"
# Four devices for a mesh, and steps that are compiled quickly.
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Of a figure: sums in another order may end a replayed burst elsewhere.
TOLERANCE = 1e-3

Content: TypeAlias = str | bytes | float
Entry: TypeAlias = str | float  # the first 16 digits of a sha256, or a figure


def settle() -> None:
    """Sets what results depend on; to be called before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["SPECJAX_CACHE_DIR"] = "off"  # no speed or executable of an earlier run
    flags = FLAGS
    if metadata.version("jaxlib").startswith("0.10."):  # later ones know one kind of emitters
        flags += ("--xla_cpu_use_fusion_emitters=false",)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    gc.set_threshold(100_000, 50, 100)  # looking for garbage takes a third of tracing
    for folder in FOLDER.parents[:2]:  # helpers of the tests, and the benchmarks
        sys.path.append(str(folder))


def made_with() -> dict[str, str]:
    """Returns the versions that entries are compared under."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"jax": metadata.version("jax"), "python": python, "machine": platform.machine()}


def contents(part: str) -> dict[str, Content]:
    """Returns what a part freezes, by the names of its entries."""
    return importlib.import_module(f"frozen_{part}").contents()


def entry_of(content: Content) -> Entry:
    if isinstance(content, float):
        return round(content, 5)
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]


def differences(frozen: dict[str, Entry], found: dict[str, Entry]) -> list[str]:
    """Returns a line for each entry that changed, is new, or is gone."""
    lines = [f"gone: {name}" for name in frozen if name not in found]
    for name, entry in found.items():
        if name not in frozen:
            lines.append(f"new: {name}")
        elif isinstance(entry, float) and isinstance(frozen[name], float):
            if not abs(entry - frozen[name]) <= TOLERANCE:
                lines.append(f"changed: {name}, {frozen[name]} -> {entry}")
        elif entry != frozen[name]:
            lines.append(f"changed: {name}")
    return lines


def keep(folder: Path, part: str, found: dict[str, Content]) -> None:
    """Writes each content as a file of its own."""
    for name, content in found.items():
        path = folder / part / name.replace("/", "_").replace(" ", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/frozen/freeze.py")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--write", action="store_true", help=f"write {FROZEN.name}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write what is hashed")
    options = parser.parse_args(argv)
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    settle()
    record = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    if not options.write and record["made_with"] != made_with():
        print(f"frozen with {record['made_with']}, and this is {made_with()}", file=sys.stderr)
        return 2
    lines = []
    for part in options.parts or PARTS:
        begin = time.process_time()
        content = contents(part)
        if options.keep:
            keep(options.keep, part, content)
        found = {name: entry_of(each) for name, each in content.items()}
        lines += [f"{part}: {line}" for line in differences(record.get(part, {}), found)]
        record[part] = found
        seconds = time.process_time() - begin
        print(f"{part}: {len(found)} entries, {seconds:.0f} CPU s", file=sys.stderr)
    print("\n".join(lines) or "all as it was frozen")
    if options.write:
        record = {"made_with": made_with()} | {part: record[part] for part in PARTS}
        FROZEN.write_text(json.dumps(record, indent=0) + "\n")
        return 0
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
