"""Puts the notebooks of colab/ on the site, as they are stored, and orders what its search finds.

Hooks of mkdocs (mkdocs.yml, `hooks`); no part of the package. Nothing is executed.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests read notebooks without mkdocs
    from mkdocs.structure.files import Files

COLAB = Path(__file__).resolve().parents[1] / "colab"
REPOSITORY = "https://github.com/specjax/specjax/blob/main/colab"
FOLDER = "notebooks"  # of the site
# Links of colab/README.md: other notebooks, pages of the site, and files that are not on it.
LINKS = (
    (r"\((\w+)\.ipynb\)", r"(\1.md)"),
    (r"\(\.\./docs/", "(../"),
    (r"\((\w+\.py)\)", rf"({REPOSITORY}/\1)"),
)
# By the first folder of a page's path: a name is looked up more often than why it was chosen.
SEARCH_BOOST = {"api": 2, "benchmarks": 0.5, "decisions": 0.5}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Says how high a page stands in results of the search."""
    boost = SEARCH_BOOST.get(page.file.src_uri.partition("/")[0], 1)
    page.meta.setdefault("search", {"boost": boost})
    return markdown


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each notebook, its pictures, and the page that lists them."""
    from mkdocs.structure.files import File

    made: dict[str, str | bytes] = {"index.md": index_page()}
    for path in sorted(COLAB.glob("*.ipynb")):
        made |= page_of(json.loads(path.read_text(encoding="utf-8")), path.stem)
    for name, content in made.items():
        files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def index_page() -> str:
    """Returns colab/README.md with the links of the site."""
    page = (COLAB / "README.md").read_text(encoding="utf-8")
    for pattern, link in LINKS:
        page = re.sub(pattern, link, page)
    return page


def page_of(notebook: dict[str, Any], name: str) -> dict[str, str | bytes]:
    """Returns the files of a notebook's page by name: Markdown, and PNG pictures."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    install = (COLAB / "install_cell.py").read_text(encoding="utf-8").strip()
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            # A badge is a picture from elsewhere: the site opens without a network.
            parts.append(re.sub(r"\[!\[([^]]*)\]\([^)]*\)\]", r"[\1]", source))
        elif source == install:
            parts.append(f"*The first cell [installs specjax]({REPOSITORY}/install_cell.py).*")
        elif cell["cell_type"] == "code":
            parts.append(fenced(source, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures)}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({picture})")
            elif text := "".join(output.get("text") or data.get("text/plain") or ""):
                parts.append(fenced(text.rstrip(), "text"))
    return {f"{name}.md": "\n\n".join(parts) + "\n", **pictures}


def fenced(text: str, language: str) -> str:
    """Returns a block of code; its fence is longer than any in the text."""
    ticks = max((len(each) for each in re.findall("`{3,}", text)), default=2) + 1
    return f"{'`' * ticks}{language}\n{text}\n{'`' * ticks}"
