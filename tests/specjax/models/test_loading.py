"""Folders to models: names, dtypes, layouts, and every way a folder can be wrong."""

import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch_archives import write_torch

from specjax.models import loading
from specjax.models.families import family_of
from specjax.models.loading import load_model
from specjax.models.weight_files import open_folder
from specjax.models.weights import Source


def _rewrite(folder, write_safetensors, change) -> None:
    """Writes the folder's weights again after `change` has had a dict of copies."""
    tensors = {name: np.array(t) for name, t in open_folder(folder).items()}
    tensors = change(tensors) or tensors
    write_safetensors(folder / "model.safetensors", tensors)


def _same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_matrices_are_out_in_and_named_as_the_model_reads_them(golden):
    tensors = open_folder(golden("llama"))
    params = load_model(golden("llama")).params
    layer = params["layers"][1]
    name = "model.layers.1.self_attn.k_proj"
    np.testing.assert_array_equal(layer["k_proj"], tensors[f"{name}.weight"])
    np.testing.assert_array_equal(layer["k_proj_bias"], tensors[f"{name}.bias"])
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embed_tokens"], embedding)


def test_matrices_of_gpt2_are_transposed(golden):
    tensors = open_folder(golden("gpt2"))
    prefix = "" if "wte.weight" in tensors else "transformer."
    layer = load_model(golden("gpt2")).params["layers"][1]
    stacked = np.concatenate([layer[f"{name}_proj"] for name in "qkv"])
    published = tensors[f"{prefix}h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(stacked, published.T)
    published = tensors[f"{prefix}h.1.mlp.c_fc.weight"]
    np.testing.assert_array_equal(layer["up_proj"], published.T)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "granite", "gpt2"])
def test_the_tree_is_the_one_that_init_makes(name, golden):
    model = load_model(golden(name))
    made = jax.eval_shape(lambda: family_of(model.config).init(jax.random.key(0), model.config))
    shape_of = lambda leaf: (leaf.shape, leaf.dtype)
    assert jax.tree.map(shape_of, model.params) == jax.tree.map(shape_of, made)


def test_the_model_around_the_weights(golden):
    model = load_model(golden("qwen3"))
    assert model.name == "qwen3"
    assert model.tokenizer is None
    assert model.config.eos_token_ids == (2, 5)
    assert model.generation_defaults == {"temperature": 0.7, "do_sample": True}
    assert load_model(str(golden("qwen3")), name="mine").name == "mine"


def test_the_tokenizer_comes_along(golden_copy):
    folder = golden_copy("llama")
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    assert load_model(folder).tokenizer.encode("aa") == [0, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.float32])
def test_dtype(dtype, golden):
    params = load_model(golden("llama"), dtype=dtype).params
    reference = load_model(golden("llama")).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    _same(params, jax.tree.map(lambda leaf: leaf.astype(dtype), reference))


@pytest.mark.parametrize(
    ("alias", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_short_names_of_dtypes(alias, dtype, golden):
    assert load_model(golden("llama"), dtype=alias).params["norm"].dtype == dtype


@pytest.mark.parametrize("dtype", ["bf17", "int8", "float64", 5, jnp.int32, "O"])
def test_dtypes_that_weights_cannot_have(dtype):
    with pytest.raises(ValueError, match=r"expected one of float32, bfloat16, float16"):
        load_model("no-such-folder", dtype=dtype)


T4, L4 = ("gpu", "7.5"), ("gpu", "8.9")


@pytest.fixture
def on(monkeypatch):
    """Returns a function that has weights loaded as on a device of another kind."""

    def load_on(platform, capability=None):
        device = types.SimpleNamespace(platform=platform, device_kind="Tesla T4")
        if capability is not None:
            device.compute_capability = capability
        monkeypatch.setattr(loading, "default_device", lambda: device)

    return load_on


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (("cpu",), "float32"),
        (("tpu",), "bfloat16"),
        (T4, "float32"),
        (L4, "bfloat16"),
        (("gpu", "10.0"), "bfloat16"),
        (("gpu", "gfx942"), "bfloat16"),  # AMD
    ],
    ids=["CPU", "TPU", "T4", "L4", "B200", "AMD"],
)
def test_default_dtype(device, dtype, golden, on):
    on(*device)
    assert load_model(golden("qwen2")).params["norm"].dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gpu_without_bfloat16_has_others(dtype, golden, on):
    on(*T4)
    assert load_model(golden("qwen2"), dtype=dtype).params["norm"].dtype == dtype


def test_bfloat16_on_a_gpu_without_it_is_one_sentence(golden, on):
    on(*L4)
    load_model(golden("qwen2"), dtype="bfloat16")
    on(*T4)
    with pytest.warns(UserWarning, match="Tesla T4 has no bfloat16.*dtype='float16'") as seen:
        model = load_model(golden("qwen2"), dtype="bfloat16")
    assert len(seen) == 1
    assert model.params["norm"].dtype == jnp.bfloat16


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_stored_dtypes(stored, golden_copy, write_safetensors):
    folder = golden_copy("llama")
    expected = load_model(folder).params
    cast = lambda tensors: {k: v.astype(jnp.dtype(stored)) for k, v in tensors.items()}
    _rewrite(folder, write_safetensors, cast)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(stored), expected)
    _same(load_model(folder).params, jax.tree.map(np.float32, rounded))


def test_weights_do_not_follow_the_file(golden_copy, write_safetensors):
    """Params are copies: changing the file under a loaded model changes nothing."""
    folder = golden_copy("llama")
    _rewrite(folder, write_safetensors, lambda tensors: tensors)
    params = load_model(folder).params
    before = jax.tree.map(np.array, params)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(b"\x7f" * (path.stat().st_size // 2))
    _same(params, before)


def test_shards(golden_copy, write_safetensors):
    folder = golden_copy("qwen3")
    expected = load_model(folder).params
    tensors = {name: np.array(t) for name, t in open_folder(folder).items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        write_safetensors(folder / shard, {name: tensors[name] for name in part})
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(str({"weight_map": weight_map}).replace("'", '"'))
    _same(load_model(folder).params, expected)


def test_gpt2_without_prefix_and_with_mask_buffers(golden_copy, write_safetensors):
    folder = golden_copy("gpt2")
    expected = load_model(folder).params

    def as_first_published(tensors):
        bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        for layer in range(2):
            bare[f"h.{layer}.attn.bias"] = np.tri(64, dtype=np.float32)[None, None]
            bare[f"h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
        return bare

    _rewrite(folder, write_safetensors, as_first_published)
    assert "h.0.ln_1.weight" in open_folder(folder)
    _same(load_model(folder).params, expected)


def test_tensors_without_a_use_are_ignored(golden_copy, write_safetensors):
    """A copy of a tied head, rotary tables, cache scales, and layers past the last."""
    folder = golden_copy("qwen2")
    expected = load_model(folder).params
    idle = {
        "lm_head.weight": open_folder(folder)["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.layers.0.self_attn.k_scale": np.ones((), np.float32),
        "model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32),
    }
    _rewrite(folder, write_safetensors, lambda tensors: tensors | idle)
    _same(load_model(folder).params, expected)


def test_tensors_that_would_change_the_output_are_not_ignored(golden_copy, write_safetensors):
    folder = golden_copy("mistral")
    bias = {"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)}
    _rewrite(folder, write_safetensors, lambda tensors: tensors | bias)
    with pytest.raises(ValueError, match=r"1 tensors in layers .*layers\.1.*q_proj\.bias"):
        load_model(folder)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_that_the_config_leaves_out(name, golden_copy):
    key = "n_layer" if name == "gpt2" else "num_hidden_layers"
    with pytest.raises(ValueError, match=r"1 layers more than the 1 .*\.1\."):
        load_model(golden_copy(name, **{key: 1}))


def test_a_layer_for_multi_token_prediction_does_not_run(golden_copy, write_safetensors):
    """It has what a layer has, and a projection of its own."""
    folder = golden_copy("qwen2")
    expected = load_model(folder).params

    def with_prediction(tensors):
        last = {
            name.replace("layers.1.", "layers.2."): tensor
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
        return tensors | last | {"model.layers.2.eh_proj.weight": np.ones((4, 4), "f4")}

    _rewrite(folder, write_safetensors, with_prediction)
    _same(load_model(folder).params, expected)


def test_weights_that_are_whole_numbers(golden_copy, write_safetensors):
    folder = golden_copy("llama")
    norm = {"model.norm.weight": np.ones(32, np.uint8)}
    _rewrite(folder, write_safetensors, lambda tensors: tensors | norm)
    with pytest.raises(ValueError, match=r"not floating point: model\.norm.* uint8"):
        load_model(folder)


def test_the_tokenizer_is_checked_before_weights_are_read(golden_copy, monkeypatch):
    folder = golden_copy("llama")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["folder", "loop", "nothing", "device"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_no_file_is_not_passed_over(name, kind, golden_copy):
    path = golden_copy("llama") / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        to = {"loop": path, "nothing": "/no/such/file", "device": os.devnull}[kind]
        path.symlink_to(to)
    with pytest.raises(ValueError, match=f"{name} is no file that can be read"):
        load_model(path.parent)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_links_out_of_the_folder(name, golden_copy, tmp_path):
    folder = golden_copy("llama")
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / name).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match="symbolic link out of its folder"):
        load_model(folder)


def test_an_untied_model_needs_its_head(golden_copy, write_safetensors):
    folder = golden_copy("llama")
    _rewrite(folder, write_safetensors, lambda t: {k: t[k] for k in t if k[:2] != "lm"})
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings: true"):
        load_model(folder)


def test_missing_tensors_are_counted_and_the_first_ten_named(golden_copy):
    with pytest.raises(ValueError, match="lacks 34 of the 54") as caught:
        load_model(golden_copy("granite", num_hidden_layers=4, attention_bias=True))
    assert str(caught.value).count("model.layers.") == 10
    assert "and 24 more" in str(caught.value)


def test_wrong_shapes_are_named_with_both(golden_copy):
    folder = golden_copy("llama", intermediate_size=50)
    wrong = r"mlp\.gate_proj\.weight is \[48, 32\], expected \[50, 32\]"
    with pytest.raises(ValueError, match=wrong):
        load_model(folder)


def test_nothing_is_read_before_all_is_checked(golden_copy, monkeypatch):
    read = []
    monkeypatch.setattr(Source, "read", lambda self, *_: read.append(self))
    with pytest.raises(ValueError, match="other shapes"):
        load_model(golden_copy("llama", vocab_size=100))
    assert not read


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/none", "a/b/c"])
def test_a_folder_that_does_not_exist(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_model(name)


def test_a_file_instead_of_a_folder(golden):
    with pytest.raises(FileNotFoundError, match="is a file; give the folder"):
        load_model(golden("llama") / "config.json")


def test_a_hub_name_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        load_model("someone/some-model")


def _fake_hub(monkeypatch, snapshot_download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_name_is_fetched(monkeypatch, golden):
    asked = []

    def snapshot_download(name, **_):
        asked.append(name)
        return str(golden("llama"))

    _fake_hub(monkeypatch, snapshot_download)
    assert load_model("someone/some-model").name == "some-model"
    assert asked == ["someone/some-model"]


def test_weights_of_torch_are_fetched_where_there_are_no_others(monkeypatch, golden, golden_copy):
    folder = golden_copy("llama")
    tensors = {name: np.array(t) for name, t in open_folder(folder).items()}
    (folder / "model.safetensors").unlink()
    asked = []

    def snapshot_download(name, *, allow_patterns, **_):
        asked.append(allow_patterns)
        if len(asked) == 2:
            write_torch(folder / "pytorch_model.bin", tensors)
        return str(folder)

    _fake_hub(monkeypatch, snapshot_download)
    loaded = load_model("someone/some-model")
    (folder / "pytorch_model.bin").unlink()
    expected = load_model(golden("llama"))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
    assert ["pytorch_model*.bin" in patterns for patterns in asked] == [False, True]


def test_a_failed_fetch_says_why(monkeypatch):
    def snapshot_download(name, **_):
        raise OSError("no route to host")

    _fake_hub(monkeypatch, snapshot_download)
    with pytest.raises(FileNotFoundError, match="no route to host"):
        load_model("someone/some-model")


def test_the_demo_models(monkeypatch, tmp_path, golden_copy):
    golden_copy("llama").rename(tmp_path / "target")
    monkeypatch.setattr(loading, "_DEMO_WEIGHTS", tmp_path)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of the same name is not meant
    assert load_model("demo").name == "demo"
    with pytest.raises(FileNotFoundError, match="reinstall specjax"):
        load_model("demo-draft")
