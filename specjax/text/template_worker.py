"""The process that renders chat templates: it imports jinja2 and holds nothing else.

A template is a program of somebody else. jinja2's immutable sandbox keeps it from Python's
internals; the limits of this process bound the time and memory that it takes. The environment is
that of `apply_chat_template` (transformers 5.24): its filters, functions and tags.

    request (marshal) -> compile, kept -> content as text where the template takes no parts -> reply
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import marshal
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

# Imported by jinja2 or Python at first use, when this process can open no file any more.
_LATER = ("encodings.unicode_escape", "html", "jinja2.constants", "jinja2.debug")
_LATER += ("pprint", "random", "textwrap", "unicodedata")
READY = b"ready"  # what is said before any request, as a reply
PREFIX_BYTES = 8  # of a request and a reply: how many bytes follow
# What the reply of a rendering that went well begins with: then the names of the variables that the
# template reads, a newline, and the text.
TEXT = b"+"
_MAX_MESSAGE_CHARS = 500


def main() -> None:
    """Answers requests until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, meant for the program
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    for name in _LATER:
        importlib.import_module(name)
    time.localtime()  # reads the time zone's file
    _limit(True, RLIMIT_CORE=0, RLIMIT_FSIZE=0, RLIMIT_NOFILE=3, RLIMIT_NPROC=0)
    reply = READY
    while True:
        replies.write(len(reply).to_bytes(PREFIX_BYTES, "little") + reply)
        replies.flush()
        size = int.from_bytes(requests.read(PREFIX_BYTES), "little")
        if not size:
            return
        reply = _answer(**marshal.loads(requests.read(size)))


def _limit(is_final: bool, **limits: int) -> None:
    """Sets limits of this process, where the system has them: for good, or until the next call."""
    with contextlib.suppress(ImportError):
        resource = importlib.import_module("resource")  # absent on Windows
        for name, value in limits.items():
            with contextlib.suppress(AttributeError, OSError, ValueError):
                _, most = resource.getrlimit(getattr(resource, name))
                most = value if is_final else most
                resource.setrlimit(getattr(resource, name), (value, most))


def _answer(
    source: str,
    variables: dict[str, Any],
    max_cpu_s: int,
    max_memory_bytes: int,
    max_output_chars: int,
) -> bytes:
    """Returns TEXT and what the template writes, or JSON with what went wrong."""
    end_s = int(time.process_time()) + 1 + max_cpu_s
    _limit(False, RLIMIT_CPU=end_s, RLIMIT_AS=max_memory_bytes)
    stage = "compile"
    try:
        template, takes_parts, names = compiled(source)
        stage = "render"
        if not takes_parts:
            variables["messages"] = [_with_text(message) for message in variables["messages"]]
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_output_chars:
                return _failure("length", RuntimeError())
        text = " ".join(names) + "\n" + "".join(pieces)
        return TEXT + text.encode("utf-8", "surrogatepass")
    except MemoryError as error:
        return _failure("memory", error)
    except jinja2.sandbox.SecurityError as error:
        return _failure("unsafe", error)
    except Exception as error:  # A template is a program, and can raise any.
        return _failure(stage, error)


def _failure(stage: str, error: Exception) -> bytes:
    # An OSError's text names a path of this machine.
    message = (error.strerror or "") if isinstance(error, OSError) else str(error)
    cut = len(message) > _MAX_MESSAGE_CHARS
    message = f"{message[:_MAX_MESSAGE_CHARS]}..." if cut else message.removesuffix(".")
    return json.dumps({"stage": stage, "kind": type(error).__name__, "message": message}).encode()


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose parts of text are one text, a line each, as vLLM joins them."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the template takes text, and a message has parts without text")
    return {**message, "content": "\n".join(texts)}


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> tuple[jinja2.Template, bool, set[str]]:
    """Returns a template, whether it takes a message's content as a list of parts, and the names
    of the variables that it reads."""
    environment = _environment()
    tree = environment.parse(source)
    takes_parts = _takes_parts(tree)
    names = jinja2.meta.find_undeclared_variables(tree) - environment.globals.keys()
    return environment.from_string(tree), takes_parts, names


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    """Returns whether a template goes through "content", or a name that stands for it."""
    names = {"content"}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    gone_through = [loop.iter for loop in tree.find_all(jinja2.nodes.For)]
    gone_through += [
        each.node
        for each in tree.find_all(jinja2.nodes.Filter)
        if each.name in ("map", "selectattr", "rejectattr")
    ]
    return any(_is_content(node, names) for node in gone_through)


def _is_content(node: Any, names: set[str]) -> bool:
    match node:
        case jinja2.nodes.Name():
            return node.name in names
        case jinja2.nodes.Getattr():
            return node.attr == "content"
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=key)):
            return key == "content"
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Slice()) | jinja2.nodes.Filter():
            return _is_content(node.node, names)
    return False


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` only renders its body.

    Templates mark with it what a model is trained to reply.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because the body must not leak its assignments.
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """`dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(message)
