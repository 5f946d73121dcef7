"""Families of a program's own: made known, loaded and run; check_family has a test of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import ENGINE, random_model, tiny_gpt2_config, tiny_llama_config
from jax.sharding import Mesh, PartitionSpec
from made_up_families import HERON, NUM_EXPERTS, STILT_JSON, heron_config

import specjax
from specjax.decode.bucket import BURST, StepKey
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import ModelDrafter, NoDrafter
from specjax.models import register, sharding
from specjax.models.dense import sequence_logits
from specjax.models.families import FAMILIES, family_of, is_own
from specjax.models.hf_config import parse_config
from specjax.models.loading import load_model
from specjax.models.weight_files import open_folder
from specjax.planning.abstract_decoder import abstract_weights
from specjax.planning.plans import model_work
from specjax.testing import save_model

STILT, HERON_CONFIG = parse_config(STILT_JSON), heron_config()
CONFIGS = {"stilt": STILT, "heron": HERON_CONFIG}


@pytest.fixture(scope="module")
def model():
    return random_model(STILT, 0)


def saved(folder, config, params, raw):
    """Returns the tensors of a folder that load_model reads `params` from."""
    save_model(folder, specjax.Model(config, params), raw)
    return {name: np.array(tensor) for name, tensor in open_folder(folder).items()}


def test_what_a_config_says():
    assert STILT.layer_windows == (20, None)
    assert [rope.theta for rope in STILT.layer_ropes] == [1e4, 1e6]
    assert STILT.scale == 0.25
    assert (STILT.attention_softcap, STILT.logits_softcap) == (5.0, 3.0)
    none = parse_config(STILT_JSON | {"attn_logit_softcapping": None})
    assert (none.attention_softcap, none.logits_softcap) == (None, 3.0)
    left_out = {key: STILT_JSON[key] for key in STILT_JSON if "softcapping" not in key}
    usual = parse_config(left_out)
    assert (usual.attention_softcap, usual.logits_softcap) == (50.0, 30.0)
    old = parse_config(STILT_JSON | {"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert [rope.factor for rope in old.layer_ropes] == [1.0, 8.0]
    new = {"sliding_attention": {"rope_theta": 500}, "full_attention": {"rope_theta": 7e5}}
    new = parse_config(STILT_JSON | {"rope_parameters": new})
    assert [rope.theta for rope in new.layer_ropes] == [500, 7e5]
    with pytest.raises(ValueError, match="key 'head_dim' is missing, which every stilt config"):
        parse_config({key: STILT_JSON[key] for key in STILT_JSON if key != "head_dim"})


@pytest.mark.parametrize("name", ["stilt", "heron"])
def test_a_folder_is_read(name, tmp_path, write_safetensors):
    config = CONFIGS[name]
    raw = {"stilt": STILT_JSON, "heron": {"model_type": "heron"}}[name]
    params = random_model(config, 0).params
    tensors = saved(tmp_path, config, params, raw)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    # A layer that has more than its family knows is refused, whatever layers are called.
    more = {"stilt": "model.layers.1.more.weight", "heron": "blocks.1.more.weight"}[name]
    write_safetensors(tmp_path / "model.safetensors", tensors | {more: np.zeros(2)})
    with pytest.raises(ValueError, match=r"1 tensors in layers .* has no use for"):
        load_model(tmp_path)


def test_a_missing_expert_is_named(tmp_path, write_safetensors):
    params = random_model(HERON_CONFIG, 0).params
    raw = {"model_type": "heron"}
    tensors = saved(tmp_path, HERON_CONFIG, params, raw)
    del tensors["blocks.1.experts.3.up.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"lacks 1 of .* blocks\.1\.experts\.3\.up\.weight"):
        load_model(tmp_path)


@pytest.mark.full
def test_an_example_generates_what_its_logits_say(model):
    prompts = [[1, 2, 3, 1, 2], [7, 8, 9]]
    sampling = specjax.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"sampling": sampling, "engine": ENGINE}
    drafted = specjax.generate(
        model,
        prompts,
        drafter="ngram",
        speculative_config={"num_speculative_tokens": 3, "policy": "fixed"},
        **options,
    )
    for prompt, completion in zip(prompts, drafted):
        text = [*prompt, *completion.token_ids]
        logits = sequence_logits(model.params, model.config, jnp.asarray([text]))
        assert np.abs(logits).max() <= STILT.logits_softcap
        said = np.asarray(logits[0]).argmax(-1)[len(prompt) - 1 : -1]
        assert said.tolist() == list(completion.token_ids)


@pytest.mark.full
@pytest.mark.parametrize(
    "field", quick(["attention_softcap", "logits_softcap", "layer_ropes"], "layer_ropes")
)
def test_every_field_counts(model, field):
    nothing = () if field == "layer_ropes" else None
    other = dataclasses.replace(STILT, **{field: nothing})
    ids = jnp.arange(30)[None]
    logits = [sequence_logits(model.params, config, ids) for config in (STILT, other)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


def test_experts_are_split_along_their_mlp():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    weights = abstract_weights(HERON_CONFIG, jnp.float32)
    layer = sharding.param_specs(weights, mesh, HERON_CONFIG)["layers"][0]
    assert layer["experts_gate_proj"] == PartitionSpec(None, "tensor", None)
    assert layer["experts_down_proj"] == PartitionSpec(None, None, "tensor")
    assert layer["router"] == PartitionSpec(None, None)
    assert layer["sinks"] == PartitionSpec("tensor")


def test_parameters_of_another_model_have_no_place():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    weights = abstract_weights(HERON_CONFIG, jnp.float32)
    with pytest.raises(ValueError, match=r"layers\.0\.experts_down_proj is none of a llama model"):
        sharding.param_specs(weights, mesh, tiny_llama_config())


def test_work_counts_what_is_read_and_multiplied():
    config = HERON_CONFIG
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(config, jnp.float32)))
    table = 61 * 32
    work = model_work(config, "bfloat16", 2)
    assert work.weight_bytes == (count - table) * 2 / 2
    assert work.token_flops == 2 * (count - table) / 2
    assert work.context_flops == 4 * 2 * 4 * 8 / 2
    assert work.layer_windows == (20, None)
    # GPT-2 reads one row of its positions, and the whole embedding as its head.
    gpt2 = tiny_gpt2_config()
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(gpt2, jnp.float32)))
    assert model_work(gpt2, "float32", 1).weight_bytes == 4 * (count - 256 * 32)


def test_registering():
    register(HERON)  # again
    with pytest.raises(ValueError, match="named 'heron' already"):
        register(dataclasses.replace(HERON))
    with pytest.raises(ValueError, match="'llama' is read by the family 'llama' already"):
        register(dataclasses.replace(HERON, name="egret", model_types={"llama": "Egret"}))
    with pytest.raises(TypeError, match=r"work=None of family 'egret' is no function"):
        register(dataclasses.replace(HERON, name="egret", model_types={}, work=None))
    assert "egret" not in FAMILIES
    with pytest.raises(ValueError, match="architecture='egret' is none of llama, gpt2"):
        family_of(tiny_llama_config(architecture="egret"))
    named = r"expected one of llama .* heron \(HeronForCausalLM\).* specjax\.models\.register"
    with pytest.raises(ValueError, match=named):
        parse_config({"model_type": "egret"})


def test_steps_of_registered_families_are_not_kept_whole():
    """Their code may change and the name of a kept step would not."""
    sizes = Sizes(rows=1, page_size=8, num_pages=2, pages_per_row=2, burst_steps=1)
    llama = tiny_llama_config()
    for target, drafter in ((STILT, NoDrafter()), (llama, ModelDrafter(STILT))):
        decoder = Decoder(
            DecoderConfig(
                target=target, drafter=drafter, sizes=sizes, engine=specjax.EngineConfig()
            )
        )
        assert decoder.executables._file(StepKey(BURST), ()) is None
    assert not is_own(STILT)
    assert is_own(llama)
    assert NUM_EXPERTS == 4


def test_a_family_that_borrows_is_not_specjaxs_own(monkeypatch):
    """Its logits may change while specjax's version stays."""
    logits = lambda *arguments: -family_of(tiny_llama_config()).logits(*arguments)
    mine = dataclasses.replace(family_of(tiny_llama_config()), name="mine", logits=logits)
    monkeypatch.setitem(FAMILIES, "mine", mine)
    assert not is_own(dataclasses.replace(tiny_llama_config(), architecture="mine"))
