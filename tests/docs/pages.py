"""The pages of the documentation and the blocks of code in them, for tests."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("colab", "examples")),
    *sorted(DOCS.rglob("*.md")),
]

# What a block begins with when it is a command although no fence says so.
COMMANDS = ("specjax ", "pip install", "python -m ", "pytest")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str  # what stands behind the fence; "" of a fence that says nothing
    text: str
    line: int  # of the first line of `text`, from 1
    not_run: str | None  # the reason in the comment above it


def name_of(page: Path) -> str:
    """Returns a page's path as tests show it."""
    return page.relative_to(ROOT).as_posix()


def found_under(name: str) -> object:
    """Returns what a dotted name stands for: a module, or a name of one."""
    parent, _, own = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(parent), own)


def blocks_of(text: str) -> list[Block]:
    """Returns the blocks of a page in order; indented ones have the language "indented"."""
    blocks: list[Block] = []
    lines = text.split("\n")
    index, reason, in_list = 0, None, False
    while index < len(lines):
        line = lines[index]
        found = _NOT_RUN.search(line)
        if line.startswith("```"):
            end = next(i for i in range(index + 1, len(lines)) if lines[i].startswith("```"))
            body = "\n".join(lines[index + 1 : end])
            blocks.append(Block(line[3:].strip(), body, index + 2, reason))
            index, reason = end, None
        elif line.startswith("    ") and not in_list and (index == 0 or not lines[index - 1]):
            end = index
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            body = "\n".join(each[4:] for each in lines[index:end]).rstrip()
            blocks.append(Block("indented", body, index + 1, reason))
            index, reason = end - 1, None
        elif found:
            reason = found[1]
        elif line.strip():
            reason = None
            in_list = bool(_ITEM.match(line)) or (in_list and line.startswith(" "))
        index += 1
    return blocks
