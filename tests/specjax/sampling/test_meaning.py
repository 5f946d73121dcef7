"""docs/sampling-meaning.md says what vLLM, transformers and specjax do."""

import importlib
import pathlib

import meanings
import pytest

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "sampling-meaning.md"


def differing(library):
    """Returns the rows whose answer is another one, with both."""
    place = meanings.LIBRARIES.index(library)
    asked = {name: getattr(row, library) for name, row in meanings.ROWS.items()}
    found = {name: meanings.answer_of(ask) for name, ask in asked.items() if ask}
    wanted = {name: meanings.ROWS[name].answers[place] for name in found}
    return {name: (found[name], wanted[name]) for name in found if found[name] != wanted[name]}


def test_specjax_does_what_the_table_says():
    assert differing("specjax") == {}


@pytest.mark.reference
@pytest.mark.parametrize("library", ["transformers", "vllm"])
@pytest.mark.filterwarnings("default")  # theirs
def test_others_do_what_the_table_says(library):
    pytest.importorskip(library)
    importlib.import_module(library)
    assert differing(library) == {}


def test_the_table_has_a_row_for_each():
    cells = [line.split(" | ")[0].strip("| ") for line in PAGE.read_text("utf-8").splitlines()]
    assert [cell for cell in cells if cell in meanings.ROWS] == list(meanings.ROWS)
