"""MTP layers: against their equations written out in numpy, in the engine, and from folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from head_equations import TARGET, VOCAB, rms
from head_folders import put, random_tensors, without, write
from pair_heads import (
    Reference,
    Rows,
    check_all_accepted,
    check_texts,
    copied_target,
    own_layers,
)

import specjax
from specjax.cli.main import main
from specjax.drafters.spec import ModelDrafter
from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import MTP_PREFIX, EagleConfig
from specjax.heads.namings.mtp_files import OWN_PREFIX, read_mtp
from specjax.heads.specs import EagleDrafter
from specjax.models.base import RopeConfig, before_final_norm
from specjax.models.families import family_of
from specjax.models.weight_files import open_folder
from specjax.planning import named_models
from specjax.testing import check_drafter, save_model, tiny_model
from specjax.trees import static_shapes

WIDTH = TARGET.config.hidden_size
KINDS = {
    "MiMo": {"has_hidden_first": True, "qkv_bias": True, "rope": RopeConfig(theta=640000.0)},
    "speculators": {"qk_norm": True},
    "own tables": {"has_embedding": True, "has_head": True},
}


def config_of(target=TARGET, **flags):
    of_layers = ("qkv_bias", "qk_norm", "rope", "num_kv_heads", "norm_eps")
    own = own_layers(**{key: flags.pop(key) for key in of_layers if key in flags})
    aux = before_final_norm(target.config.num_layers)
    return EagleConfig(layers=own, target_vocab_size=VOCAB, aux_layers=(aux,), is_mtp=True, **flags)


def make_layer(name="MiMo", seed=1):
    config = config_of(**KINDS[name])
    return config, eagle.init(jax.random.key(seed), config, std=0.2)


def loaded(name="MiMo", shape=None):
    config, params = make_layer(name)
    return specjax.LoadedDrafter("layer", EagleDrafter(config, shape), params)


class MtpReference(Reference):
    def joined(self, embedded, features):
        embedded = rms(embedded, self.params["embed_norm"])
        features = rms(features, self.params["hidden_norm"])
        pair = [features, embedded] if self.config.has_hidden_first else [embedded, features]
        return np.concatenate(pair, axis=-1)

    def said(self, x):
        return rms(x, self.params["norm"])


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_what_it_says_is_what_its_equations_say(name):
    config, params = make_layer(name)
    check_texts(MtpReference(config, params), Rows(config, params, 3), 1, VOCAB)


def swapped(params):
    return params | {"embed_norm": params["hidden_norm"], "hidden_norm": params["embed_norm"]}


def ones_for(name):
    return lambda params: params | {name: np.ones_like(params[name])}


def first_norm_of_ones(params):
    (layer,) = params["layers"]
    return params | {"layers": (ones_for("input_norm")(layer),)}


MISTAKES = {
    "order": (lambda params: params, {"has_hidden_first": False}),
    "norms swapped": (swapped, {}),
    "embed": (ones_for("embed_norm"), {}),
    "hidden": (ones_for("hidden_norm"), {}),
    "final": (ones_for("norm"), {}),
    "first": (first_norm_of_ones, {}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", quick(MISTAKES, "order", "norms swapped", "final"))
def test_each_mistake_shows(name):
    mistake, flags = MISTAKES[name]
    config, params = make_layer()
    wrong = MtpReference(dataclasses.replace(config, **flags), params)
    wrong.params = mistake(wrong.params)
    with pytest.raises(AssertionError):
        check_texts(wrong, Rows(config, params, 3), 1, VOCAB)


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


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.full
def test_a_layer_that_copies_its_target_is_always_accepted(count):
    target = copied_target()
    config = config_of(target, qkv_bias=True, num_kv_heads=4, has_hidden_first=True)
    params = eagle.init(jax.random.key(0), config)
    norms = {name: jnp.ones(WIDTH) for name in ("embed_norm", "hidden_norm", "norm")}
    only_embedding = jnp.roll(jnp.eye(WIDTH, 2 * WIDTH), WIDTH, axis=1)
    params |= norms | {"fc": only_embedding, "layers": target.params["layers"]}
    drafter = specjax.LoadedDrafter("copy", EagleDrafter(config), params)
    check_all_accepted(target, drafter, count)


def without_branches(layers):
    """Returns layers that add nothing to what they read."""
    none = lambda layer: {name: jnp.zeros_like(layer[name]) for name in ("o_proj", "down_proj")}
    return tuple(layer | none(layer) for layer in layers)


@pytest.mark.full
def test_it_reads_what_the_final_norm_of_the_target_reads():
    """A target of embeddings alone repeats its last token, and so does a layer that has its norm.

    That norm turns signs, and a layer that read the normed state would turn them back.
    """
    signs = np.where(np.arange(WIDTH) % 2, 1.0, -1.0).astype(np.float32)
    table = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    table /= np.sqrt(np.mean(table**2, axis=1, keepdims=True))
    params = {"embed_tokens": table, "lm_head": table * signs, "norm": signs}
    params = {name: jnp.asarray(leaf) for name, leaf in params.items()}
    params["layers"] = without_branches(TARGET.params["layers"])
    target = dataclasses.replace(TARGET, params=params)
    config, own = make_layer()
    own |= {"layers": without_branches(own["layers"]), "norm": params["norm"]}
    own |= {"fc": jnp.eye(WIDTH, 2 * WIDTH), "hidden_norm": jnp.ones(WIDTH)}
    out = specjax.generate(
        target,
        [[3, 3]],
        drafter=specjax.LoadedDrafter("hidden", EagleDrafter(config), own),
        speculative_config={"policy": "fixed", "num_speculative_tokens": 1},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=9),
    )
    assert out[0].token_ids == [3] * 9
    acceptance = out.stats.acceptance
    assert acceptance.num_drafted > 3
    assert acceptance.num_accepted == acceptance.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [None, static_shapes.from_rank_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])],
    ids=["chain", "tree"],
)
def test_it_keeps_the_contract_of_drafters(shape):
    check_drafter(loaded("MiMo", shape), TARGET)


# Folders.


MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "model_type": "mimo",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
OF_MIMO = KINDS["MiMo"] | {"norm_eps": 1e-5}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns a function that writes a target of the MiMo family with its layer; and the target."""
    source = tmp_path_factory.mktemp("target")
    own = RopeConfig(theta=640000.0)
    model = tiny_model(
        family="mimo", qkv_bias=True, rope=own, norm_eps=1e-5, max_position_embeddings=2048
    )
    save_model(source, model, MIMO)
    tensors = {name: np.array(tensor) for name, tensor in open_folder(source).items()}
    tensors |= random_tensors(eagle.weights_of(config_of(**OF_MIMO), OWN_PREFIX))

    def write_to(folder, change=dict, **more):
        return write(folder, MIMO | more, change(tensors))

    return write_to, model


def of_speculators(**more):
    names = "architectures", "num_nextn_predict_layers", "attention_bias"
    own = {key: value for key, value in MIMO.items() if key not in names} | {"model_type": "qwen3"}
    raw = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp"}
    return raw | {"num_nextn_predict_layers": 1, "transformer_layer_config": own | more}


def test_a_target_of_mimo_is_loaded_without_its_layer(tmp_path, published):
    write_to, model = published
    target = specjax.load_model(write_to(tmp_path))
    assert target.config == model.config
    assert target.folder == str(tmp_path.resolve())
    jax.tree.map(np.testing.assert_array_equal, target.params, model.params)
    assert jax.tree.structure(target.params) == jax.tree.structure(
        jax.eval_shape(
            lambda key: family_of(model.config).init(key, model.config), jax.random.key(0)
        )
    )


@pytest.mark.full
def test_the_layer_is_taken_from_the_target_s_folder(tmp_path, published):
    write_to, _ = published
    target = specjax.load_model(write_to(tmp_path))
    config = specjax.SpeculationConfig(method="mtp", num_speculative_tokens=2)
    drafter = specjax.load_drafter(None, target, config)
    assert drafter.spec == EagleDrafter(config_of(**OF_MIMO))
    tensors = open_folder(tmp_path)
    np.testing.assert_array_equal(drafter.params["fc"], tensors[f"{OWN_PREFIX}input_proj.weight"])
    norms = {"embed_norm": "token", "hidden_norm": "hidden", "norm": "final"}
    for name, stored in norms.items():
        expected = tensors[f"{OWN_PREFIX}{stored}_layernorm.weight"]
        np.testing.assert_array_equal(drafter.params[name], expected)
    (layer,) = drafter.params["layers"]
    names = {"input_norm": "input_layernorm.weight", "q_proj_bias": "self_attn.q_proj.bias"}
    for name, stored in names.items():
        np.testing.assert_array_equal(layer[name], tensors[f"{OWN_PREFIX}{stored}"])
    assert drafter.notes == (
        "reads the last hidden state of the target, before the final norm",
        "projects the hidden state first, as MiMo does",
    )
    assert specjax.load_drafter(tmp_path, target).spec == drafter.spec
    assert named_models.find_drafter(tmp_path, target.config) == drafter.spec
    sampling = specjax.SamplingParams(temperature=0, max_tokens=6)
    for method in ("mtp", "mimo_mtp"):
        out = specjax.generate(
            target,
            [[1, 2, 3]],
            speculative_config={"method": method, "num_speculative_tokens": 1},
            sampling=sampling,
        )
        assert out.stats.acceptance.num_drafted > 0
    assert out[0].token_ids == specjax.generate(target, [[1, 2, 3]], sampling=sampling)[0].token_ids


@pytest.mark.full
def test_the_command_finds_the_target_s_folder(tmp_path, published, capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", "off")
    write_to, _ = published
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3]}))
    options = ["--max-tokens", "6", "--temperature", "0", "--prompts", str(prompts), "--json"]
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    folder = str(write_to(tmp_path))
    code = main(["generate", "--model", folder, *options, "--speculative-config", config])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "before the final norm" in printed.err
    assert json.loads(printed.out)["stats"]["num_drafted"] > 0


def test_a_target_without_such_a_layer(tmp_path, published):
    write_to, _ = published
    of_target = lambda tensors: {key: t for key, t in tensors.items() if "mtp" not in key}
    target = specjax.load_model(write_to(tmp_path, of_target))
    config = specjax.SpeculationConfig(method="mtp")
    with pytest.raises(ValueError, match="holds no head over a target"):
        specjax.load_drafter(None, target, config)
    assert isinstance(specjax.load_drafter(tmp_path, target).spec, ModelDrafter)
    with pytest.raises(ValueError, match="was loaded from none; name the folder as 'model'"):
        specjax.load_drafter(None, TARGET, config)
    assert not specjax.load_drafter("none", TARGET, config).can_draft


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.layers.2.eh_proj.weight", "DeepSeek and GLM"),
        ("mtp.fc.weight", "Qwen3-Next"),
        ("model.mtp.layers.0.enorm.weight", "DeepSeek|MiMo-V2"),
        ("pre_projection.weight", "Gemma 4"),
    ],
)
def test_layers_of_other_families_are_refused_by_name(tmp_path, published, name, family):
    write_to, _ = published
    rows = np.ones((4, 4), np.float32)
    renamed = lambda tensors: {k: t for k, t in tensors.items() if "mtp" not in k} | {name: rows}
    target = specjax.load_model(write_to(tmp_path, renamed))
    with pytest.raises(ValueError, match=f"holds MTP layers as ({family}).* loads no such target"):
        specjax.load_drafter(None, target, specjax.SpeculationConfig(method="mtp"))


def read(folder, **options):
    return read_mtp(folder, TARGET.config, jnp.float32, **options)


@pytest.mark.parametrize("tables", [{}, {"has_embedding": True, "has_head": True}])
def test_a_folder_of_speculators(tmp_path, tables):
    config = config_of(qk_norm=True, rope=RopeConfig(theta=640000.0), norm_eps=1e-5, **tables)
    tensors = random_tensors(eagle.weights_of(config, MTP_PREFIX))
    found = read(write(tmp_path, of_speculators(), tensors))
    assert found.config == config
    np.testing.assert_array_equal(found.params["fc"], tensors["mtp_layers.0.input_proj.weight"])
    assert found.notes[1] == "projects the embedding first, as speculators 0.6 and later do"
    drafter = specjax.load_drafter(
        str(tmp_path), TARGET, specjax.SpeculationConfig(method="mtp", model=str(tmp_path))
    )
    assert drafter.spec == EagleDrafter(config)


IN_TARGET = f"{OWN_PREFIX}input_proj.weight"


@pytest.mark.parametrize(
    ("more", "change", "match"),
    [
        ({"hidden_size": 16}, dict, "for a target of 16 hidden numbers"),
        ({"vocab_size": 60}, dict, "60 tokens"),
        ({"hidden_act": "gelu"}, dict, "hidden_act"),
        ({"use_sliding_window": True}, dict, "use_sliding_window"),
        ({"num_nextn_predict_layers": 2}, dict, "there are 2 MTP layers, and one"),
        (
            {},
            put(f"{OWN_PREFIX}input_proj.weight".replace("0", "1"), lambda _: np.ones(1, "f4")),
            "there are 2 MTP layers, and one",
        ),
        ({}, without(IN_TARGET), "lacks 1 of the"),
        ({}, put(IN_TARGET, lambda w: w[:, :WIDTH]), r"expected \[32, 64\]"),
        ({}, without(f"{OWN_PREFIX}token_layernorm.weight"), "token_layernorm"),
        ({}, without(f"{OWN_PREFIX}final_layernorm.weight"), "final_layernorm"),
        ({}, without(f"{OWN_PREFIX}self_attn.q_proj.bias"), "q_proj.bias"),
        ({}, put(f"{OWN_PREFIX}norm.weight", lambda _: np.ones(WIDTH, "f4")), "no use for"),
        ({}, put("model.mtp_norm.weight", lambda _: np.ones(WIDTH, "f4")), "no use for"),
    ],
)
def test_what_is_refused(tmp_path, published, more, change, match):
    write_to, _ = published
    with pytest.raises(ValueError, match=match):
        read(write_to(tmp_path, change, **more))


@pytest.mark.parametrize(
    ("of_layer", "more", "match"),
    [
        (
            {"model_type": "qwen3_next"},
            {},
            "'qwen3_next' of transformer_layer_config: MTP layers of",
        ),
        ({"model_type": "glm_moe_dsa"}, {}, "'glm_moe_dsa' of transformer_layer_config"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding_attention"),
        ({}, {"architectures": ["FastMTPSpeculator"]}, "speculators 0.6 or later"),
        ({}, {"num_nextn_predict_layers": 3}, "there are 3 MTP layers"),
    ],
)
def test_what_is_refused_of_speculators(tmp_path, of_layer, more, match):
    tensors = random_tensors(eagle.weights_of(config_of(qk_norm=True), MTP_PREFIX))
    folder = write(tmp_path, of_speculators(**of_layer) | more, tensors)
    with pytest.raises(ValueError, match=match):
        specjax.load_drafter(folder, TARGET)


def test_captured_layers_are_not_its_to_choose(tmp_path, published):
    write_to, _ = published
    with pytest.raises(ValueError, match="reads the last hidden state"):
        read(write_to(tmp_path), aux_layer_ids=[1])


@pytest.mark.parametrize("depth", [1, 9])
def test_a_layer_of_another_target_is_refused(depth):
    config, params = make_layer()
    other = dataclasses.replace(config, aux_layers=(before_final_norm(depth),))
    drafter = specjax.LoadedDrafter("layer", EagleDrafter(other), params)
    with pytest.raises(ValueError, match=f"tokens and {depth} layers"):
        specjax.load_drafter(drafter, TARGET)


def test_a_model_with_such_a_layer_drafts_for_models_of_other_sizes(tmp_path, published):
    write_to, model = published
    folder = write_to(tmp_path)
    assert specjax.load_drafter(folder, model).spec.config.is_mtp
    deeper = tiny_model(num_layers=6, vocab_size=model.config.vocab_size)
    assert isinstance(specjax.load_drafter(folder, deeper).spec, ModelDrafter)
