"""Shows the comment above or beside a field as its description in the API reference.

Griffe, which reads the sources for the site, takes descriptions from strings alone; the
dataclasses of specjax describe their fields in comments. No part of the package.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives every class attribute without a docstring the comment that stands at it."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        is_field = isinstance(node, ast.AnnAssign) and attr.parent and attr.parent.is_class
        if not is_field or attr.docstring is not None or not isinstance(attr.filepath, object):
            return
        lines = list(attr.lines_collection[attr.filepath])
        text = comment_at(lines, node.lineno, node.end_lineno or node.lineno)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)


def comment_at(lines: list[str], first: int, last: int) -> str:
    """Returns the comment above line `first` and those within lines first to last, from 1."""
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("#").strip())
    inside = [line.partition("  # ")[2] or _whole(line) for line in lines[first - 1 : last]]
    return " ".join(part for part in [*above, *inside] if part)


def _whole(line: str) -> str:
    """Returns the comment of a line that is nothing else."""
    return line.strip().lstrip("#").strip() if line.lstrip().startswith("#") else ""
