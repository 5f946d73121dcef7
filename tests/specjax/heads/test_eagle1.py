"""EAGLE heads: against their equations written out in numpy, in the engine, and from folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from head_equations import TARGET, VOCAB
from head_folders import put, random_tensors, without, write
from pair_heads import (
    Reference,
    Rows,
    check_all_accepted,
    check_texts,
    copied_target,
    own_layers,
)
from torch_archives import write_torch

import specjax
from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.namings.eagle1_files import read_eagle
from specjax.heads.specs import EagleDrafter
from specjax.models.base import RopeConfig
from specjax.testing import check_drafter
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth

WIDTH = TARGET.config.hidden_size
FLAGS = {
    "plain": {},
    "bias": {"fc_bias": True, "qkv_bias": True},
    "own tables": {"has_embedding": True, "has_head": True, "rope": RopeConfig(theta=123.0)},
    "two layers": {"num_layers": 2},
}


def config_of(target=TARGET, **flags):
    of_layers = ("num_layers", "qkv_bias", "rope", "num_kv_heads")
    own = own_layers(**{key: flags.pop(key) for key in of_layers if key in flags})
    depth = target.config.num_layers
    return EagleConfig(layers=own, target_vocab_size=VOCAB, aux_layers=(depth,), **flags)


def make_head(name="plain", seed=1):
    config = config_of(**FLAGS[name])
    return config, eagle.init(jax.random.key(seed), config, std=0.2)


def loaded(name="plain", shape=None):
    config, params = make_head(name)
    return specjax.LoadedDrafter("head", EagleDrafter(config, shape), params)


@pytest.mark.full
@pytest.mark.parametrize("name", quick(FLAGS, "plain"))
def test_what_it_says_is_what_its_equations_say(name):
    config, params = make_head(name)
    check_texts(Reference(config, params), Rows(config, params, 3), 1, VOCAB)


@pytest.mark.parametrize("temperature", quick([0.0, 0.8], slow=[0.0]))
def test_tokens_are_those_of_plain_decoding(temperature):
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    config = {"policy": "fixed", "num_speculative_tokens": 3}
    plain = specjax.generate(TARGET, prompts, sampling=sampling)
    found = specjax.generate(
        TARGET, prompts, drafter=loaded(), speculative_config=config, sampling=sampling
    )
    assert [out.token_ids for out in found] == [out.token_ids for out in plain]
    assert found.stats.acceptance.num_drafted > 20


@pytest.mark.parametrize("count", quick([1, 3], 3, slow=[1]))
@pytest.mark.full
def test_a_head_that_copies_its_target_is_always_accepted(count):
    target = copied_target()
    config = config_of(target, qkv_bias=True, num_kv_heads=4)
    params = eagle.init(jax.random.key(0), config)
    (layer,) = target.params["layers"]
    layer = {name: leaf for name, leaf in layer.items() if name != "input_norm"}
    only_embedding = jnp.eye(WIDTH, 2 * WIDTH)
    params |= {"fc": only_embedding, "layers": (layer,)}
    drafter = specjax.LoadedDrafter("copy", EagleDrafter(config), params)
    check_all_accepted(target, drafter, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        None,
        static_shapes.from_rank_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
        Growth(3, 2, 5).cut(3),
    ],
    ids=["chain", "tree", "grown"],
)
def test_it_keeps_the_contract_of_drafters(shape):
    check_drafter(loaded("bias", shape), TARGET)


# Folders.


def raw_of(**more):
    """The config.json of published heads, whose class is that of a whole model."""
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    return raw | sizes | heads | {"rms_norm_eps": 1e-6, "bias": False} | more


def tensors_of(**flags):
    return random_tensors(eagle.weights_of(config_of(**flags)))


def read(folder, **options):
    return read_eagle(folder, TARGET.config, jnp.float32, **options)


def test_a_published_folder(tmp_path):
    tensors = tensors_of(has_embedding=True, fc_bias=True)
    found = read(write(tmp_path, raw_of(), tensors))
    assert found.config == config_of(has_embedding=True, fc_bias=True)
    np.testing.assert_array_equal(found.params["fc"], tensors["fc.weight"])
    np.testing.assert_array_equal(found.params["fc_bias"], tensors["fc.bias"])
    (layer,) = found.params["layers"]
    assert "input_norm" not in layer
    np.testing.assert_array_equal(layer["q_proj"], tensors["layers.0.self_attn.q_proj.weight"])
    assert found.notes == ("reads the last hidden state of the target, after the final norm",)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"qkv_bias": True}, {"qkv_bias": True}),
        ({"num_layers": 2}, {"num_layers": 2}),
        ({"has_head": True, "has_embedding": True}, {"has_head": True, "has_embedding": True}),
    ],
)
def test_tensors_tell_the_flags(tmp_path, flags, expected):
    found = read(write(tmp_path, raw_of(), tensors_of(**flags)))
    assert found.config == config_of(**expected)


@pytest.mark.full
@pytest.mark.parametrize("class_name", ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_it_is_known_by_its_class_or_its_tensors(tmp_path, class_name):
    folder = write(tmp_path, raw_of(), tensors_of())
    drafter = specjax.load_drafter(folder, TARGET)
    assert drafter.spec == EagleDrafter(config_of())
    write(tmp_path, raw_of(architectures=[class_name]), tensors_of())
    assert specjax.load_drafter(folder, TARGET).spec == drafter.spec
    out = specjax.generate(
        TARGET,
        [[1, 2, 3]],
        speculative_config={"method": "eagle", "model": str(folder), "num_speculative_tokens": 2},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=4),
    )
    assert out.stats.acceptance.num_drafted > 0


def test_a_copy_of_the_target_s_embedding_is_not_kept(tmp_path):
    table = np.asarray(TARGET.params["embed_tokens"])
    tensors = tensors_of() | {"embed_tokens.weight": table}
    drafter = specjax.load_drafter(write(tmp_path, raw_of(), tensors), TARGET)
    assert drafter.spec == EagleDrafter(config_of())
    assert "embed_tokens" not in drafter.params
    assert "a copy of the target's" in drafter.notes[-1]
    tensors["embed_tokens.weight"] = table + np.eye(*table.shape, dtype=np.float32)
    drafter = specjax.load_drafter(write(tmp_path, raw_of(), tensors), TARGET)
    assert "embed_tokens" in drafter.params
    # The target of a training loop has no weights yet, and they will change.
    folder = write(tmp_path, raw_of(), tensors_of() | {"embed_tokens.weight": table})
    decoder = specjax.build_decoder(TARGET, drafter=folder)
    assert "embed_tokens" in decoder._setup.abstract_drafter
    scaled = specjax.testing.tiny_model(embedding_multiplier=2.0)
    tensors["embed_tokens.weight"] = np.asarray(scaled.params["embed_tokens"])
    drafter = specjax.load_drafter(write(tmp_path, raw_of(), tensors), scaled)
    assert "embed_tokens" in drafter.params


@pytest.mark.parametrize(
    ("more", "change", "match"),
    [
        ({"hidden_size": 16}, dict, "for a target of 16 hidden numbers"),
        ({"vocab_size": 60}, dict, "60 tokens"),
        ({"hidden_act": "gelu"}, dict, "hidden_act"),
        ({}, put("fc.weight", lambda w: np.zeros((WIDTH, 3 * WIDTH), np.float32)), "EAGLE-3"),
        ({}, put("fc.weight", lambda w: w[:, 0]), "expected a matrix"),
        ({}, without("layers.0.mlp.up_proj.weight"), "lacks 1 of the"),
        ({}, put("norm.weight", lambda w: np.ones(WIDTH, np.float32)), "norm.weight"),
        ({}, put("layers.0.mlp.up_proj.weight", lambda w: w[:-1]), r"expected \[48, 32\]"),
        ({"attention_bias": True}, dict, "q_proj.bias"),
        (
            {},
            put("layers.0.input_layernorm.weight", lambda w: np.ones(WIDTH, np.float32)),
            "no such",
        ),
        ({"layer_types": ["sliding_attention"]}, dict, "sliding_attention"),
        (
            {"draft_vocab_size": 4},
            lambda tensors: {
                **tensors,
                "lm_head.weight": np.ones((4, WIDTH), np.float32),
                "d2t": np.arange(4),
            },
            "a part of the vocabulary",
        ),
        ({}, put("mask_hidden", lambda w: np.ones((1, 1, WIDTH), np.float32)), "P-EAGLE"),
    ],
)
def test_what_is_refused(tmp_path, more, change, match):
    folder = write(tmp_path, raw_of(**more), change(tensors_of()))
    with pytest.raises(ValueError, match=match):
        read(folder)


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_folders_that_vllm_converted(tmp_path, prefix):
    """The config of the layers is nested; norms that EAGLE has not are stored and not used."""
    config = config_of(has_embedding=True, has_head=True)
    tensors = random_tensors(eagle.weights_of(config))
    bare = ("fc.weight", "lm_head.weight")
    stored = {name if name in bare else prefix + name: t for name, t in tensors.items()}
    ones = np.ones(WIDTH, np.float32)
    stored |= {f"{prefix}layers.0.input_layernorm.weight": ones, f"{prefix}norm.weight": ones}
    raw = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": raw_of()}
    folder = write(tmp_path, raw | {"truncated_vocab_size": None}, stored)
    found = read(folder)
    assert found.config == config
    np.testing.assert_array_equal(found.params["fc"], tensors["fc.weight"])
    assert "are not used, as in vLLM" in found.notes[-1]
    assert specjax.load_drafter(folder, TARGET).spec == EagleDrafter(
        specjax.load_drafter(folder, TARGET).spec.config
    )
    with pytest.warns(UserWarning, match="another rms_norm_eps at the top than in its model"):
        changed = read(write(tmp_path, raw | {"rms_norm_eps": 1e-5}, stored))
    assert changed.config.layers.norm_eps == 1e-5


def test_a_part_of_the_vocabulary_as_vllm_has_it(tmp_path):
    tokens = np.array([7, 2, 60, 33, 5])
    of_five = dataclasses.replace(own_layers(), vocab_size=5)
    config = dataclasses.replace(
        config_of(has_embedding=True, has_head=True), layers=of_five, maps_vocabulary=True
    )
    tensors = random_tensors(eagle.weights_of(config)) | {"token_map": tokens}
    raw = {"model_type": "eagle", "model": raw_of(), "truncated_vocab_size": 5}
    found = read(write(tmp_path, raw, tensors))
    assert found.config == config
    np.testing.assert_array_equal(found.params["target_ids"], tokens)
    assert found.params["lm_head"].shape == (5, WIDTH)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"skip_prenorm": False}, "skip_prenorm=False is not supported"),
        ({"skip_output_norm": False}, "skip_output_norm=False is not supported"),
        ({"add_para_norm": True}, "add_para_norm=True is not supported"),
        ({"truncated_vocab_size": 5}, "and there is none"),
    ],
)
def test_what_is_refused_of_vllm(tmp_path, more, match):
    raw = {"model_type": "eagle", "model": raw_of(), **more}
    with pytest.raises(ValueError, match=match):
        read(write(tmp_path, raw, tensors_of()))


def test_p_eagle_of_one_hidden_state_is_refused_by_name(tmp_path):
    """Its class is that of P-EAGLE, its tensors are EAGLE's."""
    raw = raw_of(architectures=["PEagleForCausalLM"], mask_token_id=5)
    mask = np.ones((1, 1, WIDTH), np.float32)
    folder = write(tmp_path, raw, tensors_of() | {"mask_hidden": mask})
    with pytest.raises(ValueError, match="P-EAGLE over one hidden state") as error:
        specjax.load_drafter(str(folder), TARGET)
    assert str(folder) in str(error.value)


def test_a_tied_target_lends_its_flag(tmp_path):
    """config.json is often that of the target; the head is the target's in any case."""
    tensors = tensors_of(has_embedding=True)
    found = read(write(tmp_path, raw_of(tie_word_embeddings=True), tensors))
    assert found.config == config_of(has_embedding=True)


@pytest.mark.parametrize("method", [None, "eagle"])
def test_a_head_that_torch_saved(tmp_path, method):
    """As most published EAGLE heads are."""
    folder = write(tmp_path, raw_of(), tensors_of())
    (folder / "model.safetensors").unlink()
    write_torch(folder / "pytorch_model.bin", tensors_of())
    config = specjax.SpeculationConfig(method=method, model=str(folder))
    read_by_torch = specjax.load_drafter(str(folder), TARGET, config)
    write(tmp_path, raw_of(), tensors_of())
    expected = specjax.load_drafter(str(folder), TARGET, config)
    assert read_by_torch.spec == expected.spec
    jax.tree.map(np.testing.assert_array_equal, read_by_torch.params, expected.params)


def test_captured_layers_are_not_its_to_choose(tmp_path):
    with pytest.raises(ValueError, match="reads the last hidden state"):
        read(write(tmp_path, raw_of(), tensors_of()), aux_layer_ids=[1])


@pytest.mark.parametrize("depth", [1, 9])
def test_a_head_of_another_target_is_refused(depth):
    config, params = make_head()
    other = dataclasses.replace(config, aux_layers=(depth,))
    drafter = specjax.LoadedDrafter("head", EagleDrafter(other), params)
    with pytest.raises(ValueError, match=f"tokens and {depth} layers"):
        specjax.load_drafter(drafter, TARGET)


def test_a_whole_model_is_no_head(tmp_path):
    """Neither a model's folder nor one whose weights cannot be read."""
    raw = raw_of()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        specjax.load_drafter(tmp_path, TARGET)
