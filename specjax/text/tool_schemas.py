"""Describes Python functions as JSON schemas, which templates show to a model as its tools."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ARGUMENT = re.compile(r"(\w+)[ \t]*(?:\([^()]*\))?:(.*)")
_CHOICES = re.compile(r"\(choices: ([^()]*)\)$", re.IGNORECASE)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function with type hints and a docstring in Google's format.

    It is that of transformers' `get_json_schema` (5.24).

    Raises:
      ValueError: a type hint or a description is missing, or a type has no JSON.
    """
    name = getattr(function, "__name__", "operation")
    sections = _sections(inspect.getdoc(function) or "")
    described = _arguments(sections["Args:"])
    hints = typing.get_type_hints(function)
    parameters = dict(inspect.signature(function).parameters)
    for own in ("self", "cls"):
        if own in parameters and own not in hints:
            del parameters[own]
    properties: dict[str, Any] = {}
    for argument in parameters:
        if argument not in hints or argument not in described:
            raise ValueError(
                f"tool {name!r} has no type hint or no line under 'Args:' for {argument!r}; write "
                "both, or pass a JSON schema."
            )
        properties[argument] = _described(_type_of(hints[argument], name), described[argument])
    if not sections[""]:
        raise ValueError(f"tool {name!r} has no docstring; write one, or pass a JSON schema.")
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [key for key, each in parameters.items() if each.default is each.empty]
    if required:
        schema["required"] = required
    tool = {"name": name, "description": sections[""], "parameters": schema}
    try:
        if "return" in hints:
            tool["return"] = _type_of(hints["return"], name)
            if sections["Returns:"]:
                tool["return"]["description"] = sections["Returns:"].strip()
    except ValueError:  # models do not write what a tool returns
        pass
    return {"type": "function", "function": tool}


def _sections(doc: str) -> dict[str, str]:
    """Returns the text of a docstring by the headings that stand in a line each; "" before any."""
    lines: dict[str, list[str]] = {heading: [] for heading in ("", *_SECTIONS)}
    heading = ""
    for line in doc.splitlines():
        if line.strip() in _SECTIONS:
            heading = line.strip()
        else:
            lines[heading].append(line)
    return {heading: "\n".join(each).strip("\n").rstrip() for heading, each in lines.items()}


def _arguments(text: str) -> dict[str, str]:
    """Returns descriptions by argument; lines that are indented deeper go on with one."""
    lines = [line for line in text.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found: dict[str, str] = {}
    name = None
    for line in lines:
        match = _ARGUMENT.match(line[indent:])
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Adds a description to a schema, and the choices that it ends with as JSON."""
    if choices := _CHOICES.search(text):
        values = json.loads(choices[1])
        schema["enum"] = [each.strip() if isinstance(each, str) else each for each in values]
        text = text[: choices.start()].strip()
    return schema | {"description": text}


def _type_of(hint: Any, name: str) -> dict[str, Any]:
    """Returns the schema of a type; ValueError where it has none."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    inner = lambda each: _type_of(each, name)
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of([member.value for member in hint], name)
    if origin is typing.Literal:
        return _one_of(list(args), name)
    if origin is None and hint in _TYPES:
        return dict(_TYPES[hint])
    if origin in (typing.Union, types.UnionType):
        schema = _any_of([inner(each) for each in args if each is not type(None)])
        return schema | {"nullable": True} if type(None) in args else schema
    if origin is list:
        return {"type": "array", "items": inner(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": inner(args[1])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [inner(each) for each in args]}
    raise ValueError(
        f"tool {name!r} has the type hint {hint!r:.100}, which has no JSON; pass a JSON schema of "
        "the tool."
    )


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    if all(each.keys() == {"type"} and isinstance(each["type"], str) for each in schemas):
        names = sorted({each["type"] for each in schemas})
        return {"type": names[0] if len(names) == 1 else names}
    return {"anyOf": list(schemas)}


def _one_of(values: list[Any], name: str) -> dict[str, Any]:
    kinds = [_TYPES.get(type(each), {}).get("type") for each in values]
    if not values or not {*kinds} <= {"integer", "number", "string", "boolean", "null"}:
        raise ValueError(f"tool {name!r} has choices {values!r:.100}, which are no JSON values.")
    kinds = list(dict.fromkeys(kinds))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
