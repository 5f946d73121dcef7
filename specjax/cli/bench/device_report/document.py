"""The document of a report: what it was made on, and what each case found. Plain JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import specjax
from specjax.runtime import kept_files
from specjax.runtime.version import __version__

SCHEMA_VERSION = 1
NAME = "report.json"
# A case that ended its process so often is not tried again.
MOST_ATTEMPTS = 2
_PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# What may differ between two runs of one report.
_FREE = ("date", "host_cpu", "host_cores")

INTERRUPTED = "interrupted"
NOT_OVER = ("not_reached", INTERRUPTED)
# A case that began and has none of the other keys was interrupted.
WAYS = ("result", "left_out", "failed", *NOT_OVER)

Document = dict[str, Any]


def environment(device: Any, size: str) -> dict[str, Any]:
    """Returns the device, the machine and the versions of a report."""
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "host_cpu": host_cpu(),
        "host_cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "plugin": _plugin(),
        "specjax": __version__,
        "commit": commit(),
        "size": size,
        "date": datetime.date.today().isoformat(),
    }


def _plugin() -> str | None:
    """Returns the package of the device's compiler and its version; None on a CPU."""
    for name in _PLUGINS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return None


def host_cpu() -> str:
    """Returns the name of the machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Returns the commit of a checkout, with "-dirty" where files were changed, or the one that
    pip installed from a repository; else None."""
    (package,) = specjax.__path__
    root = Path(package).parent
    if not (root / ".git").exists():
        return _installed_commit()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed_commit() -> str | None:
    """Returns the commit in the direct_url.json that pip writes (PEP 610)."""
    try:
        text = metadata.distribution("specjax").read_text("direct_url.json")
        return json.loads(text or "{}").get("vcs_info", {}).get("commit_id", "")[:12] or None
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None


def new(made_on: Mapping[str, Any]) -> Document:
    """Returns a document without cases."""
    return {"schema_version": SCHEMA_VERSION, "made_on": dict(made_on), "cases": {}}


def open_or_new(folder: Path, made_on: Mapping[str, Any]) -> Document:
    """Returns the document in a folder, to go on with, or a new one.

    Raises:
      ValueError: the folder has a file that is no report, or one of another device or version.
    """
    path = folder / NAME
    if not path.exists():
        return new(made_on)
    try:
        found = kept_files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a report ({error}); {_ELSEWHERE}") from error
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} is no report of schema {SCHEMA_VERSION}; {_ELSEWHERE}")
    damage = _damage(found, made_on)
    if damage is not None:
        raise ValueError(f"{path} is damaged: {damage}; {_ELSEWHERE}")
    differences = _differences(found["made_on"], made_on)
    if differences:
        raise ValueError(f"{path} was made with {differences}; figures do not mix: {_ELSEWHERE}")
    return found


_ELSEWHERE = "give another folder."


# Of the outcome of a case; "result" is an object of figures.
_TYPES = {
    "result": dict,
    "failed": str,
    "left_out": str,
    "not_reached": str,
    "error": str,
    "attempts": int,
    "round": int,
}


def _damage(found: Document, made_on: Mapping[str, Any]) -> str | None:
    """Returns what of a document is not as `new` and a run write it; None if all is."""
    before, cases = found.get("made_on"), found.get("cases")
    if not isinstance(before, dict) or not before.keys() >= made_on.keys():
        return "made_on is incomplete"
    if not isinstance(cases, dict):
        return "cases is no object"
    if not _is_a(int, found.get("round", 0)):
        return "round is no number"
    for key, outcome in cases.items():
        if not isinstance(outcome, dict):
            return f"case {key!r} is no object"
        wrong = [n for n, kind in _TYPES.items() if n in outcome and not _is_a(kind, outcome[n])]
        if wrong:
            return f"{wrong[0]} of case {key!r} is {outcome[wrong[0]]!r:.40}"
    return None


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns what differs between two environments, as "jax 0.10.2, and this is 0.11"."""
    free = _FREE if now["platform"] != "cpu" else ("date",)
    return "; ".join(
        f"{name} {before.get(name)}, and this is {now[name]}"
        for name in now
        if name not in free and before.get(name) != now[name]
    )


def make_folder(folder: Path) -> None:
    """Makes a folder for a report, where none is.

    Raises:
      OSError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OSError(f"{folder} cannot be a folder ({reason}); {_ELSEWHERE}") from error


def save(folder: Path, document: Document) -> None:
    """Writes the document so that a reader finds the one before or this one, whole.

    Raises:
      OSError: it cannot be written.
    """
    if not kept_files.write_json(folder / NAME, document):
        raise OSError(f"{folder / NAME} cannot be written; give a folder that can.")


def save_text(path: Path, text: str) -> None:
    """Writes a file so that a reader finds the one before or this one, whole.

    Raises:
      OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        reason = error.strerror or type(error).__name__
        raise OSError(f"{path} cannot be written ({reason}); remove it, or {_ELSEWHERE}") from error


def is_over(document: Mapping[str, Any], key: str) -> bool:
    """Returns whether a case needs no further run: it ended since everything was begun anew."""
    outcome = document["cases"].get(key)
    if outcome is None or way_of(outcome) in NOT_OVER:
        return False
    return outcome.get("round", 0) >= round_of(document)


def round_of(document: Mapping[str, Any]) -> int:
    """Returns how often all cases were begun anew; cases have the round that they ended in."""
    return document.get("round", 0)


def way_of(outcome: Mapping[str, Any]) -> str:
    """Returns how a case ended, one of WAYS."""
    return next((way for way in WAYS if way in outcome), INTERRUPTED)


def disagrees(outcome: Mapping[str, Any]) -> bool:
    """Returns whether a case found something else than the definition of an op."""
    return outcome.get("result", {}).get("agrees") is False
