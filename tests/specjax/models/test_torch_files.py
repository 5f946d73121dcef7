"""Weights that torch.save wrote: read as they are, and nothing in them is run."""

import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from torch_archives import STORAGES, archive, name, plain, storage, tensor, text, write_torch

from specjax.models import torch_files
from specjax.models.torch_files import open_file
from specjax.models.weight_files import open_folder


def write(tmp_path, program, data=None, **options):
    path = tmp_path / "weights.bin"
    path.write_bytes(archive(program, data, **options))
    return path


def one(shape=(2, 3), *, size=6, dtype=np.float32, num_bytes=None, **options):
    """A dictionary of one tensor "a" of a storage of 6 numbers."""
    program = b"}" + text("a") + tensor(dtype, "0", size, shape, **options) + b"s."
    count = 4 * 6 if num_bytes is None else num_bytes
    return program, {"0": np.arange(count, dtype=np.uint8).tobytes()}


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
def test_every_kind_of_numbers(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    write_torch(tmp_path / "w.bin", {"a": values, "empty": np.zeros((0, 4), dtype)})
    read = open_file(tmp_path / "w.bin")
    np.testing.assert_array_equal(read["a"], values)
    assert (read["a"].dtype, read["empty"].shape) == (dtype, (0, 4))
    assert not read["a"].flags.writeable


def test_what_torch_itself_wrote():
    """tests/goldens/make_torch_golden.py"""
    read = open_file(Path(__file__).parents[2] / "goldens" / "weights.bin")
    numbers = np.arange(12, dtype=np.float32)
    expected = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
        "bias": np.float32([-1, 2]),
        "half": (np.arange(4) / 8).astype(ml_dtypes.bfloat16),
        "turned": numbers.reshape(3, 4).T,
        "part": numbers[5:7],
        "parameter": np.ones(2, np.float16),
        "ids": np.int64([3, 1]),
        "flags": np.array([True, False]),
        "number": np.float64(7),
    }
    assert list(read) == list(expected)
    for key, values in expected.items():
        np.testing.assert_array_equal(read[key], values)
        assert read[key].dtype == values.dtype


def test_views_of_one_storage(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    shared = lambda *shape, **options: tensor(np.float32, "0", 12, shape, **options)
    program = b"}(" + text("whole") + shared(3, 4) + text("turned") + shared(4, 3, strides=(1, 4))
    program += text("part") + shared(2, offset=5) + text("number") + shared(offset=11) + b"u."
    read = open_file(write(tmp_path, program, {"0": numbers.tobytes()}))
    np.testing.assert_array_equal(read["whole"], numbers.reshape(3, 4))
    np.testing.assert_array_equal(read["turned"], numbers.reshape(3, 4).T)
    np.testing.assert_array_equal(read["part"], [5, 6])
    assert read["number"] == 11


class Counted:
    """Counts how often it is made."""

    num_made = 0

    def __init__(self):
        Counted.num_made += 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_of_another_object_makes_none(tmp_path, protocol):
    program = pickle.dumps({"a": Counted()}, protocol=protocol)
    call = name(Counted.__module__, "Counted") + b")R."
    Counted.num_made = 0
    for each in (program, call):
        with pytest.raises(ValueError, match=r"no tensor needs|protocol 4, not 2"):
            open_file(write(tmp_path, each))
    assert Counted.num_made == 0


TENSOR = name("torch._utils", "_rebuild_tensor_v2")
DICT = name("collections", "OrderedDict")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (name("collections", "Counter") + b")R.", "names 'collections Counter'"),
        (name("fractions", "Fraction") + plain((1, 2)) + b"R.", "names 'fractions Fraction'"),
        (name("torch", "Size") + b")R.", "names 'torch Size'"),
        (name("builtins", "len") + b".", "names 'builtins len'"),
        (b"}.", None),
        (b"].", r"holds \[\]"),
        (b"N.", "holds None"),
        (b"}" + text("a") + plain(3) + b"s.", "'a', which is no tensor but int"),
        (b"}" + text("a") + DICT + b")Rs.", "'a', which is no tensor but dict"),
        (b"}" + plain(1) + text("a") + b"s.", "keys that are no text"),
        (b"}" + plain((1, 2)) + text("a") + b"s.", "keys that are no text"),
        (DICT + plain((1,)) + b"R.", "calls 'collections OrderedDict' with 1"),
        (TENSOR + plain((1, 2, 3, 4, 5, 6)) + b"R.", "has a tensor of shape 3"),
        (TENSOR + plain((1,)) + b"R.", "a tensor of 1 arguments"),
        (name("torch._utils", "_rebuild_parameter") + plain((1, 2, 3)) + b"R.", "calls"),
        (text("call me") + b")R.", "no function of tensors"),
        (DICT + text("no tuple") + b"R.", "no function of tensors"),
        (plain(("storage", 1, "0", "cpu", 2)) + b"Q.", "numbers of a kind"),
        (b"(" + text("storage") + DICT + text("0") + text("cpu") + plain(2) + b"tQ.", "a kind"),
        (storage("FloatStorage", "0", -1) + b".", "a storage"),
        (plain((1, 2)) + b"Q.", "damaged"),
        (b"", "damaged"),
        (b"}", "damaged"),
        (b".", "damaged"),
        (b"u.", "damaged"),
        (b"(", "damaged"),
        (b"}}u.", "damaged"),
        (b"h\x05.", "damaged"),
        (b"\x85.", "damaged"),
        (b"a.", "damaged"),
        (b"X\xff\xff\xff\x7fabc.", "damaged"),
        (b"X\x01\x00\x00\x00\xff.", "damaged"),
        (b"\xff.", "damaged"),
        (b"(i" + b"fractions\nFraction\n.", "instruction INST"),
        (b"(" + name("fractions", "Fraction") + b"o.", "names 'fractions Fraction'"),
        (b"}\x81.", "instruction NEWOBJ"),
        (b"\x82\x01.", "instruction EXT1"),
        (b"B\x01\x00\x00\x00a.", "instruction BINBYTES"),
        (b"}\x94.", "instruction MEMOIZE"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path, program, message):
    path = write(tmp_path, program)
    if message is None:
        assert open_file(path) == {}
        return
    with pytest.raises(ValueError, match=message) as refused:
        open_file(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 7}, "says 7 numbers of float32, and its entry has 24 bytes"),
        ({"dtype": np.int64}, "says 6 numbers of int64"),
        ({"shape": (7,)}, "beyond its storage"),
        ({"shape": (2, 3), "offset": 1}, "beyond its storage"),
        ({"shape": (3, 3), "strides": (1, 1)}, "repeats the 6 numbers"),
        ({"shape": (4, 3), "strides": (0, 1)}, r"as expand\(\) does; save its .contiguous"),
        ({"shape": (9,), "strides": (0,)}, "repeats the 6 numbers"),
        ({"shape": (2, 3), "strides": (6, 1)}, "beyond its storage"),
        ({"shape": (2, 3), "strides": (-3, 1)}, "strides"),
        ({"shape": (2, 3), "strides": (3,)}, "strides"),
        ({"shape": (-2, 3)}, "shape"),
        ({"shape": (1,) * 9, "size": 6}, "shape"),
        ({"shape": (True, 3)}, "shape"),
        ({"shape": (0, 50, 3)}, "shape"),
        ({"offset": -1}, "shape"),
        ({"size": 100}, "a storage"),
    ],
)
def test_tensors_lie_within_their_storage(tmp_path, changes, message, monkeypatch):
    monkeypatch.setattr(torch_files, "_MAX_NUMBERS", 100)
    with pytest.raises(ValueError, match=message):
        open_file(write(tmp_path, *one(**changes)))


def test_an_archive_that_is_damaged(tmp_path):
    path = write(tmp_path, *one())
    assert open_file(path)["a"].shape == (2, 3)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"archive|entry"):
            open_file(path)
    refused = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        try:
            assert all(array.size <= 6 for array in open_file(path).values())
        except ValueError as error:  # nothing else is raised
            refused.append(str(error))
    assert len(refused) > 100
    assert all(text.startswith(str(path)) for text in refused)


def test_work_and_memory_follow_the_size_of_the_file(tmp_path, monkeypatch):
    over_one = lambda count: (
        b"}("
        + b"".join(text(f"{index}") + tensor(np.float32, "0", 6, (2, 3)) for index in range(count))
        + b"u."
    )
    data = {"0": bytes(24)}
    assert len(open_file(write(tmp_path, over_one(4), data))) == 4
    with pytest.raises(
        ValueError, match="more than 4 times the 6 numbers of their storage, up to '4'"
    ):
        open_file(write(tmp_path, over_one(5), data))

    path = write(tmp_path, *one())
    assert open_file(path)["a"].shape == (2, 3)
    monkeypatch.setattr(torch_files, "_MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(ValueError, match=r"a directory of \d+ bytes, above 100"):
        open_file(path)


def test_entries_are_whole_and_little_endian(tmp_path, monkeypatch):
    program, data = one()
    with pytest.raises(ValueError, match="compressed entry"):
        open_file(write(tmp_path, program, data, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="lowest byte"):
        open_file(write(tmp_path, program, data, byteorder=b"big"))
    with pytest.raises(ValueError, match="has no entry 'data/0'"):
        open_file(write(tmp_path, program))
    with monkeypatch.context() as changed:
        changed.setattr(torch_files, "MAX_PICKLE_BYTES", 10)
        with pytest.raises(ValueError, match="above 10"):
            open_file(write(tmp_path, program, data))
    path = tmp_path / "pointer.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="git lfs pull"):
        open_file(path)
    path = tmp_path / "old.pt"
    path.write_bytes(struct.pack("<I", 0x1950A86A) * 9)
    with pytest.raises(ValueError, match="no zip archive"):
        open_file(path)


def test_no_entry_is_in_an_archive_twice(tmp_path, monkeypatch):
    infolist = zipfile.ZipFile.infolist
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda opened: 2 * infolist(opened))
    with pytest.raises(ValueError, match=r"two entries 'data\.pkl'"):
        open_file(write(tmp_path, *one()))


def test_a_folder_of_shards(tmp_path):
    values = {"a": np.ones(3, ml_dtypes.bfloat16), "b": np.zeros((2, 2), np.float32)}
    for shard, key in (("x-1.bin", "a"), ("x-2.bin", "b")):
        write_torch(tmp_path / shard, {key: values[key]})
    index = '{"weight_map": {"a": "x-1.bin", "b": "x-2.bin"}}'
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    read = open_folder(tmp_path)
    assert read.keys() == values.keys()
    np.testing.assert_array_equal(read["a"], values["a"])


def test_safetensors_are_preferred(tmp_path, write_safetensors):
    write_torch(tmp_path / "pytorch_model.bin", {"a": np.zeros(2, np.float32)})
    write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.warns(UserWarning, match="holds its weights twice, in model.safetensors"):
        assert open_folder(tmp_path)["a"].tolist() == [1, 1]


def test_tensors_that_no_model_needs_may_be_in_one_file_alone(tmp_path, write_safetensors):
    one, other = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
    layer = {"model.embed_tokens.weight": one, "h.0.attn.c_attn.weight": one}
    idle = ["model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.bias", "h.0.attn.masked_bias"]
    alone = {"lm_head.weight": one, **{name: one for name in idle}}
    for in_torch, in_safetensors in (
        (alone, {}),
        ({}, alone),
        ({idle[1]: other}, alone),
    ):
        write_torch(tmp_path / "pytorch_model.bin", layer | in_torch)
        write_safetensors(tmp_path / "model.safetensors", layer | in_safetensors)
        open_folder(tmp_path)
    write_torch(tmp_path / "pytorch_model.bin", layer | {"norm.weight": one})
    with pytest.warns(UserWarning, match="1 tensors are in one of them alone, such as norm.weight"):
        open_folder(tmp_path)
    write_torch(tmp_path / "pytorch_model.bin", layer | {"lm_head.weight": other})
    with pytest.warns(UserWarning, match="1 tensors differ, such as lm_head.weight"):
        open_folder(tmp_path)
