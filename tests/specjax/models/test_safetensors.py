"""The safetensors reader: what it reads, and what it says of files that are broken."""

import json

import ml_dtypes
import numpy as np
import pytest

from specjax.models import safetensors
from specjax.models.weight_files import open_file, open_folder

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(7.0, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.array([1.5, -2.0], np.float16),
    "brain": np.array([1.5, -3.0], ml_dtypes.bfloat16),
    "wide": np.array([1e300], np.float64),
}


def _write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def test_every_tensor_is_read(tmp_path, write_safetensors):
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    read = open_folder(tmp_path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        np.testing.assert_array_equal(read[name], tensor)


def test_tensors_are_views_of_a_read_only_map(tmp_path, write_safetensors):
    write_safetensors(tmp_path / "x.safetensors", TENSORS)
    tensor = open_file(tmp_path / "x.safetensors")["a"]
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("I64", np.int64),
        ("I8", np.int8),
        ("BOOL", np.bool_),
    ],
)
def test_other_dtypes(tmp_path, dtype, stored):
    values = np.array([0, 1, 1], stored)
    entry = {"dtype": dtype, "shape": [3], "data_offsets": [0, values.nbytes]}
    header = {"__metadata__": {"format": "pt"}, "x": entry}
    read = open_file(_write(tmp_path / "x", header, values.tobytes()))
    assert list(read) == ["x"]
    assert read["x"].dtype == stored
    np.testing.assert_array_equal(read["x"], values)


def test_data_need_not_be_aligned(tmp_path):
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    data = b"\0" + np.array([1, 2], np.float32).tobytes()
    for pad in range(4):
        text = json.dumps(header).encode() + b" " * pad
        read = open_file(_write(tmp_path / f"{pad}", text, data))
        np.testing.assert_array_equal(read["x"] + 0, [1, 2])


def _entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        (b'{"x": ', 8, "not JSON"),
        (b"\xff\xfe", 8, "does not begin with a brace"),
        (b'{"x": "\xff"}', 8, "not JSON"),
        ([1], 8, "does not begin with a brace"),
        (b'{"x": {}, "x": {}}', 8, "key 'x' is given twice"),
        ({"x": 3}, 8, "expected dtype, shape"),
        ({"x": {"dtype": "F32", "shape": [2]}}, 8, "expected dtype, shape"),
        (_entry(offsets=(0,)), 8, "expected dtype, shape"),
        (_entry(dtype="F4"), 8, "has dtype 'F4'"),
        (_entry(dtype=["F32"]), 8, "has dtype \\['F32'\\]"),
        (_entry(shape=("2",)), 8, "expected dtype, shape"),
        (_entry(shape=(2.0,)), 8, "expected dtype, shape"),
        (_entry(shape=(True, 2)), 8, "expected dtype, shape"),
        (_entry(shape=(1,) * 65 + (2,)), 8, "the file is corrupt"),
        (_entry(), 7, "ends at byte 8 of the data but the file holds 7"),
        (_entry(offsets=(8, 0)), 8, "bytes 8 to 0"),
        (_entry(offsets=(-8, 0)), 8, "whole numbers from 0"),
        (_entry(shape=(-2,)), 8, r"shape=\[-2\]"),
        (_entry(shape=(3,)), 8, "needs 12 bytes but has 8"),
        (_entry(dtype="F16"), 8, "needs 4 bytes but has 8"),
    ],
)
def test_a_broken_header_is_explained(tmp_path, header, num_bytes, message):
    path = _write(tmp_path / "x.safetensors", header, b"\0" * num_bytes)
    with pytest.raises(ValueError, match=message) as caught:
        open_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\1\0", b"PK\3\4 a zip file of pickles"])
def test_a_header_longer_than_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        open_folder(tmp_path)


def test_a_git_lfs_pointer(tmp_path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(ValueError, match="git lfs pull"):
        open_folder(tmp_path)


def _write_shards(folder, write_safetensors):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_safetensors(folder / names[0], {"a": TENSORS["a"]})
    write_safetensors(folder / names[1], {"half": TENSORS["half"]})
    weight_map = {"a": names[0], "half": names[1]}
    _write_index(folder, {"weight_map": weight_map})
    return weight_map


def _write_index(folder, index):
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards(tmp_path, write_safetensors):
    _write_shards(tmp_path, write_safetensors)
    write_safetensors(tmp_path / "consolidated.safetensors", {"b": TENSORS["a"]})
    read = open_folder(tmp_path)
    assert list(read) == ["a", "half"]
    np.testing.assert_array_equal(read["half"], TENSORS["half"])


def test_a_missing_shard_is_named(tmp_path, write_safetensors):
    weight_map = _write_shards(tmp_path, write_safetensors)
    (tmp_path / weight_map["half"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of the 2 files.*00002-of-00002"):
        open_folder(tmp_path)


def test_an_index_of_another_export(tmp_path, write_safetensors):
    weight_map = _write_shards(tmp_path, write_safetensors)
    _write_index(tmp_path, {"weight_map": weight_map | {"c": weight_map["a"]}})
    with pytest.raises(ValueError, match=r"places 1 tensors.*: c"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "is corrupt"),
        ({"weight_map": []}, "is corrupt"),
        ({"weight_map": {"a": 3}}, "is corrupt"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' is given twice"),
    ],
)
def test_a_corrupt_index(tmp_path, index, message):
    _write_index(tmp_path, index)
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path)


def _two(first, second, num_bytes):
    """Two tensors of bytes at the offsets given."""
    header = {
        name: {
            "dtype": "U8",
            "shape": [offsets[1] - offsets[0]],
            "data_offsets": offsets,
        }
        for name, offsets in (("a", first), ("b", second))
    }
    return header, b"\0" * num_bytes


@pytest.mark.parametrize(
    ("first", "second", "num_bytes", "message"),
    [
        ([0, 4], [2, 6], 6, "'b' begins at byte 2, where 4 .* overlaps"),
        ([0, 4], [0, 4], 4, "overlaps"),
        ([0, 4], [6, 8], 8, "'b' begins at byte 6, where 4 .* leaves bytes unused"),
        ([2, 4], [4, 8], 8, "'a' begins at byte 2, where 0"),
        ([0, 4], [4, 8], 9, "holds 9 bytes of tensors but its header describes 8"),
    ],
)
def test_tensors_fill_the_file_without_overlap(tmp_path, first, second, num_bytes, message):
    path = _write(tmp_path / "x", *_two(first, second, num_bytes))
    with pytest.raises(ValueError, match=message):
        open_file(path)


def test_a_header_that_is_one_byte_off(tmp_path, write_safetensors):
    """Padding hides it from JSON, and every weight would be shifted by a byte."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for other in (length - 1, length + 1):
        path.write_bytes(other.to_bytes(8, "little") + content[8:])
        with pytest.raises(ValueError, match=r"Fetch it again|fetch the file again"):
            open_file(path)


def test_a_header_above_the_limit_is_not_read(tmp_path, monkeypatch):
    path = _write(tmp_path / "model.safetensors", _entry(), b"\0" * 8)
    assert open_file(path)["x"].shape == (2,)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 40)
    with pytest.raises(ValueError, match="claims a header of 61 bytes, and at most 40"):
        open_file(path)


def test_links_out_of_the_folder_are_not_followed(tmp_path, write_safetensors):
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "elsewhere", TENSORS)
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"symbolic link out of its folder.*copy"):
        open_folder(folder)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "part", TENSORS)
    (folder / "model.safetensors").symlink_to("part")
    (tmp_path / "link").symlink_to(folder)
    assert open_folder(tmp_path / "link").keys() == TENSORS.keys()


def test_links_of_the_hugging_face_cache_are_followed(tmp_path, write_safetensors):
    repository = tmp_path / "models--someone--some-model"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    write_safetensors(repository / "blobs" / "abc", TENSORS)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert open_folder(snapshot).keys() == TENSORS.keys()
    (snapshot / "model.safetensors").unlink()
    write_safetensors(tmp_path / "elsewhere", TENSORS)
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere")
    with pytest.raises(ValueError, match="symbolic link out of its folder"):
        open_folder(snapshot)


def test_an_index_that_leaves_its_folder(tmp_path):
    _write_index(tmp_path, {"weight_map": {"a": "../model.safetensors"}})
    with pytest.raises(ValueError, match="outside its folder"):
        open_folder(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither"):
        open_folder(tmp_path)
