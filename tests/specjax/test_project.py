"""What the repository promises about itself."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest

import specjax
import specjax.configs.presets
from specjax.configs.models import PUBLISHED, SHAPES, known_shape
from specjax.models.abstract import abstract_weights
from specjax.models.hf_config import parse_config
from specjax.models.unparsing import llama_skeleton

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Numbers in all weights, where a tied head counts once. Published as they stand: of Qwen2.5 7B and
# 32B, Mistral Nemo and Small and Granite 3.3 8B, as the Hub says for their safetensors files. Of
# others the model cards round them.
NUM_PARAMETERS = {
    "bench_60m": 57_942_528,
    "bench_60m_draft": 17_958_144,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
}


def get_config(package, name):
    return importlib.import_module(f"{package.__name__}.{name}").get_config()


def names_in(package):
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def test_one_version():
    assert PROJECT["project"]["version"] == specjax.__version__


def test_the_changelog_can_be_released():
    """One heading per version, the topmost that of this one: a date makes it what is checked."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## .*$", text, re.MULTILINE)
    versions = [re.match(r"## \[(.+?)\] - (.+)$", heading).groups() for heading in headings]
    assert versions[0][0] == specjax.__version__
    assert len({version for version, _ in versions}) == len(versions)
    for version, date in versions:
        is_out = date != "not yet released"
        leads_to = f"releases/tag/v{version}" if is_out else "commits/main"
        assert f"\n[{version}]: https://github.com/specjax/specjax/{leads_to}\n" in text
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (checked,) = re.findall(r'grep -Eq "(.+)" CHANGELOG.md', workflow)
    dated = headings[0].replace("not yet released", "2026-01-02")
    assert re.search(checked.replace("$version", re.escape(specjax.__version__)), dated)


def num_parameters(config):
    """Counts by shapes of few layers: all layers are alike."""
    sizes = []
    for few in (1, 2):
        shapes = abstract_weights(config.first_layers(few), "float32")
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    return sizes[0] + (config.num_layers - 1) * (sizes[1] - sizes[0])


def test_model_shapes_have_the_size_they_say():
    assert {name: num_parameters(config) for name, config in SHAPES.items()} == NUM_PARAMETERS


def test_names_of_published_models_are_those_of_their_shapes():
    shapes = {
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
        "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
        "Qwen/Qwen3-8B": "qwen3-8b",
        "Qwen/Qwen3-8B-Base": "qwen3-8b",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
        "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo",
        "mistralai/Mistral-Small-24B-Base-2501": "mistral-small-24b",
        "ibm-granite/granite-3.3-2b-base": "granite-3.3-2b",
        "llama_3_1_8b": "llama-3.1-8b",
        "bench_60m": "bench_60m",
    }
    assert {name: known_shape(name) for name in shapes} == {
        name: SHAPES[own] for name, own in shapes.items()
    }
    # Others of their names have other shapes, or are somebody else's.
    others = ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B-FP8", "someone/Qwen3-8B", "llama")
    assert not any(map(known_shape, others))
    assert len(PUBLISHED) >= 24


def test_a_shape_is_what_its_config_json_says():
    """As read from the sizes that their files hold."""
    for name in ("qwen2.5-7b", "qwen3-32b", "mistral-nemo", "granite-3.3-8b", "llama-3.1-8b"):
        own = {"model_type": SHAPES[name].family} | llama_skeleton(SHAPES[name])
        assert parse_config(own) == SHAPES[name], name


@pytest.mark.parametrize("name", names_in(specjax.configs.presets))
def test_presets_are_engine_configs(name):
    assert isinstance(get_config(specjax.configs.presets, name), specjax.EngineConfig)


def test_every_package_is_found():
    """setuptools leaves out a folder of modules that lacks __init__.py."""
    for package in ("specjax", "pallas_kernels", "configs"):
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_import_names_are_two():
    """A user's own `configs` is not shadowed: the folder's modules lie in specjax."""
    setuptools = pytest.importorskip("setuptools")  # Python 3.12 on brings none
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = setuptools.PackageFinder.find(str(ROOT), include=find["include"])
    assert {name.partition(".")[0] for name in found} == {"specjax", "pallas_kernels"}
    folders = {path.parent for path in (ROOT / "configs").rglob("__init__.py")}
    inner = [folder.relative_to(ROOT).as_posix() for folder in folders]
    names = {f"specjax.{name.replace('/', '.')}" for name in inner}
    assert {"specjax.configs", "specjax.configs.presets"} <= names
    assert names == {name for name in found if "specjax.configs" in name}
    assert "specjax.configs" in PROJECT["tool"]["setuptools"]["package-data"]


def test_public_names_are_all_that_is_listed():
    names = dir(specjax)
    for name in ("Completion", "Engine", "LoadedDrafter", "generate"):
        assert name in names
    assert len(names) <= 45
    assert all(hasattr(specjax, name) for name in names)
    home = {getattr(specjax, name) for name in names if name != "__version__"}
    assert not any(inspect.ismodule(value) for value in home)
    assert not {"TYPE_CHECKING", "Any", "annotations", "importlib"} & set(names)


def test_ci_runs_the_commands_of_the_readme():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert 'pip install . && specjax generate "class Logger:" --temperature 0' in readme
    assert 'pip install ".[test]" && pytest' in readme
    assert 'generate "class Logger:"' in ci
    # A wheel of this folder, with the extra of the tests.
    assert 'pip" wheel -q --no-deps' in ci
    assert '"$wheel[test' in ci
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


_FETCHED = re.compile(
    r"""(?:pip3?|uv)\s(?:install|add)\s[^&;|`\n]*?(?<![\w/.+@-])specjax(?![\w/.-]|\[[\w,]+\]\s@)|"""
    r"""(?:uvx|pipx\srun|pipx\sinstall)\sspecjax|(?<![\w.])specjax\[[\w,]+\](?!\s@)"""
)


def fetched_by_name(text):
    """Returns what would fetch specjax from a package index, where nothing bears its name."""
    return [hit[0] for hit in _FETCHED.finditer(text)]


def test_no_hint_fetches_the_name_from_an_index():
    own, wrong = Path(__file__).relative_to(ROOT).as_posix(), {}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        if name == own or not (ROOT / name).is_file():
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if found := fetched_by_name(text):
            wrong[name] = found
    assert not wrong


def test_which_hints_fetch_the_name_from_an_index():
    fetched = ("pip install specjax", 'pip install -U "specjax[tpu]"', "needs specjax[hub]")
    fetched += ("uv add specjax", "uvx specjax", "pip\ninstall specjax", "pipx run specjax plan")
    fetched += ("pip install specjax==0.1.0", "pip install specjax && specjax plan")
    local = ("pip install . && specjax generate", 'pip install ".[tpu]"', 'pip install "jax[tpu]"')
    local += ("pip install git+https://github.com/specjax/specjax", "pip install -e ./specjax")
    local += ('pip install "specjax[plot] @ git+https://github.com/specjax/specjax"',)
    assert [hint for hint in fetched if not fetched_by_name(hint)] == []
    assert [hint for hint in local if fetched_by_name(hint)] == []


def test_types_are_shipped():
    assert (ROOT / "specjax" / "py.typed").exists()
    shipped = PROJECT["tool"]["setuptools"]["package-data"]["specjax"]
    assert {"py.typed", "__init__.pyi"} <= {*shipped}
    assert "demo/weights/**/*" in shipped


def test_license_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
