"""Facts that a head's folder says in two places: a test for each row of docs/two-places.md."""

import dataclasses
import json
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from head_equations import TARGET, VOCAB
from head_folders import random_tensors, vocabulary_maps, write
from pair_heads import own_layers
from torch_archives import write_torch

import specjax
from specjax.heads.equations import eagle, eagle3, medusa
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import OF_VLLM, PUBLISHED, MedusaConfig
from specjax.heads.namings.eagle1_files import read_eagle
from specjax.heads.namings.eagle_files import is_eagle3, read_eagle3
from specjax.heads.namings.newest_state_files import MEDUSA_FILES, read_medusa
from specjax.models import two_places

DOCS = Path(__file__).resolve().parents[3] / "docs" / "two-places.md"
WIDTH, DEPTH = TARGET.config.hidden_size, TARGET.config.num_layers
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
EAGLE = EagleConfig(
    layers=own_layers(),
    target_vocab_size=VOCAB,
    aux_layers=(DEPTH,),
    has_embedding=True,
    has_head=True,
)
MEDUSA = MedusaConfig(
    target_hidden_size=WIDTH, target_vocab_size=VOCAB, aux_layers=(DEPTH,), most_drafts=3
)
ROWS = {}


def row(fact):
    def add(test):
        ROWS[fact] = test
        return test

    return add


def test_the_table_has_these_rows():
    _, _, table = DOCS.read_text().partition("## Heads over a target")
    table, _, _ = table.partition("## ")
    facts = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert facts == ["fact", *ROWS]


@pytest.mark.parametrize("fact", ROWS)
def test_row(fact, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ROWS[fact](tmp_path)


def warned(match):
    return pytest.warns(UserWarning, match=match)


def refused(match):
    return pytest.raises(ValueError, match=match)


def eagle_in(folder, raw=None, tensors=None):
    tensors = random_tensors(eagle.weights_of(EAGLE)) if tensors is None else tensors
    return read_eagle(write(folder, RAW | (raw or {}), tensors), TARGET.config, jnp.float32)


def medusa_in(folder, raw, tensors):
    return read_medusa(write(folder, raw, tensors), TARGET.config, jnp.float32)


@row("a head's own matrix")
def _(folder):
    tensors = random_tensors(eagle.weights_of(EAGLE))
    for ties in (True, False, None):
        found = eagle_in(folder, {"tie_word_embeddings": ties}, tensors)
        assert found.config == EAGLE
        np.testing.assert_array_equal(found.params["lm_head"], tensors["lm_head.weight"])
    without = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    assert not eagle_in(folder, {"tie_word_embeddings": False}, without).config.has_head


@row("a head's rope")
def _(folder):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    both = {"rope_scaling": yarn, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    rope = eagle_in(folder, both).config.layers.rope
    assert (rope.kind, rope.theta) == ("yarn", 1e6)
    with warned("rope_scaling beside rope_parameters.*rope_theta"):
        eagle_in(folder, both | {"rope_scaling": yarn | {"rope_theta": 5e5}})
    with warned("rope_theta=20000.0 beside rope_theta=500000.0"):
        own = {"rope_scaling": yarn | {"rope_theta": 5e5}, "rope_theta": 2e4}
        assert eagle_in(folder, own).config.layers.rope.theta == 5e5


@row("sizes of a head")
def _(folder):
    with refused("head_dim=16, and layers.0.self_attn.q_proj.weight"):
        eagle_in(folder, {"head_dim": 16})
    with refused("not those of its config.json"):
        eagle_in(folder, {"intermediate_size": 40})
    with refused("attention_bias=true, and there is no tensor"):
        eagle_in(folder, {"attention_bias": True})


@row("the number of Medusa heads")
def _(folder):
    for naming, raw in (
        (PUBLISHED, {"medusa_num_heads": 2}),
        (PUBLISHED, {"medusa_num_heads": 5, "medusa_num_layers": 2}),
        (OF_VLLM, {"model_type": "medusa", "num_heads": 2}),
    ):
        found = medusa_in(folder, raw, random_tensors(medusa.weights_of(MEDUSA, naming)))
        assert found.config == MEDUSA
        assert found.notes[-1] == "drafts at most 3 tokens, one for each head"


@row("the tokens that a head says")
def _(folder):
    part = dataclasses.replace(MEDUSA, own_vocab_size=5)
    tensors = random_tensors(medusa.weights_of(part, OF_VLLM)) | {"token_map": np.arange(5) * 3}
    raw = {"model_type": "medusa", "vocab_size": VOCAB}
    assert medusa_in(folder, raw | {"truncated_vocab_size": 5}, tensors).config == part
    for said in (4, VOCAB, None):
        with refused("truncated_vocab_size=.* needs a tensor 'token_map'"):
            medusa_in(folder, raw | {"truncated_vocab_size": said}, tensors)
    own = Eagle3Config(
        layers=dataclasses.replace(own_layers(), vocab_size=5),
        target_vocab_size=VOCAB,
        target_hidden_size=WIDTH,
        aux_layers=(0,),
        has_head=True,
        maps_vocabulary=True,
    )
    maps = vocabulary_maps(5, VOCAB)
    tensors = random_tensors(eagle3.weights_of(own)) | maps
    raw = RAW | {"draft_vocab_size": 5, "eagle_aux_hidden_state_layer_ids": [0]}
    read = lambda raw, tensors: read_eagle3(write(folder, raw, tensors), TARGET.config, jnp.float32)
    assert read(raw, tensors).config.vocab_size == 5
    with refused("draft_vocab_size=6, and lm_head.weight has 5 rows"):
        read(raw | {"draft_vocab_size": 6}, tensors)
    with refused("d2t and t2d name different tokens"):
        read(raw, tensors | {"t2d": ~maps["t2d"]})


@row("layers within a config of vLLM")
def _(folder):
    raw = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": RAW}
    for key, value in {"rms_norm_eps": 1e-3, "rope_theta": 5e5}.items():
        tensors = random_tensors(eagle.weights_of(EAGLE))
        write(
            folder, raw | {"model": RAW | {key: 2e4 if key[1] == "o" else 0.5}, key: value}, tensors
        )
        with warned(f"another {key} at the top than in its model; the top is used"):
            layers = read_eagle(folder, TARGET.config, jnp.float32).config.layers
        assert value in (layers.norm_eps, layers.rope.theta)
    for more in ({"method": "eagle3"}, {"model": {"architectures": ["LlamaForCausalLMEagle3"]}}):
        assert is_eagle3(two_places.with_inner_model(raw | more))
    assert not is_eagle3(two_places.with_inner_model(raw))


@row("norms that EAGLE has not")
def _(folder):
    raw = {"model_type": "eagle", "model": RAW}
    ones = {"norm.weight": np.ones(WIDTH, np.float32)}
    ones["layers.0.input_layernorm.weight"] = ones["norm.weight"]
    tensors = random_tensors(eagle.weights_of(EAGLE))
    read = lambda raw: read_eagle(write(folder, raw, tensors | ones), TARGET.config, jnp.float32)
    assert read(raw).config == EAGLE
    assert "norm.weight are not used, as in vLLM" in read(raw).notes[-1]
    for key in ("skip_prenorm", "skip_output_norm"):
        with refused(f"{key}=False is not supported"):
            read(raw | {"model": RAW | {key: False}})
    with refused("logit_scale=2.0 is not supported"):
        read(raw | {"logit_scale": 2.0})


@row("files of a head")
def _(folder):
    tensors = random_tensors(medusa.weights_of(MEDUSA, PUBLISHED))
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    write(folder, {"medusa_num_heads": 3}, tensors)
    (folder / "model.safetensors").rename(folder / MEDUSA_FILES[0])
    read = lambda: read_medusa(folder, TARGET.config, jnp.float32).params["heads"][0]["lm_head"]
    write_torch(folder / MEDUSA_FILES[1], tensors)
    np.testing.assert_array_equal(read(), tensors["0.1.weight"])
    write_torch(folder / MEDUSA_FILES[1], other)
    with warned(f"twice, in {MEDUSA_FILES[0]} and {MEDUSA_FILES[1]}, and .* tensors differ"):
        np.testing.assert_array_equal(read(), tensors["0.1.weight"])
    for path in folder.iterdir():
        path.unlink()
    tensors = random_tensors(eagle.weights_of(EAGLE))
    write(folder, RAW, tensors)
    write_torch(folder / "pytorch_model.bin", {name: t + 1 for name, t in tensors.items()})
    with warned(r"twice, in model\.safetensors and pytorch_model\.bin"):
        found = specjax.load_drafter(folder, TARGET)
    np.testing.assert_array_equal(found.params["fc"], tensors["fc.weight"])


@row("an adapter in place of a draft model")
def _(folder):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/base"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(FileNotFoundError, match=r"adapter of PEFT over .*'someone/base'.*Merge"):
        specjax.load_drafter(folder, TARGET)
