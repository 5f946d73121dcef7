"""From what a user names to a drafter, and what is refused before any compile."""

import dataclasses
from pathlib import Path

import pytest

from specjax.drafters.loading import LoadedDrafter, load_drafter
from specjax.drafters.spec import ModelDrafter, NgramDrafter, NoDrafter
from specjax.models.loading import load_model

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"


@pytest.fixture(scope="module")
def target():
    return load_model(GOLDENS / "llama")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_as_text_or_path(target, kind):
    drafter = load_drafter(kind(GOLDENS / "llama"), target)
    assert drafter.is_model
    assert drafter.name == "llama"
    assert drafter.spec == ModelDrafter(target.config)


def test_names_that_are_no_model(target):
    assert load_drafter(None, target).spec == NoDrafter()
    assert load_drafter("ngram", target).spec == NgramDrafter()
    assert not load_drafter(None, target).can_draft


def test_a_loaded_drafter_is_returned_as_it_is(target):
    for source in (target, "ngram", None):
        drafter = load_drafter(source, target)
        assert load_drafter(drafter, target) is drafter


def test_a_loaded_drafter_of_another_vocabulary_is_refused(target):
    size = target.config.vocab_size
    config = dataclasses.replace(target.config, vocab_size=size + 1)
    drafter = LoadedDrafter("other", ModelDrafter(config), target.params)
    message = f"draft 'other' have vocabularies of {size} and {size + 1} tokens"
    with pytest.raises(ValueError, match=message):
        load_drafter(drafter, target)


@pytest.mark.parametrize("source", [3, b"ngram", ["ngram"], {}])
def test_other_types_are_refused(target, source):
    with pytest.raises(TypeError, match="expected None, 'ngram', 'demo', a folder"):
        load_drafter(source, target)
