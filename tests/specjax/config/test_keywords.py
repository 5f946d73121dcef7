"""Names of other libraries, and misspelt ones: the error says what to write."""

import inspect

import pytest

import specjax
from specjax.api.requests import one_each
from specjax.config import keywords
from specjax.config.sampling import OF_MODEL
from specjax.models.base import Model
from specjax.rl.beginning import sampling_of
from specjax.testing.tiny_models import tiny_config

NO_MODEL = Model(tiny_config(), {}, name="none", generation_defaults={"temperature": 0.6})

# What is called, with which keywords, and the end of the message.
WRONG = [
    (specjax.SamplingParams, {"max_new_tokens": 64}, "did you mean max_tokens=64?"),
    (specjax.SamplingParams, {"temprature": 0.5}, "did you mean temperature=0.5?"),
    (specjax.SamplingParams, {"do_sample": False}, "do_sample=False is temperature=0 of"),
    (specjax.SamplingParams, {"guided_json": {}}, "text is not held to a grammar here"),
    (specjax.SamplingParams, {"num_beams": 4}, "there is no beam search"),
    (specjax.SamplingParams, {"stop_strings": ["a"]}, "did you mean stop=['a']?"),
    (specjax.SamplingParams, {"max_rows": 4}, "it belongs to engine={'max_rows': 4}"),
    (specjax.SamplingParams, {"nothing_like_it": 4}, "keyword argument 'nothing_like_it'"),
    (specjax.EngineConfig, {"max_num_seqs": 8}, "did you mean max_rows=8?"),
    (specjax.EngineConfig, {"gpu_memory_utilization": 0.9}, "memory_bytes=... says"),
    (specjax.EngineConfig, {"page_sise": 8}, "did you mean page_size=8?"),
    (specjax.SpeculationConfig, {"num_assistant_tokens": 3}, "did you mean num_speculative_tokens"),
    (specjax.SpeculationConfig, {"methd": "ngram"}, "did you mean method='ngram'?"),
    (specjax.SpeculationConfig, {"assistant_model": "a"}, "did you mean model='a'?"),
    (specjax.generate, {"max_new_tokens": 64}, "write sampling={'max_tokens': 64}"),
    (specjax.generate, {"temperature": 0}, "write sampling={'temperature': 0}"),
    (specjax.generate, {"max_model_len": 9}, "write engine={'max_context': 9}"),
    (specjax.generate, {"assistant_model": "demo"}, "did you mean drafter='demo'?"),
    (specjax.generate, {"sampling_params": None}, "did you mean sampling=..."),
    (specjax.generate, {"tensor_parallel_size": 2}, "pass a jax mesh"),
    (specjax.stream, {"max_tokns": 2}, "did you mean sampling={'max_tokens': 2}?"),
    (specjax.Engine, {"max_num_seqs": 8}, "write engine={'max_rows': 8}"),
    (specjax.Engine, {"draftr": "demo"}, "did you mean drafter='demo'?"),
    (specjax.build_decoder, {"max_num_seqs": 8}, "write engine={'max_rows': 8}"),
    (specjax.rollout, {"num_generations": 8}, "did you mean num_samples=8?"),
    (specjax.rollout, {"max_tokens": 8}, "write sampling={'max_tokens': 8}"),
    (specjax.rollout_turns, {"temperature": 1}, "write sampling={'temperature': 1}"),
    (specjax.rollout_stream, {"group_size": 4}, "did you mean num_samples=4?"),
    (specjax.load_model, {"torch_dtype": "float32"}, "did you mean dtype='float32'?"),
]


def test_an_unknown_keyword_says_what_to_write():
    failures = []
    for called, given, end in WRONG:
        positional = () if inspect.isclass(called) and called is not specjax.Engine else ("x", "y")
        try:
            called(*positional, **given)
        except TypeError as error:
            said = str(error)
        else:
            said = "no error"
        if end not in said or f"unexpected keyword argument {next(iter(given))!r}" not in said:
            failures.append((called.__name__, given, said))
    assert not failures


def test_a_name_that_means_an_argument_is_not_said_to_belong_elsewhere():
    for called in (specjax.SamplingParams, specjax.EngineConfig, specjax.load_model):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'model'$"):
            called(model=1)


def test_an_engine_says_it_too_before_a_request_is_made():
    engine = object.__new__(specjax.Engine)
    for add in (engine.add, lambda *of, **given: next(engine.stream(*of, **given))):
        with pytest.raises(TypeError, match=r"write sampling=.'max_tokens': 5"):
            add("prompt", max_tokens=5)


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (NO_MODEL, "generate", r"^a Model has no attribute 'generate'; write specjax.generate\("),
        (object.__new__(specjax.Engine), "generate", "^an Engine has .* Engine.add takes a prompt"),
        (object.__new__(specjax.Engine), "run", "`while engine.has_work: engine.step"),
        (NO_MODEL, "parms", "^'Model' object has no attribute 'parms'$"),
    ],
)
def test_attributes_of_other_libraries_say_what_to_write(owner, name, said):
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=said):
        getattr(owner, name)


def test_what_a_property_lacks_is_said_as_without_hints():
    @keywords.hints_at({"run": "write walk"})
    class Owner:
        @property
        def walk(self):
            return self.legs

    with pytest.raises(AttributeError, match=r"^'Owner' object has no attribute 'legs'$"):
        _ = Owner().walk


def test_names_that_are_here_are_not_explained_away():
    """Neither table has a name that a config takes, but for fields of the same name elsewhere."""
    fields = {name for names in keywords._fields_of.values() for name in names}
    arguments = set(inspect.signature(specjax.generate).parameters)
    arguments |= set(inspect.signature(specjax.rollout).parameters)
    arguments |= set(inspect.signature(specjax.load_model).parameters)
    assert not fields & keywords.INSTEAD.keys()
    assert set(" ".join(keywords.RENAMED.values()).split()) <= fields | arguments
    assert not keywords.RENAMED.keys() & keywords.INSTEAD.keys()


def test_signatures_stay_as_they_are_written():
    for called in (specjax.SamplingParams, specjax.EngineConfig, specjax.generate, specjax.Engine):
        names = list(inspect.signature(called).parameters)
        assert {"arguments", "keywords"}.isdisjoint(names), called
        assert len(names) > 8, called
    assert specjax.generate.__doc__.startswith("Generates text")


def test_a_mapping_is_taken_for_sampling_parameters_and_checked_alike():
    given = {"max_tokens": 7, "temperature": 0.5}
    for sampling in (given, [given, given], specjax.SamplingParams(**given)):
        one, other = one_each(sampling, NO_MODEL, 2)
        assert one == other == specjax.SamplingParams(**given).filled({})
    wrong = {
        "max_new_tokens": "which is no field of SamplingParams; did you mean max_tokens=7?",
        "nothing_like_it": "which is no field of SamplingParams; expected any of temperature, ",
        "max_rows": "it belongs to engine=",
    }
    for name, said in wrong.items():
        with pytest.raises(ValueError, match="sampling has the key") as raised:
            one_each({name: 7}, NO_MODEL, 2)
        assert said in str(raised.value)
        fine, error = one_each([given, {name: 7}], NO_MODEL, 2)  # its own prompt fails alone
        assert fine.max_tokens == 7
        assert said in str(error)
    for given in (5, "greedy", [{}, 5]):
        found = None
        try:
            found = one_each(given, NO_MODEL, 2)[1]
        except ValueError as error:
            found = error
        assert "must be a SamplingParams or a mapping of its fields" in str(found), given
    with pytest.raises(ValueError, match=r"engine has the key 'max_num_seqs'.*max_rows=3"):
        keywords.made(specjax.EngineConfig, {"max_num_seqs": 3}, "engine")


def test_what_is_left_open_is_the_models_else_the_librarys():
    whole = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    params = specjax.SamplingParams(max_tokens=64, top_p=0.5)
    filled = params.filled(whole)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.6, 0.5, 20)
    assert (filled.repetition_penalty, filled.min_p, filled.max_tokens) == (1.2, 0.0, 64)
    assert filled.filled({"temperature": 0.1}) == filled
    given = specjax.SamplingParams(temperature=1.0, top_k=0, repetition_penalty=1.0)
    assert given.filled(whole).temperature == 1.0  # the library's own value, if it is given
    assert given.filled(whole).top_k == 0
    assert given.filled(whole).repetition_penalty == 1.0
    library = params.filled({})
    assert {name: getattr(library, name) for name in OF_MODEL} == {**OF_MODEL, "top_p": 0.5}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    greedy = specjax.SamplingParams().filled({"do_sample": False, "temperature": 0.7, **penalties})
    assert greedy == specjax.SamplingParams(temperature=0, **penalties).filled({})
    drawn = specjax.SamplingParams().filled({"do_sample": True, "top_k": 20})
    assert (drawn.temperature, drawn.top_k) == (1.0, 20)


def test_a_rollout_takes_nothing_from_the_models_file():
    for given in (None, {"max_tokens": 3}, specjax.SamplingParams(max_tokens=3)):
        sampling = sampling_of(None, given)
        assert {name: getattr(sampling, name) for name in OF_MODEL} == OF_MODEL
        assert one_each(sampling, NO_MODEL, 1) == [sampling]  # nothing is left for the model's
    with pytest.raises(ValueError, match="did you mean max_tokens=3"):
        sampling_of(None, {"max_new_tokens": 3})


def test_parameters_are_shown_as_they_are_written():
    shown = {
        "SamplingParams()": specjax.SamplingParams(),
        "SamplingParams(temperature=0, stop='a')": specjax.SamplingParams(temperature=0, stop="a"),
        "SamplingParams(logit_bias={3: 1.0}, seed=2)": specjax.SamplingParams(
            logit_bias={3: 1.0}, seed=2
        ),
    }
    for text, params in shown.items():
        assert repr(params) == text
        assert eval(text, {"SamplingParams": specjax.SamplingParams}) == params
    assert "temperature=0.6, top_k=0, top_p=1.0" in repr(one_each(None, NO_MODEL, 1)[0])
