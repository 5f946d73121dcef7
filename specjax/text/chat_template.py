"""Renders the messages of a chat by a model's own template.

A template comes with the weights and is not trusted: `template_process` renders it elsewhere, and
it sees nothing but text, numbers, lists and dictionaries. Arguments mean what they mean to
`apply_chat_template` (transformers 5.24); those of it that are not acted on are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from specjax.config.checks import shown
from specjax.config.names import closest
from specjax.runtime.stack_level import of_the_caller
from specjax.text import template_process
from specjax.text.tool_schemas import schema_of

MAX_SOURCE_CHARS = 128 * 1024
MAX_DEPTH = 100  # of dictionaries, lists and other containers inside each other
# Written behind the final message that is to be continued. The space shows whether the template
# strips what it writes.
_HERE = "CONTINUED_FROM_HERE "
# Names that a message's reasoning goes by; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MEDIA = ("image", "video", "audio", "file")
_LISTS = ("tools", "documents")
_ARGUMENTS = (*_LISTS, "chat_template", "add_generation_prompt", "continue_final_message")
# Arguments of apply_chat_template and of vLLM's chat that have no effect here, by the values that
# ask for none, and what to do.
_IDS = "the ids of one prompt are returned as a list"
_NOT_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "padding": ((False, None, "do_not_pad"), _IDS),
    "truncation": ((False, None, "do_not_truncate"), f"{_IDS}; cut them"),
    "max_length": ((None,), f"{_IDS}; cut them"),
    "return_tensors": ((None,), f"{_IDS}; make an array of them"),
    "return_dict": ((False, None), _IDS),
    "tokenizer_kwargs": ((None, {}), _IDS),
    "add_special_tokens": ((False, None), "a template writes special tokens itself"),
    "sanitize_control_tokens": ((False, None), "check the messages for them"),
    "return_assistant_tokens_mask": (
        (False, None),
        "what a model replied is known where it was generated",
    ),
    "chat_template_kwargs": ((None, {}), "pass its entries as arguments of their own"),
    "chat_template_content_format": ((None, "auto"), "it is found in the template"),
}


def chosen(templates: str | Mapping[str, str] | None, asked: str | None, has_tools: bool) -> str:
    """Returns the template to render.

    Args:
      templates: a tokenizer's own: one, or several by name.
      asked: the name of one of them, or the text of another; None: "tool_use" where there are
        tools and such a template, else "default".
    """
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    if asked is not None:
        source = named.get(asked, asked)
        if source is asked and "{" not in asked:
            raise ValueError(
                f"chat_template={asked!r:.100} is neither the name of a template of this tokenizer "
                f"({', '.join(sorted(named)) or 'it has none'}) nor a template's text, which has "
                "{{ or {% in it."
            )
        return source
    if not named:
        raise ValueError(
            "this tokenizer has no chat template; add chat_template.jinja to the model's folder, "
            "pass chat_template= (--chat-arguments '{\"chat_template\": ...}' on the command "
            "line), or pass the prompt as text."
        )
    name = "tool_use" if has_tools and "tool_use" in named else "default"
    if name not in named:
        raise ValueError(
            f"this tokenizer has chat templates named {', '.join(sorted(named))}, and none is the "
            "default; pass chat_template= with one of these names."
        )
    return named[name]


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any] | Callable] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str = False,
) -> str:
    """Returns the text of a conversation; arguments as of `Tokenizer.encode_chat`.

    Args:
      source: the template, from any model's folder.
      variables: others of the template, which is to have a place for each.
      special_tokens: variables too, if it has a place for them.

    Raises:
      ValueError: an argument is none, the template is not valid, fails on the messages, uses a
        forbidden operation, or takes more than a limit of `template_process`.
    """
    _check_taken(variables)
    if not isinstance(add_generation_prompt, bool | None):
        raise ValueError(
            f"add_generation_prompt={shown(add_generation_prompt)} must be True, False or None."
        )
    messages = [_message(message) for message in _listed("messages", messages)]
    if not messages:
        raise ValueError("there are no messages; give at least one.")
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: one goes on "
                "with the final message, the other begins a new one."
            )
        final = _marked(source, messages, continue_final_message)
    given = {"tools": None if tools is None else [_tool(tool) for tool in _listed("tools", tools)]}
    given["documents"] = None if documents is None else _listed("documents", documents)
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(
            f"the chat template has {len(source)} characters, and at most {MAX_SOURCE_CHARS} are "
            f"compiled; {template_process.ADVICE}"
        )
    text, names = template_process.rendered(
        str.__str__(source),
        {
            **plain(special_tokens or {}),
            **plain(variables),
            **plain(given),
            "messages": messages,
            "add_generation_prompt": (
                not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt
            ),
        },
    )
    _warn_of_unseen(names, {**variables, **given})
    return _continued(text, final) if continue_final_message else text


def _check_taken(variables: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that would be taken for variables of the template."""
    for name, (harmless, instead) in _NOT_TAKEN.items():
        value = variables.get(name, harmless[0])
        if not any(value is each or value == each for each in harmless):
            raise ValueError(f"{name}={shown(value)} is not available: {instead}.")


def _warn_of_unseen(names: Collection[str], given: Mapping[str, Any]) -> None:
    """Warns of variables that a template, which reads those of these names, does not read."""
    for name, value in given.items():
        is_empty = value is None or (name in _LISTS and not value)
        if is_empty or name in names or name in _NOT_TAKEN:
            continue
        meant = None if name in _LISTS else closest(name, {*_ARGUMENTS, *names}, 0.8)
        hint = "" if meant is None else f" (did you mean {meant!r}?)"
        warnings.warn(
            f"this chat template has no place for {name:.100}, which has no effect{hint}; name "
            "another template by chat_template=, or say it in a message.",
            stacklevel=of_the_caller(),
        )


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list, got {type(values).__name__}.")
    return list(values)


def _message(message: Any) -> dict[str, Any]:
    """Returns a message as templates take it: without what is None, its reasoning by both names."""
    message = plain(message)
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a dict with role and content, got {shown(message)}.")
    parts = message.get("content")
    for part in parts if isinstance(parts, list | tuple) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if any(medium in str(kind) for medium in _MEDIA):
            raise ValueError(
                f"a message has a part of type {kind!r:.50}, and models here read text alone; "
                'leave it out, or put what it shows into words ({"type": "text", "text": ...}).'
            )
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tool(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return tool
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return schema_of(tool)
    raise ValueError(f"tools holds {shown(tool)}; expected JSON schemas or functions.")


def plain(value: Any, depth: int = 0) -> Any:
    """Returns a value made of Python's own types; "<Type>" stands for any other object.

    A template may call methods of what it is given, which nobody made for that.

    Args:
      depth: how many containers hold it.

    Raises:
      ValueError: containers are nested deeper than MAX_DEPTH, or hold themselves.
    """
    if depth > MAX_DEPTH:
        raise ValueError(
            f"a message or an argument of a chat is nested too deep; at most {MAX_DEPTH} lists and "
            "dictionaries may stand inside each other."
        )
    inside = functools.partial(plain, depth=depth + 1)
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {inside(key): inside(each) for key, each in value.items()}
        case list():
            return [inside(each) for each in value]
        case tuple():
            return tuple(inside(each) for each in value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of numpy or jax
        return inside(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: inside(getattr(value, field.name)) for field in fields}
    dump = getattr(value, "model_dump", None)  # of pydantic
    if callable(dump):
        return inside(dump())
    return f"<{type(value).__name__}>"


def _marked(source: str, messages: list[dict[str, Any]], field: bool | str) -> str:
    """Puts _HERE behind a field of the final message; returns the field's text.

    Args:
      field: its name; True: "content".
    """
    name = field if isinstance(field, str) else "content"
    message = messages[-1]
    value = message.get(name)
    # Reasoning stands there under several names, any of which the template may read.
    alike = [key for key in _REASONING if message.get(key) == value] if name in _REASONING else []
    names = alike or [name]
    if isinstance(value, list | tuple):
        texts = [part for part in value if isinstance(part, dict) and "text" in part]
        value = texts[-1]["text"] if texts else None
        if texts:
            texts[-1]["text"] = f"{value}{_HERE}"
    elif isinstance(value, str):
        message |= dict.fromkeys(names, f"{value}{_HERE}")
    if not isinstance(value, str) or not any(key in source for key in names):
        raise ValueError(
            f"continue_final_message={field!r:.50}: the final message has no text {name!r}, or the "
            "template does not write it."
        )
    return value


def _continued(text: str, final: str) -> str:
    """Returns a text up to _HERE, without the mark."""
    at = text.rfind(_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the template does not write the final message as it is, so "
            "it cannot be continued; leave it out, or change the message."
        )
    is_stripped = not text[at:].startswith(_HERE)
    return text[:at].rstrip() if is_stripped else text[:at]
