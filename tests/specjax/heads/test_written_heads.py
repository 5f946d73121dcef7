"""Heads that save_pretrained writes: each naming says a head whole, or refuses it by name."""

import dataclasses
import json

import golden_heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import written_heads
from asked_for import quick
from written_heads import CASES, DEEP, NAMINGS, SHALLOW, eagle3_of

import specjax
from specjax.checkpoints import pretrained_heads
from specjax.models import weight_writing
from specjax.models.safetensors import open_file
from specjax.models.weight_files import open_folder

PAIRS = [(case, naming) for case in CASES for naming in NAMINGS[case.split(", ")[0]]]
QUICK = [pair for pair in PAIRS if "plain" in pair[0] or pair[1] not in CASES[pair[0]].namings]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def raw_of(folder):
    return json.loads((folder / "config.json").read_text())


def eagle3_head(**flags):
    return written_heads.HeadCase(eagle3_of(**flags), DEEP, ()).load()


@pytest.mark.parametrize("pair", quick(PAIRS, *QUICK), ids=" as ".join)
def test_a_head_comes_back_or_is_refused(pair, tmp_path):
    case, naming = CASES[pair[0]], pair[1]
    head, folder = case.load(), tmp_path / "saved"
    if naming not in case.namings:
        with pytest.raises(ValueError, match=f"naming='{naming}' cannot say .*=.* of this "):
            specjax.save_pretrained(head, folder, naming=naming, target=case.target)
        assert not folder.exists()
        return
    specjax.save_pretrained(head, folder, naming=naming, target=case.target)
    loaded = specjax.load_drafter(folder, case.target)
    assert loaded.spec == head.spec
    assert_same(loaded.params, head.params)


@pytest.mark.parametrize("name", quick(CASES, *(name for name in CASES if "EAGLE-3" in name)))
def test_auto_takes_the_first_naming_that_can_say_a_head(name, tmp_path):
    case = CASES[name]
    if not case.namings:
        with pytest.raises(ValueError, match=r"no naming of .* can say this one \(.*save_orbax"):
            specjax.save_pretrained(case.load(), tmp_path / "saved", target=case.target)
        return
    for folder, naming in (("auto", "auto"), ("named", case.namings[0])):
        specjax.save_pretrained(case.load(), tmp_path / folder, naming=naming, target=case.target)
    assert raw_of(tmp_path / "auto") == raw_of(tmp_path / "named")


def test_a_refusal_names_the_naming_that_can(tmp_path):
    head = eagle3_head(norm_before_residual=True, norm_before_fc=True)
    match = (
        r"naming='specforge' cannot say norm_before_fc=True, norm_before_residual=True of this "
        r"EAGLE-3 head; naming='speculators' can\."
    )
    with pytest.raises(ValueError, match=match):
        specjax.save_pretrained(head, tmp_path / "saved", naming="specforge")
    with pytest.raises(ValueError, match=r"expected 'auto', 'specforge', 'speculators' or 'sglan"):
        specjax.save_pretrained(head, tmp_path / "saved", naming="z-lab")


# Drafts of folders that were written, against what the equations of each format said.

GOLDEN = {
    name: head
    for name, head in golden_heads.golden_heads().items()
    if name not in ("mtp", "pard")  # the one is in its target's files, the other is a model
}


@pytest.mark.parametrize("name", quick(GOLDEN, "medusa"))
def test_drafts_are_those_of_the_golden_file(name, tmp_path):
    golden = GOLDEN[name]
    (tmp_path / "given").mkdir()
    head = golden.load(tmp_path / "given")
    specjax.save_pretrained(head, tmp_path / "saved", target=golden.target)
    loaded = specjax.load_drafter(tmp_path / "saved", golden.target)
    with np.load(golden_heads.FOLDER / f"{name}.npz") as stored:
        tokens, taps, expected = (stored[key] for key in ("tokens", "taps", "logits"))
    found = golden.found(loaded.spec.config, loaded.params, tokens, taps)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# Names of tensors and keys, as published files have them.

ATTENTION_AND_MLP = (
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
)
HEAD_NORMS = ("self_attn.k_norm.weight", "self_attn.q_norm.weight")


def layer(prefix, names=ATTENTION_AND_MLP, *more):
    return {f"{prefix}{name}" for name in (*names, *more)}


OF_EAGLE3 = {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"}
OF_BLOCK = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    name for index in (0, 1) for name in layer(f"layers.{index}.", ATTENTION_AND_MLP, *HEAD_NORMS)
}
CONFIDENCE = {"confidence_head.proj.bias", "confidence_head.proj.weight"}
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
GATE = {"markov_head.gate_proj.bias", "markov_head.gate_proj.weight"}
OF_DFLASH2 = {
    "candidate_selector.hidden_projection.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    *(
        f"layers.{index}.{conv}.{part}"
        for index in (0, 1)
        for conv in ("attention_conv", "mlp_conv")
        for part in ("base_kernel", "kernel_projection.weight")
    ),
}
TENSORS = {
    ("EAGLE-3, a part of the vocabulary", "specforge"): OF_EAGLE3
    | layer("midlayer.", ATTENTION_AND_MLP, "hidden_norm.weight"),
    ("EAGLE-3, a part of the vocabulary", "speculators"): OF_EAGLE3
    | layer("layers.0.", ATTENTION_AND_MLP, "hidden_norm.weight"),
    ("EAGLE-3, norms before fc", "specforge"): OF_EAGLE3
    | {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
    | layer("midlayer.", ATTENTION_AND_MLP, "hidden_norm.weight"),
    ("EAGLE-3, the target's head", "sglang"): {"fc.weight", "norm.weight"}
    | layer("midlayer.", ATTENTION_AND_MLP, "hidden_norm.weight"),
    ("P-EAGLE, a part of the vocabulary", "speculators"): OF_EAGLE3
    | {"embed_tokens.weight", "mask_hidden"}
    | layer("layers.0.", ATTENTION_AND_MLP, "hidden_norm.weight")
    | layer("layers.1."),
    ("EAGLE, tables", "eagle"): {"embed_tokens.weight", "fc.weight", "lm_head.weight"}
    | layer("layers.0.", ATTENTION_AND_MLP[1:]),
    ("MTP, norms of queries", "speculators"): layer(
        "mtp_layers.0.",
        (*ATTENTION_AND_MLP, "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        *(f"{name}_layernorm.weight" for name in ("token", "hidden", "final")),
        "input_proj.weight",
    ),
    ("DFlash, plain", "z-lab"): OF_BLOCK,
    ("DFlash, a part of the vocabulary", "speculators"): OF_BLOCK
    | {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"},
    ("DFlash2, plain", "z-lab"): OF_BLOCK | OF_DFLASH2,
    ("DFlash2, plain", "speculators"): OF_BLOCK | OF_DFLASH2,
    ("DSpark, gated", "specforge"): OF_BLOCK | MARKOV | GATE | CONFIDENCE,
    ("DSpark, tables", "deepspec"): OF_BLOCK
    | MARKOV
    | CONFIDENCE
    | {"embed_tokens.weight", "lm_head.weight"},
    ("Medusa, plain", "medusa"): {
        f"{head}.{part}" for head in range(3) for part in ("0.linear.weight", "0.linear.bias")
    }
    | {"0.1.weight", "1.1.weight", "2.1.weight"},
    ("Medusa, no biases", "vllm"): {
        name.format(head)
        for head in range(3)
        for name in ("blocks.{}.layers.0.weight", "lm_heads.{}.weight")
    },
    ("MLP speculator, tied", "ibm"): {
        "speculator.emb.0.weight",
        "speculator.head.0.weight",
        "speculator.ln.0.bias",
        "speculator.ln.0.weight",
        "speculator.proj.0.weight",
        "speculator.proj.1.weight",
    },
}


@pytest.mark.parametrize(("name", "naming"), TENSORS)
def test_tensors_have_the_published_names(name, naming, tmp_path):
    case, folder = CASES[name], tmp_path / "saved"
    specjax.save_pretrained(case.load(), folder, naming=naming, target=case.target)
    file = "medusa_lm_head.safetensors" if naming == "medusa" else "model.safetensors"
    assert {*open_file(folder / file)} == TENSORS[name, naming]
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", file]


SPECULATORS = {"speculators_model_type", "speculators_version", "speculators_config"}
PROPOSAL = {"proposal_type", "speculative_tokens", "accept_tolerance", "verifier_accept_k"}
KEYS = {
    ("EAGLE-3, plain", "speculators"): {
        *SPECULATORS,
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "fc_norm",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "target_hidden_size",
        "transformer_layer_config",
    },
    ("EAGLE-3, plain", "specforge"): {
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "hidden_size",
        "num_hidden_layers",
        "rope_theta",
        "rope_parameters",
        "torch_dtype",
    },
    ("P-EAGLE, plain", "speculators"): {*SPECULATORS, "mask_token_id"},
    ("DFlash, plain", "speculators"): {
        *SPECULATORS,
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "sample_from_anchor",
        "sliding_window_non_causal",
    },
    ("DFlash, plain", "z-lab"): {"block_size", "dflash_config", "layer_types", "num_target_layers"},
    ("DSpark, plain", "speculators"): {
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    },
    ("DSpark, tables", "deepspec"): {
        "markov_rank",
        "mask_token_id",
        "num_anchors",
        "target_layer_ids",
    },
    ("Medusa, plain", "medusa"): {"medusa_num_heads", "medusa_num_layers"},
    ("Medusa, plain", "vllm"): {"num_heads", "num_hidden_layers", "medusa_fc_bias"},
    ("MLP speculator, plain", "ibm"): {"emb_dim", "inner_dim", "n_predict", "tie_weights"},
}


@pytest.mark.parametrize(("name", "naming"), KEYS)
def test_config_has_the_published_keys(name, naming, tmp_path):
    case = CASES[name]
    specjax.save_pretrained(case.load(), tmp_path / "saved", naming=naming, target=case.target)
    raw = raw_of(tmp_path / "saved")
    assert KEYS[name, naming] <= {*raw}
    if "speculators_config" not in raw:
        return
    said = raw["speculators_config"]
    assert said["algorithm"] == raw["speculators_model_type"]
    (method,) = said["proposal_methods"]
    assert {*method} == PROPOSAL
    assert said["default_proposal_method"] == method["proposal_type"] == "greedy"
    assert said["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert raw["transformer_layer_config"]["vocab_size"] == case.config.target_vocab_size


@pytest.mark.parametrize(
    ("name", "naming", "expected"),
    [
        ("EAGLE-3, plain", "speculators", {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
        (
            "EAGLE-3, plain",
            "specforge",
            {
                "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
                "eagle_config": {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": [-1, 2, 5],
                },
            },
        ),
        ("EAGLE-3, two captured layers", "sglang", {"num_aux_hidden_states": 2}),
        (
            "DFlash, the first and the last layer",
            "speculators",
            {"aux_hidden_state_layer_ids": [0, 6]},
        ),
        (
            "DFlash, the first and the last layer",
            "z-lab",
            {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [-1, 5]}},
        ),
        ("DSpark, tables", "deepspec", {"target_layer_ids": [1, 4]}),
    ],
)
def test_captured_layers_are_said_as_the_naming_says_them(name, naming, expected, tmp_path):
    """By inputs of layers, or by outputs, of which one has a number less."""
    case = CASES[name]
    specjax.save_pretrained(case.load(), tmp_path / "saved", naming=naming, target=case.target)
    raw = raw_of(tmp_path / "saved")
    assert {key: raw.get(key) for key in expected} == expected


# What our reader takes from the tensors, and others from config.json.
VALUES = {
    ("EAGLE-3, the target's head", "sglang"): {"draft_vocab_size": None},
    ("EAGLE-3, a part of the vocabulary", "specforge"): {"draft_vocab_size": 20, "vocab_size": 61},
    ("EAGLE-3, a bias of fc", "sglang"): {"bias": True},
    ("EAGLE-3, norms before fc", "specforge"): {"fc_norm": True, "bias": False},
    ("EAGLE-3, norms before fc", "speculators"): {"fc_norm": True, "norm_before_fc": False},
    ("EAGLE-3, a norm before fc", "speculators"): {"fc_norm": False, "norm_before_fc": True},
    ("EAGLE-3, plain", "specforge"): {"norm_output": None},
    ("EAGLE-3, plain", "speculators"): {"norm_output": False, "norm_before_residual": False},
    ("EAGLE-3, another width", "specforge"): {"target_hidden_size": 32, "hidden_size": 48},
    ("EAGLE-3, norms of queries", "speculators, layers"): {
        "model_type": "qwen3",
        "attention_bias": False,
    },
    ("EAGLE-3, biases", "speculators, layers"): {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
    ("EAGLE-3, llama3 rope", "specforge"): {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "rope_parameters": {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    ("P-EAGLE, plain", "specforge"): {
        "mask_token_id": written_heads.MASK,
        "pard_token": written_heads.MASK,
    },
    ("EAGLE, a bias of fc", "eagle"): {"architectures": ["LlamaForCausalLM"], "bias": True},
    ("EAGLE, plain", "sglang"): {"architectures": ["LlamaForCausalLMEagle"], "bias": False},
    ("EAGLE, biases of queries alone", "eagle"): {"qkv_bias": True, "attention_bias": False},
    ("MTP, norms of queries", "speculators"): {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
    },
    ("DFlash, causal", "z-lab"): {
        "is_causal": True,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 4], "causal": True},
    },
    ("DFlash, a window", "z-lab"): {
        "is_causal": False,
        "sliding_window": 40,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    ("DFlash, a causal window", "z-lab"): {"is_causal": None, "sliding_window_non_causal": False},
    ("DFlash, a window", "speculators"): {"sliding_window_non_causal": True},
    ("DFlash, biases", "z-lab"): {"attention_bias": True},
    ("DFlash, the anchor", "speculators"): {"sample_from_anchor": True, "block_size": 4},
    ("DFlash, plain", "z-lab"): {"num_target_layers": 6, "layer_types": ["full_attention"] * 2},
    ("DSpark, gated", "speculators"): {
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    ("DSpark, masks", "speculators"): {
        "sample_from_anchor": False,
        "confidence_head_with_markov": False,
    },
    ("Medusa, two blocks", "medusa"): {"medusa_num_heads": 3, "medusa_num_layers": 2},
    ("Medusa, no biases", "vllm"): {"num_heads": 3, "medusa_fc_bias": False},
    ("Medusa, plain", "vllm"): {"medusa_fc_bias": True},
    ("MLP speculator, tied", "ibm"): {"tie_weights": True, "scale_input": True, "n_predict": 3},
}


@pytest.mark.parametrize(("name", "where"), VALUES)
def test_flags_are_said_to_readers_that_ask_config_json(name, where, tmp_path):
    case, (naming, *nested) = CASES[name], where.split(", ")
    specjax.save_pretrained(case.load(), tmp_path / "saved", naming=naming, target=case.target)
    raw = raw_of(tmp_path / "saved")
    raw = raw["transformer_layer_config"] if nested else raw
    expected = VALUES[name, where]
    assert {key: raw.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "count"),
    [("EAGLE-3, plain", 3), ("MTP, plain", 1), ("DFlash, plain", 3), ("DFlash, the anchor", 4)],
)
def test_servers_are_told_how_many_tokens_to_draft(name, count, tmp_path):
    case = CASES[name]
    specjax.save_pretrained(case.load(), tmp_path / "saved", naming="speculators")
    (method,) = raw_of(tmp_path / "saved")["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == count


def test_a_vocabulary_is_stored_as_offsets(tmp_path):
    case = CASES["EAGLE-3, a part of the vocabulary"]
    head = case.load()
    ids = np.sort(np.random.default_rng(3).choice(61, 20, replace=False)).astype(np.int32)
    head = dataclasses.replace(head, params=head.params | {"target_ids": jnp.asarray(ids)})
    specjax.save_pretrained(head, tmp_path / "saved")
    tensors = open_folder(tmp_path / "saved")
    assert tensors["d2t"].dtype == np.int64
    assert tensors["d2t"].tolist() == (ids - np.arange(20)).tolist()
    assert tensors["t2d"].dtype == np.bool_
    assert np.flatnonzero(tensors["t2d"]).tolist() == ids.tolist()
    # SpecForge has both for a head that says every token, too, and speculators neither.
    specjax.save_pretrained(eagle3_head(), tmp_path / "saved")
    tensors = open_folder(tmp_path / "saved")
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()
    specjax.save_pretrained(eagle3_head(), tmp_path / "saved", naming="speculators")
    assert "d2t" not in open_folder(tmp_path / "saved")


def test_p_eagle_stores_its_mask_as_a_row(tmp_path):
    specjax.save_pretrained(CASES["P-EAGLE, plain"].load(), tmp_path / "saved")
    assert open_folder(tmp_path / "saved")["mask_hidden"].shape == (1, 1, 96)
    assert raw_of(tmp_path / "saved")["mask_token_id"] == written_heads.MASK


# Weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept(dtype, tmp_path):
    head = eagle3_head()
    head = dataclasses.replace(
        head, params=jax.tree.map(lambda leaf: leaf.astype(dtype), head.params)
    )
    specjax.save_pretrained(head, tmp_path / "saved")
    assert raw_of(tmp_path / "saved")["torch_dtype"] == dtype
    target = dataclasses.replace(
        DEEP, params=jax.tree.map(lambda leaf: leaf.astype(dtype), DEEP.params)
    )
    assert_same(specjax.load_drafter(tmp_path / "saved", target).params, head.params)


def test_weights_of_two_dtypes_and_nan(tmp_path):
    head = eagle3_head()
    norm = head.params["norm"].at[0].set(jnp.nan).astype(jnp.bfloat16)
    head = dataclasses.replace(head, params=head.params | {"norm": norm})
    specjax.save_pretrained(head, tmp_path / "saved")
    stored = open_folder(tmp_path / "saved")
    assert stored["norm.weight"].tobytes() == np.asarray(norm).tobytes()
    assert raw_of(tmp_path / "saved")["torch_dtype"] == "float32"


def test_large_heads_are_several_files(tmp_path):
    head = eagle3_head()
    specjax.save_pretrained(head, tmp_path / "saved", max_file_bytes=10_000)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    assert_same(specjax.load_drafter(tmp_path / "saved", DEEP).params, head.params)


def test_a_head_over_a_mesh(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    head = eagle3_head()
    params = head.params | {"lm_head": jax.device_put(head.params["lm_head"], split)}
    specjax.save_pretrained(dataclasses.replace(head, params=params), tmp_path / "saved")
    assert_same(specjax.load_drafter(tmp_path / "saved", DEEP).params, head.params)


# What fails changes nothing.


@pytest.mark.parametrize(
    ("break_", "error", "match"),
    [
        (
            lambda params: params | {"target_ids": params["target_ids"].at[1].set(0)},
            ValueError,
            r"cannot be read: the folder: d2t must lead to 20 different tokens",
        ),
        (
            lambda params: params | {"target_ids": params["target_ids"].at[1].set(61)},
            ValueError,
            "d2t must lead to 20 different tokens below 61",
        ),
        (
            lambda params: {name: leaf for name, leaf in params.items() if name != "norm"},
            ValueError,
            r"are not those that abstract_params of its spec says: .*norm",
        ),
        (
            lambda params: params | {"fc": params["fc"][:, :-1]},
            ValueError,
            r"are not those that abstract_params of its spec says: .*fc",
        ),
        (
            lambda params: params | {"fc": params["fc"].astype(jnp.int32)},
            ValueError,
            "fc.weight is int32; weights are written as",
        ),
    ],
    ids=["one token twice", "no token", "a missing weight", "a cut weight", "whole numbers"],
)
def test_wrong_weights_change_nothing(break_, error, match, tmp_path):
    head, folder = CASES["EAGLE-3, a part of the vocabulary"].load(), tmp_path / "saved"
    specjax.save_pretrained(head, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=match):
        specjax.save_pretrained(
            dataclasses.replace(head, params=break_(head.params)), folder, naming="speculators"
        )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_config_that_no_file_says_changes_nothing(tmp_path):
    head = eagle3_head(own={"attention_softcap": 30.0})
    match = r"cannot say this config: layers.attention_softcap=30.0 for None"
    with pytest.raises(ValueError, match=match):
        specjax.save_pretrained(head, tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_what_was_written_is_compared(tmp_path, monkeypatch):
    """A flag that is lost on the way, and a weight."""
    head = eagle3_head(norm_output=True)
    with monkeypatch.context() as patched:
        patched.setattr(pretrained_heads, "write_json", lose("norm_output"))
        with pytest.raises(ValueError, match="cannot say this config: norm_output=True for False"):
            specjax.save_pretrained(head, tmp_path / "saved")
    make = weight_writing.Tensor.make

    def wrong(self):
        made = make(self)
        return -made if self.parts[0][0].name == "norm.weight" else made

    with monkeypatch.context() as patched:
        patched.setattr(weight_writing.Tensor, "make", wrong)
        with pytest.raises(AssertionError, match=r"\['norm'\] is read as other numbers"):
            specjax.save_pretrained(head, tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def lose(name):
    def write(path, content):
        path.write_text(json.dumps({key: each for key, each in content.items() if key != name}))

    return write


# Targets


def test_what_is_said_of_the_target(tmp_path):
    head = eagle3_head()
    specjax.save_pretrained(DEEP, tmp_path / "target")
    target = specjax.load_model(tmp_path / "target")
    for options, name in (
        ({}, None),
        ({"target": DEEP}, None),  # of no folder, and its name is none of the hub
        ({"target": dataclasses.replace(DEEP, name="org/model")}, "org/model"),
        ({"target": target}, str((tmp_path / "target").resolve())),
        ({"target": target, "card": {"target": "org/model"}}, "org/model"),
        ({"card": {"target": "org/model"}}, "org/model"),
        ({"target": hub(target)}, "org/the.model"),
    ):
        specjax.save_pretrained(head, tmp_path / "saved", naming="speculators", **options)
        said = raw_of(tmp_path / "saved")["speculators_config"]["verifier"]
        classes = ["LlamaForCausalLM"] if "target" in options else []
        assert said == {"name_or_path": name, "architectures": classes}
        card = (tmp_path / "saved" / "README.md").read_text()
        assert ("base_model: " in card) == (name is not None and name.startswith("org/"))


def hub(target):
    folder = "/cache/hub/models--org--the.model/snapshots/0a1b"
    return dataclasses.replace(target, folder=folder)


def test_a_head_of_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the head is for a target of .* at least 6 layers"):
        specjax.save_pretrained(eagle3_head(), tmp_path / "saved", target=SHALLOW)


def test_flat_files_of_blocks_need_the_target(tmp_path):
    head = CASES["DFlash, plain"].load()
    match = r"cannot say the target's number of layers \(pass target=\)"
    with pytest.raises(ValueError, match=match):
        specjax.save_pretrained(head, tmp_path / "saved", naming="z-lab")
    specjax.save_pretrained(head, tmp_path / "saved")
    assert raw_of(tmp_path / "saved")["speculators_model_type"] == "dflash"


def test_dflash2_says_how_its_target_scales(tmp_path):
    head = CASES["DFlash2, plain"].load()
    scaled = dataclasses.replace(DEEP.config, embedding_multiplier=12.0, logits_divisor=8.0)
    target = dataclasses.replace(DEEP, config=scaled)
    specjax.save_pretrained(head, tmp_path / "saved", target=target)
    said = raw_of(tmp_path / "saved")["dflash_config"]
    assert (said["input_embedding_scale"], said["output_multiplier"]) == (12.0, 0.125)
    assert specjax.load_drafter(tmp_path / "saved", target).spec == head.spec
    with pytest.raises(ValueError, match=r"cannot say input_embedding_scale=12\.0 of the target"):
        specjax.save_pretrained(head, tmp_path / "b", naming="speculators", target=target)


# Other drafters, and cards


def test_what_is_no_head(tmp_path):
    for options in ({"naming": "specforge"}, {"card": {}}, {"target": DEEP}):
        with pytest.raises(ValueError, match="are for heads over a target"):
            specjax.save_pretrained(DEEP, tmp_path / "saved", **options)
    with pytest.raises(NotImplementedError, match=r"is no draft model .* nor a head over a target"):
        specjax.save_pretrained(specjax.load_drafter("ngram", DEEP), tmp_path / "saved")


CARD = {
    "target": "org/model",
    "data": ["a | b", "c"],
    "steps": 12_000,
    "loss": jnp.float32(1.23456),
    "by": np.str_("two\nlines"),
    "is_public": np.True_,
    "epochs": np.int64(3),
    "acceptance": np.array([0.81, 0.62, 0.4401]),
    "versions": {"jax": "0.10.2", "optax": "0.2"},
}
ROWS = (
    "| data | a \\| b, c |",
    "| steps | 12,000 |",
    "| loss | 1.235 |",
    "| by | two lines |",
    "| is_public | True |",
    "| epochs | 3 |",
    "| acceptance | 0.81, 0.62, 0.4401 |",
    "| versions, jax | 0.10.2 |",
    "| reads | the inputs of the target's layers 0, 3, 6 (from 0) |",
    "| vocabulary | 20 of the target's 61 |",
    "| kind | EAGLE-3 |",
    "| naming of the files | specforge |",
)


def test_the_card(tmp_path):
    head = CASES["EAGLE-3, a part of the vocabulary"].load()
    specjax.save_pretrained(head, tmp_path / "saved", card=CARD)
    card = (tmp_path / "saved" / "README.md").read_text()
    _, front, rest = card.split("---\n", 2)
    assert front.startswith("library_name: specjax\nbase_model: org/model\ntags:\n- ")
    assert "- eagle3\n" in front
    for row in ROWS:
        assert f"\n{row}\n" in rest
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(head.params))
    assert f"| bytes | {num_bytes:,} (float32) |" in rest
    assert "vllm serve org/model" in rest
    assert "--speculative-algorithm EAGLE3" in rest
    specjax.save_pretrained(head, tmp_path / "saved", target=DEEP)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "## Training" not in card
    assert "layers 0, 3, 6 (from 0); 6 is what follows the last one" in card


def test_arguments_of_another_kind(tmp_path):
    with pytest.raises(TypeError, match=r"target is 'org/model'; expected a Model.*card="):
        specjax.save_pretrained(eagle3_head(), tmp_path / "saved", target="org/model")
    with pytest.raises(TypeError, match="card is 'fast'; expected a mapping"):
        specjax.save_pretrained(eagle3_head(), tmp_path / "saved", card="fast")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "naming", "servers"),
    [
        ("EAGLE-3, plain", "speculators", {"vllm"}),
        ("EAGLE-3, plain", "specforge", {"vllm", "sglang"}),
        ("EAGLE-3, an embedding", "specforge", {"vllm"}),  # SGLang has the target's in its place
        ("EAGLE-3, another width", "specforge", {"vllm", "sglang"}),
        ("EAGLE-3, plain", "sglang", {"sglang"}),
        ("DFlash, plain", "z-lab", {"vllm", "sglang"}),
        ("Medusa, plain", "medusa", set()),
    ],
)
def test_the_card_names_servers_that_read_the_naming(name, naming, servers, tmp_path):
    case = CASES[name]
    specjax.save_pretrained(case.load(), tmp_path / "saved", naming=naming, target=case.target)
    card = (tmp_path / "saved" / "README.md").read_text()
    commands = {"vllm": "vllm serve", "sglang": "sglang.launch_server"}
    assert {server for server, command in commands.items() if command in card} == servers


def test_only_own_cards_are_replaced(tmp_path):
    folder = tmp_path / "saved"
    for name in ("Medusa, plain", "EAGLE-3, plain", "Medusa, plain"):
        specjax.save_pretrained(CASES[name].load(), folder)
    specjax.save_pretrained(DEEP, folder)
    assert not (folder / "README.md").exists()
    (folder / "README.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match=r"saved holds README.md, and a save replaces"):
        specjax.save_pretrained(eagle3_head(), folder)
    assert (folder / "README.md").read_text() == "# Mine\n"
