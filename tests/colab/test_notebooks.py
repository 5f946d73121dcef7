"""The notebooks of colab/: what is stored in them, their install cell, and that they run."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLAB = ROOT / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
INSTALL_CELL = (COLAB / "install_cell.py").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXAMPLES = {path.stem for path in (ROOT / "examples").glob("*.py")}
OLD_JAX = "0.10.2"
# What is part of the package, to build it from beside the working tree.
SOURCES = ("specjax", "pallas_kernels", "pyproject.toml", "README.md")
RUN_TIMEOUT_S = 900

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code_cells(path):
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def outputs(path):
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def kinds(path):
    """Returns what each code cell put out: names of streams, and types of data."""
    return [
        [output.get("name") or sorted(output["data"]) for output in cell["outputs"]]
        for cell in code_cells(path)
    ]


def printed(path):
    """Returns the texts that cells put out; pictures are left out."""
    texts = []
    for output in outputs(path):
        texts.append("".join(output.get("text", "")))
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/"):
                texts.append("".join(data))
    return "\n".join(texts)


def install_cell():
    """Returns the names that the install cell defines; specjax is there, so it installs nothing."""
    names = {}
    exec(compile(INSTALL_CELL, "install_cell.py", "exec"), names)
    return names


def test_there_are_five():
    assert NAMES == ["choosing_k", "quickstart", "rl_rollouts", "train_a_drafter", "tree_drafts"]


def test_run_knows_all():
    names = re.search(r"^NAMES = (.+)$", (COLAB / "run.py").read_text(), re.MULTILINE)
    assert sorted(ast.literal_eval(names[1])) == NAMES


@every_notebook
def test_what_it_imports_of_this_repository_is_there(path):
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.Import):
                for name in {alias.name for alias in node.names} & EXAMPLES:
                    importlib.import_module(name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specjax"):
                names = ", ".join(alias.name for alias in node.names)
                exec(f"from {node.module} import {names}", {})


@every_notebook
def test_begins_with_badge_and_install_cell(path):
    first, second = cells(path)[:2]
    here = f"specjax/specjax/blob/main/colab/{path.name}"
    assert first["cell_type"] == "markdown"
    assert source(first).startswith("[![Open In Colab](")
    assert f"https://colab.research.google.com/github/{here}" in source(first)
    assert second["cell_type"] == "code"
    assert source(second).strip() == INSTALL_CELL.strip()


@every_notebook
def test_stored_outputs_are_those_of_one_whole_run(path):
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs(path))
    assert all(output["output_type"] != "error" for output in outputs(path))
    assert all(output.get("name") != "stderr" for output in outputs(path))


@every_notebook
def test_stored_outputs_say_nothing_of_a_machine_and_warn_of_nothing(path):
    text = printed(path)
    assert not re.search(r"warning|traceback", text, re.IGNORECASE)
    assert not re.search(r"/(home|root|tmp|Users|usr|var|opt|work|private)/", text)
    assert not re.search(r"0x[0-9a-f]{6,}", text)


@every_notebook
def test_the_last_cell_shows_a_gain(path):
    """Times plain decoding, of a table of `compare` or of lines that say so."""
    outputs_of_last = code_cells(path)[-1]["outputs"]
    last = "".join("".join(output.get("text", "")) for output in outputs_of_last)
    table = [line.split() for line in last.splitlines()]
    by_table = [
        float(row[2]) for row in table if len(row) > 4 and re.fullmatch(r"\d+\.\d\d", row[2])
    ]
    by_line = [float(found) for found in re.findall(r"(\d+\.\d\d) times plain", last)]
    assert max(by_table + by_line) > 1.1


def test_the_default_policy_is_as_fast_as_each_k_that_is_fixed():
    outputs_of_last = code_cells(COLAB / "choosing_k.ipynb")[-1]["outputs"]
    last = "".join("".join(output["text"]) for output in outputs_of_last)
    times = dict(re.findall(r"^(.+?) +[\d.]+ s, (\d\.\d\d) times plain", last, re.MULTILINE))
    own = float(times.pop("model, goodput"))
    assert len(times) > 5
    assert own >= max(map(float, times.values())) - 0.02  # that of the table, too


@every_notebook
def test_links_lead_to_notebooks(path):
    for cell in cells(path):
        for link in re.findall(r"\]\(([^)]+\.ipynb)\)", source(cell)):
            if not link.startswith("https:"):
                assert (COLAB / link).exists(), link


# The install cell


def test_the_oldest_jax_is_that_of_the_project():
    assert f"jax>={install_cell()['OLDEST_JAX']}" in PROJECT["project"]["dependencies"]


@pytest.mark.parametrize(
    ("installed", "asked"),
    [
        (
            {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.1.0"},
            ["jax==0.10.2", "jaxlib==0.10.2"],
        ),
        (
            {
                "jax": "0.11.0",
                "jaxlib": "0.11.0",
                "jax-cuda12-plugin": "0.11.0",
                "jax-cuda12-pjrt": "0.11.0",
            },
            [
                "jax==0.11.0",
                "jax-cuda12-pjrt==0.11.0",
                "jax-cuda12-plugin==0.11.0",
                "jaxlib==0.11.0",
            ],
        ),
        (
            {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.43"},
            ["jax==0.12.0.1", "jaxlib==0.12.0.1", "libtpu==0.0.43"],
        ),
        (
            {"jax": "0.7.2", "jaxlib": "0.7.2", "jax-cuda12-plugin": "0.7.2"},
            ["jax[cuda12]>=0.10.2"],
        ),
        ({"jax": "0.9.9", "jaxlib": "0.9.9", "libtpu": "0.0.30"}, ["jax[tpu]>=0.10.2"]),
        ({"jax": "0.7.2", "jaxlib": "0.7.2"}, ["jax[]>=0.10.2"]),
        ({"numpy": "2.1.0", "jaxtyping": "0.3"}, ["jax[]>=0.10.2"]),
    ],
    ids=["cpu", "gpu", "tpu", "old gpu", "old tpu", "old cpu", "no jax"],
)
def test_jax_and_its_plugin_stay_or_are_replaced_together(installed, asked):
    names = install_cell()
    assert names["requirements"](installed) == [names["SPECJAX"], *asked]


@pytest.mark.notebook
def test_jax_that_was_there_stays(tmp_path):
    """The cell, run in an environment with the oldest jax: needs an index of packages."""
    (tmp_path / "checkout").mkdir()
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
        options = {} if copy is shutil.copy else {"ignore": ignored}
        copy(ROOT / name, tmp_path / "checkout" / name, **options)
    shutil.copy(ROOT / "LICENSE", tmp_path / "checkout")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*arguments):
        done = subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pins = [f"jax=={OLD_JAX}", f"jaxlib=={OLD_JAX}"]
    run("-m", "pip", "install", "-q", *pins)
    git = "git+https://github.com/specjax/specjax"
    assert git in INSTALL_CELL
    here = INSTALL_CELL.replace(git, (tmp_path / "checkout").as_uri())
    (tmp_path / "cell.py").write_text(here)
    run("cell.py")
    said = run(
        "-c",
        "import jax, jaxlib, matplotlib, specjax; specjax.load_model('demo');"
        "print(jax.__version__, jaxlib.__version__)",
    )
    assert said.split() == [OLD_JAX, OLD_JAX]
    assert run("cell.py") == ""  # and a second time there is nothing to do


# They run


@pytest.mark.notebook
@every_notebook
def test_runs(path, tmp_path, say):
    """In a fresh kernel, without an error, to outputs of the kinds that are stored."""
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # the devices that tests share
    done = subprocess.run(
        [sys.executable, COLAB / "run.py", "--out", tmp_path, path.stem],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert kinds(tmp_path / path.name) == kinds(path)
    say(done.stdout.strip())
