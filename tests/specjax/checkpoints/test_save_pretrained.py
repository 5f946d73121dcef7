"""Folders that save_pretrained writes are read as the models that were saved."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_gpt2, tiny_llama

import specjax
from specjax.drafters.spec import NgramDrafter
from specjax.models import safetensors
from specjax.models.base import RopeConfig
from specjax.runtime import whole_folders

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))


def assert_same(given, expected):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def assert_comes_back(model, folder, dtype=None, **keys):
    specjax.save_pretrained(model, folder, **keys)
    loaded = specjax.load_model(folder, dtype=dtype)
    assert loaded.config == model.config
    assert loaded.generation_defaults == model.generation_defaults
    assert_same(loaded.params, model.params)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_folder", [True, False])
def test_every_golden_model(name, has_folder, tmp_path):
    model = specjax.load_model(GOLDENS / name)
    model = model if has_folder else dataclasses.replace(model, folder=None)
    assert_comes_back(model, tmp_path / "saved")


LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0)
YARN = RopeConfig(
    kind="yarn", factor=4.0, attention_factor=1.2, truncate=False, beta_fast=16.0, beta_slow=2.0
)
SLIDING = {"layer_windows": (None, 5), "family": "qwen3", "qk_norm": True}
MODELS = {
    "a rope of llama 3": tiny_llama(0, rope=LLAMA3),
    "yarn": tiny_llama(0, rope=YARN),
    "linear": tiny_llama(0, rope=RopeConfig(kind="linear", factor=2.0)),
    "biases": tiny_llama(0, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mimo": tiny_llama(0, family="mimo", qkv_bias=True),
    "qwen 3 that slides": tiny_llama(0, **SLIDING),
    "mistral that slides": tiny_llama(0, family="mistral", layer_windows=(7, 7)),
    "mistral that slides in part": tiny_llama(0, family="mistral", layer_windows=(7, None)),
    "no sliding mistral": tiny_llama(0, family="mistral"),
    "granite": tiny_llama(0, family="granite", attention_scale=0.25, residual_multiplier=0.5),
    "a mask": tiny_llama(0, mask_token_id=60),
    "ids": tiny_llama(0, bos_token_id=1, eos_token_ids=(2, 3)),
    "gpt2 with a head of its own": tiny_gpt2(
        0, qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=False, activation="gelu"
    ),
    "gpt2 without scales": tiny_gpt2(
        0, qkv_bias=True, o_bias=True, mlp_bias=True, attention_scale=1.0
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_configs_that_were_never_loaded(name, tmp_path):
    assert_comes_back(MODELS[name], tmp_path / "saved")


@pytest.mark.parametrize("ids", [(), (3,), (3, 4)])
def test_other_ids_that_end_a_text(ids, tmp_path):
    model = specjax.load_model(GOLDENS / "qwen3")
    assert model.config.eos_token_ids not in [(), (3,), (3, 4)]
    config = dataclasses.replace(model.config, eos_token_ids=ids)
    assert_comes_back(dataclasses.replace(model, config=config), tmp_path / "saved")


def test_a_config_that_was_changed_since(tmp_path):
    model = specjax.load_model(GOLDENS / "llama")
    config = dataclasses.replace(model.config, norm_eps=3e-5)
    assert_comes_back(dataclasses.replace(model, config=config), tmp_path / "saved")


def test_a_family_that_is_none(tmp_path):
    model = tiny_llama(0, family="mine")
    with pytest.raises(ValueError, match=r"config.family='mine' is no model_type of .*'llama'"):
        specjax.save_pretrained(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_granite_of_the_usual_scale(tmp_path):
    """Its config.json always says the scale of attention."""
    model = tiny_llama(0, family="granite")
    specjax.save_pretrained(model, tmp_path / "saved")
    assert specjax.load_model(tmp_path / "saved").config.attention_scale == model.config.scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype, tmp_path):
    model = specjax.load_model(GOLDENS / "gpt2", dtype=dtype)
    assert_comes_back(model, tmp_path / "saved", dtype)
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["torch_dtype"] == dtype
    assert "dtype" not in raw


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_of_most_bytes_is_that_of_the_config(dtype, tmp_path):
    for rare in {"bfloat16", "float16", "float32"} - {dtype}:
        model = tiny_llama(0, num_layers=1)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
        params = {**params, "norm": params["norm"].astype(rare)}
        specjax.save_pretrained(dataclasses.replace(model, params=params), tmp_path / rare)
        assert json.loads((tmp_path / rare / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_several_files(name, tmp_path):
    model = specjax.load_model(GOLDENS / name)
    folder = tmp_path / "saved"
    assert_comes_back(model, folder, max_file_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    contents = {file: safetensors.open_file(folder / file) for file in files}
    for file, tensors in contents.items():
        assert {name for name, where in index["weight_map"].items() if where == file} == set(
            tensors
        )
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= 20_000
    total = sum(each.nbytes for tensors in contents.values() for each in tensors.values())
    assert index["metadata"] == {"total_size": total}
    # The next save, in one file, leaves none of these.
    assert_comes_back(model, folder)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]


def test_weights_on_a_mesh(tmp_path):
    model = tiny_llama(0)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    places = specjax.param_shardings(model.config, mesh)
    on_mesh = jax.tree.map(jax.device_put, model.params, places)
    assert_comes_back(dataclasses.replace(model, params=on_mesh), tmp_path / "saved")


def test_a_trainers_tree_under_our_names(tmp_path):
    model = tiny_llama(0)
    params = {"params": {**model.params, "layers": list(model.params["layers"])}}
    specjax.save_pretrained(dataclasses.replace(model, params=params), tmp_path / "saved")
    assert_same(specjax.load_model(tmp_path / "saved").params, model.params)


def test_draft_models(tmp_path):
    target = specjax.load_model("demo")
    drafter = specjax.load_drafter("demo", target)
    specjax.save_pretrained(drafter, tmp_path / "draft")
    again = specjax.load_drafter(tmp_path / "draft", target)
    assert again.spec == drafter.spec
    assert_same(again.params, drafter.params)
    with pytest.raises(NotImplementedError, match=r"'ngram' is no draft model .* save_orbax"):
        specjax.save_pretrained(specjax.load_drafter("ngram", target), tmp_path / "ngram")
    assert os.listdir(tmp_path) == ["draft"]


# Tokenizers


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_tokenizer(has_folder, tmp_path):
    model = specjax.load_model("demo")
    if not has_folder:
        model = dataclasses.replace(model, folder=None)
        model.tokenizer.chat_template = "{{ messages[0].content }}"
    specjax.save_pretrained(model, tmp_path / "saved")
    loaded = specjax.load_model(tmp_path / "saved").tokenizer
    for text in ("def f(x):\n\treturn x", "\u4f60\u597d"):
        assert loaded.encode(text) == model.tokenizer.encode(text)
    assert loaded.special_tokens == model.tokenizer.special_tokens
    assert loaded.chat_template == model.tokenizer.chat_template


def test_templates_by_name(tmp_path):
    model = dataclasses.replace(specjax.load_model("demo"), folder=None)
    templates = {"default": "d", "tool_use": "{{ tools }}"}
    model.tokenizer.chat_template = templates
    specjax.save_pretrained(model, tmp_path / "by_name")
    again = specjax.load_model(tmp_path / "by_name")
    assert again.tokenizer.chat_template == templates
    more = tmp_path / "by_name" / "additional_chat_templates"
    more.mkdir()
    for name, text in templates.items():
        (more / f"{name}.jinja").write_text(text)
    specjax.save_pretrained(specjax.load_model(more.parent), tmp_path / "copied")
    assert (tmp_path / "copied" / more.name / "tool_use.jinja").read_text() == "{{ tools }}"
    assert specjax.load_model(tmp_path / "copied").tokenizer.chat_template == templates


def test_files_are_copied_only_where_they_say_the_same(tmp_path):
    specjax.save_pretrained(specjax.load_model("demo"), tmp_path / "first")
    path = tmp_path / "first" / "tokenizer_config.json"
    raw = json.loads(path.read_text()) | {"own_key": 1}
    path.write_text(json.dumps(raw))
    model = specjax.load_model(tmp_path / "first")
    specjax.save_pretrained(model, tmp_path / "second")
    assert json.loads((tmp_path / "second" / path.name).read_text())["own_key"] == 1
    model.tokenizer.special_tokens["bos_token"] = "<|endoftext|>"
    specjax.save_pretrained(model, tmp_path / "third")
    assert "own_key" not in (tmp_path / "third" / path.name).read_text()
    assert specjax.load_model(tmp_path / "third").tokenizer.bos_token == "<|endoftext|>"


def test_layers_that_predict_more_are_not_promised(tmp_path):
    model = MODELS["mimo"]
    specjax.save_pretrained(model, tmp_path / "first")
    path = tmp_path / "first" / "config.json"
    raw = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1, "auto_map": {"a": "m.M"}}
    path.write_text(json.dumps(raw))
    (tmp_path / "first" / "m.py").write_text("class M: ...")
    specjax.save_pretrained(specjax.load_model(tmp_path / "first"), tmp_path / "second")
    raw = json.loads((tmp_path / "second" / "config.json").read_text())
    assert raw["num_nextn_predict_layers"] == 0
    assert (tmp_path / "second" / "m.py").read_text() == "class M: ..."
    specjax.save_pretrained(specjax.load_model(tmp_path / "second"), tmp_path / "second")
    assert (tmp_path / "second" / "m.py").exists()


# Whole folders


def test_only_what_a_save_wrote_is_replaced(tmp_path):
    model, folder = tiny_llama(0), tmp_path / "saved"
    (folder / "inner").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"saved holds inner, and a save replaces the folder"):
        specjax.save_pretrained(model, folder)
    (folder / "inner").rmdir()
    specjax.save_pretrained(model, folder)
    (folder / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"saved holds notes.md"):
        specjax.save_pretrained(tiny_llama(1), folder)
    assert_same(specjax.load_model(folder).params, model.params)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text("mine")
    with pytest.raises(ValueError, match=r"scripts holds train.py"):
        specjax.save_pretrained(model, scripts)
    (scripts / "config.json").write_text("{}")  # of something else
    with pytest.raises(ValueError, match=r"scripts holds train.py"):
        specjax.save_pretrained(model, scripts)
    (scripts / "train.py").unlink()
    with pytest.raises(ValueError, match=r"scripts holds config.json"):
        specjax.save_pretrained(model, scripts)
    with pytest.raises(ValueError, match=r"is a file; give the name of a folder"):
        specjax.save_pretrained(model, folder / "config.json")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(whole_folders, "_exchange", lambda one, other: False)
    folder, link = tmp_path / "saved", tmp_path / "link"
    link.symlink_to(folder)
    for seed in (0, 1):
        specjax.save_pretrained(tiny_llama(seed), link)
        assert_same(specjax.load_model(folder).params, tiny_llama(seed).params)
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "saved"]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~whole_folders._umask()


def test_a_failed_save_changes_nothing(tmp_path):
    model, folder = tiny_llama(0), tmp_path / "saved"
    specjax.save_pretrained(model, folder)
    other = dataclasses.replace(model.config, qkv_bias=True, o_bias=False)
    params = tiny_llama(0, qkv_bias=True).params
    with pytest.raises(ValueError, match=r"cannot say this config: o_bias=False for True"):
        specjax.save_pretrained(specjax.Model(other, params), folder)
    short = {name: leaf for name, leaf in model.params.items() if name != "norm"}
    with pytest.raises(ValueError, match=re.escape("norm (32,)")):
        specjax.save_pretrained(dataclasses.replace(model, params=short), folder)
    doubled = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), model.params)
    with pytest.raises(ValueError, match=r"is int32; weights are written as"):
        specjax.save_pretrained(dataclasses.replace(model, params=doubled), folder)
    with pytest.raises(ValueError, match=r"max_file_bytes=0 must be"):
        specjax.save_pretrained(model, folder, max_file_bytes=0)
    with pytest.raises(TypeError, match="neither a Model nor"):
        specjax.save_pretrained(model.params, folder)
    drafter = specjax.LoadedDrafter("n-gram", NgramDrafter())
    for what in (model, drafter, model.params):
        with pytest.raises(TypeError, match=r"as in save_pretrained\(model, folder\)"):
            specjax.save_pretrained(folder, what)
        with pytest.raises(TypeError, match=r"as in save_orbax\(path, model\)"):
            specjax.save_orbax(what, folder)
    assert os.listdir(tmp_path) == ["saved"]
    assert_same(specjax.load_model(folder).params, model.params)


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from helpers import tiny_llama
    import specjax
    from specjax.models import weight_writing
    from specjax.runtime import whole_folders

    folder, when = sys.argv[2:]
    specjax.save_pretrained(tiny_llama(0), folder)
    num_made = 0
    make = weight_writing.Tensor.make

    def made(self):
        global num_made
        num_made += 1
        if num_made == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(self)

    if when == "weights":
        weight_writing.Tensor.make = made
    else:
        whole_folders._take_place = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
    specjax.save_pretrained(tiny_llama(1), folder)
    """
)


@pytest.mark.full
@pytest.mark.parametrize("when", quick(["weights", "rename"], "weights"))
def test_a_killed_save_leaves_the_last_one(when, tmp_path):
    tests = os.path.dirname(sys.modules["helpers"].__file__)
    folder = tmp_path / "saved"
    command = [sys.executable, "-c", KILLED, tests, str(folder), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    (left,) = [name for name in os.listdir(tmp_path) if name != "saved"]
    assert left.startswith(".saved.saving-")
    assert_same(specjax.load_model(folder).params, tiny_llama(0).params)
    specjax.save_pretrained(tiny_llama(2), folder)
    assert_same(specjax.load_model(folder).params, tiny_llama(2).params)


# transformers


@pytest.mark.reference
@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "a rope of llama 3", "biases", "qwen 3 that slides"])
def test_transformers_computes_the_same(name, has_folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from specjax.models.dense import sequence_logits

    model = specjax.load_model(GOLDENS / name) if name in NAMES else MODELS[name]
    model = model if has_folder else dataclasses.replace(model, folder=None)
    specjax.save_pretrained(model, tmp_path / "saved", max_file_bytes=30_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    theirs = theirs.eval().to(torch.float32)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        found = sequence_logits(model.params, model.config, jnp.asarray(ids))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
