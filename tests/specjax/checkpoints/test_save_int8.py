"""Models that are saved in int8 come back as what is stored, and are stored so again."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax.models import safetensors
from specjax.models.dense import sequence_logits
from specjax.models.int8_reading import Int8Matrix
from specjax.models.weight_files import open_folder

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
WEIGHTS = "model.safetensors"


def raw_of(folder):
    return json.loads((folder / "config.json").read_text())


def stored_of(folder):
    """Returns what the files hold, scales under their own names."""
    return {
        name: each
        for path in sorted(folder.glob("*.safetensors"))
        for name, each in safetensors.open_file(path).items()
    }


def assert_same_files(folder, other):
    ours, theirs = stored_of(folder), stored_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        is_part = tensor.dtype == np.int8 or name.endswith("_scale")
        # Vectors have the dtype in which they were loaded.
        assert tensor.dtype == theirs[name].dtype or not is_part
        assert np.array_equal(tensor, theirs[name].astype(tensor.dtype)), name


def assert_near(found, expected):
    """Matrices are as near as 8 bits can be, and vectors equal."""

    def check(ours, theirs):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        if ours.ndim < 2:
            return np.testing.assert_array_equal(ours, theirs)
        error, most = np.abs(ours - theirs), np.abs(theirs).max()
        assert error.max() <= 0.51 * most / 127
        assert error.max() > 0
        return None

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_there_and_back(name, dtype, tmp_path):
    model = specjax.load_model(GOLDENS / name, dtype="bfloat16")
    specjax.save_pretrained(model, tmp_path / "a", stored="int8")
    loaded = specjax.load_model(tmp_path / "a", dtype=dtype)
    assert loaded.config == model.config
    assert loaded.generation_defaults == model.generation_defaults
    # Rows of GPT-2 are stored as columns, and bfloat16 rounds once more.
    if not name.startswith("gpt") and dtype == "float32":
        assert_near(loaded.params, model.params)
    specjax.save_pretrained(loaded, tmp_path / "b", stored="int8")
    assert_same_files(tmp_path / "a", tmp_path / "b")
    if dtype == "bfloat16":
        assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
        assert raw_of(tmp_path / "a") == raw_of(tmp_path / "b")


@pytest.mark.full  # the embedded model's forward is compiled
def test_half_the_bytes_of_the_embedded_model_and_nearly_its_probabilities(tmp_path):
    demo = specjax.load_model("demo")
    # The embedded weights are multiples of their scales; these are not.
    moved = jax.tree.map(
        lambda x: x + 0.003 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), demo.params
    )
    model = dataclasses.replace(demo, params=moved)
    specjax.save_pretrained(model, tmp_path / "a", stored="int8")
    in_bfloat16 = 2 * sum(leaf.size for leaf in jax.tree.leaves(demo.params))
    assert (tmp_path / "a" / WEIGHTS).stat().st_size < 0.51 * in_bfloat16
    loaded = specjax.load_model(tmp_path / "a")
    text = "def main():\n    for name in sorted(os.listdir(path)):\n        print(name)\n"
    ids = jnp.asarray([model.tokenizer.encode(text)])

    logits = jax.jit(sequence_logits, static_argnums=1)

    def nats(model):
        logprobs = jax.nn.log_softmax(logits(model.params, model.config, ids))
        return float(-jnp.mean(logprobs[0, jnp.arange(ids.shape[1] - 1), ids[0, 1:]]))

    assert nats(loaded) != nats(model)
    assert abs(nats(loaded) - nats(model)) < 0.01


def test_saved_whole_again_nothing_says_int8(tmp_path):
    specjax.save_pretrained(specjax.load_model(GOLDENS / "llama"), tmp_path / "a", stored="int8")
    loaded = specjax.load_model(tmp_path / "a")
    assert raw_of(tmp_path / "a")["quantization_config"]["format"] == "int-quantized"
    specjax.save_pretrained(loaded, tmp_path / "b")
    assert "quantization_config" not in raw_of(tmp_path / "b")
    again = specjax.load_model(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    # In place, too.
    specjax.save_pretrained(loaded, tmp_path / "a")
    assert "quantization_config" not in raw_of(tmp_path / "a")
    specjax.load_model(tmp_path / "a")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_is_the_embedding_is_ignored(is_tied, tmp_path):
    model = tiny_llama(0, tie_word_embeddings=is_tied)
    specjax.save_pretrained(model, tmp_path / "a", stored="int8")
    said = raw_of(tmp_path / "a")["quantization_config"]
    assert said["ignore"] == (["lm_head"] if is_tied else [])
    kinds = {name: isinstance(x, Int8Matrix) for name, x in open_folder(tmp_path / "a").items()}
    assert kinds["model.embed_tokens.weight"]
    assert kinds.get("lm_head.weight", True)
    assert not kinds["model.norm.weight"]


def test_several_files_and_a_mesh(tmp_path):
    model = specjax.load_model(GOLDENS / "llama")
    specjax.save_pretrained(model, tmp_path / "whole", stored="int8")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    places = specjax.param_shardings(model.config, mesh)
    split = dataclasses.replace(model, params=jax.tree.map(jax.device_put, model.params, places))
    specjax.save_pretrained(split, tmp_path / "split", stored="int8", max_file_bytes=1000)
    assert len([*(tmp_path / "split").glob("*.safetensors")]) > 4
    assert_same_files(tmp_path / "whole", tmp_path / "split")
    on_mesh = specjax.load_model(tmp_path / "split", mesh=mesh)
    expected = specjax.load_model(tmp_path / "whole").params
    jax.tree.map(np.testing.assert_array_equal, on_mesh.params, expected)


def test_a_row_of_zeros(tmp_path):
    model = tiny_llama(0)
    params = model.params | {"embed_tokens": model.params["embed_tokens"].at[3].set(0)}
    specjax.save_pretrained(dataclasses.replace(model, params=params), tmp_path, stored="int8")
    loaded = specjax.load_model(tmp_path)
    assert not np.any(loaded.params["embed_tokens"][3])
    assert_near(loaded.params, params)


def test_numbers_that_int8_cannot_hold_change_nothing(tmp_path):
    model, folder = tiny_llama(0), tmp_path / "saved"
    specjax.save_pretrained(model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    params = model.params | {"embed_tokens": model.params["embed_tokens"].at[3, 1].set(jnp.nan)}
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight holds NaN"):
        specjax.save_pretrained(dataclasses.replace(model, params=params), folder, stored="int8")
    with pytest.raises(
        ValueError, match="stored='int4' is no way to store weights; expected 'int8"
    ):
        specjax.save_pretrained(model, folder, stored="int4")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
