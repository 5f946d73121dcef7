"""Compiled steps kept on disk, so that a second start does not compile."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

# Every executable is kept: loading a model compiles dozens of small ones.
MIN_COMPILE_TIME_S = 0.0
ENVIRONMENT_VARIABLE = "SPECJAX_CACHE_DIR"
_OFF = ("0", "off")
# jax's option and its default: any other value, or the option's environment
# variable, is the user's own choice.
_OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
}


def enable() -> Path | None:
    """Turns on jax's persistent compilation cache, unless the user has set it up.

    Where the user set its directory or its minimum compile time, through jax.config
    or the environment, both are left alone. May be called at any time and repeatedly;
    what was compiled before is not kept.

    Returns:
      The folder in use, None when this function changed nothing: the user's own
      setting, SPECJAX_CACHE_DIR=off, or a folder that cannot be written.
    """
    folder = cache_folder()
    if folder is None:
        return None
    if _option("jax_compilation_cache_dir") == str(folder):
        return folder
    if is_set_by_user() or not _is_writable(folder):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_TIME_S)
    return folder


def is_set_by_user() -> bool:
    """Returns whether jax's own cache options differ from their defaults."""
    return any(
        name.upper() in os.environ or _option(name) != default
        for name, default in _OPTIONS.items()
    )


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Returns where compiled steps are kept, None where SPECJAX_CACHE_DIR says "off".

    One folder per kind of processor: code compiled for one may not run on another,
    and home directories are shared.
    """
    root = user_cache_dir(os.environ if environment is None else environment)
    return None if root is None else root / "compilation" / processor()


def private_folder(name: str, *, makes: bool = False) -> Path | None:
    """Returns a folder of specjax's own for files that are executed, one per kind of processor.

    None where SPECJAX_CACHE_DIR says "off", or the folder cannot be written.

    Args:
      makes: whether to make it where it is missing.
    """
    root = user_cache_dir(os.environ)
    if root is None:
        return None
    folder = root / name / processor()
    if makes and not _is_writable(folder):
        return None
    return folder


def user_cache_dir(environment: Mapping[str, str]) -> Path | None:
    """Returns specjax's folder in the user's cache directory, by the platform's custom."""
    chosen = environment.get(ENVIRONMENT_VARIABLE, "").strip()
    if chosen.lower() in _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser().absolute()
    try:
        home = Path.home()
    except RuntimeError:  # no home directory, as in some containers
        return None
    if sys.platform == "win32":
        base = environment.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = environment.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "specjax"


def _option(name: str) -> object:
    return getattr(jax.config, name)


def processor() -> str:
    """Returns a short name of the host's processor and its instruction sets."""
    features = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            features = next((x for x in lines if x.startswith(("flags", "Feat"))), "")
    except OSError:  # not Linux: the name has to do
        features = platform.processor()
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def _is_writable(folder: Path) -> bool:
    """Makes the folder; only its owner may write, because what it holds is executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
