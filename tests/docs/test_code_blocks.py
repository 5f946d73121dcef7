"""Every block of code of the README and of the documentation is run, or read as far as can be.

Python blocks of a page run in order in one namespace. "path/to/model" and "path/to/draft" stand
for the folders of the embedded pair, outputs are cut to a few tokens, and the names of
`setting` are there before the first block. Pages beside the quick set run over the first layers
of that pair: steps of all eight take three times as long to compile. Commands go through the
parsers that the command line has; what `specjax generate` prints in the README and in the first
guide comes of running it. A block that cannot run here says why: <!-- not run: reason -->.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib

import pytest
from asked_for import quick
from demo_layers import save_first_layers
from pages import COMMANDS, PAGES, ROOT, Block, blocks_of, name_of

import specjax
from specjax import demo
from specjax.cli import main as command_line
from specjax.models import loading

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LANGUAGES = {"python", "sh", "json", "toml", "text", "indented"}
SHELL = {"sh", "indented"}
PLACEHOLDERS = {"path/to/model": demo.TARGET_FOLDER, "path/to/draft": demo.DRAFT_FOLDER}
FEW_TOKENS = 8
# Their commands are run, not only parsed.
RUN_PAGES = ("README.md", "docs/guides/first-text.md")
# Programs that a reader has from elsewhere; their arguments are theirs.
OTHER_PROGRAMS = {"git", "cd", "pytest", "pre-commit", "mkdocs", "export", ".ci/run"}
# Reasons for not running a block: what it needs and a test must not.
NEEDS = (
    "needs a TPU",
    "needs a model with a chat template",
    "needs a GPU",
    "needs the network",
    "needs the file of prompts",
    "needs the tunix extra",
    "needs the weights of a head",
    "needs the weights of a PARD model",
    "takes minutes",
)

TEXTS = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
BLOCKS = {name: blocks_of(text) for name, text in TEXTS.items()}
PYTHON = {
    name: found
    for name, blocks in BLOCKS.items()
    if (found := [block for block in blocks if block.language == "python"])
}
# Pages whose blocks run in the quick set; others compile steps of their own.
QUICK = {"README.md", "docs/guides/adding-a-kernel.md", "docs/tunix.md"}
SLOW = {"docs/guides/first-text.md"}  # which calls what README.md calls
COMMAND_LINES = [
    (name, block, command)
    for name, blocks in BLOCKS.items()
    for block in blocks
    if block.language in SHELL
    for command in (block.text.replace("\\\n", " ").split("\n"))
    if block.language == "sh" or command.startswith(COMMANDS)
]


def placed(text: str) -> str:
    """Returns a text with the embedded pair for placeholders, few tokens, and short loops."""
    for placeholder, folder in PLACEHOLDERS.items():
        text = text.replace(placeholder, str(folder))
    text = re.sub(r"\b(max_tokens=|--max-tokens )\d+", rf"\g<1>{FEW_TOKENS}", text)
    text = re.sub(r"\bin range\(\d{2,}\)", "in range(2)", text)
    return re.sub(r"\b(max_rows=)\d+", r"\g<1>4", text)


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory):
    """Returns a folder like that of the embedded weights, of the first layers of both models."""
    return save_first_layers(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def pair(request, monkeypatch):
    """Has the embedded pair and the placeholders be their first layers, but for the quick set."""
    if request.node.callspec.params["name"] not in QUICK:
        weights = request.getfixturevalue("first_layers")
        monkeypatch.setattr(loading, "_DEMO_WEIGHTS", weights)
        monkeypatch.setitem(PLACEHOLDERS, "path/to/model", weights / "target")
        monkeypatch.setitem(PLACEHOLDERS, "path/to/draft", weights / "draft")


def setting():
    """Returns names that pages use without saying where they come from."""
    target = specjax.load_model("demo")
    draft = specjax.load_drafter("demo", target)
    return {
        "specjax": specjax,
        "target": target,
        "model": target,
        "drafter": draft,
        "draft": draft,
        "prompt": "def main():",
        "prompts": ["def main():", "import os"],
    }


@pytest.mark.parametrize(
    "name",
    quick(PYTHON, *QUICK, slow=SLOW),
)
def test_python_blocks_run(name, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = setting()
    for block in PYTHON[name]:
        # Lines of errors are those of the page.
        source = "\n" * (block.line - 1) + placed(block.text)
        code = compile(source, name, "exec")
        if block.not_run is None:
            exec(code, namespace)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_say_what_they_are(name):
    for block in BLOCKS[name]:
        at = f"{name}:{block.line}"
        assert block.language in LANGUAGES, at
        if block.language == "json":
            json.loads(block.text)
        if block.not_run is not None:
            assert block.not_run.startswith(NEEDS), at


@pytest.mark.parametrize(
    "name, block, command", COMMAND_LINES, ids=[f"{n}:{b.line}" for n, b, _ in COMMAND_LINES]
)
def test_commands_are_understood(name, block, command):
    for words in commands_in(command):
        check(words)


def commands_in(line: str) -> list[list[str]]:
    """Returns the commands of a line, word by word, without comments and pipes' other ends."""
    words = shlex.split(placed(line), comments=True)
    commands: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|", ";"):
            commands.append([])
        else:
            commands[-1].append(word)
    found = []
    for command in commands:
        while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):  # environment variables
            command.pop(0)
        if ">" in command:
            command = command[: command.index(">")]
        if command:
            found.append(command)
    return found


def check(words: list[str]) -> None:
    """Raises where a command names what is not there."""
    program, *arguments = words
    if program == "specjax":
        parse(arguments)
    elif program in ("pip", "python") and "pip" in words[:3]:
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            if "jax[" not in " ".join(arguments):
                assert set(extra.split(",")) <= set(EXTRAS), words
    elif program == "python":
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None, words
        else:
            assert (ROOT / arguments[0]).exists(), words
    else:
        assert program in OTHER_PROGRAMS, words


def parse(arguments: list[str]) -> None:
    """Reads the arguments of `specjax`; exits where they are wrong."""
    if arguments not in (["--version"], ["--help"]):
        assert "run" in command_line.build_parser().parse_args(arguments), arguments


@pytest.mark.full
@pytest.mark.parametrize("name", RUN_PAGES)
def test_generation_commands_run(name, capsys):
    ran = 0
    for page, block, line in COMMAND_LINES:
        if page != name or block.not_run is not None:
            continue
        for program, *arguments in commands_in(line):
            if (program, *arguments[:1]) == ("specjax", "generate"):
                if "--max-tokens" not in arguments:
                    arguments += ["--max-tokens", str(FEW_TOKENS)]
                assert command_line.main(arguments) == 0, line
                ran += 1
    assert ran
    assert capsys.readouterr().out.strip()


NUMBER = re.compile(r"\d[\d,.]*")


@pytest.mark.slow  # the gate has plans of compiled steps without the page
def test_a_plan_prints_what_its_guide_shows(capsys):
    name = "docs/guides/memory.md"
    command = next(line for page, _, line in COMMAND_LINES if page == name)
    ((_, *arguments),) = commands_in(command)
    assert command_line.main(arguments) == 0
    printed = {NUMBER.sub("#", line): line for line in capsys.readouterr().out.splitlines()}
    shown = next(block for block in BLOCKS[name] if block.language == "text").text.splitlines()
    numbers = lambda line: [float(each.replace(",", "")) for each in NUMBER.findall(line)]
    for line in shown:
        same = printed[NUMBER.sub("#", line)]
        # Bytes of steps differ between versions of XLA.
        assert numbers(same) == pytest.approx(numbers(line), rel=0.01), same


def test_a_block_is_found_with_its_reason_and_line():
    text = "a\n\n<!-- not run: needs a TPU -->\n```python\nx\n```\n"
    text += "\n    specjax plan\n\n- b\n\n    c\n"
    assert blocks_of(text) == [
        Block("python", "x", 5, "needs a TPU"),
        Block("indented", "specjax plan", 8, None),
    ]


def test_commands_that_are_not_there_are_noticed():
    for line in ('pip install ".[nothing]"', "python -m specjax.nothing", "nothing x"):
        with pytest.raises((AssertionError, ModuleNotFoundError)):
            check(commands_in(line)[0])
    with pytest.raises(SystemExit):
        check(commands_in("specjax generate --nothing")[0])
