"""What a `--speculative-config` written for vLLM means here."""

import json
import re
import warnings
from pathlib import Path

import pytest
from helpers import first_layer, tiny_llama

from specjax.config import vllm_json
from specjax.config.speculation import SpeculationConfig
from specjax.drafters.base import DrafterContext
from specjax.heads.loading import load_drafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MODEL = {"model": "some/folder", "num_speculative_tokens": 4}


def read(given):
    """Returns the config of a JSON that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return SpeculationConfig.from_json(given)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, {"verification": "seeded", "speculation_max_rows": None}),
        ({"rejection_sample_method": "standard"}, {"verification": "rejection"}),
        ({"rejection_sample_method": "probabilistic"}, {"verification": "rejection"}),
        ({"rejection_sample_method": "block"}, {"verification": "block"}),
        ({"rejection_sample_method": "strict"}, {"verification": "seeded"}),
        (
            {"rejection_sample_method": "block", "draft_sample_method": "greedy"},
            {"verification": "delta"},
        ),
        (
            {
                "rejection_sample_method": "standard",
                "draft_sample_method": "probabilistic",
            },
            {"verification": "rejection"},
        ),
        (
            {
                "acceptance_method": "typical_acceptance_sampler",
                "posterior_threshold": 0.2,
                "posterior_alpha": 0.4,
            },
            {"verification": "typical", "typical_epsilon": 0.2, "typical_delta": 0.4},
        ),
        ({"disable_by_batch_size": 30}, {"speculation_max_rows": 30}),
        ({"speculative_disable_by_batch_size": 8}, {"speculation_max_rows": 8}),
        ({"max_model_len": 100}, {"max_model_len": 100}),
        ({"draft_tensor_parallel_size": 1}, {"draft_tensor_parallel_size": 1}),
        ({"draft_tensor_parallel_size": 4}, {"draft_tensor_parallel_size": 4}),
        # A switch that is off asks for nothing.
        ({"enforce_eager": False, "revision": None}, {}),
        ({"parallel_drafting": False}, {"parallel_drafting": False}),
        ({"parallel_drafting": True}, {"parallel_drafting": True}),
        ({"store_features": False}, {"store_features": False}),
        ({"store_features": "captured"}, {"store_features": "captured"}),
    ],
)
def test_keys_with_a_meaning(given, fields):
    config = read(MODEL | given)
    assert config.method == "draft_model"
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_ngram_of_the_device_is_the_ngram():
    assert read(NGRAM | {"method": "ngram_gpu"}) == read(NGRAM)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        # Accepted up to each place, there; given the token before, here.
        ({"synthetic_acceptance_rates": [0.8, 0.6, 0.6, 0.3]}, (0.8, 0.75, 1.0, 0.5)),
        ({"synthetic_acceptance_rates": [0.5, 0.0, 0.0, 0.0]}, (0.5, 0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 3.75}, (1.0, 1.0, 0.75, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 5}, (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_synthetic_acceptance(given, rates):
    config = read(MODEL | {"rejection_sample_method": "synthetic"} | given)
    assert config.verification == "synthetic"
    assert config.synthetic_acceptance_rates == pytest.approx(rates)


def test_synthetic_rates_under_the_own_name_of_the_rule_stay_as_they_are():
    own = {"verification": "synthetic", "synthetic_acceptance_rates": [0.5, 0.7]}
    assert read(MODEL | own).synthetic_acceptance_rates == (0.5, 0.7)


def test_keys_without_a_use_are_named_with_the_reason_in_one_warning():
    given = MODEL | {
        "quantization": "fp8",
        "enforce_eager": True,
        "draft_sample_method": "greedy",
    }
    with pytest.warns(UserWarning, match="has no use for") as caught:
        config = SpeculationConfig.from_json(json.dumps(given))
    (warning,) = caught
    assert warning.filename == __file__
    for key in given.keys() - MODEL.keys():
        assert re.search(rf"\b{key} \([a-zA-Z' ,]+\)", str(warning.message)), key
    assert config == read(MODEL)


def test_a_context_of_ngrams_has_no_use():
    with pytest.warns(UserWarning, match="max_model_len .matching has no"):
        config = SpeculationConfig.from_json(NGRAM | {"max_model_len": 9})
    assert config == read(NGRAM)


def test_suffix_is_matching_over_own_and_shared_text():
    given = {"method": "suffix", "num_speculative_tokens": 6}
    assert SpeculationConfig.from_json(given).method == "history"
    with pytest.warns(UserWarning, match="suffix_decoding_max_tree_depth .drafts read"):
        SpeculationConfig.from_json(given | {"suffix_decoding_max_tree_depth": 24})


def test_what_nobody_knows_is_a_warning_of_its_own():
    given = NGRAM | {"surprise": 1, "revision": "main"}
    with pytest.warns(UserWarning, match="speculative_config: ") as caught:
        SpeculationConfig.from_json(given)
    useless, unknown = (str(warning.message) for warning in caught)
    assert "revision (" in useless
    assert "surprise" not in useless
    assert unknown == "speculative_config: ignored unknown keys surprise."


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_speculative_token", "num_speculative_tokens"),
        ("num_spec_tokens", "num_speculative_tokens"),
        ("promt_lookup_max", "prompt_lookup_max"),
        ("rejection_sampling_method", "rejection_sample_method"),
        ("disable_by_batchsize", "disable_by_batch_size"),
        ("metod", "method"),
        ("quantisation", "quantization"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_right_one(key, meant):
    with pytest.raises(ValueError, match=f"no key '{key}' .did you mean '{meant}'"):
        SpeculationConfig.from_json({"method": "ngram", key: 3})


def test_a_misspelt_method_is_suggested():
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        SpeculationConfig.from_json({"method": "ngramm"})


@pytest.mark.parametrize("more", ['"num_speculative_tokens": 3', '"num_speculative_tokens": 2'])
def test_a_key_that_stands_twice_is_refused(more):
    text = '{"method": "ngram", "num_speculative_tokens": 2, ' + more + "}"
    with pytest.raises(ValueError, match="key 'num_speculative_tokens' twice"):
        read(text)


def test_an_empty_name_of_a_model_is_refused_as_that():
    with pytest.raises(ValueError, match="model='' must name a folder or a model"):
        read({"model": ""})


def test_keys_are_strings():
    with pytest.raises(ValueError, match="keys that are no strings"):
        SpeculationConfig.from_json({1: 2})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 2}, "the drafter's is 'draft_tensor_parallel_size'."),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size=0 must be"),
        ({"rejection_sample_method": "hope"}, "expected one of standard, block"),
        ({"draft_sample_method": "hope"}, "expected one of greedy, probabilistic"),
        (
            {"rejection_sample_method": "block", "verification": "seeded"},
            "verification='seeded' contradicts 'block'",
        ),
        (
            {"disable_by_batch_size": 8, "speculation_max_rows": 9},
            "'disable_by_batch_size' is 8 and 'speculation_max_rows' is 9",
        ),
        ({"disable_by_batch_size": 0}, "speculation_max_rows=0 must be a whole"),
        ({"speculation_max_rows": 2.5}, "speculation_max_rows=2.5 must be a whole"),
        ({"max_model_len": -1}, "max_model_len=-1 must be a whole"),
        ({"synthetic_acceptance_length": 2}, "is for rejection_sample_method='synth"),
        ({"method": "deepseek_mtp"}, "'deepseek_mtp' is not available: .*loads no target of"),
        ({"method": "glm4_moe_mtp"}, "'mtp' is for MiMo-7B .*; this version has 'ngram' and 'hi"),
        ({"method": "custom_class"}, "pass a drafter of your own as drafter="),
    ],
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig.from_json(MODEL | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs one of synthetic_acceptance_rates"),
        (
            {
                "synthetic_acceptance_rates": [1, 1, 1, 1],
                "synthetic_acceptance_length": 2,
            },
            "needs one of synthetic_acceptance_rates",
        ),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1, 0.1]}, "none above the one"),
        ({"synthetic_acceptance_rates": [1.5, 0.6, 0.1, 0.1]}, "from 0 to 1"),
        ({"synthetic_acceptance_rates": [0.5]}, "as many as num_speculative_tokens=4"),
        ({"synthetic_acceptance_rates": 0.5}, "must list numbers"),
        ({"synthetic_acceptance_length": 0.9}, "must be a number from 1 to K . 1"),
        ({"synthetic_acceptance_length": 5.1}, "must be a number from 1 to K . 1"),
        (
            {"synthetic_acceptance_length": 2, "num_speculative_tokens": None},
            "which must be given",
        ),
    ],
)
def test_synthetic_acceptance_that_means_nothing(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig.from_json(MODEL | {"rejection_sample_method": "synthetic"} | given)


def test_every_key_of_the_table_is_read():
    """docs/speculative-config.md names no key that is unknown, and leaves none out."""
    own = vllm_json
    known = {
        *own._USELESS,
        *own._OTHER_NAMES,
        "rejection_sample_method",
        "acceptance_method",
        "draft_sample_method",
        "synthetic_acceptance_length",
        "tensor_parallel_size",
        *SpeculationConfig.__dataclass_fields__,
    }
    folder = Path(__file__).resolve().parents[3] / "docs"
    text = (folder / "speculative-config.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`[^|]*) \|", text, flags=re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+)`", " ".join(table)))
    assert named == known


def test_the_positions_of_a_draft_model_may_be_fewer():
    target = tiny_llama(0)
    draft = first_layer(target)
    context = DrafterContext(target=target.config, num_speculative_tokens=2, dtype="float32")
    load = lambda most: load_drafter(
        draft, target, SpeculationConfig(max_model_len=most)
    ).spec.build(context)
    assert load(None).max_positions == 512
    assert load(100).max_positions == 100
    with pytest.raises(ValueError, match="max_model_len=513 is more than the 512"):
        load(513)
