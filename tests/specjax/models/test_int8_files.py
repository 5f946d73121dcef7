"""Matrices that files hold in int8, with scales: read as the format says, or refused by name."""

import copy
import json
import re
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import specjax
from specjax.models import int8_config, int8_reading, int8_writing
from specjax.models.hf_config import parse_config
from specjax.models.int8_reading import Int8Matrix
from specjax.models.weight_files import open_folder
from specjax.models.weight_writing import of_array

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SAID = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}
ONE = "model.layers.0.mlp.up_proj"
BF16 = np.dtype(ml_dtypes.bfloat16)


def said(weights=None, group=None, **top):
    """Returns a quantization_config with some keys replaced."""
    made = copy.deepcopy(SAID) | top
    if weights or group:
        made["config_groups"]["group_0"]["weights"] |= weights or {}
        made["config_groups"]["group_0"] |= group or {}
    return made


def in_int8(tensors, strategy="channel", dtype=BF16):
    """Returns tensors with drawn int8 numbers and scales in place of matrices."""
    rng, made = np.random.default_rng(0), {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            made[name] = tensor
            continue
        made[name] = rng.integers(-128, 128, tensor.shape).astype(np.int8)
        shape = (len(tensor), 1) if strategy == "channel" else (1,)
        made[f"{name}_scale"] = rng.uniform(1e-3, 2e-3, shape).astype(dtype)
    return made


def products(tensors, dtype):
    """Returns what the weights are: exact products, rounded to float32 and to the dtype."""
    made = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if scale is not None:
            tensor = tensor.astype(np.float64) * scale.astype(np.float64)
        if not name.endswith("_scale"):
            made[name] = tensor.astype(np.float32).astype(dtype)
    return made


@pytest.fixture
def stored(golden_copy, write_safetensors):
    """Returns the folder of a golden with matrices in int8, and its tensors."""

    def store(name="llama", change=lambda tensors: tensors, config=SAID, **how):
        folder = golden_copy(name, **({} if config is None else {"quantization_config": config}))
        tensors = {each: np.array(tensor) for each, tensor in open_raw(folder).items()}
        tensors = change(in_int8(tensors, **how))
        write_safetensors(folder / "model.safetensors", tensors)
        return folder, tensors

    return store


def open_raw(folder):
    return {name: np.array(each) for name, each in open_folder(folder).items()}


def assert_weights(model, expected, places):
    layer = model.params["layers"][1]
    for leaf, name in places.items():
        given = layer[leaf] if leaf in layer else model.params[leaf]
        assert np.asarray(given).tobytes() == expected[name].tobytes(), leaf


LLAMA = {
    "embed_tokens": "model.embed_tokens.weight",
    "k_proj": "model.layers.1.self_attn.k_proj.weight",
    "down_proj": "model.layers.1.mlp.down_proj.weight",
    "input_norm": "model.layers.1.input_layernorm.weight",
    "lm_head": "lm_head.weight",
}


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("scale", [np.float32, BF16, np.float16])
def test_weights_are_scale_times_number(scale, dtype, stored):
    folder, tensors = stored(dtype=scale)
    model = specjax.load_model(folder, dtype=dtype)
    assert_weights(model, products(tensors, dtype), LLAMA)


def test_one_scale_per_tensor(stored):
    config = said(weights={"strategy": "tensor"})
    folder, tensors = stored(strategy="tensor", config=config)
    assert_weights(specjax.load_model(folder), products(tensors, np.float32), LLAMA)
    without = said(weights={"strategy": None})  # one number, as no size of groups is named
    (folder / "config.json").write_text(
        json.dumps(
            json.loads((folder / "config.json").read_text()) | {"quantization_config": without}
        )
    )
    assert_weights(specjax.load_model(folder), products(tensors, np.float32), LLAMA)


def test_matrices_that_are_turned_and_cut(stored):
    """GPT-2 stores [in, out], and q, k and v as one; scales are of rows as they are stored."""
    folder, tensors = stored("gpt2")
    expected = products(tensors, np.float32)
    model = specjax.load_model(folder)
    name = next(name for name in expected if name.endswith("h.1.attn.c_attn.weight"))
    whole, layer = expected[name], model.params["layers"][1]
    given = np.concatenate([layer[leaf] for leaf in ("q_proj", "k_proj", "v_proj")])
    np.testing.assert_array_equal(given, whole.T)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 4, "tensor": 2}])
def test_over_a_mesh(sizes, stored):
    folder, _ = stored()
    count = int(np.prod([*sizes.values()]))
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), devices=jax.devices()[:count])
    split = specjax.load_model(folder, mesh=mesh, dtype="bf16")
    whole = specjax.load_model(folder, dtype="bf16")
    assert len(split.params["layers"][0]["up_proj"].sharding.device_set) == count
    jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)


def test_scales_in_another_file(stored, write_safetensors):
    folder, tensors = stored()
    whole = specjax.load_model(folder)
    (folder / "model.safetensors").unlink()
    files = {name: "b" if name.endswith("_scale") else "a" for name in tensors}
    for file in ("a", "b"):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        write_safetensors(folder / file, part)
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    jax.tree.map(np.testing.assert_array_equal, specjax.load_model(folder).params, whole.params)
    wrong = {name: tensors[name] for name in tensors if files[name] == "b"}
    wrong[f"{ONE}.weight_scale"][0] = np.nan
    write_safetensors(folder / "b", wrong)
    with pytest.raises(ValueError, match=rf"/b: tensor '{ONE}.weight_scale' holds nan"):
        specjax.load_model(folder)


def test_long_matrices_are_multiplied_block_by_block(stored, monkeypatch):
    folder, tensors = stored()
    monkeypatch.setattr(int8_reading, "_BLOCK", 100)  # three rows of 32 numbers
    assert_weights(specjax.load_model(folder), products(tensors, np.float32), LLAMA)


def test_some_matrices_may_be_whole(stored):
    """As `ignore` has it, a head often is."""
    head = np.ones((99, 32), np.float32)

    def change(tensors):
        del tensors["lm_head.weight_scale"]
        return tensors | {"lm_head.weight": head}

    folder, tensors = stored(change=change, config=said(ignore=["lm_head"]))
    model = specjax.load_model(folder)
    np.testing.assert_array_equal(model.params["lm_head"], head)
    assert_weights(model, products(tensors, np.float32), LLAMA)


ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def test_activations_keep_their_precision_with_one_warning(stored):
    def change(tensors):
        return tensors | {f"{ONE}.input_scale": np.ones(1, np.float32)}

    config = said(group={"input_activations": ACTIVATIONS}, kv_cache_scheme={"num_bits": 8})
    folder, tensors = stored(change=change, config=config)
    with pytest.warns(UserWarning, match="few bits of what is computed") as caught:
        model = specjax.load_model(folder)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "(group_0.input_activations, kv_cache_scheme)" in text
    assert str(folder / "config.json") in text
    tensors.pop(f"{ONE}.input_scale")
    assert_weights(model, products(tensors, np.float32), LLAMA)


def test_weights_alone_warn_of_nothing(stored):
    folder, _ = stored()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specjax.load_model(folder)


def test_inspect_counts_what_is_stored_and_what_is_loaded(stored):
    from specjax.heads.inspection import inspect

    folder, tensors = stored()
    found = inspect(folder)
    matrices = [name for name in tensors if name.endswith("_scale")]
    assert found["stored_in_int8"] == len(matrices)
    assert found["tensors"] == len(tensors) - len(matrices)
    assert found["bytes"] == sum(each.nbytes for each in tensors.values())
    whole = products(tensors, BF16)
    assert found["bytes_in_bfloat16"] == sum(each.nbytes for each in whole.values())
    assert found["dtypes"][0] == "int8"


def test_plans_are_of_the_loaded_dtype(stored):
    """Nothing of a config says how its files are stored."""
    folder, _ = stored()
    raw = json.loads((folder / "config.json").read_text())
    assert parse_config(raw) == parse_config(raw | {"quantization_config": None})


# Files that are not so


def without(name):
    return lambda tensors: {each: tensors[each] for each in tensors if each != name}


def replaced(name, array):
    return lambda tensors: tensors | {name: np.asarray(array)}


def with_scale(value):
    def change(tensors):
        tensors[f"{ONE}.weight_scale"][2] = value
        return tensors

    return change


SCALE = f"{ONE}.weight_scale"
ROWS = 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(SCALE), f"'{ONE}.weight' is int8, and there is no '{SCALE}'"),
        (replaced(SCALE, np.ones((32, 1), "f4")), rf"'{SCALE}' is float32\[32, 1\], .*\[48, 1\]"),
        (replaced(SCALE, np.ones(ROWS, "f4")), rf"'{SCALE}' is float32\[48\], expected"),
        (replaced(SCALE, np.ones((ROWS, 2), "f4")), rf"'{SCALE}' is float32\[48, 2\], expected"),
        (replaced(SCALE, np.ones((1,), "f4")), rf"'{SCALE}' is float32\[1\], expected"),
        (replaced(SCALE, np.ones((ROWS, 1), "i4")), rf"'{SCALE}' is int32\[48, 1\], expected f"),
        (with_scale(np.nan), f"'{SCALE}' holds nan; expected positive"),
        (with_scale(np.inf), f"'{SCALE}' holds inf; expected positive"),
        (with_scale(0), rf"'{SCALE}' holds 0\.0; expected positive"),
        (with_scale(-1), rf"'{SCALE}' holds -1\.0; expected positive"),
        (replaced(f"{ONE}.weight", np.ones((ROWS, 32), "f4")), f"'{SCALE}' .*which is float32"),
        (without(f"{ONE}.weight"), f"'{SCALE}' holds the scales of .*, which is not there"),
        (
            replaced("model.norm.weight", np.ones(32, np.int8)),
            "'model.norm.weight' is int8, and there is no 'model.norm.weight_scale'",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, message, stored):
    folder, _ = stored(change=change)
    file = re.escape(str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=rf"{file}: tensor {message}"):
        specjax.load_model(folder)


def test_zero_points_are_refused(stored):
    point = replaced(f"{ONE}.weight_zero_point", np.ones((ROWS, 1), np.int8))
    folder, _ = stored(change=point)
    with pytest.raises(ValueError, match=r"no use for them: .*up_proj.weight_zero_point"):
        specjax.load_model(folder)


def test_int8_of_which_config_says_nothing(stored):
    folder, _ = stored(config=None)
    message = r"model.safetensors: tensor '.*weight' is int8, .* config.json has no quantization_c"
    with pytest.raises(ValueError, match=message):
        specjax.load_model(folder)


PACKED = said(format="pack-quantized", weights={"num_bits": 4, "strategy": "group"})
REFUSED = {
    "gptq": {"quant_method": "gptq", "bits": 8},
    "awq": {"quant_method": "awq"},
    "fp8": {"quant_method": "fp8"},
    "no method": said(quant_method=None),
    "packed": PACKED,
    "mixed": said(format="mixed-precision"),
    "num_bits=4": said(weights={"num_bits": 4}),
    "num_bits=True": said(weights={"num_bits": True}),
    "num_bits=8.0": said(weights={"num_bits": 8.0}),
    "symmetric=1": said(weights={"symmetric": 1}),
    "type='float'": said(weights={"type": "float"}),
    "symmetric=False": said(weights={"symmetric": False}),
    "dynamic=True": said(weights={"dynamic": True}),
    "strategy='group'": said(weights={"strategy": "group", "group_size": 128}),
    "strategy=None": said(weights={"strategy": None, "group_size": 128}),
    "strategy=['channel']": said(weights={"strategy": ["channel"]}),
    "format='pack-quantized'": said(group={"format": "pack-quantized"}),
    "transform_config": said(transform_config={"config_groups": {"u": {}}}),
    "sparsity_config": said(sparsity_config={"format": "sparse-24-bitmask"}),
    "config_groups=None": said(config_groups=None),
    "config_groups.'W8A8'=": said(config_groups={"W8A8": ["Linear"]}),
    "group_0": said(group={"weights": 8}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused(name, golden):
    raw = json.loads((golden("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"quantised weights .* 'int-quantized' are") as caught:
        parse_config(raw | {"quantization_config": REFUSED[name]})
    if "=" in name or "_" in name:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        said(weights={"strategy": None, "group_size": -1}),
        said(format="naive-quantized"),
        said(transform_config={}, sparsity_config={"format": "dense"}),
        said(group={"format": "int-quantized"}),
        int8_config.config_of(["lm_head.weight"]),
    ],
)
def test_other_words_for_the_same(config):
    assert int8_config.strategies({"quantization_config": config}) == {"channel"}


def test_a_group_without_weights_and_two_strategies():
    groups = SAID["config_groups"] | {
        "group_1": {"targets": ["x"], "weights": WEIGHTS | {"strategy": "tensor"}},
        "group_2": {"targets": ["y"], "weights": None},
    }
    raw = {"quantization_config": said(config_groups=groups)}
    assert int8_config.strategies(raw) == {"channel", "tensor"}
    assert int8_config.strategies({}) == set()


def test_packed_weights_say_what_is_read(golden_copy, write_safetensors):
    """Of a folder whose config.json was not looked at: the head of a target."""
    folder = golden_copy("llama", quantization_config=PACKED)
    write_safetensors(folder / "model.safetensors", {"fc.weight_packed": np.ones((4, 4), np.int32)})
    with pytest.raises(ValueError, match=r"config.json: .*format='pack-quantized'.*are not read"):
        open_folder(folder)


# An array like numpy's


def test_what_stands_for_a_matrix():
    scales = np.broadcast_to(np.float32([[0.5], [2.0]]), (2, 3))
    matrix = Int8Matrix(np.int8([[1, 2, 3], [4, 5, -128]]), scales)
    whole = np.float32([[0.5, 1.0, 1.5], [8.0, 10.0, -256.0]])
    assert (matrix.shape, matrix.ndim, matrix.size, matrix.dtype) == ((2, 3), 2, 6, np.float32)
    np.testing.assert_array_equal(np.asarray(matrix), whole)
    np.testing.assert_array_equal(np.asarray(matrix[1, 2]), whole[1, 2])
    np.testing.assert_array_equal(matrix.swapaxes(0, 1)[1:].astype(np.float16), whole.T[1:])
    np.testing.assert_array_equal(matrix[..., 1:2].astype(np.float32), whole[:, 1:2])
    assert np.asarray(matrix, np.float64).dtype == np.float64
    assert np.array_equal(matrix, whole)
    assert matrix[2:].astype(np.float32).shape == (0, 3)
    with pytest.raises(ValueError, match="multiplied out"):
        np.asarray(matrix, copy=False)


# Rounding


def test_rounding_by_hand():
    matrix = np.float32([[127.0, -127.0, 63.6], [0.0] * 3, [-254.0, 1.1, 3.0], [127.3, 0, -1.6]])
    values, scales = int8_writing.rounded(matrix, "x")
    # 1.5 is as near to 2 as to 1. 127.3 is 127.5 in bfloat16.
    assert values.tolist() == [[127, -127, 64], [0, 0, 0], [-127, 1, 2], [127, 0, -2]]
    assert scales[1] > 0
    assert scales[[0, 2, 3], 0].tolist() == [1, 2, np.float32(127.5) / 127]
    assert scales.shape == (4, 1)
    assert scales.dtype == np.float32


SIZES = [1.0, 1e-30, 1e-37, 1e-40, 1e37]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, dtype) for size in SIZES for dtype in (np.float32, BF16)] + [(1.0, np.float16)],
)
def test_rounding_again_changes_nothing(size, dtype):
    drawn = np.random.default_rng(0).standard_normal((2000, 40)) * size
    values, scales = int8_writing.rounded(drawn.astype(np.float32), "x")
    read = (values * scales.astype(np.float32)).astype(dtype)
    again, scales_again = int8_writing.rounded(read, "x")
    np.testing.assert_array_equal(again, values)
    assert scales_again.tobytes() == scales.tobytes()
    error = np.abs(drawn - values * scales.astype(np.float64))
    assert np.all(error <= int8_writing.largest_error(drawn.astype(np.float32)))
    if size == 1.0:
        assert np.all(np.abs(values).max(axis=-1) == 127)
        assert error.max() > np.abs(drawn).max() / 127 / 3  # no more digits than 8 bits have


def test_the_largest_number_is_127_scales_wherever_it_is_rounded():
    """From 1 to 2 in steps of a fourth of bfloat16's, both signs."""
    sizes = np.float32(1 + np.arange(512) / 512)
    matrix = np.stack([sizes, -sizes], axis=1)
    values, scales = int8_writing.rounded(matrix, "x")
    np.testing.assert_array_equal(values, [[127, -127]] * 512)
    assert np.all(np.abs(values * scales - matrix) <= int8_writing.largest_error(matrix))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_numbers_that_int8_cannot_hold(value):
    matrix = np.ones((4, 4), np.float32)
    matrix[2, 1] = value
    with pytest.raises(ValueError, match=r"fc.weight holds NaN, an infinity or a number near"):
        int8_writing.in_int8({"fc.weight": of_array("fc.weight", matrix)})["fc.weight"].make()


def test_long_matrices_are_rounded_block_by_block(monkeypatch):
    matrix = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)
    whole = int8_writing.rounded(matrix, "x")
    int8_writing.rounded(1 - matrix, "x")  # memory that is used again holds other numbers
    monkeypatch.setattr(int8_writing, "_BLOCK", 20)
    for ours, theirs in zip(int8_writing.rounded(matrix, "x"), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_stored_in_int8():
    shapes = {
        "fc.weight": (3, 4),
        "experts.weight": (2, 3, 4),
        "norm.weight": (4,),
        "fc.bias": (3,),
        "d2t": (3,),
        "mask_hidden": (1, 1, 4),
        "none.weight": (0, 4),
    }
    tensors = {name: of_array(name, np.ones(shape, "f4")) for name, shape in shapes.items()}
    made = int8_writing.in_int8(tensors)
    assert [*made] == [
        "fc.weight",
        "fc.weight_scale",
        "experts.weight",
        "experts.weight_scale",
        *(name for name in shapes if name not in ("fc.weight", "experts.weight", "none.weight")),
        "none.weight",
        "none.weight_scale",
    ]
    assert made["experts.weight_scale"].shape == (2, 3, 1)
    assert all(each.make().shape == each.shape for each in made.values())
    assert made["fc.weight"].make().dtype == np.int8
    # Scales alone, too, and twice.
    for _ in range(2):
        np.testing.assert_array_equal(made["fc.weight_scale"].make(), np.float32(1 / 127))


@pytest.mark.reference
def test_numbers_are_those_of_compressed_tensors(stored):
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    raw = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    folder, tensors = stored(config=int8_config.config_of(["lm_head.weight"]))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    found = open_folder(folder)
    for name, tensor in tensors.items():
        if tensor.dtype != np.int8:
            continue
        scale = torch.from_numpy(tensors[f"{name}_scale"].astype(np.float32))
        for dtype, theirs in raw.items():
            parts = {"weight": torch.from_numpy(tensor), "weight_scale": scale.to(theirs)}
            given = compressor.decompress(parts, scheme)["weight"]
            assert given.dtype == theirs
            ours = found[name].astype(jnp.dtype(dtype)).astype(np.float32)
            np.testing.assert_array_equal(ours, given.float().numpy())
