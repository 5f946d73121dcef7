"""Finds the chat templates of a folder, which may stand in four places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.runtime.model_files import find_file, read_bytes, read_optional_json
from specjax.text.chat_template import MAX_SOURCE_CHARS

TEMPLATE, LEGACY = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja


def chat_template_of(
    folder: Path, settings: Mapping[str, Any], settings_name: str
) -> tuple[str | dict[str, str] | None, list[str]]:
    """Returns the template of a folder, or several by name; and what its files hold beside.

    Files of one template each win over chat_template.json, which wins over tokenizer_config.json.
    A file that is not used is not in the way, whatever it holds.

    Args:
      settings: what tokenizer_config.json holds.
      settings_name: the name of that file.

    Raises:
      ValueError: a file that is used holds no template.
    """
    notes: list[str] = []
    used: dict[str, tuple[str, str]] = {}  # name of a template -> file, text
    for name, file in _files(folder):
        text = _text(folder / file)
        if name in used and not _is_same(used[name][1], text):
            notes.append(_unused(folder, used[name][0], file, [name]))
        used.setdefault(name, (file, text))
    for file in (LEGACY, settings_name):
        try:
            config = settings if file == settings_name else read_optional_json(folder, LEGACY)
            named = _named(folder, file, config.get("chat_template"), notes)
        except ValueError as error:
            if not used:
                raise
            notes.append(f"{error} It is not used, since {next(iter(used.values()))[0]} is there.")
            continue
        if not used:
            used = {name: (file, text) for name, text in named.items()}
        elif lost := [
            name
            for name, text in named.items()
            if name not in used or not _is_same(used[name][1], text)
        ]:
            winner = used.get(lost[0], next(iter(used.values())))[0]
            notes.append(_unused(folder, winner, file, lost))
    texts = {name: text for name, (_, text) in used.items()}
    return (texts["default"] if texts.keys() == {"default"} else texts or None), notes


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, file) of files of one template each; of two of a name the first is used."""
    more = folder / MORE_TEMPLATES
    if more.is_dir():
        for name in sorted(path.stem for path in more.iterdir() if path.suffix == ".jinja"):
            if find_file(folder, file := f"{MORE_TEMPLATES}/{name}.jinja") is not None:
                yield name, file
    if find_file(folder, TEMPLATE) is not None:
        yield "default", TEMPLATE


def _is_same(one: str, other: str) -> bool:
    """Whether two templates are the same: jinja drops a last newline."""
    return one.removesuffix("\n") == other.removesuffix("\n")


def _unused(folder: Path, used: str, other: str, names: list[str]) -> str:
    listed = ", ".join(names)[:100]
    return (
        f"{folder}/{other} holds a chat template that is not used ({listed}), since {used} is "
        "there; remove one of them."
    )


def _named(folder: Path, file: str, template: Any, notes: list[str]) -> dict[str, str]:
    """Returns the templates of a file by name, {} of None; adds to what there is to say."""
    if template is None or isinstance(template, str):
        return {} if template is None else {"default": template}
    if isinstance(template, dict):
        template = [{"name": key, "template": text} for key, text in template.items()]
    named: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [template]:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"a chat template in {folder}/{file} is {str(entry)[:100]}, expected text or a "
                "list of objects with name and template; fetch the file again."
            )
        if named.get(name, text) != text:
            notes.append(f"{folder}/{file} has two chat templates {name!r:.50}; the last is used.")
        named[name] = text
    return named


def _text(path: Path) -> str:
    """Returns the template in a file."""
    try:
        return read_bytes(path, 4 * MAX_SOURCE_CHARS).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); fetch the file again.") from error
