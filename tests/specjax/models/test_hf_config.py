"""config.json of both generations, and what is refused."""

import dataclasses
import json

import pytest

from specjax.models.base import RopeConfig
from specjax.models.config_values import optional_number, rope
from specjax.models.hf_config import parse_config, read_config
from specjax.runtime import model_files

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
GOLDENS = ["llama", "llama_tied", "llama_yarn", "qwen2", "qwen2_sliding", "qwen3"]
GOLDENS += ["mistral", "granite", "gpt2", "gpt_bigcode"]
CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "mistral": "MistralForCausalLM",
    "granite": "GraniteForCausalLM",
}


def _family(family, **options):
    architectures = [CLASSES.get(family, "LlamaForCausalLM")]
    return {**LLAMA, "model_type": family, "architectures": architectures, **options}


def _as_version_4(config):
    """Writes a version 5 config the way version 4 wrote it."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    old.pop("layer_types", None)
    old["torch_dtype"] = config["dtype"]
    if "rope_parameters" in config:
        scaling = dict(config["rope_parameters"])
        old["rope_theta"] = scaling.pop("rope_theta")
        scaling["type"] = scaling.pop("rope_type")
        old["rope_scaling"] = None if scaling["type"] == "default" else scaling
    return old


@pytest.mark.parametrize("name", GOLDENS)
def test_both_generations_say_the_same(name, golden):
    config = json.loads((golden(name) / "config.json").read_text())
    assert parse_config(config) == parse_config(_as_version_4(config))


def test_llama_3_2_as_published():
    """The values that Llama-3.2-1B is published with."""
    config = parse_config(
        {
            **LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 131072,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )
    assert config.rope == RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert config.tie_word_embeddings
    assert config.norm_eps == 1e-5
    assert config.scale == 64**-0.5
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_mimo_7b_as_published():
    """The values that MiMo-7B is published with; the keys are those of Qwen2, and of its layers
    that predict more."""
    config = parse_config(
        {
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "model_type": "mimo",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 640000,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151680,
        }
    )
    assert config.rope == RopeConfig(theta=640000.0)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (128, 8, 1e-5)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)
    assert config.layer_windows == ()
    assert (config.architecture, config.family) == ("llama", "mimo")


def test_mimo_is_qwen2_by_another_name():
    mimo, qwen2 = (parse_config(_family(name, attention_bias=True)) for name in ("mimo", "qwen2"))
    assert dataclasses.replace(mimo, family="qwen2") == qwen2


def test_what_a_silent_config_means():
    config = parse_config(LLAMA | {"num_key_value_heads": None})
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.rope == RopeConfig(theta=10000.0)
    assert not config.tie_word_embeddings
    assert config.layer_windows == ()
    assert config.eos_token_ids == ()
    assert parse_config(_family("qwen3")).head_dim == 128
    assert parse_config({k: v for k, v in LLAMA.items() if k != "model_type"}) == (
        parse_config(LLAMA)
    )


@pytest.mark.parametrize(
    ("family", "qkv", "o", "mlp", "qk_norm"),
    [
        ("llama", True, True, True, False),
        ("qwen2", True, False, False, False),
        ("qwen3", True, True, False, True),
        ("mimo", True, False, False, False),
        ("mistral", False, False, False, False),
        ("granite", True, True, True, False),
    ],
)
def test_biases_and_norms_of_a_family(family, qkv, o, mlp, qk_norm):
    """With every bias asked for, each family has those it knows."""
    config = parse_config(_family(family, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (qkv, o, mlp)
    assert config.qk_norm == qk_norm
    config = parse_config(_family(family))
    has_bias = family in ("qwen2", "mimo")
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (has_bias, False, False)


def test_multipliers_are_granite_only():
    options = {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
    }
    config = parse_config(_family("granite", **options))
    assert (config.embedding_multiplier, config.scale) == (12.0, 0.5)
    assert (config.residual_multiplier, config.logits_divisor) == (0.25, 8.0)
    assert parse_config(_family("granite")).scale == 1.0
    assert parse_config(LLAMA | options) == parse_config(LLAMA)


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("mistral", {"sliding_window": 6}, (6, 6)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {}, (4096, 4096)),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, ()),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, ()),
        (
            "qwen3",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
            (None, 5),
        ),
        (
            "qwen2",
            {
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}, ()),
        ("llama", {"sliding_window": 5}, ()),
        ("mimo", {"sliding_window": 5, "max_window_layers": 1}, ()),
    ],
)
def test_windows(family, options, windows):
    assert parse_config(_family(family, **options)).layer_windows == windows


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0},
    ],
)
def test_windows_that_make_no_sense(options):
    with pytest.raises(ValueError, match="expected"):
        parse_config(_family("qwen2", **options))


def test_yarn():
    """The rule of the paper unless a factor or mscale is given; old and new keys."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = parse_config(LLAMA | {"rope_scaling": yarn, "rope_theta": 1e6}).rope
    assert (found.kind, found.factor, found.theta) == ("yarn", 4.0, 1e6)
    assert found.attention_factor is None
    assert (found.beta_fast, found.beta_slow, found.truncate) == (32.0, 1.0, True)
    given = parse_config(LLAMA | {"rope_scaling": yarn | {"attention_factor": 0.5}})
    assert given.rope.attention_factor == 0.5
    mscale = {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert parse_config(LLAMA | {"rope_scaling": yarn | mscale}).rope.attention_factor == 1
    stretched = {"rope_type": "yarn", "factor": None} | {"original_max_position_embeddings": 1024}
    assert parse_config(LLAMA | {"rope_parameters": stretched}).rope.factor == 2.0


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_theta_of_the_rope_wins_over_that_beside_it(key):
    """As transformers 5 reads configs that have both."""
    raw = LLAMA | {key: {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 2e4}
    with pytest.warns(UserWarning, match=r"rope_theta=20000\.0 beside rope_theta=500000\.0"):
        assert parse_config(raw).rope == RopeConfig(theta=5e5)
    silent = raw | {key: {"rope_type": "default", "rope_theta": None}}
    assert parse_config(silent).rope == RopeConfig(theta=2e4)


GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0},
}


def test_a_rope_per_layer_type():
    raw = {"rope_parameters": GEMMA3_ROPES}
    of_type = lambda layer_type, **more: rope(raw, 64, layer_type, **more)
    assert of_type("sliding_attention", default_theta=1e6) == RopeConfig(theta=1e4)
    linear = RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert of_type("full_attention", default_theta=1e6) == linear
    with pytest.raises(ValueError, match=r"per layer type \(sliding_attention, full_attention\)"):
        of_type(None)
    with pytest.raises(ValueError, match="and no object 'chunked_attention'; add it"):
        of_type("chunked_attention")
    raw = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    assert of_type("sliding_attention") == of_type("full_attention") == linear


def test_gpt2():
    config = parse_config(GPT2)
    assert (config.architecture, config.intermediate_size) == ("gpt2", 128)
    assert config.norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert parse_config(GPT2 | {"n_inner": 64}).intermediate_size == 64
    assert parse_config(GPT2 | {"scale_attn_weights": False}).scale == 1.0


def test_gpt_bigcode():
    raw = GPT2 | {"model_type": "gpt_bigcode"}
    config = parse_config(raw)
    assert (config.architecture, config.family) == ("gpt2", "gpt_bigcode")
    assert (config.num_heads, config.num_kv_heads) == (4, 1)
    with pytest.raises(ValueError, match="multi_query=False"):
        parse_config(raw | {"multi_query": False})


def test_a_number_that_may_be_null():
    cap = lambda raw, **options: optional_number(raw, "cap", 50.0, **options)
    assert (cap({}), cap({"cap": None}), cap({"cap": 30})) == (50.0, None, 30.0)
    assert optional_number({}, "cap") is None
    for value in (0, "30", True):
        with pytest.raises(ValueError, match=r"cap=.* must be a number above 0"):
            cap({"cap": value})
    with pytest.raises(ValueError, match="at most 20"):
        cap({"cap": 30}, most=20.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "mamba"}, "'mamba'.*expected one of llama"),
        (LLAMA | {"model_type": "mamba"}, "specjax.models.register.*adding-a-model.md"),
        ({}, "expected one of llama"),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "load_drafter"),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]}, "not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act='relu'.*expected 'silu'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic.*cached"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "per layer type"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        (LLAMA | {"num_key_value_heads": 3}, "num_heads=4 must be a multiple"),
        (LLAMA | {"num_attention_heads": 3}, "not a multiple of num_heads=3"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "'vocab_size'"),
        (GPT2 | {"activation_function": "relu"}, "activation_function='relu'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        parse_config(config)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000 .* from 1 to 4096"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be"),
        ({"hidden_size": -32}, "hidden_size=-32 must be"),
        ({"hidden_size": 32.0}, "hidden_size=32.0 must be"),
        ({"hidden_size": float("nan")}, "hidden_size=nan must be"),
        ({"hidden_size": 10**40}, "hidden_size=1000.* must be"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be"),
        ({"intermediate_size": [48]}, r"intermediate_size=\[48\] must be"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2 must be"),
        ({"head_dim": -8}, "head_dim=-8 must be"),
        ({"max_position_embeddings": "128"}, "max_position_embeddings='128' must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 must be"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a number above 1"),
        ({"rope_theta": -1e4}, "rope_theta=-10000.0 must be"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"rope_parameters": YARN | {"factor": 0}}, "factor=0 must be"),
        ({"rope_parameters": YARN | {"beta_fast": -1}}, "beta_fast=-1 must be"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "must be below"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true"),
        ({"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ({"eos_token_id": 128}, "eos_token_id=128 is no token; .* 0 to 127"),
        ({"eos_token_id": [2, -1]}, "eos_token_id=-1 is no token"),
        ({"eos_token_id": "2"}, "eos_token_id='2' is no token"),
        ({"eos_token_id": True}, "eos_token_id=True is no token"),
        ({"bos_token_id": 128}, "bos_token_id=128 is no token"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"quantization_config": [1]}, "quantised weights"),
    ],
)
def test_values_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        parse_config(LLAMA | options)


@pytest.mark.parametrize(
    "types", ["full_attention", [["full_attention"], "full_attention"], {"a": 1}]
)
def test_layer_types_that_are_no_list_of_names(types):
    with pytest.raises(ValueError, match="must be a list of names"):
        parse_config(_family("qwen2", layer_types=types))


def test_null_is_as_good_as_absent():
    keys = ("head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    keys += ("max_position_embeddings", "attention_bias", "eos_token_id")
    assert parse_config(LLAMA | dict.fromkeys(keys)) == parse_config(LLAMA)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": [5, 999]}, "eos_token_id=999 is no token"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"temperature": "1"}, "temperature='1' is a str"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"do_sample": "no"}, "do_sample='no' must be true or false"),
        ({"do_sample": False, "repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
        ({"do_sample": False, "presence_penalty": "1"}, "presence_penalty='1' is a str"),
        ({"do_sample": False, "top_k": 2.5}, "top_k=2.5"),
    ],
)
def test_a_generation_config_that_means_nothing(tmp_path, generation, message):
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{message}"):
        _write(tmp_path, LLAMA, generation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"vocab_size": 1, "vocab_size": 2}', "key 'vocab_size' is given twice"),
        ('{"a": ', "is not JSON"),
        ("\ud800", "is not JSON"),
    ],
)
def test_json_that_means_nothing(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("MAX_JSON_BYTES", 10, "more than 10 bytes, the most that is read"),
        ("MAX_JSON_CONTAINERS", 3, "of more than 3 objects and lists"),
        ("MAX_JSON_VALUES", 2, "or 2 values"),
    ],
)
def test_json_above_a_limit_is_not_read(tmp_path, monkeypatch, limit, most, message):
    (tmp_path / "config.json").write_text('{"a": [[], [], 1, 2]}')
    assert model_files.read_json(tmp_path / "config.json")
    monkeypatch.setattr(model_files, limit, most)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_json_that_python_finds_too_deep_is_refused(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RecursionError

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(json, "loads", fails)
    with pytest.raises(ValueError, match="nested too deep"):
        read_config(tmp_path)


def _write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_generation_config(tmp_path):
    config, defaults = _write(
        tmp_path,
        LLAMA | {"eos_token_id": 2},
        {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": None, "pad_token_id": 0},
    )
    assert config.eos_token_ids == (7, 8)
    assert defaults == {"temperature": 0.6}


def test_generation_config_may_be_silent_or_absent(tmp_path):
    assert _write(tmp_path, LLAMA | {"eos_token_id": 2})[0].eos_token_ids == (2,)
    config, defaults = _write(tmp_path, LLAMA | {"eos_token_id": 2}, {})
    assert (config.eos_token_ids, defaults) == ((2,), {})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: .*'mamba'"):
        _write(tmp_path, {"model_type": "mamba"})
