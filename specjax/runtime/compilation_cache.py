"""Sets up folders of compiled steps on disk, so that a second start does not compile.

Files in the folder are executed: any user with the right to write to it, or to replace it,
could run code as this user. A folder that other users could change is therefore not used.
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

from specjax.runtime.stack_level import of_the_caller

# Every executable is stored: loading a model compiles dozens of small ones.
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

    If the user set its directory or its minimum compile time, through jax.config or the
    environment, both stay as they are. It may be called at any time and repeatedly;
    functions compiled before are not stored.

    Returns:
      The folder in use, or None when this function changed nothing: the user's own
      setting, SPECJAX_CACHE_DIR=off, a folder that is not writable, or one that other
      users could change, for which it warns once.
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
    """Returns the folder of compiled steps, or None with SPECJAX_CACHE_DIR=off.

    One folder per kind of processor: code compiled for one may not run on another,
    and home directories are shared.
    """
    return own_folder("compilation", environment)


def own_folder(name: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Returns the path of a folder for this kind of processor; None with
    SPECJAX_CACHE_DIR=off."""
    root = user_cache_dir(os.environ if environment is None else environment)
    return None if root is None else root / name / processor()


def private_folder(name: str, *, makes: bool = False) -> Path | None:
    """Returns a folder of specjax's own for files that are executed, one per kind of processor.

    It returns None with SPECJAX_CACHE_DIR=off, if the folder is missing or not writable, and
    if other users could change it, for which it warns once.

    Args:
      makes: whether to create a missing folder.
    """
    folder = own_folder(name)
    if folder is None or not (_is_writable(folder) if makes else folder.is_dir()):
        return None
    if (danger := _danger(folder)) is not None:
        _warn_once(folder, danger)
        return None
    return folder


def user_cache_dir(environment: Mapping[str, str]) -> Path | None:
    """Returns specjax's folder in the platform's cache directory of the user."""
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
    """Creates the folder, writable only by its owner; returns whether it can be written."""
    missing = []
    try:
        for each in (folder, *folder.parents):
            if each.exists():
                break
            missing.append(each)
        # One by one: with `parents=True` the parents would get the mode of the umask.
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _danger(folder: Path) -> str | None:
    """Returns how other users could change files in the folder, or None if they cannot.

    The folder must belong to the user, and no other user may write to it. Its parents must
    belong to the user or to the system; other users may write to them only if they are sticky
    like /tmp, where only the owner of an entry may rename it. Both ends of a link are
    checked.
    """
    if os.name != "posix":
        return None  # on such systems the user's cache folder is private
    user = os.geteuid()
    try:
        # In a container the system's files may belong to an unnamed user.
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
    """Returns whether a group has no member but the user: many systems give each user one."""
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
        stacklevel=of_the_caller(),
    )
