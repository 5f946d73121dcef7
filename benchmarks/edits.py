"""Versions of a source text, each the one before with an edit as people ask for it.

Every kind of edit is a function from lines to lines, deterministic, and touches a line in every
`EVERY`, or all places of a name. The result need not run.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

EVERY = 40  # lines between two edits of a kind that goes by lines
_DEFINED = re.compile(r"^\s*(?:def|class) +([A-Za-z_]\w*)", re.MULTILINE)


class Edit(NamedTuple):
    """What was asked for, and the lines after it."""

    request: str
    lines: list[str]


def rename(lines: list[str]) -> Edit:
    """Renames the function or class that the text names most."""
    name = _most_named(lines)
    new = f"{name}_now" if name.islower() else f"Own{name}"
    return Edit(f"rename {name} to {new}", _substituted(lines, rf"\b{name}\b", new))


def insert(lines: list[str]) -> Edit:
    """Adds a call that logs before a line in every EVERY."""

    def begins(index: int) -> bool:
        before = lines[index - 1].rstrip() if index else ""
        return bool(lines[index].strip()) and not before.endswith((",", "(", "[", "{", "\\"))

    found = list(lines)
    for index in reversed(_places(lines, 0.5, begins)):
        line = lines[index]
        found.insert(index, f'{line[: len(line) - len(line.lstrip())]}log.debug("at {index}")')
    return Edit("log where it is", found)


def argument(lines: list[str]) -> Edit:
    """Adds an argument to what the text names most, and to its calls."""
    name = _most_named(lines)
    defined = _substituted(lines, rf"(\bdef {name}\([^()]+)\)", r"\1, timeout=None)")
    called = _substituted(defined, rf"(?<!def )\b({name}\([^()]+)\)", r"\1, timeout=timeout)")
    return Edit(f"give {name} a timeout", called)


def delete(lines: list[str]) -> Edit:
    """Deletes a line in every EVERY."""
    gone = set(_places(lines, 0.25, lambda index: bool(lines[index].strip())))
    return Edit("drop what is not needed", [each for i, each in enumerate(lines) if i not in gone])


def comment(lines: list[str]) -> Edit:
    """Changes a comment or docstring in every EVERY lines; where there is none, adds a comment."""
    found = list(lines)
    is_remark = lambda index: lines[index].lstrip().startswith(("#", '"""'))
    for index in _places(lines, 0.0, is_remark):
        line = lines[index]
        parts = re.match(r'(\s*(?:#|""")\s*)(.*)', line)
        found[index] = f"{line}  # as before" if parts is None else f"{parts[1]}Note: {parts[2]}"
    return Edit("mark the comments", found)


KINDS: tuple[Callable[[list[str]], Edit], ...] = rename, insert, argument, delete, comment


def versions(text: str, count: int) -> list[Edit]:
    """Returns the text and `count` edited versions of it, each of the one before.

    Raises:
      ValueError: the text defines no name, or an edit changes nothing in it.
    """
    found = [Edit("", text.splitlines())]
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        found.append(kind(found[-1].lines))
        if found[-1].lines == found[-2].lines:
            raise ValueError(
                f"{kind.__name__} changes nothing in {text!r:.60}; take a longer text."
            )
    return found


def _most_named(lines: list[str]) -> str:
    """Returns the function or class defined in the text that stands in it most often."""
    text = "\n".join(lines)
    names = list(dict.fromkeys(_DEFINED.findall(text)))
    if not names:
        raise ValueError(f"{text!r:.60} defines no function and no class; take another text.")
    words = Counter(re.findall(r"\w+", text))
    return max(names, key=lambda name: words[name])


def _places(lines: list[str], after: float, suits: Callable[[int], bool]) -> list[int]:
    """Returns a line of every EVERY or so: the first that suits, or the first looked at.

    Args:
      after: the share of those lines that is passed over first.
    """
    count = max(round(len(lines) / EVERY), 1)
    ends = [len(lines) * part // count for part in range(count + 1)]
    found = []
    for start, end in itertools.pairwise(ends):
        inside = range(start + int(after * (end - start)), end)
        found.append(next(filter(suits, inside), inside[0]))
    return found


def _substituted(lines: list[str], pattern: str, new: str) -> list[str]:
    return [re.sub(pattern, new, line) for line in lines]
