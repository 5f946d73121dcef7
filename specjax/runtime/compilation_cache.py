"""Compiled steps kept on disk, so that a second start does not compile.

What is in the folder is executed: whoever may write to it, or put another folder in its
place, runs code as the user. A folder that others could change is therefore not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator, Mapping
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
      setting, SPECJAX_CACHE_DIR=off, a folder that cannot be written, or one that
      others could change, which is said once in a warning.
    """
    folder = cache_folder()
    if folder is None:
        return None
    if _option("jax_compilation_cache_dir") == str(folder):
        return folder
    if is_set_by_user() or not _is_writable(folder):
        return None
    if (danger := _danger(folder)) is not None:
        _warn_once(folder, danger)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_TIME_S)
    return folder


def is_set_by_user() -> bool:
    """Returns whether jax's own cache options differ from their defaults."""
    return any(
        name.upper() in os.environ or _option(name) != default for name, default in _OPTIONS.items()
    )


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Returns where compiled steps are kept, None where SPECJAX_CACHE_DIR says "off".

    One folder per kind of processor: code compiled for one may not run on another,
    and home directories are shared.
    """
    return own_folder("compilation", environment)


def own_folder(name: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Returns where a folder of this kind of processor lies; None where SPECJAX_CACHE_DIR says
    "off"."""
    root = user_cache_dir(os.environ if environment is None else environment)
    return None if root is None else root / name / processor()


def private_folder(name: str, *, makes: bool = False) -> Path | None:
    """Returns a folder of specjax's own for files that are executed, one per kind of processor.

    None where SPECJAX_CACHE_DIR says "off", where it is missing or cannot be written, and
    where others could change it, which is said once in a warning.

    Args:
      makes: whether to make it where it is missing.
    """
    folder = own_folder(name)
    if folder is None or not (_is_writable(folder) if makes else folder.is_dir()):
        return None
    if (danger := _danger(folder)) is not None:
        _warn_once(folder, danger)
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


@functools.cache
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
    missing = []
    try:
        for each in (folder, *folder.parents):
            if each.exists():
                break
            missing.append(each)
        # One by one: `parents=True` would make all but the last as the umask says.
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _danger(folder: Path) -> str | None:
    """Returns how others could change what is in the folder, None where they cannot.

    The folder must be the user's own and writable by nobody else. Folders above it must
    belong to the user or to the system, and be writable by nobody else either, or sticky
    as /tmp is, where only its owner may rename what is in it. Links are looked at on
    both ends.
    """
    if os.name != "posix":
        return None  # the user's folder of such systems is the user's own
    user = os.geteuid()
    try:
        # In a container the system's files may belong to a user of no name.
        trusted = {user, 0, os.stat("/").st_uid}
        for path in dict.fromkeys(_with_parents(folder)):
            info = path.stat()
            is_folder = path in (folder, folder.resolve())
            owners = {user} if is_folder else trusted
            if info.st_uid not in owners:
                return f"{path} belongs to another user ({_user_name(info.st_uid)})"
            is_sticky = not is_folder and bool(info.st_mode & stat.S_ISVTX)
            if _others_may_write(info) and not is_sticky:
                return f"others may write to {path} (mode {stat.S_IMODE(info.st_mode):o})"
    except OSError as error:
        return f"its permissions cannot be read ({error})"
    return None


def _with_parents(folder: Path) -> Iterator[Path]:
    for path in (folder, folder.resolve()):
        yield path
        yield from path.parents


def _others_may_write(info: os.stat_result) -> bool:
    if info.st_mode & stat.S_IWOTH:
        return True
    return bool(info.st_mode & stat.S_IWGRP) and not _is_own_group(info.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether a group has no member but the user: many systems give each user one."""
    import grp
    import pwd

    if group == 0:
        return True  # of the system's own users
    with contextlib.suppress(KeyError):
        own = pwd.getpwuid(os.geteuid())
        entry = grp.getgrgid(group)
        is_alone = all(member == own.pw_name for member in entry.gr_mem)
        return own.pw_gid == group and entry.gr_name == own.pw_name and is_alone
    return False


def _user_name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


@functools.cache
def _warn_once(folder: Path, danger: str) -> None:
    warnings.warn(
        f"compiled steps are not kept: {danger}, and what is kept in {folder} is "
        "executed. Take the others' right to write away, set "
        f"{ENVIRONMENT_VARIABLE} to a folder of your own, or {ENVIRONMENT_VARIABLE}=off.",
        stacklevel=3,
    )
