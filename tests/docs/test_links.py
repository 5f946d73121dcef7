"""Links of the README and of the documentation lead somewhere; no network is asked."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, PAGES, ROOT, blocks_of, found_under, name_of

import specjax
import specjax.models
import specjax.testing
from specjax.config import names

PAGES = [*PAGES, ROOT / "pallas_kernels" / "README.md", ROOT / "specjax" / "demo" / "README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.+?) *$", flags=re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^::: ([\w.]+)", flags=re.MULTILINE)


def without_code(text: str) -> str:
    """Returns a page without its blocks of code, in which links are none."""
    return _FENCE.sub("", text)


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that a page has on the site and on GitHub alike."""
    text = without_code(page.read_text(encoding="utf-8"))
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in _HEADING.findall(text)]
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s]+", "-", each) for each in plain} | set(_DIRECTIVE.findall(text))


def problem_with(target: str, page: Path) -> str | None:
    """Returns what is wrong with a link of a page; None where nothing is."""
    if target.startswith(REPOSITORY):
        inside = re.match(r"/(?:blob|tree)/main/([^#]+)", target.removeprefix(REPOSITORY))
        if inside is not None and (ROOT / inside[1]).exists():
            return None
        return "is not in the repository"
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    if not there.exists():
        return "is not there"
    if DOCS in page.parents and there != DOCS and DOCS not in there.parents:
        return "leaves the site; link to the repository instead"
    if anchor and there.suffix == ".md" and anchor not in anchors_of(there):
        return f"has no heading #{anchor}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    text = without_code(page.read_text(encoding="utf-8"))
    targets = ["".join(found) for found in _LINK.findall(text)]
    wrong = {target: problem for target in targets if (problem := problem_with(target, page))}
    assert not wrong


def test_links_to_nowhere_are_noticed():
    page = DOCS / "index.md"
    assert problem_with("nothing.md", page) == "is not there"
    assert problem_with("terms.md#nothing", page) == "has no heading #nothing"
    assert problem_with("../README.md", page) is not None
    assert problem_with(f"{REPOSITORY}/blob/main/nothing.md", page) == "is not in the repository"
    assert problem_with("terms.md", page) is None


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in DOCS.rglob("*.md"):
        assert re.search(
            rf"[ ]{re.escape(page.relative_to(DOCS).as_posix())}$", navigation, re.M
        ), page


# What docs/your-own-drafter.md, "What stays", adds to the names of `specjax` and `specjax.testing`.
FOR_DRAFTERS = {
    "specjax.drafters.base.ModelWork",
    "specjax.drafters.base.by_page",
    "specjax.drafters.base.by_row",
    "specjax.models.dense.sequence_logits",
    "specjax.paged.kv_cache.slots",
    "specjax.sampling.choose_tokens",
    "specjax.drafters.draws.draw_siblings",
    "specjax.drafters.draws.noise_keys",
}


FOR_FAMILIES = {
    "specjax.models.base.RopeConfig",
    "specjax.models.base.look_up",
    "specjax.models.layers.rms_norm",
}
FOR_LAYOUTS = {
    "specjax.models.layouts.Layout",
    "specjax.models.layouts.Place",
    "specjax.models.layouts.linen",
    "specjax.models.layouts.maxtext",
    "specjax.models.layouts.nnx",
    "specjax.models.layouts.operations",
    "specjax.models.layouts.tunix",
}
RESULTS = {f"{home}.{name}" for name, home in names.RETURNED.items()}
FOR_POLICIES = {
    "specjax.decode.bucket.Bucket",
    "specjax.policy.interface.Decision",
    "specjax.policy.interface.Load",
    "specjax.policy.interface.Outcome",
    "specjax.policy.interface.SpeculationPolicy",
}


def reference() -> list[str]:
    """Returns every name that the API reference describes."""
    return [
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))
    ]


def imports_of(page: Path) -> set[str]:
    """Returns the dotted names that a page's Python takes from the insides of specjax."""
    names = set()
    for block in blocks_of(page.read_text(encoding="utf-8")):
        tree = ast.parse(block.text) if block.language == "python" else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specjax."):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("page", ["adding-a-model.md", "weights-layout.md", "your-own-drafter.md"])
def test_what_a_guide_imports_is_in_the_reference(page):
    described = [*map(found_under, reference())]
    modules = {getattr(each, "__module__", None) for each in described}

    def is_described(name: str) -> bool:
        value = found_under(name)
        if any(value is each for each in described):
            return True
        if isinstance(value, ModuleType):  # some of its names are, each by its own
            return value.__name__ in modules
        return any(found_under(name.rpartition(".")[0]) is each for each in described)

    imported = imports_of(DOCS / page)
    assert imported
    assert {name for name in imported if not is_described(name)} == set()


def test_every_public_name_is_in_the_reference():
    named = reference()
    public = {f"specjax.{name}" for name in dir(specjax)} - {"specjax.__version__"}
    public |= {f"specjax.testing.{name}" for name in specjax.testing.__all__}
    of_training = {f"specjax.training.{name}" for name in specjax.training.__all__}
    public |= of_training - {f"specjax.training.{name}" for name in dir(specjax)}
    public |= RESULTS | FOR_DRAFTERS | FOR_FAMILIES | FOR_LAYOUTS | FOR_POLICIES
    family = (*specjax.models._HOME, "blocks", "config_values", "weights")
    public |= {f"specjax.models.{name}" for name in family}
    assert public == {name for name in named if name.startswith("specjax.")}
    ops = {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/api.py")}
    assert {f"pallas_kernels.{op}.{op}" for op in ops} <= set(named)
    assert len(named) == len(set(named))


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
