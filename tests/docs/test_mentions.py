"""Files and names of specjax that sources and pages mention are there."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, found_under

FOLDERS = (
    *("benchmarks", "colab", "configs", "docs", "examples", "pallas_kernels", "specjax"),
    *("tests", "tools"),
)
FILES = {
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")
}
# Tests name what is not there on purpose, and the changelog what was.
SOURCES = sorted(
    ["CONTRIBUTING.md", "README.md"]
    + [
        path
        for path in FILES
        if path.endswith((".py", ".md")) and not path.startswith(("colab/", "tests/"))
    ]
)
PATH = re.compile(r"(?<![\w/.:-])(?:[\w-]+/)+[\w-]+\.(?:py|md|json|svg|png|ipynb)\b")
NAME = re.compile(
    r"(?<![\w/.@-])(?:specjax|pallas_kernels|benchmarks|tools)(?:\.[A-Za-z_]\w*)+(?![\w/]|-)"
)
OF_OTHERS = ("litgpt/", "tunix/")
NEED_TUNIX = ("specjax.integrations.tunix", "benchmarks.tunix_sampler")


def is_there(path: str, source: str) -> bool:
    """Returns whether a path leads to a file: from the root, from its source, or as an ending."""
    beside = (ROOT / source).parent / path
    return beside.exists() or any(f"/{file}".endswith(f"/{path}") for file in FILES)


def is_a_name(name: str) -> bool:
    """Returns whether a dotted name is a module, a name of one, or an attribute of a class."""
    value, parts = None, name.split(".")
    for length in range(2, len(parts) + 1):
        if isinstance(value, type):
            return hasattr(value, parts[length - 1])
        try:
            value = found_under(".".join(parts[:length]))
        except (AttributeError, ImportError):
            return False
    return True


def missing_from(text: str, source: str) -> list[str]:
    """Returns the paths and names in a text that are not there."""
    paths = {path for path in PATH.findall(text) if not path.startswith(OF_OTHERS)}
    names = {name for name in NAME.findall(text) if not name.startswith(NEED_TUNIX)}
    wrong = {path for path in paths if not is_there(path, source)}
    return sorted(wrong | {name for name in names if not is_a_name(name)})


def test_paths_and_names_are_there():
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in SOURCES}
    missing = {source: missing_from(text, source) for source, text in texts.items()}
    assert {source: wrong for source, wrong in missing.items() if wrong} == {}


@pytest.mark.parametrize(
    "text", ["`policy/nothing.py`", "specjax.nothing", "specjax.Engine.nothing", "(gone/x.md)"]
)
def test_what_is_not_there_is_noticed(text):
    assert missing_from(text, "docs/index.md")
