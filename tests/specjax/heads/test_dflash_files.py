"""Folders with DFlash heads: as z-lab and speculators write them, and what is refused."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from head_folders import put, random_tensors, vocabulary_maps, without, write

import specjax
from specjax.config.vllm_json import HEADS
from specjax.heads.equations import dflash
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.kinds import KINDS
from specjax.heads.namings.dflash_files import read_dflash
from specjax.heads.specs import DFlashDrafter
from specjax.models.base import ModelConfig, RopeConfig
from specjax.planning.named_models import find_drafter
from specjax.testing import tiny_model

TARGET = tiny_model(num_layers=6)
WIDTH, VOCAB, DRAFT_VOCAB, MASK = 32, 61, 20, 60
LAYERS = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


# Of DFlash2: in dflash_config as z-lab writes it, at the top in speculators.
SELECTOR = {
    "conv_kernel_size": 3,
    "conv_group_size": 8,
    "selector_rank": 6,
    "selector_top_k": 7,
}


def flat(said=None, **more):
    """A head as z-lab writes it: the target's embedding and head."""
    said = {"mask_token_id": MASK, "target_layer_ids": [1, 4]} | (said or {})
    raw = {"architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 6}
    return raw | LAYERS | {"dflash_config": said} | more


def nested(**more):
    raw = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [2, 5],
        "block_size": 4,
        "draft_vocab_size": DRAFT_VOCAB,
        "mask_token_id": MASK,
    }
    return raw | {"transformer_layer_config": LAYERS} | more


def config_of(own=None, **flags):
    sizes = {
        "architecture": "llama",
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e6),
        "qk_norm": True,
    }
    defaults = {
        "target_vocab_size": VOCAB,
        "target_hidden_size": WIDTH,
        "aux_layers": (2, 5),
        "block_size": 4,
        "mask_token_id": MASK,
        "causal_layers": (False, False),
    }
    return DFlashConfig(layers=ModelConfig(**sizes | (own or {})), **defaults | flags)


def tensors_of(config, seed=0):
    tensors = random_tensors(dflash.weights_of(config), seed)
    maps = vocabulary_maps(DRAFT_VOCAB, VOCAB, seed) if config.maps_vocabulary else {}
    return tensors | maps


OWN_TABLES = {"has_embedding": True, "has_head": True, "maps_vocabulary": True}


def read(folder, **options):
    return read_dflash(folder, TARGET.config, jnp.float32, **options)


def test_the_naming_of_z_lab(tmp_path):
    tensors = tensors_of(config_of())
    found = read(write(tmp_path, flat(), tensors))
    assert found.config == config_of()
    np.testing.assert_array_equal(found.params["fc"], tensors["fc.weight"])
    layer = found.params["layers"][1]
    np.testing.assert_array_equal(layer["k_norm"], tensors["layers.1.self_attn.k_norm.weight"])
    assert found.notes == (
        "captures the inputs of layers 2, 5 (dflash_config.target_layer_ids)",
        "drafts blocks of 4 with token 60 as their mask",
    )


def test_the_naming_of_speculators(tmp_path):
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES)
    tensors = tensors_of(config)
    found = read(write(tmp_path, nested(), tensors))
    assert found.config == config
    assert found.params["target_ids"].tolist() == np.flatnonzero(tensors["t2d"]).tolist()


@pytest.mark.parametrize(
    ("raw", "options", "expected"),
    [
        (flat({"target_layer_ids": None}), {}, {"aux_layers": (2, 4)}),
        (flat(), {"aux_layer_ids": (0, 6)}, {"aux_layers": (0, 6)}),
        (flat({"block_size": 8}, block_size=None), {}, {"block_size": 8}),
        (flat({"causal": True}), {}, {"causal_layers": (True, True)}),
        (
            flat({"sample_from_anchor": True}, block_size=1),
            {},
            {"samples_from_anchor": True, "block_size": 1},
        ),
        (
            flat(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
            {},
            {"own": {"layer_windows": (8, None)}, "causal_layers": (True, False)},
        ),
    ],
    ids=["default layers", "layers", "size inside", "causal", "anchor", "window"],
)
def test_what_a_config_says(tmp_path, raw, options, expected):
    config = config_of(**expected)
    assert read(write(tmp_path, raw, tensors_of(config)), **options).config == config


@pytest.mark.parametrize(
    ("raw", "change", "match"),
    [
        (flat(vocab_size=60), None, "was trained for"),
        (flat(hidden_size=64), None, "was trained for"),
        (flat(num_target_layers=7), None, "this target has 6 layers"),
        (flat(hidden_act="gelu"), None, "hidden_act"),
        (flat(num_hidden_layers=3), None, "lacks 11 of"),
        (flat(block_size=1), None, "block_size"),
        (flat(block_size=65), None, "block_size"),
        (flat(block_size=None), None, "block_size"),
        (flat({"block_size": 5}), None, "block_size=4, and dflash_config.block_size=5"),
        (flat({"block_size": 0}), None, "block_size=4, and dflash_config.block_size=0"),
        (flat({"block_size": 1}), None, "block_size=4, and dflash_config.block_size=1"),
        (flat(mask_token_id=59), None, "mask_token_id=59, and dflash_config.mask_token_id=60"),
        (
            flat({"sample_from_anchor": True}, sample_from_anchor=False),
            None,
            "sample_from_anchor=False, and dflash_config.sample_from_anchor=True",
        ),
        (flat({"mask_token_id": None}), None, "mask_token_id is missing"),
        (flat({"mask_token_id": 61}), None, "no token"),
        (flat({"target_layer_ids": [1, 6]}), None, "from -1 to 5"),
        (flat({"target_layer_ids": [1]}), None, "captured layers"),
        (flat({"target_layer_ids": 3}), None, "a list of layers"),
        (flat({"use_swa": True}), None, "use_swa"),
        (flat({"attention_sink_bias": True}), None, "attention_sink_bias"),
        (flat({"projector_type": "markov"}), None, "projector_type"),
        (flat(dflash_config=3), None, "must be an object"),
        (flat(draft_vocab_size=20), None, "must agree"),
        (
            flat(
                layer_types=["sliding_attention"] * 2,
                sliding_window=8,
                sliding_window_non_causal=True,
            ),
            None,
            "sliding_window=8 of layers that are not causal",
        ),
        (flat(SELECTOR), None, "conv_group_size"),
        (flat(), without("norm.weight"), "lacks 1 of"),
        (
            flat(),
            without("layers.0.self_attn.q_proj.weight"),
            "expected a DFlash head, which has it",
        ),
        (flat(), put("hidden_norm.weight", lambda norm: norm[:-1]), "expected \\[32\\]"),
        (flat(), put("markov_head.markov_w1.weight", lambda _: np.ones(3, np.float32)), "DSpark"),
        (flat(), put("layers.0.attention_conv.x", lambda _: np.ones(3, np.float32)), "DFlash2"),
        (flat(), put("layers.2.x", lambda _: np.ones(3, np.float32)), "no use for"),
    ],
)
def test_what_is_refused(tmp_path, raw, change, match):
    tensors = tensors_of(config_of())
    folder = write(tmp_path, raw, tensors if change is None else change(tensors))
    with pytest.raises(ValueError, match=match):
        read(folder)


OF_DFLASH2 = {
    "conv_kernel_size": 3,
    "conv_group_size": 8,
    "markov_rank": 6,
    "markov_kind": "selector",
    "selector_top_k": 7,
}


def dflash2(said=None, **more):
    """A DFlash2 head as z-lab writes it."""
    return flat(SELECTOR | (said or {}), architectures=["DFlash2DraftModel"], **more)


def nested2(**more):
    kind = {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
    return nested() | kind | SELECTOR | {"draft_vocab_size": VOCAB} | more


@pytest.mark.full
def test_a_dflash2_head_of_z_lab(tmp_path):
    config = config_of(**OF_DFLASH2)
    tensors = tensors_of(config)
    raw = dflash2({"output_multiplier": 1.0}, input_embedding_scale=1.0)
    found = read(write(tmp_path, raw, tensors))
    assert found.config == config
    stored = {
        "markov_w1": "predecessor_codebook",
        "markov_w2": "successor_codebook",
        "hidden_projection": "hidden_projection.weight",
    }
    for leaf, name in stored.items():
        np.testing.assert_array_equal(found.params[leaf], tensors[f"candidate_selector.{name}"])
    for conv in ("attention_conv", "mlp_conv"):
        for leaf, name in (("base", "base_kernel"), ("proj", "kernel_projection.weight")):
            of_file = tensors[f"layers.1.{conv}.{name}"]
            np.testing.assert_array_equal(found.params["layers"][1][f"{conv}_{leaf}"], of_file)
    out = specjax.generate(
        TARGET,
        [1, 2, 3],
        speculative_config={"method": "dflash", "model": str(tmp_path)},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=6),
    )
    assert out.stats.acceptance is not None


def test_a_dflash2_head_of_speculators(tmp_path):
    config = config_of(**OF_DFLASH2, has_embedding=True, has_head=True)
    folder = write(tmp_path, nested2(), tensors_of(config))
    assert read(folder).config == config
    usual = OF_DFLASH2 | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
    config = config_of(**usual | {"markov_rank": 256}, has_embedding=True, has_head=True)
    raw = {key: value for key, value in nested2().items() if key not in SELECTOR}
    assert read(write(tmp_path, raw, tensors_of(config))).config == config


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}


@pytest.mark.parametrize(
    ("raw", "causal_layers"),
    [
        (dflash2(**SLIDING), (True, False)),
        (dflash2(**SLIDING, is_causal=False), (False, False)),
        (dflash2(**SLIDING, is_causal=True), (True, True)),
        (dflash2({"causal": False}, **SLIDING), (False, False)),
        (dflash2({"causal": True}, **SLIDING, is_causal=False), (False, False)),
        (dflash2(**SLIDING, sliding_window_non_causal=True), (False, False)),
        (nested2(transformer_layer_config=LAYERS | SLIDING), (False, False)),
        (
            nested2(transformer_layer_config=LAYERS | SLIDING, sliding_window_non_causal=False),
            (True, False),
        ),
    ],
)
def test_which_layers_are_causal(tmp_path, raw, causal_layers):
    own = {"has_embedding": True, "has_head": True} if "speculators_model_type" in raw else {}
    windows = {"layer_windows": (40, None)}
    config = config_of(windows, **OF_DFLASH2, **own, causal_layers=causal_layers)
    assert read(write(tmp_path, raw, tensors_of(config))).config == config


@pytest.mark.parametrize(
    ("raw", "change", "match"),
    [
        (dflash2({"selector_top_k": None}), None, "'selector_top_k' is missing"),
        (dflash2({"selector_top_k": VOCAB + 1}), None, "selector_top_k=62"),
        (dflash2({"selector_rank": 5}), None, r"expected \[5, 32\]"),
        (dflash2({"conv_kernel_size": 5}), None, "conv_kernel_size=5"),
        (dflash2({"conv_kernel_size": 2}), None, r"expected \[2, 2, 32\]"),
        (dflash2({"conv_group_size": 5}), None, "must divide"),
        (dflash2({"sample_from_anchor": True}), None, "sample_from_anchor=true"),
        (dflash2({"input_embedding_scale": 2.0}), None, "input_embedding_scale=2.0"),
        (dflash2(output_multiplier=0.5), None, "output_multiplier=0.5"),
        (dflash2(final_logit_softcapping=30.0), None, "final_logit_softcapping=30.0"),
        (dflash2({"markov": 1}), None, "markov"),
        (
            dflash2(),
            without("layers.1.mlp_conv.kernel_projection.weight"),
            "lacks 1 of .* a DFlash2 head",
        ),
        (dflash2(), put("layers.0.mlp_conv.x", lambda _: np.ones(3, np.float32)), "no use for"),
        (dflash2(), put("markov_head.x", lambda _: np.ones(3, np.float32)), "is of DSpark"),
        (flat(), None, "is of DFlash2, which is not supported in a config.json of DFlash"),
        (
            nested2() | {"speculators_model_type": "dspark"},
            None,
            "is of DFlash2, which is not supported in a config.json of DSpark",
        ),
    ],
)
def test_what_is_refused_of_dflash2(tmp_path, raw, change, match):
    tensors = tensors_of(config_of(**OF_DFLASH2))
    folder = write(tmp_path, raw, tensors if change is None else change(tensors))
    with pytest.raises(ValueError, match=match):
        read(folder)


def test_dflash2_over_a_part_of_the_vocabulary_is_refused(tmp_path):
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, **OF_DFLASH2)
    folder = write(tmp_path, nested2(draft_vocab_size=DRAFT_VOCAB), tensors_of(config))
    with pytest.raises(ValueError, match="over a part of the vocabulary"):
        read(folder)


def dspark(**more):
    kind = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    return nested() | kind | {"markov_rank": 6} | more


@pytest.mark.parametrize("class_name", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_a_dspark_head_of_flat_keys(tmp_path, class_name):
    config = config_of(**MARKOV)
    raw = flat(architectures=[class_name], mask_token_id=MASK, target_layer_ids=[1, 4])
    del raw["dflash_config"]
    found = read(write(tmp_path, raw, tensors_of(config)))
    assert found.config == config
    assert found.notes[0] == "captures the inputs of layers 2, 5 (target_layer_ids)"
    loaded = specjax.load_drafter(tmp_path, TARGET)
    assert loaded.spec == DFlashDrafter(config)


# Of DSpark, as SpecForge has it in dflash_config; the last two are of training alone.
SPECFORGE = {
    "projector_type": "dspark",
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "attention_mode": "gqa",
    "confidence_head_alpha": 1.0,
}


def test_a_dspark_head_of_specforge(tmp_path):
    config = config_of(**MARKOV, has_confidence=True, confidence_reads_token=True)
    tensors, raw = tensors_of(config), {"architectures": ["DSparkDraftModel"]}
    assert read(write(tmp_path, flat(SPECFORGE, **raw), tensors)).config == config
    # As it rewrites config.json for a server: at the top, too.
    raw = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6, "markov_head_type": "vanilla"}
    assert read(write(tmp_path, flat(SPECFORGE, **raw), tensors)).config == config
    for more, match in (
        ({"markov_rank": 5}, "markov_rank=5, and dflash_config.markov_rank=6"),
        ({"said": SPECFORGE | {"markov_rank": 5}}, "markov_rank=6, and dflash_config.markov_r"),
        ({"said": SPECFORGE | {"enable_confidence_head": False}}, "enable_confidence_head=False"),
        ({"said": SPECFORGE | {"projector_type": "domino"}}, "projector_type='domino'"),
    ):
        folder = write(tmp_path, flat(**{"said": SPECFORGE} | raw | more), tensors)
        with pytest.raises(ValueError, match=match):
            read(folder)
    # What is of DSpark is no key of DFlash.
    folder = write(tmp_path, flat({"markov_rank": 6}), tensors_of(config_of()))
    with pytest.raises(ValueError, match="markov_rank"):
        read(folder)
    folder = write(tmp_path, flat({"projector_type": "dflash"}), tensors_of(config_of()))
    assert read(folder).config == config_of()


MARKOV = {"samples_from_anchor": True, "markov_rank": 6}


@pytest.mark.full
def test_a_dspark_head(tmp_path):
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, **MARKOV)
    tensors = tensors_of(config)
    folder = write(tmp_path, dspark(), tensors)
    found = read(folder)
    assert found.config == config
    for name in ("markov_w1", "markov_w2"):
        np.testing.assert_array_equal(found.params[name], tensors[f"markov_head.{name}.weight"])
    out = specjax.generate(
        TARGET,
        [1, 2, 3],
        speculative_config={"method": "dspark", "model": str(folder)},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=6),
    )
    assert out.stats.acceptance is not None
    plain = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, samples_from_anchor=True)
    for rank in (0, None):
        found = read(write(tmp_path, dspark(markov_rank=rank), tensors_of(plain)))
        assert found.config == plain
        assert found.notes[-1] == "has no Markov head: each token is drafted as DFlash does"
        write(tmp_path, dspark(markov_rank=rank), tensors)
        with pytest.raises(ValueError, match=f"markov_rank={rank}, and .*markov_w1.* 6 columns"):
            read(folder)
    write(tmp_path, dspark(sample_from_anchor=False), tensors_of(config))
    assert not read(folder).config.samples_from_anchor


@pytest.mark.parametrize("reads_token", [True, False])
def test_a_confidence_head(tmp_path, reads_token):
    sure = {"has_confidence": True, "confidence_reads_token": reads_token}
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, **MARKOV, **sure)
    tensors = tensors_of(config)
    flags = {"enable_confidence_head": True, "confidence_head_with_markov": reads_token}
    for more in ({}, flags):
        found = read(write(tmp_path, dspark(**more), tensors))
        assert found.config == config
        for leaf, of_file in (("confidence", "weight"), ("confidence_bias", "bias")):
            stored = tensors[f"confidence_head.proj.{of_file}"]
            np.testing.assert_array_equal(found.params[leaf], stored)
        assert "ranks drafts over rows" in found.notes[-1]
    write(tmp_path, dspark(confidence_head_with_markov=not reads_token), tensors)
    with pytest.raises(ValueError, match="confidence_head_with_markov="):
        read(tmp_path)
    write(tmp_path, dspark(enable_confidence_head=False), tensors)
    with pytest.raises(ValueError, match="enable_confidence_head=False"):
        read(tmp_path)


@pytest.mark.parametrize(("kind", "name"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_kinds_of_markov_heads(tmp_path, kind, name):
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, **MARKOV, markov_kind=kind)
    tensors = tensors_of(config)
    found = read(write(tmp_path, dspark(markov_head_type=kind), tensors))
    assert found.config == config
    for leaf, of_file in ((name, "weight"), (f"{name}_bias", "bias")):
        stored = tensors[f"markov_head.{name}.{of_file}"]
        np.testing.assert_array_equal(found.params[leaf], stored)
    write(tmp_path, dspark(), tensors)
    assert read(tmp_path).config == config


@pytest.mark.parametrize(
    ("more", "change", "match"),
    [
        ({"markov_rank": 5}, None, "has 6 columns"),
        ({"enable_confidence_head": True}, None, "no tensor 'confidence_head.proj.weight'"),
        (
            {},
            put("confidence_head.proj.weight", lambda _: np.ones((1, 38), np.float32)),
            "confidence_head.proj.bias",
        ),
        (
            {"markov_rank": 0},
            lambda tensors: (
                {name: tensor for name, tensor in tensors.items() if not name.startswith("markov")}
                | {
                    "confidence_head.proj.weight": np.ones((1, 38), np.float32),
                    "confidence_head.proj.bias": np.ones(1, np.float32),
                }
            ),
            "there is no Markov head",
        ),
        ({"markov_head_type": "gated"}, None, "markov_head_type='gated'.*of a vanilla head"),
        ({"markov_head_type": 3}, None, "markov_head_type=3"),
        (
            {"markov_head_type": "vanilla"},
            put("markov_head.gate_proj.weight", lambda _: np.ones((6, 38), np.float32)),
            "of a gated head",
        ),
        (
            {},
            put("markov_head.gate_proj.weight", lambda _: np.ones((6, 38), np.float32)),
            "markov_head.gate_proj.bias",
        ),
        (
            {},
            put("markov_head.joint_proj.weight", lambda _: np.ones((18, 40), np.float32)),
            r"joint_proj.weight is \[18, 40\], expected \[18, 44\]|lacks 1",
        ),
        ({}, put("markov_head.joint_proj.bias", lambda _: np.ones(18, np.float32)), "no use for"),
        (
            {"sample_from_anchor": False},
            put("markov_head.joint_proj.weight", lambda _: np.ones((18, 44), np.float32)),
            "sample_from_anchor=false is not supported",
        ),
        ({}, without("markov_head.markov_w1.weight"), "there is no tensor"),
        ({}, without("markov_head.markov_w2.weight"), "of a DSpark head"),
        ({}, put("markov_head.markov_w2.weight", lambda w: w[:, :-1]), r"expected \[20, 6\]"),
        ({}, put("logit_head.x", lambda _: np.ones(3, np.float32)), "earlier naming"),
    ],
)
def test_what_is_refused_of_dspark(tmp_path, more, change, match):
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES, **MARKOV)
    tensors = tensors_of(config)
    folder = write(tmp_path, dspark(**more), tensors if change is None else change(tensors))
    with pytest.raises(ValueError, match=match):
        read(folder)


@pytest.mark.full  # that of EAGLE is in the quick set
def test_a_folder_is_a_drafter(tmp_path):
    """In bfloat16, under generate; tokens are those of plain decoding."""
    config = config_of({"vocab_size": DRAFT_VOCAB}, **OWN_TABLES)
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
        for name, tensor in tensors_of(config).items()
    }
    folder = write(tmp_path, nested(), tensors)
    loaded = specjax.load_drafter(folder, TARGET)
    assert loaded.params["fc"].dtype == jnp.float32  # as the target's weights
    assert "blocks of 4" in repr(loaded)
    sampling = specjax.SamplingParams(temperature=0.8, max_tokens=12, seed=1)
    how = {"policy": "fixed", "num_speculative_tokens": 2}
    calls = [
        specjax.generate(TARGET, [[1, 2, 3]], drafter=of, speculative_config=how, sampling=sampling)
        for of in (str(folder), None)
    ]
    assert calls[0][0].token_ids == calls[1][0].token_ids
    assert calls[0].stats.acceptance.num_drafted > 5


@pytest.mark.full
def test_a_config_names_its_method(tmp_path):
    folder = write(tmp_path, flat(), tensors_of(config_of()))
    config = specjax.SpeculationConfig.from_json({"method": "dflash", "model": str(folder)})
    out = specjax.generate(TARGET, [1, 2, 3], speculative_config=config)
    assert out.stats.acceptance is not None
    with pytest.raises(ValueError, match="holds a head of method 'dflash'"):
        specjax.generate(
            TARGET, [1, 2, 3], speculative_config={"method": "eagle3", "model": str(folder)}
        )
    with pytest.raises(ValueError, match="'dflash' without a 'model'"):
        specjax.SpeculationConfig(method="dflash")


@pytest.mark.full
def test_a_drafter_that_a_call_names_goes_before_that_of_the_config(tmp_path):
    folder = write(tmp_path, flat(), tensors_of(config_of()))
    config = {"method": "dflash", "model": "elsewhere"}
    out = specjax.generate(TARGET, [1, 2, 3], drafter=str(folder), speculative_config=config)
    assert out.stats.acceptance.num_drafted > 0


def test_a_plan_reads_no_weights(tmp_path):
    folder = write(tmp_path, flat(), tensors_of(config_of()))
    assert find_drafter(folder, TARGET.config) == DFlashDrafter(config_of())
    (work,) = find_drafter(folder, TARGET.config).work(TARGET.config, jnp.bfloat16)
    assert (work.num_forwards(3), work.num_forwards(0)) == (1, 0)
    # Two layers and the target's head, in two bytes each; four tokens of each row.
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 8 + 2 * 32
    assert work.weight_bytes == 2 * (2 * layer + VOCAB * WIDTH)
    assert work.of_forward(3, 0, 2).flops == 12 * work.weight_bytes
    causal = DFlashDrafter(config_of(causal_layers=(True, True)))
    (work,) = causal.work(TARGET.config, jnp.bfloat16)
    assert [work.forward_tokens(k) for k in (1, 2, 3, 9)] == [2, 3, 4, 4]


def test_a_plan_counts_what_dflash2_has_besides():
    plain, more = config_of(), config_of(**OF_DFLASH2)
    # Four convolutions of three taps and two sides: kernels of four groups, and of each channel.
    convolutions = 4 * 2 * 3 * (4 + 1) * WIDTH
    selector = 6 * (WIDTH + 7)  # rows of seven candidates are read
    found = dflash.draft_products(more) - dflash.draft_products(plain)
    assert found == convolutions + selector


def test_every_kind_of_head_is_a_method():
    assert {kind.method for kind in KINDS} == set(HEADS)
