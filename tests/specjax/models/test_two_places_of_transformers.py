"""What transformers does with each row of the first table of docs/two-places.md."""

import contextlib
import json
import logging
from typing import Any

import numpy as np
import pytest
import test_two_places as ours
from test_two_places import FULL, GPT2, LLAMA3, SLIDING, YARN
from torch_archives import write_torch

from specjax.models.weight_files import open_folder

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]  # theirs
folders = ours.folders

# Rows of which loading a folder shows nothing.
NOT_TESTED = {"a text model within another": "each family of transformers has its own rule"}
ROWS = {}


def row(fact):
    return lambda test: ROWS.setdefault(fact, test)


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def test_every_row_is_tested_or_says_why_not(transformers):
    table, _, _ = ours.DOCS.read_text().partition("## Tokenizers")
    facts = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(facts) == sorted(["fact", *ROWS, *NOT_TESTED])


@pytest.mark.parametrize("fact", ROWS)
def test_row(fact, folders):
    ROWS[fact](folders)


@contextlib.contextmanager
def told():
    """Gives a list that gets what transformers logs."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def load(folder):
    """Returns the model of a folder and what was logged while it was loaded."""
    from transformers import AutoModelForCausalLM

    with told() as lines:
        model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), "\n".join(lines)


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def array(tensor):
    return tensor.detach().float().numpy()


def same(one, other):
    """Returns whether two folders have the same logits, over more tokens than any window here."""
    import torch

    ids = torch.arange(1, 25)[None]
    return torch.equal(*(load(folder)[0](ids).logits for folder in (one, other)))


def generated(folder, *prompt, **options) -> list:
    """Returns the tokens that follow a prompt, or all of them where there is none."""
    import torch

    model: Any = load(folder)[0]
    inputs = torch.tensor([prompt]) if prompt else None
    return model.generate(inputs, do_sample=False, **options)[0, len(prompt) :].tolist()


def _tensors(folder):
    return {name: np.array(tensor) for name, tensor in open_folder(folder).items()}


def is_not_read(folders, name, keys):
    assert same(folders.of(name, **keys), folders.of(name))


def is_hidden(folders, write):
    """Checks that other weights that `write` puts beside model.safetensors are not read."""
    folder = folders.of()
    write(folders, folder, ours._changed(_tensors(folder)))
    assert same(folder, folders.of())


def has_class(folders, name, keys, expected):
    assert type(load(folders.of(name, **keys))[0]).__name__ == f"{expected}ForCausalLM"


def has_rope(folders, keys, expected):
    rope = load(folders.of(**keys))[0].config.rope_parameters
    assert rope | expected == rope


def generates_with(folders, key, own, generation, expected):
    found, _ = load(folders.of(generation=generation, **{key: own}))
    assert getattr(found.generation_config, key) == expected


ORIGINAL, PLAIN = "original_max_position_embeddings", {"rope_type": "default", "rope_theta": 1e6}
ON, BASE = {"sliding_window": 5, "use_sliding_window": True}, {"rope_theta": 5e5}
MIXED = {"layer_types": [SLIDING, FULL]}
CONTEXTS = ("n_positions", "max_sequence_length", "seq_length", "model_max_length")
OF_LLAMA, *ALIASES = (
    {"architectures": [name]}
    for name in ("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel", "MyForCausalLM")
)
CASES = {
    "the rope": [
        (has_rope, {"rope_parameters": PLAIN, "rope_scaling": YARN}, YARN | {"rope_theta": 1e4}),
    ],
    "the rope's base": [
        (has_rope, {key: YARN | base, "rope_theta": 2e4}, base or {"rope_theta": 2e4})
        for key in ("rope_parameters", "rope_scaling")
        for base in (BASE, {})
    ],
    # AutoConfig alone, without a model, says the length within.
    "the rope's original length": [
        (has_rope, {"rope_parameters": rope | BASE | within} | beside, {ORIGINAL: expected})
        for rope in ({"rope_type": "yarn", "factor": 4.0}, LLAMA3)
        for within in ({ORIGINAL: 64}, {})
        for beside, expected in (({ORIGINAL: 32}, 32), ({}, within.get(ORIGINAL, 128)))
    ],
    "the rope's type": [(has_rope, {"rope_scaling": YARN | {"type": "a"}}, {"rope_type": "yarn"})],
    "the context under a rope that stretches": [
        (is_not_read, name, {"max_position_embeddings": 16}) for name in ("llama", "llama_yarn")
    ],
    "other names of the context": [(is_not_read, "llama", {key: 4}) for key in CONTEXTS],
    "a window of a family without one": [
        (is_not_read, name, {"sliding_window": 5} | more)
        for name in ("llama", "granite")
        for more in ({}, MIXED)
    ],
    "heads of keys and values": [(is_not_read, "gpt_bigcode", {"num_key_value_heads": 4})],
    "class and type of a model": [(has_class, "qwen2", OF_LLAMA, "Qwen2")],
    "a class of another name": [(has_class, "llama", keys, "Llama") for keys in ALIASES],
    "keys that a family does not read": [(is_not_read, "qwen2", {"embedding_multiplier": 12.0})],
    "ids that end a text: two files": [(generates_with, "eos_token_id", 2, {"eos_token_id": 7}, 7)],
    "sampling defaults": [(generates_with, "top_k", 5, {"top_k": 7}, 7)],
    "a file and an index": [(is_hidden, ours._shards)],
    "safetensors and files of torch": [
        (is_hidden, lambda _, folder, other: write_torch(folder / "pytorch_model.bin", other)),
    ],
}
for fact, cases in CASES.items():
    ROWS[fact] = lambda folders, cases=cases: [check(folders, *case) for check, *case in cases]


@row("a head of its own")
def _(folders):
    drawn = np.random.default_rng(7).normal(0, 0.1, (99, 32)).astype(np.float32)
    own = lambda tensors: tensors | {"lm_head.weight": drawn}
    copied = lambda tensors: tensors | {"lm_head.weight": ours._embedding(tensors)}
    for name in ("llama", "qwen2", "gpt2"):
        for change, is_own in ((own, True), (copied, False)):
            model, said = load(folders.of(name, tie_word_embeddings=True, change=change))
            assert np.array_equal(array(model.lm_head.weight), drawn) == is_own
            assert ("tie_word_embeddings" in said) == is_own


@row("a head that is absent")
def _(folders):
    folder = folders.of(tie_word_embeddings=False, change=ours._without_head)
    (one, said), (other, _) = load(folder), load(folder)
    assert "lm_head.weight" in said
    assert not np.array_equal(array(one.lm_head.weight), array(other.lm_head.weight))


@row("what a type of rope does not read")
def _(folders):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    _, said = load(folders.of(rope_parameters=rope | {"beta_fast": 2.0}))
    assert "Unrecognized keys in `rope_parameters` for 'rope_type'='linear'" in said
    half = {"partial_rotary_factor": 0.5}
    for keys in ({"rope_parameters": rope | half}, half):
        with pytest.raises(RuntimeError, match="size of tensor"):
            generated(folders.of(**keys), 5)


@row("other names of GPT-2's sizes")
def _(folders):
    from transformers import AutoConfig

    names = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
    names |= {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    for other, key in names.items():
        for raw in (GPT2, ours.BIG_CODE):
            both: Any = raw | {other: 8}
            assert getattr(AutoConfig.for_model(**both), key) == 8


@row("windows that are switched off")
def _(folders):
    folder = folders.of("qwen2", sliding_window=5, use_sliding_window=False, **MIXED)
    with pytest.raises(TypeError, match="NoneType"):
        generated(folder, 5)


@row("which layers slide")
def _(folders):
    mixed = folders.of("qwen2", **ON, **MIXED)
    assert same(mixed, folders.of("qwen2", **ON, **MIXED, max_window_layers=1))
    has_class(folders, "mistral", MIXED, "Ministral")
    for name in ("qwen2", "mistral"):
        for types in ([FULL, SLIDING], [SLIDING] * 2, [FULL] * 2):
            other = folders.of(name, **ON, layer_types=types)
            assert not same(folders.of(name, **ON, **MIXED), other)
    every = folders.of("mistral", **ON, layer_types=[SLIDING] * 2)
    assert same(every, folders.of("mistral", **ON))


@row("sizes of config.json and of tensors")
def _(folders):
    for key, value in {"vocab_size": 90, "head_dim": 16, "intermediate_size": 40}.items():
        with pytest.raises(RuntimeError, match="mismatch"):
            load(folders.of(**{key: value}))


@row("quantised weights")
def _(folders):
    of = lambda method: {"quant_method": method, "bits": 4}
    with pytest.raises(ImportError, match="GPTQ"):
        load(folders.of(quantization_config=of("gptq"), compression_config=of("awq")))
    is_not_read(folders, "llama", {"compression_config": of("awq")})


@row("the dtype")
def _(folders):
    for own, dtype in (("float16", "float16"), (None, "bfloat16")):
        model, _ = load(folders.of(dtype=own, torch_dtype="bfloat16"))
        assert str(model.dtype) == f"torch.{dtype}"


@row("ids that end a text: the tokenizer")
def _(folders):
    folder = folders.of(eos_token_id=None, generation={})
    first = generated(folder, 5, 6, max_new_tokens=3)[0]
    ours._add_tokenizer(folder, tokens=first + 1, eos_token=f"t{first}")
    assert tokenizer_of(folder).eos_token_id == first
    assert len(generated(folder, 5, 6, max_new_tokens=3)) == 3


@row("special tokens")
def _(folders):
    token = {"content": "t4", "special": True, "normalized": False}
    decoder: dict[str, Any] = {"added_tokens_decoder": {"4": token}}
    for key in ("eos_token", "bos_token", "pad_token"):
        for more, expected in (({}, "t3"), (decoder, "t4")):
            folder = ours._add_tokenizer(folders.of(), {key: "t3"}, **{key: "t4"}, **more)
            assert getattr(tokenizer_of(folder), key) == expected


@row("tokens of the tokenizer and the model")
def _(folders):
    folder = ours._add_tokenizer(folders.of(), tokens=100)
    ids = tokenizer_of(folder).encode("t99")
    with pytest.raises(IndexError):
        generated(folder, *ids)


@row("the tokenizer's longest text")
def _(folders):
    tokenizer = tokenizer_of(ours._add_tokenizer(folders.of(), model_max_length=3))
    with told() as lines:
        assert tokenizer.encode("abab") == [0, 1, 0, 1]
    assert "longer than the specified maximum sequence length" in "".join(lines)


@row("other keys of generation_config.json")
def _(folders):
    of = lambda **acts: folders.of(eos_token_id=None, generation={"max_new_tokens": 4} | acts)
    plain = generated(of(), 5, 6)
    assert len(plain) == 4
    assert generated(of(suppress_tokens=plain[:1]), 5, 6)[0] != plain[0]


@row("tokens that begin and pad a text")
def _(folders):
    folder = folders.of(bos_token_id=1, pad_token_id=3, generation={"bos_token_id": 2})
    ours._add_tokenizer(folder, bos_token="t4", pad_token="t3")
    assert tokenizer_of(folder).encode("ab") == [0, 1]
    first = lambda: generated(folder, max_new_tokens=1)[0]
    assert first() == 2
    (folder / "generation_config.json").unlink()
    assert first() == 1


@row("an index and its files")
def _(folders):
    name, norm = "model-00001-of-00001.safetensors", "model.norm.weight"
    for other in ("a.safetensors", "z.safetensors"):
        folder = folders.of()
        tensors = _tensors(folder)
        (folder / "model.safetensors").rename(folder / name)
        folders.put(folder, {norm: tensors[norm] + 1, "other": tensors[norm]}, other)
        weight_map = {key: name for key in tensors if key != norm} | {"other": other}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(KeyError, match="metadata"):
            load(folder)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        found = array(load(folder)[0].model.norm.weight)
        np.testing.assert_array_equal(found, tensors[norm] + (other == "z.safetensors"))


@row("files that no index names")
def _(folders):
    unlisted = "model-00002-of-00003.safetensors"
    is_hidden(folders, lambda folders, folder, tensors: folders.put(folder, tensors, unlisted))


@row("the mask token of a parallel draft model")
def _(folders):
    is_not_read(folders, "llama", {"pard_token": 7, "ptd_token_id": 8})


@row("tensors that nothing uses")
def _(folders):
    folder = folders.of(change=lambda t: t | {"model.other.weight": np.ones(3, np.float32)})
    assert "model.other.weight" in load(folder)[1]
    assert same(folder, folders.of())


@row("an adapter")
def _(folders):
    from transformers.utils import is_peft_available

    folder = folders.of()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folders.of("qwen2")), "r": 2}
    adapter |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight".format
    parts = {"A": np.ones((2, 32), np.float32), "B": np.ones((32, 2), np.float32)}
    lora = {name(i, part): parts[part] for i in (0, 1) for part in parts}
    folders.put(folder, lora, "adapter_model.safetensors")
    assert type(load(folder)[0]).__name__ == "LlamaForCausalLM"
    assert same(folder, folders.of()) != is_peft_available()
