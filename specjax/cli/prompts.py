"""Reads the prompts of the command line and of a --prompts file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.cli import sampling_arguments
from specjax.runtime.stack_level import of_the_caller
from specjax.text.chat import Chat

# Keys beside "messages", as of the OpenAI API and of vLLM.
CHAT_KEYS = (
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

_LIKE_JSON = re.compile(r'\s*\{\s*"(prompt|messages)"')


class PromptEntry(NamedTuple):
    """One prompt, its sampling parameters and its source."""

    prompt: str | list[int] | list[dict[str, Any]] | Chat
    sampling: dict[str, Any]  # fields of SamplingParams that it sets itself
    source: str  # "FILE line 3", empty for the command line


def collect(
    texts: Sequence[str],
    path: str | None,
    *,
    is_chat: bool,
    chat_arguments: Mapping[str, Any] | None = None,
) -> list[PromptEntry]:
    """Returns the prompts of the command line, then those of a file.

    Args:
      path: a file with a JSON value per line, "-" for stdin.
      is_chat: wrap prompts that are text into a message of the user.
      chat_arguments: of the template, for every chat; a line's own win.

    Raises:
      ValueError: there is no prompt, or a line of the file is wrong; it is named.
    """
    entries = [PromptEntry(text, {}, "") for text in texts]
    if path is not None:
        entries.extend(read_file(path))
    if not entries:
        raise ValueError(
            "there is no prompt; give one as an argument, or --prompts FILE with one per line."
            if path is None
            else f"{'stdin' if path == '-' else path} holds no prompt; write one per line."
        )
    if is_chat:
        entries = [_as_chat(entry) for entry in entries]
    if chat_arguments:
        if all(messages_of(entry.prompt) is None for entry in entries):
            raise ValueError(
                "--chat-arguments are of a chat template, and no prompt is a chat; add --chat, or "
                'write "messages" in a line of --prompts.'
            )
        entries = [_with_arguments(entry, chat_arguments) for entry in entries]
    return entries


def read_file(path: str) -> Iterator[PromptEntry]:
    """Yields the prompts of a file of JSON lines, or of lines of text in a file named .txt.

    Empty lines are passed over.
    """
    if path == "-":
        yield from _read_lines("stdin", sys.stdin)
        return
    try:
        lines = open(path, encoding="utf-8-sig")  # noqa: SIM115, closed below
    except OSError as error:
        raise ValueError(
            f"--prompts {path} cannot be read ({_reason(error)}); give a file with a JSON value "
            'per line, or "-" for stdin. A prompt itself is written without --prompts.'
        ) from None
    with lines:
        yield from _read_lines(path, lines)


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    return (error.strerror or type(error).__name__).lower()


def _read_lines(name: str, lines) -> Iterator[PromptEntry]:
    number, is_text, is_first = 0, name.lower().endswith(".txt"), True
    try:
        for number, line in enumerate(lines, 1):
            if line.strip():
                if is_first and is_text and _LIKE_JSON.match(line):
                    warnings.warn(
                        f"in {name}, a file named .txt, each line is a prompt as it stands; name "
                        "it .jsonl if the objects are to be read.",
                        stacklevel=of_the_caller(),
                    )
                is_first = False
                prompt, sampling = (line.rstrip("\r\n"), {}) if is_text else parse_line(line)
                yield PromptEntry(prompt, sampling, f"{name} line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no UTF-8 after line {number}: {error}.") from None
    except ValueError as error:
        raise ValueError(f"{name} line {number}: {error}") from None


def parse_line(line: str) -> tuple[Any, dict[str, Any]]:
    """Returns a prompt and the sampling parameters beside it.

    A line is a JSON string, or an object with "prompt" (text or token ids) or
    "messages" (of a chat, with CHAT_KEYS beside it), and any sampling parameters.

    Raises:
      ValueError: it is neither.
    """
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"this is no JSON ({error}); write a string, or an object with prompt or messages. In "
            "a file named .txt a line is a prompt as it stands."
        ) from None
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict):
        raise ValueError(
            f"a {type(value).__name__} is no prompt; write a string, or an object with prompt or "
            f"messages."
        )
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("expected exactly one of the keys prompt and messages.")
    is_chat = "messages" in value
    prompt = value.pop("messages" if is_chat else "prompt")
    if is_chat and not _is_chat(prompt):
        raise ValueError("messages must be a list of objects with role and content.")
    if not is_chat and not _is_plain(prompt):
        raise ValueError("prompt must be a string or a list of token ids.")
    if is_chat and (arguments := _chat_arguments(value)):
        prompt = _chat(prompt, arguments)
    return prompt, sampling_arguments.from_json(value)


def chat_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of the template that the command line gives as JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.100} is no JSON object")
    return value


def _chat_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Takes the arguments of a chat's template out of an object."""
    arguments = {key: value.pop(key) for key in CHAT_KEYS if key in value}
    more = arguments.pop("chat_template_kwargs", {})
    if not isinstance(more, dict):
        raise ValueError(f"chat_template_kwargs is {more!r:.100}, expected an object.")
    return arguments | more


def _with_arguments(entry: PromptEntry, arguments: Mapping[str, Any]) -> PromptEntry:
    messages = messages_of(entry.prompt)
    if messages is None:
        return entry
    own = entry.prompt.arguments if isinstance(entry.prompt, Chat) else {}
    return entry._replace(prompt=_chat(messages, {**arguments, **own}))


def _chat(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> Chat:
    for name in ("messages", "self"):
        if name in arguments:
            raise ValueError(
                f"{name!r} is no argument of a chat's template; leave it out. The messages stand "
                'in "messages" of a line of --prompts.'
            )
    return Chat(messages, **arguments)


def messages_of(prompt: Any) -> Any:
    """Returns the messages of a chat; None of a text or of token ids."""
    if isinstance(prompt, Chat):
        return prompt.messages
    return prompt if _is_chat(prompt) else None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and "role" in message for message in value)
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(type(token_id) is int for token_id in value)  # a bool is none
    )


def _as_chat(entry: PromptEntry) -> PromptEntry:
    if not isinstance(entry.prompt, str):
        return entry
    return entry._replace(prompt=[{"role": "user", "content": entry.prompt}])
