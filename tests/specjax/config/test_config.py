"""What a user may ask for, and how a wrong request is refused."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest

from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig


def test_defaults_and_extremes_are_valid():
    SamplingParams().validate()
    SamplingParams(
        temperature=0,
        top_k=-1,
        top_p=1e-6,
        min_p=1.0,
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        frequency_penalty=2,
        logit_bias={0: -math.inf, 9: 5.0},
        bad_token_ids=[1],
        allowed_token_ids=[1, 2],
        min_tokens=3,
        max_tokens=3,
        stop_token_ids=(9,),
        stop=["a", "b"],
        seed=2**64 - 1,
        n=3,
        logprobs=0,
        num_speculative_tokens=0,
    ).validate(vocab_size=10)


def test_numpy_whole_numbers_are_whole_numbers():
    ids = np.array([1, 2])
    SamplingParams(stop_token_ids=ids, bad_token_ids=ids).validate(vocab_size=3)
    SamplingParams(allowed_token_ids=ids, seed=np.int64(3)).validate()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 0.5),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("n", 0),
        ("n", 1.5),
        ("seed", -2),
        ("seed", 1.5),
        ("seed", True),
        ("logprobs", -2),
        ("logprobs", 2.0),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 1.5),
        ("logit_bias", None),
        ("logit_bias", [(1, 1.0)]),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("bad_token_ids", [-1]),
        ("bad_token_ids", [1.5]),
        ("bad_token_ids", [True]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("stop_token_ids", [-1]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", iter("ab")),
        ("temperature", 10**400),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {1: -1e39}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: "2"}),
        ("bad_token_ids", None),
        ("bad_token_ids", 5),
        ("bad_token_ids", [[1]]),
        ("bad_token_ids", np.ones((1, 1), int)),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [[1]]),
        ("stop_token_ids", None),
        ("stop_token_ids", iter([1])),
        ("ignore_eos", "yes"),
        ("speculate", None),
        ("speculate", 2),
    ],
)
def test_sampling_params_refuse_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value}).validate()


def test_sampling_params_refuse_contradictions():
    with pytest.raises(ValueError, match=r"min_tokens=5 exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4).validate()
    with pytest.raises(ValueError, match="forbids every one"):
        SamplingParams(allowed_token_ids=[3], bad_token_ids=[3, 4]).validate()


def test_logit_bias_reaches_the_ends_of_float32():
    most = float(np.finfo(np.float32).max)
    SamplingParams(logit_bias={1: most, 2: -most, 3: np.float32(most)}).validate()


def test_allowed_tokens_must_leave_one_before_min_tokens():
    allowed = SamplingParams(
        allowed_token_ids=[3, 4, 5],
        bad_token_ids=[3],
        logit_bias={4: -math.inf},
        stop_token_ids=np.array([5]),
    )
    allowed.validate()
    with pytest.raises(ValueError, match=r"min_tokens=1 .*allowed_token_ids"):
        dataclasses.replace(allowed, min_tokens=1).validate()
    only_eos = SamplingParams(allowed_token_ids=[9], min_tokens=1)
    only_eos.validate()
    with pytest.raises(ValueError, match="min_tokens=1"):
        only_eos.validate(eos_token_ids=[9])
    dataclasses.replace(only_eos, ignore_eos=True).validate(eos_token_ids=[9])
    with pytest.raises(ValueError, match="forbids every one"):
        SamplingParams(allowed_token_ids=[3], logit_bias={3: -math.inf}).validate()


@pytest.mark.parametrize(
    "name", ["logit_bias", "bad_token_ids", "allowed_token_ids", "stop_token_ids"]
)
def test_token_ids_are_held_against_the_vocabulary(name):
    value = {10: 1.0} if name == "logit_bias" else [10]
    params = SamplingParams(**{name: value})
    params.validate()
    params.validate(vocab_size=11)
    with pytest.raises(ValueError, match=f"{name} holds 10.*from 0 to 9"):
        params.validate(vocab_size=10)


def test_stop_strings_are_a_tuple():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens=64"),
        ({"num_speculative_tokens": 1.5}, "num_speculative_tokens=1.5"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"verification": "hopeful"}, "'hopeful' is unknown.*greedy, seeded, delta"),
        ({"verification": None}, "None is unknown"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_max=4"),
        ({"prompt_lookup_max": 17}, "prompt_lookup_max=17"),
        ({"prompt_lookup_max": 2.5}, "prompt_lookup_max=2.5"),
        ({"prompt_lookup_max": "3"}, "prompt_lookup_max='3'"),
        ({"method": "deepseek_mtp"}, "'deepseek_mtp' is not available.*'ngram'.*'draft_model'"),
        ({"method": "draft_model"}, "without a 'model': name a folder"),
        ({"method": "eagle3"}, "without a 'model': name a folder"),
        ({"model": 3}, "model=3"),
    ],
)
def test_speculation_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**fields)


def test_speculation_config_at_its_edges():
    assert SpeculationConfig(num_speculative_tokens=0).num_speculative_tokens == 0
    SpeculationConfig(num_speculative_tokens=63, prompt_lookup_max=16)
    SpeculationConfig(prompt_lookup_min=1, prompt_lookup_max=1)
    assert hash(SpeculationConfig()) == hash(SpeculationConfig())


@pytest.mark.parametrize(
    ("fields", "depth"),
    [
        ({}, 7),
        ({"policy": "fixed"}, 4),
        ({"verification": "rejection"}, 4),
        ({"prompt_lookup_matches": 2}, 4),
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 7}, 7),
        ({"speculative_token_tree": (2, 1)}, 2),
        ({"speculative_token_tree": (2, 1), "num_speculative_tokens": 1}, 1),
        ({"tree_top_k": 2}, 4),
    ],
)
def test_the_depth_follows_from_what_was_written(fields, depth):
    for config in (SpeculationConfig(**fields), SpeculationConfig.from_json(fields)):
        assert config.depth == depth
        written = fields.get("num_speculative_tokens")
        assert config.num_speculative_tokens == written
        again = dataclasses.replace(config, speculation_max_rows=3)
        assert (again.depth, again.num_speculative_tokens) == (depth, written)


@pytest.mark.parametrize("tree", [(256,), (257,), (10**9,), (2, 10**9), [(i,) for i in range(256)]])
def test_a_tree_of_too_many_nodes_is_refused_for_its_size(tree):
    with pytest.raises(ValueError, match="has more than 255 nodes"):
        SpeculationConfig(speculative_token_tree=tree)


@pytest.mark.parametrize("as_text", [True, False])
def test_from_json_reads_the_keys_of_vllm(as_text):
    given = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    config = SpeculationConfig.from_json(json.dumps(given) if as_text else given)
    assert {name: getattr(config, name) for name in given} == given
    assert config.verification == "seeded"


def test_from_json_infers_the_method_from_the_model():
    read = SpeculationConfig.from_json
    assert read({"model": "some/folder"}).method == "draft_model"
    assert read({"model": "[ngram]"}).method == "ngram"
    assert read({"model": "ngram", "method": None}).method == "ngram"
    assert read({}) == read("{}") == SpeculationConfig()


def test_from_json_takes_null_as_not_given():
    given = {field.name: None for field in dataclasses.fields(SpeculationConfig)}
    assert SpeculationConfig.from_json(given) == SpeculationConfig()
    config = SpeculationConfig.from_json({"prompt_lookup_max": 1, "prompt_lookup_min": None})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (1, 1)


def test_from_json_lets_one_lookup_bound_move_the_other():
    read = SpeculationConfig.from_json
    assert read({"prompt_lookup_max": 1}).prompt_lookup_min == 1
    assert read({"prompt_lookup_max": 8}).prompt_lookup_min == 2
    assert read({"prompt_lookup_min": 6}).prompt_lookup_max == 6
    assert read({"prompt_lookup_min": 3}).prompt_lookup_max == 4


def test_from_json_names_the_keys_it_ignores():
    given = {"method": "ngram", "surprise": 2, "acceptance": 1}
    message = "ignored unknown keys acceptance, surprise"
    with pytest.warns(UserWarning, match=message) as caught:
        config = SpeculationConfig.from_json(given)
    assert config == SpeculationConfig(method="ngram")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculationConfig.from_json({"method": "ngram"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[1]", "must be a JSON object, got list"),
        ("3", "must be a JSON object, got int"),
        (None, "must be a JSON object, got NoneType"),
        ({"method": "deepseek_mtp"}, "'deepseek_mtp' is not available.*ngram.*draft_model"),
        ({"method": 3}, "3 is not available"),
        ({"method": ["ngram"]}, "'ngram'.* is not available"),
        ({"method": "draft_model"}, "without a 'model': name a folder"),
        ({"method": "eagle3"}, "without a 'model': name a folder"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens='4'"),
        ({"prompt_lookup_max": "3"}, "prompt_lookup_max='3'"),
        ({"prompt_lookup_min": "3"}, "prompt_lookup_min='3'"),
    ],
)
def test_from_json_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig.from_json(given)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineConfig)])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_engine_config_refuses(name, value):
    if value is True and name in ("prefix_caching", "mixed_prefill"):
        value = None  # neither yes nor no
    if name == "batch_safety_margin" and value in (0, 1.5):
        value = 100  # a percentage, 0 included
    with pytest.raises(ValueError, match=f"EngineConfig.{name}={value!r}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("buckets", [(0,), (33,), (1.0,), "12"])
def test_engine_config_refuses_row_buckets(buckets):
    with pytest.raises(ValueError, match="from 1 to max_rows=32"):
        EngineConfig(row_buckets=buckets)


def test_engine_config_sorts_row_buckets():
    config = EngineConfig(row_buckets=[8, 2, 8])
    assert config.row_buckets == (2, 8)
    assert hash(config) != hash(EngineConfig())


def test_engine_config_leaves_to_the_requests_what_is_none():
    EngineConfig(num_pages=None, max_context=None)
    assert EngineConfig(page_size=1, num_pages=1, max_rows=1).page_size == 1
    assert hash(EngineConfig()) == hash(EngineConfig())


@pytest.mark.parametrize("name", ["max_rows", "burst_steps"])
def test_engine_config_refuses_none_where_a_size_must_be(name):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: None})


SIZES = (
    "page_size",
    "num_pages",
    "max_rows",
    "burst_steps",
    "max_context",
    "kv_cache_bytes",
    "memory_bytes",
    "max_bias_entries",
    "max_allowed_tokens",
    "max_stop_tokens",
    "max_logprobs",
    "logit_bytes",
    "token_bucket",
    "max_prefill_tokens",
)
NO_SIZES = (10**30, -1, 0, math.nan, math.inf, True, "5", 2.5, 1e9, [1], (1,), {})


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_nothing_could_hold_are_refused_by_name(name):
    for value in NO_SIZES:
        with pytest.raises(ValueError, match=f"EngineConfig.{name}="):
            EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("page_size", 10**6), ("num_pages", 10**12), ("max_rows", 10**6)],
)
def test_sizes_beyond_any_device(name, value):
    with pytest.raises(ValueError, match=f"EngineConfig.{name}={value} must be"):
        EngineConfig(**{name: value})


def test_pages_whose_tokens_no_int32_numbers():
    EngineConfig(num_pages=2**27 - 1, page_size=16)
    with pytest.raises(ValueError, match="num_pages=134217728 pages of 16 tokens"):
        EngineConfig(num_pages=2**27, page_size=16)


def test_every_size_has_a_most():
    sized = {
        field.name
        for field in dataclasses.fields(EngineConfig)
        if field.type in ("int", "int | None")
    }
    assert sized == set(SIZES)


def test_sizes_of_numpy_become_whole_numbers():
    engine = EngineConfig(page_size=np.int8(64), row_buckets=[np.int64(4)])
    assert type(engine.page_size) is int
    assert [type(bucket) for bucket in engine.row_buckets or ()] == [int]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 100, "5", True, None])
def test_margins_that_are_no_percentage(value):
    with pytest.raises(ValueError, match="batch_safety_margin"):
        EngineConfig(batch_safety_margin=value)


@pytest.mark.parametrize("seed", [2**64, 10**30, -2])
def test_seeds_that_are_no_64_bits_are_refused_when_made(seed):
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*64 - 1"):
        SamplingParams(seed=seed)


@pytest.mark.parametrize("fields", [{"n": 0}, {"temperature": -1}, {"stop": [""]}])
def test_parameters_that_mean_nothing_cannot_be_made(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)
