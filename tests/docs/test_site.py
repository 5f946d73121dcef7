"""What mkdocs.yml and docs/*.py say and draw of the site; mkdocs itself is not needed."""

from __future__ import annotations

import json
import re

import draw_benchmarks
import draw_guides
import drawing
import site_pages
from pages import DOCS, PAGES, ROOT

SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
PNG = b"\x89PNG"


def test_the_search_splits_names_into_their_parts():
    found = re.search(r"separator: '(.+)'$", SETTINGS, re.M)
    assert found is not None
    separator = found[1].replace("''", "'")
    words = {
        "num_speculative_tokens": ["num", "speculative", "tokens"],
        "`SamplingParams.top_p`": ["Sampling", "Params", "top", "p"],
        "--spec-config": ["spec", "config"],
        '{"method": "ngram"}': ["method", "ngram"],
        "max_tokens=64, ...": ["max", "tokens", "64"],
        "specjax.Engine(target)": ["specjax", "Engine", "target"],
    }
    split = {text: list(filter(None, re.split(separator, text))) for text in words}
    assert split == words


def test_every_notebook_is_a_page_with_its_pictures():
    named = re.findall(r"notebooks/(\w+)\.md$", SETTINGS, re.M)
    assert sorted(named) == sorted(["index", *(path.stem for path in NOTEBOOKS)])
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        files = site_pages.page_of(notebook, path.stem)
        page = files.pop(f"{path.stem}.md")
        assert page.count("(" + path.stem + "-") == len(files) > 0
        assert all(content.startswith(PNG) for content in files.values())
        sources = ["".join(cell["source"]) for cell in notebook["cells"]]
        install, *code = (s for s, c in zip(sources, notebook["cells"]) if c["cell_type"] == "code")
        assert install.strip() not in page
        assert all(f"```python\n{source.strip()}\n```" in page for source in code)


def test_a_page_has_what_cells_put_out_and_nothing_from_elsewhere():
    text = {"output_type": "stream", "name": "stdout", "text": ["one\n", "```\n"]}
    result = {"output_type": "execute_result", "data": {"text/plain": ["2"]}}
    cells = [
        {"cell_type": "markdown", "source": ["[![Open](https://a/b.svg)](https://c)\n", "# T"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [text, result]},
    ]
    page = site_pages.page_of({"cells": cells}, "n")["n.md"]
    assert page == (
        "[Open](https://c)\n# T\n\n```python\nprint(1)\n```\n\n"
        "````text\none\n```\n````\n\n```text\n2\n```\n"
    )


def test_links_of_the_list_of_notebooks_lead_to_pages():
    index = site_pages.index_page()
    assert "(quickstart.md)" in index
    assert "(../benchmarks/device-report.md)" in index
    assert "/blob/main/colab/install_cell.py)" in index
    assert ".ipynb" not in index


def test_pictures_are_those_of_today_and_shown_in_light_and_dark():
    """Where they differ: python docs/draw_guides.py && python docs/draw_benchmarks.py."""
    files = drawing.pictures(draw_guides.DRAWN | draw_benchmarks.DRAWN)
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    stale, unseen = [], []
    for path, text in files.items():
        mode = "dark" if path.stem.endswith("-dark") else "light"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(DOCS).as_posix())
        if f"{path.name}#gh-{mode}-mode-only" not in shown:
            unseen.append(path.relative_to(DOCS).as_posix())
    assert (stale, unseen) == ([], [])
    others = {DOCS / f"{name}.svg" for name in ("house", "house-dark", "generation", "favicon")}
    assert set(DOCS.rglob("*.svg")) == {*files, *others}


def test_a_table_of_a_page_is_read_by_its_first_line():
    first, *_ = drawing.table("drafters", "| drafter | times plain")
    assert first[0] == "draft model"
    assert first != drawing.table("drafters", "| drafter | times plain", 1)[0]
