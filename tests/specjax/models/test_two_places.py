"""Facts that a folder says in two places: a test for each row of docs/two-places.md."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from torch_archives import write_torch

from specjax.models.config_values import rope
from specjax.models.families import family_of
from specjax.models.hf_config import parse_config, read_folder
from specjax.models.loading import load_model
from specjax.models.opened_folders import open_model
from specjax.models.tensor_checks import check_tensors
from specjax.models.weight_files import open_folder

DOCS = Path(__file__).resolve().parents[3] / "docs" / "two-places.md"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
GPT2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_positions": 64}
BIG_CODE = GPT2 | {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"

ROWS = {}


def row(fact):
    def add(test):
        ROWS[fact] = test
        return test

    return add


class Folders:
    """Folders of a golden checkpoint, changed."""

    def __init__(self, copy, write):
        self.copy, self.write = copy, write

    def of(self, name="llama", *, change=None, generation=None, **options):
        folder = self.copy(name, **options)
        if change is not None:
            self.put(folder, change({k: np.array(t) for k, t in open_folder(folder).items()}))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    def put(self, folder, tensors, name="model.safetensors"):
        self.write(folder / name, tensors)


@pytest.fixture
def folders(golden_copy, write_safetensors, tmp_path):
    def copy(name, **options):
        folder = golden_copy(name, **options)
        # Each test may make several.
        return folder.rename(tmp_path / f"folder {len(list(tmp_path.iterdir()))}")

    return Folders(copy, write_safetensors)


@pytest.fixture(autouse=True)
def all_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def warned(match):
    return pytest.warns(UserWarning, match=match)


def refused(match):
    return pytest.raises(ValueError, match=match)


def noted(folder, match):
    """Asserts that exactly one note says it, and returns the model without weights."""
    model, _, notes = open_model(folder, "model")
    assert [bool(re.search(match, note)) for note in notes] == [True], notes
    return model


def silent(folder):
    model, _, notes = open_model(folder, "model")
    assert notes == ()
    return model


def test_the_table_has_these_rows():
    table, _, _ = DOCS.read_text().partition("## Tokenizers")
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    facts = [line.split("|")[1].strip() for line in lines]
    assert [fact for fact in facts if fact != "fact" and set(fact) != {"-"}] == [*ROWS]


@pytest.mark.parametrize("fact", ROWS)
def test_row(fact, folders):
    ROWS[fact](folders)


def _embedding(tensors):
    return next(t for name, t in tensors.items() if "embed_tokens" in name or "wte" in name)


@row("a head of its own")
def _(folders):
    draw = np.random.default_rng(7)
    head = draw.normal(0, 0.1, (99, 32)).astype(np.float32)
    own, copied, last = (
        lambda t: t | {"lm_head.weight": head},
        lambda t: t | {"lm_head.weight": _embedding(t)},
        lambda t: t | {"lm_head.weight": _embedding(t) + np.eye(99, 32, -67, np.float32)},
    )
    of = lambda name, change: folders.of(name, tie_word_embeddings=True, change=change)
    for name in ("llama", "qwen2", "mistral", "granite", "gpt2", "gpt_bigcode"):
        tied = silent(of(name, _without_head)).config
        assert tied.tie_word_embeddings
        assert silent(of(name, copied)).config == tied
        for change in (own, last):
            untied = noted(of(name, change), "tie_word_embeddings: true.*stored head is used")
            assert untied.config == dataclasses.replace(tied, tie_word_embeddings=False)
    hidden = draw.normal(0, 1, (3, 32)).astype(np.float32)
    for name in ("llama", "gpt2"):
        with warned("stored head is used"):
            model = load_model(of(name, own))
        logits = family_of(model.config).logits(model.params, model.config, hidden)
        np.testing.assert_allclose(logits, hidden @ head.T, atol=1e-5, err_msg=name)


def _without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@row("a head that is absent")
def _(folders):
    for name in ("llama", "mistral", "gpt2"):
        folder = folders.of(name, tie_word_embeddings=False, change=_without_head)
        with refused(r"lm_head\.weight.*tie_word_embeddings: true"):
            load_model(folder)


@row("the rope")
def _(folders):
    plain = {"rope_type": "default", "rope_theta": 1e6}
    for raw in (LLAMA, QWEN, MISTRAL):
        both = raw | {"rope_parameters": plain, "rope_scaling": YARN}
        alone = parse_config(raw | {"rope_scaling": YARN, "rope_theta": 1e6}).rope
        assert parse_config(both).rope == alone
        assert parse_config(both | {"rope_theta": 1e6}).rope == alone
    assert (alone.kind, alone.theta) == ("yarn", 1e6)
    other = plain | {"rope_type": "linear", "factor": 2.0}
    with warned("rope_scaling beside rope_parameters.*another rope_type, factor"):
        assert parse_config(LLAMA | {"rope_parameters": other, "rope_scaling": YARN}).rope == alone
    with warned("another rope_theta"):
        raw = {"rope_parameters": plain, "rope_scaling": YARN | {"rope_theta": 5e5}}
        assert parse_config(LLAMA | raw).rope.theta == 5e5
    with refused("beside rope_parameters per layer type"):
        parse_config(LLAMA | {"rope_parameters": {FULL: plain}, "rope_scaling": YARN})


@row("the rope's base")
def _(folders):
    for key in ("rope_parameters", "rope_scaling"):
        raw = LLAMA | {key: YARN | {"rope_theta": 5e5}}
        with warned("rope_theta=20000.0 beside rope_theta=500000.0"):
            assert parse_config(raw | {"rope_theta": 2e4}).rope.theta == 5e5
        assert parse_config(raw | {"rope_theta": 5e5}).rope.theta == 5e5
        assert parse_config(LLAMA | {key: YARN, "rope_theta": 5e5}).rope.theta == 5e5


@row("the rope's original length")
def _(folders):
    original = "original_max_position_embeddings"
    for scaling in (YARN, LLAMA3 | {original: 64}):
        for key in ("rope_parameters", "rope_scaling"):
            with warned(f"{original}=32 beside {original}=64"):
                found = parse_config(LLAMA | {key: scaling, original: 32}).rope
            assert found.original_max_position_embeddings == 32
            found = parse_config(LLAMA | {key: scaling, original: None}).rope
            assert found.original_max_position_embeddings == 64
    found = parse_config(LLAMA | {"rope_scaling": LLAMA3, original: 32}).rope
    assert found.original_max_position_embeddings == 32
    found = parse_config(LLAMA | {"rope_scaling": LLAMA3}).rope
    assert found.original_max_position_embeddings == 256


@row("the rope's type")
def _(folders):
    for scaling in (YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}):
        same = parse_config(LLAMA | {"rope_scaling": scaling | {"type": scaling["rope_type"]}})
        assert same.rope.kind == scaling["rope_type"]
        with refused("rope_type=.* and type='default' of one rope differ"):
            parse_config(LLAMA | {"rope_scaling": scaling | {"type": "default"}})


@row("what a type of rope does not read")
def _(folders):
    linear = {"rope_type": "linear", "factor": 2.0}
    unread = {"beta_fast": (LLAMA3, linear), "low_freq_factor": (YARN, linear)}
    unread["extrapolation_factor"] = (YARN, LLAMA3, linear)
    for key, scalings in unread.items():
        for scaling in scalings:
            with warned(f"rope of type .* has {key}, which is not used"):
                parse_config(LLAMA | {"rope_scaling": scaling | {key: 2.0}})
    for holder in (lambda value: {"rope_scaling": YARN | value}, dict):
        with refused("partial_rotary_factor=0.5"):
            parse_config(LLAMA | holder({"partial_rotary_factor": 0.5}))


@row("the context under a rope that stretches")
def _(folders):
    context = lambda scaling, most=256, **more: (
        parse_config(
            LLAMA | {"rope_scaling": scaling, "max_position_embeddings": most} | more
        ).max_position_embeddings
    )
    assert context(YARN, 64) == context(YARN, 80) == context(YARN, 256) == 256
    assert context(YARN, 1024) == 1024
    assert context(YARN, 32) == 32  # less than the original length is meant
    assert context(YARN | {"factor": None}, 256) == 256
    assert context(YARN, 64, original_max_position_embeddings=64) == 256
    assert context(YARN | {"original_max_position_embeddings": None}, 64) == 256
    assert context({"type": "linear", "factor": 2.5}, 64) == 160
    assert context({"type": "linear", "factor": 4}, 64, original_max_position_embeddings=16) == 64
    assert context(LLAMA3 | {"original_max_position_embeddings": 64}, 128) == 128
    assert context(None, 128) == 128
    for kind in ("dynamic", "longrope"):
        with refused(f"rope type '{kind}' is not supported"):
            context({"rope_type": kind, "factor": 2.0})


@row("other names of the context")
def _(folders):
    plain = silent(folders.of()).config
    for key in ("n_positions", "max_sequence_length", "seq_length", "model_max_length"):
        assert noted(folders.of(**{key: 32}), f"does not read: {key}").config == plain


@row("other names of GPT-2's sizes")
def _(folders):
    names = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
    names |= {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    for raw in (GPT2, BIG_CODE):
        for other, key in names.items():
            assert parse_config(raw | {other: raw[key]}) == parse_config(raw)
            renamed = {k: v for k, v in raw.items() if k != key} | {other: raw[key]}
            assert parse_config(renamed) == parse_config(raw)
            with refused(f"{key}={raw[key]} and {other}=8 are one fact"):
                parse_config(raw | {other: 8})
    assert parse_config(GPT2 | {"n_inner": None, "intermediate_size": 64}).intermediate_size == 64
    with warned("n_ctx beside another n_positions"):
        assert parse_config(GPT2 | {"n_ctx": 32}) == parse_config(GPT2 | {"n_ctx": 64})


@row("windows that are switched off")
def _(folders):
    for family in ("qwen2", "qwen3", "mimo"):
        name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mimo": "MiMo"}[family]
        raw = QWEN | {"model_type": family, "architectures": [f"{name}ForCausalLM"]}
        off = raw | {"sliding_window": 5, "use_sliding_window": False}
        assert parse_config(off | {"layer_types": [FULL] * 2}).layer_windows == ()
        with refused("use_sliding_window=false and layer_types"):
            parse_config(off | {"layer_types": [SLIDING, FULL]})
        assert parse_config(off | {"max_window_layers": 0}).layer_windows == ()
    off = {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 1}
    silent(folders.of("qwen2", **off))


@row("which layers slide")
def _(folders):
    on = QWEN | {"sliding_window": 5, "use_sliding_window": True}
    assert parse_config(on | {"max_window_layers": 1}).layer_windows == (None, 5)
    assert parse_config(on | {"layer_types": [SLIDING, FULL]}).layer_windows == (5, None)
    for types, windows in (([SLIDING, FULL], (5, None)), ([FULL, FULL], ())):
        with warned("layer_types beside a max_window_layers of others"):
            both = parse_config(on | {"layer_types": types, "max_window_layers": 1})
        assert both.layer_windows == windows
    agree = on | {"layer_types": [FULL, SLIDING], "max_window_layers": 1}
    assert parse_config(agree).layer_windows == (None, 5)
    # Of Mistral, sliding_window alone is that of every layer.
    types = {"sliding_window": 5, "layer_types": [SLIDING, FULL]}
    assert parse_config(MISTRAL | types).layer_windows == (5, None)
    assert parse_config(MISTRAL | {"sliding_window": 5}).layer_windows == (5, 5)


@row("a window of a family without one")
def _(folders):
    for name in ("llama", "granite"):
        model = noted(folders.of(name, sliding_window=5), "does not read: sliding_window")
        assert model.config.layer_windows == ()
        types = {"sliding_window": 5, "layer_types": [SLIDING, FULL]}
        assert silent(folders.of(name, **types)).config.layer_windows == (5, None)


@row("heads of keys and values")
def _(folders):
    assert parse_config(BIG_CODE | {"num_key_value_heads": 1}).num_kv_heads == 1
    with refused("num_key_value_heads=4 is not supported"):
        parse_config(BIG_CODE | {"num_key_value_heads": 4})
    with refused("multi_query=False"):
        parse_config(BIG_CODE | {"multi_query": False, "num_key_value_heads": 1})
    noted(folders.of("gpt2", num_key_value_heads=2), "does not read: num_key_value_heads")
    noted(folders.of("llama", multi_query=True), "does not read: multi_query")


@row("the mask token of a parallel draft model")
def _(folders):
    for names in ({"pard_token": 7}, {"ptd_token_id": 7}, {"pard_token": 7, "ptd_token_id": 7}):
        assert silent(folders.of(**names)).config.mask_token_id == 7
    with refused("pard_token=7 and ptd_token_id=8 are two mask tokens"):
        load_model(folders.of(pard_token=7, ptd_token_id=8))


@row("sizes of config.json and of tensors")
def _(folders):
    wrong = {"vocab_size": 90, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 40}
    for key, value in wrong.items():
        folder = folders.of("llama", **{key: value})
        model, tensors, _ = open_model(folder, "model")
        with refused("of other shapes than its config.json says"):
            check_tensors(folder, model.config, tensors)
    for key, value in {"n_inner": 40, "n_positions": 32, "vocab_size": 90}.items():
        folder = folders.of("gpt2", **{key: value})
        model, tensors, _ = open_model(folder, "model")
        with refused("of other shapes than its config.json says"):
            check_tensors(folder, model.config, tensors)


@row("class and type of a model")
def _(folders):
    for name, other in (("Mistral", "llama"), ("Llama", "mistral"), ("Qwen2", "qwen3")):
        with refused("are of two families. Correct"):
            parse_config(LLAMA | {"model_type": other, "architectures": [f"{name}ForCausalLM"]})
    for raw in (LLAMA, QWEN):
        assert parse_config({k: v for k, v in raw.items() if k != "model_type"}) == (
            parse_config(raw)
        )


@row("a class of another name")
def _(folders):
    aliases = {"llama": ("LLaMAForCausalLM", "LlamaModel", "YiForCausalLM")}
    aliases |= {"mistral": ("MistralModel",), "gpt2": ("GPT2Model", "GPT2LMHead_LMHeadModel")}
    for family, names in aliases.items():
        for name in names:
            folder = folders.of(family, architectures=[name])
            model, tensors, _ = open_model(folder, "model")
            check_tensors(folder, model.config, tensors)
            assert model.config.family == family
    own = {"architectures": ["MyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "my.My"}}
    noted(folders.of(**own), "own code .auto_map., which is not run: the model is read as llama")
    silent(folders.of(auto_map=own["auto_map"]))
    no_type = {k: v for k, v in LLAMA.items() if k != "model_type"}
    assert parse_config(no_type | {"architectures": ["LLaMAForCausalLM"]}) == parse_config(LLAMA)
    others = ["LlamaForSequenceClassification", "LlamaForCausalLMEagle3", "EagleLlamaModel"]
    others += ["LlamaForRewardModel", "LlamaMedusaModel", "LlamaForTokenClassification"]
    for name in others:
        with refused("is not supported as a language model"):
            parse_config(LLAMA | {"architectures": [name]})
    bare = lambda tensors: {k.removeprefix("model."): t for k, t in tensors.items()}
    with refused("lacks .* of the .* tensors of a llama model"):
        load_model(folders.of(architectures=["LlamaModel"], change=bare))


@row("quantised weights")
def _(folders):
    for key in ("quantization_config", "compression_config"):
        with refused("asks for quantised weights .*'gptq'"):
            parse_config(LLAMA | {key: {"quant_method": "gptq"}})
    two = {"quantization_config": {"quant_method": "gptq"}}
    two["compression_config"] = {"quant_method": "awq"}
    with refused("quantization_config and compression_config differ"):
        parse_config(LLAMA | two)


@row("the dtype")
def _(folders):
    for said in ({"dtype": "float16"}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"}):
        folder = folders.of(**said | {"torch_dtype": "bfloat16"})
        silent(folder)
        assert {leaf.dtype for leaf in jax.tree.leaves(load_model(folder).params)} == {
            np.dtype(np.float32)
        }


@row("keys that a family does not read")
def _(folders):
    unread = {"embedding_multiplier": 12.0, "rms_eps": 1e-3, "text_config": {"hidden_size": 8}}
    unread |= {"num_experts": 4, "final_logit_softcapping": 30.0}
    for key, value in unread.items():
        noted(folders.of("qwen2", **{key: value}), f"qwen2 model does not read: {key}\\.")
    # false and 0 switch off what the family has.
    for key in ("use_qk_norm", "qkv_bias", "use_rope"):
        noted(folders.of("qwen3", **{key: False}), f"qwen3 model does not read: {key}\\.")
    noted(folders.of(attn_scale=0.0, n_ctx=5), r"llama model does not read: attn_scale, n_ctx\.")
    silent(folders.of(resid_pdrop=0.0, hidden_dropout_prob=0.0, output_past=False))
    idle = {"use_cache": True, "_name_or_path": "a", "attention_dropout": 0.1, "use_mrope": False}
    silent(folders.of("qwen2", **idle))
    silent(folders.of("granite", embedding_multiplier=2.0))
    for name in ("qwen2", "mistral"):  # whose biases the tensors tell, as MiMo-7B is published
        silent(folders.of(name, attention_bias=True))


@row("ids that end a text: two files")
def _(folders):
    for own, also in ((2, 7), ([2, 3], [3, 7]), ([2, 7], 7)):
        folder = folders.of(eos_token_id=own, generation={"eos_token_id": also})
        model = noted(folder, r"eos_token_id=\[2.*: a text does not end there")
        assert model.config.eos_token_ids == tuple(also if isinstance(also, list) else [also])
    folder = folders.of(eos_token_id=2, generation={"eos_token_id": [2, 7]})
    assert silent(folder).config.eos_token_ids == (2, 7)


def _add_tokenizer(folder, special=None, tokens=5, **settings):
    vocab = {"a": 0, "b": 1, **{f"t{i}": i for i in range(2, tokens)}}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([AddedToken(f"t{tokens - 1}", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


@row("ids that end a text: the tokenizer")
def _(folders):
    ends = lambda folder: silent(folder).config.eos_token_ids
    of = lambda **options: folders.of(generation={}, **options)
    assert ends(_add_tokenizer(of(eos_token_id=None), eos_token="t4")) == (4,)
    assert ends(_add_tokenizer(of(eos_token_id=2), eos_token="t4")) == (2, 4)
    assert ends(_add_tokenizer(of(eos_token_id=[4, 2]), eos_token={"content": "t4"})) == (4, 2)
    assert ends(_add_tokenizer(of(eos_token_id=2), {"eos_token": "t4"})) == (2, 4)
    assert ends(_add_tokenizer(of(eos_token_id=2), {"eos_token": "t4"}, eos_token=None)) == (2, 4)
    assert ends(_add_tokenizer(of(eos_token_id=2), {"eos_token": None}, eos_token="t4")) == (2, 4)
    assert ends(_add_tokenizer(of(eos_token_id=2))) == (2,)
    both = folders.of(eos_token_id=2, generation={"eos_token_id": [2, 3]})
    assert ends(_add_tokenizer(both, eos_token="t4")) == (2, 3, 4)
    # What generation_config.json leaves out of config.json's is the tokenizer's.
    left_out = folders.of(eos_token_id=4, generation={"eos_token_id": 2})
    assert ends(_add_tokenizer(left_out, eos_token="t4")) == (2, 4)
    beyond = _add_tokenizer(of(eos_token_id=2), tokens=101, eos_token="t100")
    model, _, notes = open_model(beyond, "model")
    assert model.config.eos_token_ids == (2,)
    assert [word in note for note in notes for word in ("is token 100", "101 tokens")] == [
        *(True, False),
        *(False, True),
    ]


@row("special tokens")
def _(folders):
    for key in ("eos_token", "bos_token", "pad_token"):
        folder = folders.of(eos_token_id=4, generation={})
        _add_tokenizer(folder, {key: "t3"}, **{key: "t4"})
        model = noted(folder, f"says another {key} than tokenizer_config.json, which is used")
        assert model.tokenizer.special_tokens[key] == "t4"
    folder = folders.of(eos_token_id=4, generation={})
    silent(_add_tokenizer(folder, {"eos_token": "t4"}, eos_token="t4"))


@row("tokens of the tokenizer and the model")
def _(folders):
    noted(_add_tokenizer(folders.of(), tokens=100), "has 100 tokens and the model 99")
    silent(_add_tokenizer(folders.of(), tokens=99))
    silent(_add_tokenizer(folders.of(), tokens=90))


@row("the tokenizer's longest text")
def _(folders):
    context = silent(folders.of()).config.max_position_embeddings
    folder = _add_tokenizer(folders.of(), model_max_length=context - 1)
    model = noted(folder, f"model_max_length={context - 1}, .* context of {context}")
    assert model.config.max_position_embeddings == context
    for most in (context, 10**30, 1e30):
        silent(_add_tokenizer(folders.of(), model_max_length=most))


@row("sampling defaults")
def _(folders):
    keys = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    for key, value in keys.items():
        folder = folders.of(generation={"temperature": 0.7}, **{key: value})
        assert noted(folder, f"does not read: {key}").generation_defaults == {"temperature": 0.7}
    neutral = {"temperature": 1.0, "top_k": 50, "max_length": 20, "num_beams": 1}
    assert silent(folders.of(generation=keys, **neutral)).generation_defaults == keys


@row("other keys of generation_config.json")
def _(folders):
    acts = {"num_beams": 4, "max_new_tokens": 7, "no_repeat_ngram_size": 2, "max_length": 20}
    acts |= {"stop_strings": ["x"], "suppress_tokens": [3], "typical_p": 0.9, "max_length": 100}
    for key, value in acts.items():
        folder = folders.of(max_position_embeddings=256, generation={key: value})
        noted(folder, rf"generation_config.json .* does not read: {key}\.")
    idle = {"bos_token_id": 1, "pad_token_id": 0, "max_length": 256, "_from_model_config": True}
    idle |= {"num_beams": 1, "epsilon_cutoff": 0.0, "min_new_tokens": 0, "disable_compile": False}
    silent(folders.of(max_position_embeddings=256, generation=idle))


@row("tokens that begin and pad a text")
def _(folders):
    folder = folders.of(bos_token_id=1, pad_token_id=3, generation={"bos_token_id": 2})
    folder = _add_tokenizer(folder, bos_token="t4", pad_token="t3")
    model = silent(folder)
    assert model.tokenizer.encode("ab") == [0, 1]


def _shards(folders, folder, tensors, name="model-00001-of-00001.safetensors", listed=None):
    folders.put(folder, tensors, name)
    index = {"weight_map": dict.fromkeys(tensors if listed is None else listed, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _changed(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


def _is_read(folder, tensors):
    found = open_folder(folder)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in tensors.items())
    return True


@row("a file and an index")
def _(folders):
    for name in ("llama", "gpt2", "qwen3"):
        folder = folders.of(name)
        tensors = {name: np.array(tensor) for name, tensor in open_folder(folder).items()}
        _shards(folders, folder, tensors)
        assert _is_read(folder, tensors)  # the same twice
        _shards(folders, folder, _changed(tensors))
        with warned(r"twice, in model\.safetensors and .*index\.json, and .* tensors differ"):
            assert _is_read(folder, tensors)
        (folder / "model-00001-of-00001.safetensors").unlink()
        with warned("files that model.safetensors.index.json names are not there"):
            assert _is_read(folder, tensors)
        # An index that names the file itself is no other place.
        first = sorted(tensors)[0]
        folders.put(folder, {first: tensors[first]}, "b.safetensors")
        rest = {name: tensor for name, tensor in tensors.items() if name != first}
        folders.put(folder, rest)
        weight_map = dict.fromkeys(rest, "model.safetensors") | {first: "b.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert _is_read(folder, tensors)


@row("safetensors and files of torch")
def _(folders):
    folder = folders.of()
    tensors = {name: np.array(tensor) for name, tensor in open_folder(folder).items()}
    write_torch(folder / "pytorch_model.bin", tensors)
    assert _is_read(folder, tensors)
    half = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    write_torch(folder / "pytorch_model.bin", half)
    assert _is_read(folder, tensors)
    for other in (_changed(tensors), {**tensors, "more": np.ones(3, np.float32)}):
        write_torch(folder / "pytorch_model.bin", other)
        with warned("twice, in model.safetensors and pytorch_model.bin"):
            assert _is_read(folder, tensors)
    (folder / "model.safetensors").unlink()
    write_torch(folder / "pytorch_model.bin", tensors)
    index = {"weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with warned("files that pytorch_model.bin.index.json names are not there"):
        assert _is_read(folder, tensors)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    (folder / "pytorch_model.bin.index.json").unlink()
    folders.put(folder, tensors)
    with warned("the latter cannot be read"):
        assert _is_read(folder, tensors)


@row("an index and its files")
def _(folders):
    folder = folders.of()
    tensors = {name: np.array(tensor) for name, tensor in open_folder(folder).items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    _shards(folders, folder, tensors, listed=names[:-1])
    assert _is_read(folder, tensors)
    folders.put(folder, {names[0]: tensors[names[0]] + 1}, "b.safetensors")
    name = "model-00001-of-00001.safetensors"
    weight_map = dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map | {"other": "b.safetensors"}})
    )
    with refused("places 1 tensors in files .* that do not hold them: other"):
        open_folder(folder)
    twice = {names[0]: tensors[names[0]] + 1, "other": np.ones(3, np.float32)}
    folders.put(folder, twice, "b.safetensors")
    with warned(rf"1 tensors in two files that differ: {re.escape(names[0])}"):
        assert _is_read(folder, tensors | {"other": twice["other"]})
    folders.put(folder, twice | {names[0]: tensors[names[0]]}, "b.safetensors")
    assert _is_read(folder, tensors | {"other": twice["other"]})


@row("files that no index names")
def _(folders):
    folder = folders.of()
    tensors = {name: np.array(tensor) for name, tensor in open_folder(folder).items()}
    for name in ("consolidated.safetensors", "rust_model.ot"):
        (folder / name).write_bytes(b"not read")
    assert _is_read(folder, tensors)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _is_read(folder, tensors)
    for name in ("model-00002-of-00003.safetensors", "pytorch_model-00001-of-00002.bin"):
        (folder / name).write_bytes(b"not read")
        with warned(rf"no index names, which are not read: {name}\. Take"):
            assert _is_read(folder, tensors)
        (folder / name).unlink()


@row("tensors that nothing uses")
def _(folders):
    for name in ("llama", "gpt2"):
        for extra in ("score.weight", "v_head.summary.weight", "vision.layers.0.q.weight"):
            put = lambda t, extra=extra: t | {extra: np.ones(3, np.float32)}
            with warned(f"1 tensors that a {name} model does not use: {extra}"):
                load_model(folders.of(name, change=put))
        put = lambda t: t | {"lm_head.bias": np.ones(99, np.float32)}
        with refused("lm_head.bias, which a .* model does not have"):
            load_model(folders.of(name, change=put))
    quiet = ("model.mtp_layers.0.x.weight", "medusa_head.0.weight", "model.rotary_emb.inv_freq")
    put = lambda t: t | {extra: np.ones(3, np.float32) for extra in quiet}
    load_model(folders.of(change=put))


@row("an adapter")
def _(folders):
    adapter = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "someone/base"})
    folder = folders.of()
    (folder / "adapter_config.json").write_text(adapter)
    noted(folder, "adapter_config.json of PEFT: the adapter is not applied")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    for _ in range(2):  # with a config.json and without
        with pytest.raises(
            FileNotFoundError, match=r"adapter of PEFT over .*'someone/base'.*Merge"
        ):
            load_model(folder)
        (folder / "config.json").unlink(missing_ok=True)


@row("a text model within another")
def _(folders):
    for nested in ("llava", "gemma3", "mistral3"):
        with refused(f"model_type='{nested}' .*is not supported"):
            parse_config({"model_type": nested, "text_config": LLAMA, "tie_word_embeddings": True})


def test_rope_of_layers_of_two_types():
    """An object per layer type has an original length of its own."""
    by_type = {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    raw = {"rope_parameters": by_type, "original_max_position_embeddings": 32}
    assert rope(raw, 256, FULL).original_max_position_embeddings == 64
    assert rope(raw, 256, SLIDING).theta == 1e4


def test_a_saved_context_is_read_again():
    """`max_position_embeddings` of a stretched rope holds what was stretched."""
    for scaling in (YARN, {"type": "linear", "factor": 2.5}, LLAMA3):
        config = parse_config(LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 65})
        again = family_of(config).unparse(config) | {"model_type": "llama"}
        assert parse_config(again) == config


def test_config_and_generation_config_of_published_folders_are_silent(golden, folders):
    names = ["llama", "llama_tied", "llama_yarn", "qwen2", "qwen2_sliding", "qwen3"]
    names += ["mistral", "granite", "gpt2", "gpt_bigcode"]
    for name in names:
        assert read_folder(golden(name)).notes == (), name


def test_a_model_whose_tokens_see_both_ways_is_refused(folders):
    """transformers 5 and vLLM read such a folder as a model of embeddings."""
    with pytest.raises(ValueError, match="is_causal=false"):
        read_folder(folders.of(is_causal=False))
    silent(folders.of(is_causal=True))


def test_keys_that_published_folders_have_are_silent(tmp_path):
    """Of Llama 3.1, Qwen2.5, Qwen3, Granite 3, MiMo-7B, PARD, GPT-2 and StarCoder."""
    common = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
    common |= {"attention_dropout": 0.0, "transformers_version": "4.43.0"}
    of_qwen = {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": 131072}
    of_granite = {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
    summary = {"summary_type": "cls_index", "summary_use_proj": True, "summary_first_dropout": 0.1}
    llama3 = LLAMA3 | {"original_max_position_embeddings": 64}
    class_of = lambda name: {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]}
    configs = [
        LLAMA | {"pretraining_tp": 1, "mlp_bias": False, "rope_scaling": llama3, "rope_theta": 5e5},
        QWEN | of_qwen | {"use_mrope": False, "rope_theta": 1e6},
        LLAMA | class_of("Qwen3") | of_qwen | {"rope_scaling": None, "attention_bias": False},
        LLAMA | class_of("Granite") | of_granite | {"residual_multiplier": 0.2, "pad_token_id": 0},
        LLAMA | class_of("MiMo") | {"attention_bias": True, "num_nextn_predict_layers": 1},
        QWEN | of_qwen | {"pard_token": 98, "spd_type": "pard"},
        GPT2 | dropouts | summary | {"n_ctx": 64, "task_specific_params": {"a": 1}},
        BIG_CODE | dropouts | {"attention_softmax_in_fp32": True, "validate_runner_input": True},
    ]
    for config in configs:
        (tmp_path / "config.json").write_text(json.dumps(common | config))
        assert read_folder(tmp_path).notes == (), config["model_type"]
