"""Names that users write: what is misspelt is told apart from what is asked of the Hub."""

import typing

import pytest
from helpers import tiny_llama

import specjax
from specjax.config import engine, names, rules, vllm_json
from specjax.config.names import check_drafter, closest, suggestion
from specjax.models import loading
from specjax.models.layouts import named, tables
from specjax.training import trainer


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(loading, "_fetch", lambda name: pytest.fail("asked the Hub"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ngramm", "ngram"),
        ("n-gram", "ngram"),
        ("histroy", "history"),
        ("dmo", "demo"),
        ("nones", "none"),
        ("distilgpt2", None),
    ],
)
def test_an_unknown_drafter_lists_what_there_is(name, meant):
    known = "'none', 'ngram', 'history', 'self-int8', 'self-int4', 'demo'"
    with pytest.raises(ValueError, match=known) as said:
        specjax.load_drafter(name, tiny_llama(0))
    question = "did you mean" if meant is None else f"did you mean '{meant}'?"
    assert (question in str(said.value)) == (meant is not None)


@pytest.mark.parametrize("name", ["org/draft", "./draft", "none", "history", "self-int4", "demo"])
def test_paths_hub_names_and_known_ones_pass(name):
    check_drafter(name)


def test_a_folder_that_is_there_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    check_drafter("draft")


def test_a_drafter_called_none_is_plain_decoding():
    assert not specjax.load_drafter("none", tiny_llama(0)).can_draft


def test_names_of_other_libraries_say_what_is_here():
    with pytest.raises(ValueError, match=r"'suffix' is unknown \('history' reads on"):
        check_drafter("suffix")
    for name, said in {
        "LLM": "(specjax.generate takes prompts at once, specjax.Engine requests",
        "SpeculativeConfig": "(did you mean 'SpeculationConfig'?)",
        "Nothing": "no attribute 'Nothing'",
    }.items():
        with pytest.raises(AttributeError) as raised:
            getattr(specjax, name)
        assert said in str(raised.value)
    with pytest.raises(TypeError, match=r"target is 'demo'; expected a Model, as specjax.load_mo"):
        specjax.build_decoder("demo")


def test_what_is_like_nothing_is_no_misspelling():
    assert closest("surprise", ["ngram", "history"]) is None
    assert suggestion("surprise", ["ngram", "history"]) == ""


def test_names_in_types_are_those_that_are_taken():
    types = {
        names.DrafterName: names.DRAFTERS,
        names.Method: vllm_json.METHODS,
        rules.VerificationRule: rules.VERIFICATION_RULES,
        names.OptimizerName: trainer.RATES,
        tables.LayoutName: named.NAMES,
        engine.KvCacheDtype: (*engine.KV_CACHE_DTYPES, *engine._SAME_DTYPES),
    }
    for literal, taken in types.items():
        assert set(typing.get_args(literal)) == set(taken)
