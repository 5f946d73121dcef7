"""Writes files as torch.save does, and others that it never would."""

import io
import pickle
import zipfile

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


def write_torch(path, tensors, **options):
    """Writes arrays by name to a file; options as of `archive`."""
    arrays = {str(key): np.asarray(array) for key, array in enumerate(tensors.values())}
    program = (
        b"\x80\x02"
        + b"}("
        + b"".join(
            text(name) + tensor(array.dtype, key, array.size, array.shape)
            for name, (key, array) in zip(tensors, arrays.items(), strict=True)
        )
    )
    data = {key: array.tobytes() for key, array in arrays.items()}
    path.write_bytes(archive(program + b"u.", data, **options))


def archive(program, data=None, *, compression=zipfile.ZIP_STORED, byteorder=b"little"):
    """Returns a file of a pickle and storages by key."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as opened:
        opened.writestr("archive/data.pkl", program)
        opened.writestr("archive/byteorder", byteorder)
        for key, content in (data or {}).items():
            opened.writestr(f"archive/data/{key}", content)
    return file.getvalue()


def text(value):
    """Returns the instruction that puts a text on the stack."""
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def plain(value):
    """Returns the instructions that put tuples of numbers and flags on the stack."""
    return pickle.dumps(value, protocol=2)[2:-1]


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def storage(dtype, key, size):
    kind = dtype if isinstance(dtype, str) else STORAGES[np.dtype(dtype)]
    identity = text("storage") + name("torch", kind) + text(key) + text("cpu")
    return b"(" + identity + plain(size) + b"tQ"


def tensor(dtype, key, size, shape, *, strides=None, offset=0):
    """Returns the instructions of a tensor over a storage of `size` numbers."""
    if strides is None:
        strides = tuple(int(np.prod(shape[index + 1 :])) for index in range(len(shape)))
    arguments = storage(dtype, key, size) + plain(offset) + plain(shape) + plain(strides)
    arguments += plain(False) + name("collections", "OrderedDict") + b")R"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"
