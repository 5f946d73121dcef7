"""Stores compiled steps on disk, so that a later process neither traces nor compiles them.

jax's own compilation cache saves a second process the compilation, but not the tracing and
lowering before it, which take seconds of Python for a speculative step. A file here holds
the loaded form of one executable. Its name is a digest of everything that determines the
executable: source code, versions, device, compiler flags, jax's settings, the decoder's
configuration, and the shapes of the arguments.

An executable that came from jax's cache must not be stored here: XLA on a CPU does not
serialise it completely (jax 0.10.2 to 0.12: "Function ... not found" once it is run). So each
function is named after its file, which makes it new to jax's cache; if jax's cache serves it
all the same, it is not stored.

A file begins with a digest of the rest, because a torn write or a flipped bit could otherwise
end the process or silently decode other tokens. The digest is no signature.

Reading such a file executes its content, as with jax's cache. So files are read only from a
folder that no other user can write to (`compilation_cache.private_folder`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

import pallas_kernels
from specjax.decode.compiler_options import compile_with
from specjax.runtime import compilation_cache

FORMAT = 2
DIGEST_BYTES = hashlib.sha256().digest_size  # length of the digest at the start of a file
MOST_BYTES = 2**30  # of all files; the least recently read are deleted first
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
FOLDER = "executables"
# Settings of jax that change no executable.
_UNRELATED = ("cache", "log", "traceback", "profiler", "explain", "transfer_guard")


def name_of(description: str, inputs: Any) -> str | None:
    """Returns the name of an executable, or None where it cannot be stored.

    Args:
      description: tells the function, and everything it closes over, from others.
      inputs: arguments of the function: arrays or their shapes.
    """
    if jax.process_count() > 1 or compilation_cache.user_cache_dir(os.environ) is None:
        return None
    leaves, tree = jax.tree.flatten(inputs)
    # An executable is bound to its device; only those of the default device are stored.
    places = [getattr(leaf, "sharding", None) for leaf in leaves]
    here = {jax.devices()[0]}
    if any(place is not None and place.device_set != here for place in places):
        return None
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    text = repr((FORMAT, _surroundings(), description, str(tree), shapes))
    return hashlib.sha256(text.encode()).hexdigest()


def size(name: str | None) -> int | None:
    """Returns the size of a stored executable in bytes, or None where there is none.

    The file is not checked; `load` does that.
    """
    folder = None if name is None else compilation_cache.own_folder(FOLDER)
    if folder is None:
        return None
    try:
        return (folder / f"{name}.bin").stat().st_size
    except OSError:
        return None


def load(name: str | None, inputs: Any) -> Callable[..., Any] | None:
    """Returns a stored executable, or None where there is none that can be read."""
    path = _path(name)
    if path is None or not path.exists():
        return None
    try:
        content = path.read_bytes()
        digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the file is damaged")
        payload, results = pickle.loads(data)
        in_tree = jax.tree.structure((tuple(inputs), {}))
        loaded = serialize_executable.deserialize_and_load(
            payload,
            in_tree,
            jax.tree.structure(results),
            # The default is all devices of the process.
            execution_devices=jax.devices()[:1],
        )
    except Exception:  # another version, a truncated or damaged file: the step is compiled again
        with contextlib.suppress(OSError):  # a read-only folder, as in a container image
            path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return loaded


def compile_new(
    name: str | None, lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a lowered function; returns the executable, and whether it may be stored.

    Args:
      options: of the compiler; they follow from what `name_of` is told.
    """
    _listen()
    _HITS.count = 0
    compiled = compile_with(lowered, options)
    return compiled, name is not None and not _HITS.count


def save(name: str | None, compiled: jax.stages.Compiled) -> None:
    """Stores a newly compiled executable, if its backend can serialise it and the folder is
    writable."""
    path = _path(name, makes=True)
    if path is None:
        return
    try:
        payload, _, out_tree = serialize_executable.serialize(compiled)
        results = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        data = pickle.dumps((payload, results))
        # A concurrent reader finds either no file or a complete one.
        new = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.new")
        new.write_bytes(hashlib.sha256(data).digest() + data)
        new.replace(path)
        _prune(path.parent)
    except Exception:  # a backend that cannot serialise; a full disk
        return


class _Hits(threading.local):
    count = 0  # hits of jax's cache in this thread


_HITS = _Hits()


@functools.cache
def _listen() -> None:
    """Counts hits of jax's cache; jax reports each hit in the thread that compiles."""

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _HITS.count += 1

    jax.monitoring.register_event_listener(note)


def _path(name: str | None, *, makes: bool = False) -> Path | None:
    if name is None:
        return None
    folder = compilation_cache.private_folder(FOLDER, makes=makes)
    return None if folder is None else folder / f"{name}.bin"


def _prune(folder: Path) -> None:
    """Deletes the least recently read files until the rest take at most MOST_BYTES."""
    files = sorted(
        ((entry.stat().st_mtime, entry) for entry in folder.iterdir()),
        key=lambda each: each[0],
    )
    excess = sum(entry.stat().st_size for _, entry in files) - MOST_BYTES
    for _, entry in files:
        if excess <= 0:
            return
        excess -= entry.stat().st_size
        entry.unlink(missing_ok=True)


def _surroundings() -> tuple[Any, ...]:
    """Returns what determines every executable besides its own description."""
    device = jax.devices()[0]
    settings = sorted(
        (name, str(value))
        for name, value in jax.config.values.items()
        if not any(word in name for word in _UNRELATED)
    )
    return (
        _source_digest(),
        jax.__version__,
        jaxlib.__version__,
        device.platform,
        device.device_kind,
        device.id,
        device.client.platform_version,
        compilation_cache.processor(),
        [os.environ.get(name, "") for name in COMPILER_FLAGS],
        settings,
    )


@functools.cache
def _source_digest() -> str:
    """Returns a digest of the code that steps are traced from."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
