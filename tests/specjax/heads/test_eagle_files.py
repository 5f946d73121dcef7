"""Folders with EAGLE-3 heads: the namings of EAGLE and of speculators, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from head_folders import put, random_tensors, vocabulary_maps, without, write

import specjax
from specjax.cli import plan_document, plan_report
from specjax.cli.main import main
from specjax.config.speculation import SpeculationConfig
from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import FLAT_PREFIX, NUMBERED_PREFIX, Eagle3Config
from specjax.heads.namings.eagle_files import read_eagle3
from specjax.heads.specs import EagleDrafter
from specjax.models.base import ModelConfig
from specjax.planning import named_models, plans
from specjax.planning.named_models import find_drafter
from specjax.testing import tiny_model

TARGET = tiny_model(num_layers=6)
WIDTH, VOCAB, DRAFT_VOCAB = 32, 61, 20
LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}


def flat(**more):
    """A head as EAGLE and SpecForge write it: the target's embedding, its own head."""
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    return raw | {"model_type": "llama", "hidden_act": "silu"} | LAYER | more


def nested(**more):
    raw = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    raw |= {"draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True}
    return raw | {"transformer_layer_config": LAYER | {"model_type": "llama"}} | more


def config_of(**flags):
    own = ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=DRAFT_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_layers=flags.pop("num_layers", 1),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        norm_eps=1e-5,
    )
    return Eagle3Config(
        layers=own,
        target_hidden_size=WIDTH,
        target_vocab_size=VOCAB,
        aux_layers=flags.pop("aux_layers", (2, 3, 3)),
        maps_vocabulary=True,
        **flags,
    )


def masks_of(*shape):
    return put("mask_hidden", lambda _: np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def tensors_of(config, prefix, seed=0):
    """Returns random tensors of a head by the names of its file."""
    tensors = random_tensors(eagle3.weights_of(config, prefix), seed)
    return tensors | vocabulary_maps(DRAFT_VOCAB, VOCAB, seed)


def read(folder, **options):
    return read_eagle3(folder, TARGET.config, jnp.float32, **options)


def test_the_naming_of_eagle(tmp_path):
    config = config_of()
    tensors = tensors_of(config, FLAT_PREFIX)
    found = read(write(tmp_path, flat(), tensors))
    assert found.config == config
    np.testing.assert_array_equal(found.params["fc"], tensors["fc.weight"])
    first = found.params["layers"][0]
    np.testing.assert_array_equal(first["q_proj"], tensors["midlayer.self_attn.q_proj.weight"])
    assert found.params["target_ids"].tolist() == np.flatnonzero(tensors["t2d"]).tolist()
    assert found.notes == (
        "captures the inputs of layers 2, 3, 3 (the default, for lack of a word in config.json)",
    )


def test_the_naming_of_speculators(tmp_path):
    """Several layers, its own embedding, and norms before fc."""
    config = config_of(
        num_layers=2,
        aux_layers=(0, 2, 6),
        has_embedding=True,
        norm_before_residual=True,
        norm_output=True,
        norm_before_fc=True,
    )
    tensors = tensors_of(config, NUMBERED_PREFIX)
    tensors["verifier_norm.weight"] = np.ones(WIDTH, np.float32)
    raw = nested(eagle_aux_hidden_state_layer_ids=[0, 2, 6], norm_output=True)
    found = read(write(tmp_path, raw, tensors))
    assert found.config == config
    assert found.params["layers"][1]["q_proj"].shape == (32, WIDTH)


@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, {}, (1, 2, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, {}, (2, 3, 6)),
        ({"target_layer_ids": [-1, 2, 5]}, {}, (0, 3, 6)),  # of DeepSpec
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "target_layer_ids": [0, 1, 4]},
            {},
            (1, 2, 5),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, {"aux_layer_ids": (0, 1, 2)}, (0, 1, 2)),
    ],
)
def test_captured_layers_are_stored_in_several_ways(tmp_path, more, options, expected):
    folder = write(tmp_path, flat(**more), tensors_of(config_of(), FLAT_PREFIX))
    found = read(folder, **options)
    assert found.config.aux_layers == expected
    assert ", ".join(map(str, expected)) in found.notes[0]


@pytest.mark.parametrize(
    ("more", "change", "match"),
    [
        ({"hidden_size": 48}, None, "cannot use"),
        ({"vocab_size": 60}, None, "was trained for"),
        ({"target_hidden_size": 64}, None, "was trained for"),
        ({"draft_vocab_size": 21}, None, "must agree"),
        ({"num_attention_heads": None}, None, "num_attention_heads"),
        ({"hidden_act": "gelu"}, None, "hidden_act"),
        ({"logit_scale": 2.0}, None, "logit_scale"),
        ({"norm_output": 3}, None, "norm_output"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, None, "from 0 to 6"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "target_layer_ids": [1, 2, 5]},
            None,
            "capture different layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, None, "captured layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, None, "a list of layers"),
        ({}, without("d2t"), "d2t"),
        ({}, without("norm.weight"), "lacks 1 of"),
        ({}, without("midlayer.self_attn.q_proj.weight"), "expected an EAGLE-3 head, which has it"),
        ({}, put("d2t", lambda d2t: np.flatnonzero(np.arange(61) > 40)), "different tokens"),
        ({}, put("d2t", lambda d2t: d2t.astype(np.float32)), "a whole number"),
        ({}, put("norm.weight", lambda norm: norm[:-1]), "expected \\[32\\]"),
        ({}, put("fc.weight", lambda fc: fc.astype(np.int64)), "floating point"),
        ({}, put("fc.weight", lambda fc: fc[0]), "expected a matrix"),
        ({}, put("midlayer.self_attn.q_proj.weight", lambda q: q[0, 0]), "expected a matrix"),
        ({}, put("lm_head.weight", lambda head: head[:0]), "expected a matrix"),
        (
            {"draft_vocab_size": 70},
            put("lm_head.weight", lambda _: np.ones((70, 32), np.float32)),
            "no more than tokens",
        ),
        ({}, put("d2t", lambda d2t: d2t + np.int64(2**63 - 1 - d2t.max())), "different tokens"),
        ({}, put("d2t", lambda d2t: 0 * d2t), "t2d name different tokens"),
        ({}, put("t2d", lambda t2d: ~t2d), "t2d name different tokens"),
        ({}, put("t2d", lambda t2d: t2d | True), "t2d name different tokens"),
        ({}, put("layers.99999999999.x", lambda _: np.ones(3, np.float32)), "no use for"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, None, "sliding_attention"),
        ({"layer_types": 1}, None, "layer_types=1 of such a head must be a list"),
        ({"layer_types": "sliding_attention_x"}, None, "must be a list"),
        ({"norm_before_fc": True}, None, "norm_before_fc=true"),
        ({"fc_norm": True}, None, "fc_norm=true"),
        ({"attention_bias": True}, None, "attention_bias=true"),
        ({"head_dim": 16}, None, "head_dim=16, and midlayer.self_attn.q_proj.weight has 32 rows"),
        ({}, put("mask_hidden", lambda _: np.ones((1, 1, 96), np.float32)), "is missing; add it"),
        ({"mask_token_id": 3}, None, "there is no tensor 'mask_hidden'"),
        ({"parallel_drafting": True}, None, "there is no tensor 'mask_hidden'"),
        ({"architectures": ["PEagleDraftModel"]}, None, "there is no tensor 'mask_hidden'"),
        ({}, without("lm_head.weight"), "lm_head.weight"),
        ({}, put("markov_head.markov_w1.weight", lambda _: np.ones(3, np.float32)), "no use for"),
    ],
)
def test_what_is_refused(tmp_path, more, change, match):
    tensors = tensors_of(config_of(), FLAT_PREFIX)
    folder = write(tmp_path, flat(**more), tensors if change is None else change(tensors))
    with pytest.raises(ValueError, match=match):
        read(folder)


@pytest.mark.full
def test_a_plan_captures_the_layers_that_are_named(tmp_path, monkeypatch):
    folder = write(tmp_path, flat(), tensors_of(config_of(), FLAT_PREFIX))
    assert find_drafter(folder, TARGET.config, (0, 1, 1)).taps == (0, 1, 1)
    planned = []
    monkeypatch.setattr(named_models, "find_config", lambda name: TARGET.config)
    monkeypatch.setattr(plans, "make_plan", lambda request, _: planned.append(request.drafter.taps))
    monkeypatch.setattr(plan_report, "render", str)
    monkeypatch.setattr(plan_document, "to_dict", lambda plan, document: document)
    assert main(["plan", "it", "--drafter", str(folder), "--aux-layer-ids", "1,0,1"]) == 0
    assert planned == [(1, 0, 1)]


@pytest.mark.parametrize(
    ("raw", "prefix", "shape"),
    [
        (nested(speculators_model_type="peagle", mask_token_id=60), NUMBERED_PREFIX, (1, 1, 96)),
        (flat(ptd_token_id=60, pard_token=60, parallel_drafting=True), FLAT_PREFIX, (1, 96)),
        (flat(architectures=["PEagleDraftModel"], mask_token_id=60), NUMBERED_PREFIX, (1, 1, 96)),
    ],
    ids=["speculators", "as vLLM reads it", "SpecForge"],
)
def test_the_namings_of_p_eagle(tmp_path, raw, prefix, shape):
    is_nested = "transformer_layer_config" in raw
    config = config_of(num_layers=2, mask_token_id=60, norm_before_residual=is_nested)
    tensors = masks_of(*shape)(tensors_of(dataclasses.replace(config, mask_token_id=None), prefix))
    folder = write(tmp_path, raw, tensors)
    how = {"method": "eagle3", "model": str(folder), "parallel_drafting": True}
    loaded = specjax.load_drafter(str(folder), TARGET, SpeculationConfig(**how))
    assert loaded.spec == EagleDrafter(config) == find_drafter(folder, TARGET.config)
    np.testing.assert_array_equal(loaded.params["mask_hidden"], np.arange(96))
    assert loaded.notes[1] == "P-EAGLE: drafts all tokens in one pass, with token 60 as their mask"


@pytest.mark.parametrize(
    ("more", "shape", "match"),
    [
        ({"mask_token_id": 61}, (1, 1, 96), "mask_token_id=61 is no token"),
        ({"mask_token_id": 5, "pard_token": 6}, (1, 1, 96), "5.*6.*add it as 'mask_token_id'"),
        ({"mask_token_id": 5, "parallel_drafting": False}, (1, 1, 96), "parallel_drafting=false"),
        ({"mask_token_id": 5}, (1, 1, 64), "mask_hidden is .64., expected .96."),
        ({"mask_token_id": 5}, (3, 32), "expected one state"),
    ],
)
def test_what_is_refused_of_p_eagle(tmp_path, more, shape, match):
    tensors = masks_of(*shape)(tensors_of(config_of(), FLAT_PREFIX))
    with pytest.raises(ValueError, match=match):
        read(write(tmp_path, flat(**more), tensors))


def test_a_head_whose_class_is_a_model_is_known_by_its_vocabulary(tmp_path):
    raw = flat(architectures=["LlamaForCausalLM"])
    folder = write(tmp_path, raw, tensors_of(config_of(), FLAT_PREFIX))
    assert specjax.load_drafter(folder, TARGET).spec == EagleDrafter(config_of())


def test_an_order_of_all_tokens_is_read(tmp_path):
    """The head says every token, by numbers of its own."""
    order = np.random.default_rng(0).permutation(VOCAB)
    tensors = tensors_of(config_of(), FLAT_PREFIX)
    tensors["lm_head.weight"] = np.ones((VOCAB, WIDTH), np.float32)
    tensors |= {"d2t": order - np.arange(VOCAB), "t2d": np.ones(VOCAB, bool)}
    found = read(write(tmp_path, flat(draft_vocab_size=VOCAB), tensors))
    assert found.params["target_ids"].tolist() == order.tolist()


def test_a_table_of_its_own_is_not_the_target_s_head(tmp_path):
    tensors = without("lm_head.weight")(tensors_of(config_of(has_embedding=True), FLAT_PREFIX))
    for name in ("d2t", "t2d"):
        del tensors[name]
    raw = flat(draft_vocab_size=VOCAB, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        read(write(tmp_path, raw, tensors))


def test_a_map_of_a_matrix_that_is_not_there_is_refused(tmp_path):
    tensors = without("lm_head.weight")(tensors_of(config_of(), FLAT_PREFIX))
    tensors |= {"d2t": np.roll(np.arange(VOCAB), 1) - np.arange(VOCAB)}
    raw = flat(draft_vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"'d2t' numbers the tokens of lm_head\.weight"):
        read(write(tmp_path, raw, tensors))
    tensors["d2t"] = np.zeros(VOCAB, np.int64)  # says nothing
    assert not read(write(tmp_path, raw, tensors)).config.maps_vocabulary


@pytest.mark.parametrize("value", ["independent", "eagle4", True])
def test_an_unknown_kind_of_speculators_is_refused(tmp_path, value):
    raw = flat(speculators_model_type=value)
    folder = write(tmp_path, raw, tensors_of(config_of(), FLAT_PREFIX))
    with pytest.raises(ValueError, match=f"speculators_model_type={value!r} is not supported"):
        specjax.load_drafter(folder, TARGET)


def test_what_torch_did_not_save_is_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    (tmp_path / "config.json").write_text(json.dumps(flat()))
    with pytest.raises(ValueError, match="weights_only=True"):
        specjax.load_drafter(tmp_path, TARGET)


def test_a_head_of_another_target_is_refused(tmp_path):
    folder = write(tmp_path, flat(), tensors_of(config_of(aux_layers=(2, 3, 3)), FLAT_PREFIX))
    loaded = specjax.load_drafter(folder, TARGET)
    for other in (tiny_model(vocab_size=70, num_layers=6), tiny_model(num_layers=2)):
        with pytest.raises(ValueError, match="was trained for it"):
            specjax.load_drafter(loaded, other)


def test_layers_are_any_sequence(tmp_path):
    folder = write(tmp_path, flat(), tensors_of(config_of(), FLAT_PREFIX))
    loaded = specjax.load_drafter(folder, TARGET, aux_layer_ids=range(4, 7))
    assert loaded.spec.taps == (4, 5, 6)
    assert "captured after the final norm" in loaded.notes[0]


@pytest.mark.full
def test_a_folder_is_a_drafter(tmp_path):
    """In bfloat16, under generate; tokens are those of plain decoding."""
    tensors = tensors_of(config_of(), FLAT_PREFIX)
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
        for name, tensor in tensors.items()
    }
    folder = write(tmp_path, flat(), tensors)
    loaded = specjax.load_drafter(folder, TARGET)
    assert loaded.params["fc"].dtype == jnp.float32  # as the target's weights
    assert "captures the inputs of layers 2, 3, 3" in repr(loaded)
    sampling = specjax.SamplingParams(temperature=0.8, max_tokens=12, seed=1)
    how = {"policy": "fixed", "num_speculative_tokens": 2}
    calls = [
        specjax.generate(TARGET, [[1, 2, 3]], drafter=of, speculative_config=how, sampling=sampling)
        for of in (str(folder), None)
    ]
    assert calls[0][0].token_ids == calls[1][0].token_ids
    assert calls[0].stats.acceptance.num_drafted > 5


def test_captured_layers_are_said_for_heads_alone():
    with pytest.raises(ValueError, match="head over the target, and the drafter is 'ngram'"):
        specjax.load_drafter("ngram", TARGET, aux_layer_ids=(0, 1, 2))
