"""Keeps the processes that render chat templates, and asks them.

A process starts with the first template that is rendered and serves the next ones. It gets no
variables of the environment but those that Python needs, so it holds no keys, and what goes wrong
in it ends it alone. Threads share a few processes; a fork of the program starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import marshal
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from specjax.runtime.model_files import parse_object

MAX_CPU_S = 5  # of a processor, per rendering; not on Windows
MAX_WAIT_S = 60.0  # by the clock, of which a busy machine takes its part
MAX_MEMORY_BYTES = 2**30  # of addresses; on Linux
MAX_OUTPUT_CHARS = 10_000_000
MAX_PROCESSES = 4
ADVICE = "use the template that the model's authors published, or pass the prompt as text."
_MAX_REPLY_BYTES = 64 * 2**20
_START = "import sys; sys.path += sys.argv[1:]; from template_worker import main; main()"
# As in template_worker, which needs jinja2.
_READY, _TEXT, _PREFIX_BYTES = b"ready", b"+", 8
_NEEDED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "TZDIR")


class Stopped(Exception):
    """A rendering took more than it may, or ended its process. The message says what it does."""


def rendered(source: str, variables: dict[str, Any]) -> tuple[str, set[str]]:
    """Returns what a template writes, given values of Python's own types; and the names of the
    variables that it reads.

    Raises:
      ValueError: it is no template, fails on the messages, is unsafe, or was stopped.
      OSError: no process can be started.
    """
    try:
        return _rendered(source, variables)
    except Stopped as error:
        raise ValueError(
            f"the chat template was stopped: {error}. It may be broken or hostile; {ADVICE}"
        ) from error


def _rendered(source: str, variables: dict[str, Any]) -> tuple[str, set[str]]:
    request = {
        "source": source,
        "variables": variables,
        "max_cpu_s": MAX_CPU_S,
        "max_memory_bytes": MAX_MEMORY_BYTES,
        "max_output_chars": MAX_OUTPUT_CHARS,
    }
    reply = _pool.ask(marshal.dumps(request))
    if reply.startswith(_TEXT):
        names, _, text = reply[len(_TEXT) :].decode("utf-8", "surrogatepass").partition("\n")
        return text, set(names.split())
    failure = {key: str(value) for key, value in parse_object(reply, "a reply").items()}
    stage = failure.get("stage", "render")
    if stage == "memory":
        raise Stopped(f"it takes more than {MAX_MEMORY_BYTES} bytes of memory")
    if stage == "length":
        raise Stopped(f"it writes more than {MAX_OUTPUT_CHARS} characters")
    error = ": ".join(filter(None, (failure.get("kind"), failure.get("message"))))
    if stage == "compile":
        said = f"failed to compile: {error}; {ADVICE}"
    elif stage == "unsafe":
        said = f"is unsafe and was stopped: {error}; {ADVICE}"
    else:
        said = (
            f"failed on {len(variables['messages'])} messages: {error}. Change the messages "
            "(roles, order) to what the model's template takes."
        )
    raise ValueError(f"the chat template {said}")


class _Worker:
    """One process, which answers one request at a time."""

    def __init__(self):
        folders = [str(Path(__file__).parent), *map(_folder_of, ("jinja2", "markupsafe"))]
        try:
            self._process = subprocess.Popen(
                # -I -S: of the program's modules, only those below these folders.
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _NEEDED if name in os.environ},
            )
        except OSError as error:
            raise OSError(
                f"a process of {sys.executable!r}, which renders chat templates, cannot be started "
                f"({error}); pass prompts as text."
            ) from error
        self._is_late = False
        if self._exchange() != _READY:
            raise OSError(
                "the process that renders chat templates did not start (exit code "
                f"{self.end()}); check that {sys.executable} can import jinja2 3.1.6."
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """Returns a reply; Stopped where the process ends or takes too long."""
        reply = self._exchange(len(request).to_bytes(_PREFIX_BYTES, "little") + request)
        if reply is not None:
            return reply
        code = self.end()
        if self._is_late:
            raise Stopped(f"it does not end within {MAX_WAIT_S:g} s")
        if code == -getattr(signal, "SIGXCPU", 0):
            raise Stopped(f"it computes for more than {MAX_CPU_S:g} s")
        raise Stopped(f"it ends the process that renders it (exit code {code})")

    def _exchange(self, request: bytes = b"") -> bytes | None:
        """Sends a request and returns what comes back; None where less does than is announced."""
        timer = threading.Timer(MAX_WAIT_S, self._stop)
        timer.daemon = True
        timer.start()
        to, back = self._pipes
        try:
            to.write(request)
            to.flush()
            size = int.from_bytes(back.read(_PREFIX_BYTES), "little")
            reply = back.read(size) if 0 < size <= _MAX_REPLY_BYTES else b""
        except OSError:  # the process has ended
            return None
        finally:
            timer.cancel()
        return reply if reply and len(reply) == size else None

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin
        assert self._process.stdout
        return self._process.stdin, self._process.stdout

    def _stop(self) -> None:
        self._is_late = True
        self._process.kill()

    def end(self) -> int:
        """Ends the process; returns its exit code."""
        self._process.kill()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what was not sent yet has nowhere to go
                pipe.close()
        return self._process.wait()


def _folder_of(module: str) -> str:
    """Returns the folder that a package is imported from."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise OSError(f"{module} is not installed, which renders chat templates.")
    return str(Path(spec.origin).parent.parent)


class _Pool:
    """Processes that wait for requests, at most MAX_PROCESSES."""

    def __init__(self, of_the_parent: _Pool | None = None):
        self._idle: list[_Worker] = []
        self._room = threading.BoundedSemaphore(MAX_PROCESSES)
        # Of a program that forked: neither used nor ended here.
        self._of_the_parent = of_the_parent

    def ask(self, request: bytes) -> bytes:
        with self._room:
            worker = self._take()
            try:
                reply = worker.ask(request)
            except BaseException:
                worker.end()
                raise
            self._idle.append(worker)
        return reply

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()  # which threads may call at once
            except IndexError:
                return _Worker()
            if worker.is_alive:
                return worker
            worker.end()

    def close(self) -> None:
        """Ends what waits, so that no pipe is left open where the program ends."""
        while self._idle:
            self._idle.pop().end()


_pool = _Pool()
atexit.register(lambda: _pool.close())


def _after_a_fork() -> None:
    global _pool
    _pool = _Pool(_pool)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_a_fork)
