"""Reads weights that torch.save wrote, and runs nothing that they say.

Such a file is a zip archive: `data.pkl` describes the tensors, and each other entry holds the
numbers of one storage, uncompressed. A pickle is a program for a machine with a stack, which may
import and call anything. Here it runs on a machine that knows only the instructions that a
dictionary of tensors needs, and that calls nothing: a name of a class or function is a text, which
is compared with the few names that tensors are described by. Anything else is refused.

torch before 1.6 wrote another format, which is not read.
"""

from __future__ import annotations

import collections
import math
import os
import pickletools
import reprlib
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.runtime.model_files import check_no_pointer

# Of data.pkl, which becomes objects of 80 times its size at most; 10,000 tensors have 1.5 MB.
MAX_PICKLE_BYTES = 2 * 2**20
_MAX_DIRECTORY_BYTES = 16 * 2**20  # of the archive, about 100 per entry
_MAX_DIMENSIONS = 8
_MAX_NUMBERS = 2**48  # of a tensor, axes of size 0 left out
# Of all tensors over one storage, by its size: tied weights and parts of a tensor share one.
_MOST_SHARED = 4
_PROTOCOL = 2  # of the pickles that torch.save writes
_ARGUMENTS = 6, 7  # of the function that makes a tensor; the last is optional
_END = struct.Struct("<4s8xI6x")  # of an archive without a comment: signature, directory bytes
_END_64 = struct.Struct("<4s36xQ8x")  # where a longer form stands before it, and the place of that:
_LOCATOR = struct.Struct("<4s16x")
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of name and extra

_STORAGES = {
    "torch DoubleStorage": np.float64,
    "torch FloatStorage": np.float32,
    "torch HalfStorage": np.float16,
    "torch BFloat16Storage": ml_dtypes.bfloat16,
    "torch LongStorage": np.int64,
    "torch IntStorage": np.int32,
    "torch ShortStorage": np.int16,
    "torch CharStorage": np.int8,
    "torch ByteStorage": np.uint8,
    "torch BoolStorage": np.bool_,
}
_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_NAMES = {*_STORAGES, _DICT, _TENSOR, _PARAMETER}


class _Name(NamedTuple):
    """A class or function that a pickle names, as "module name"."""

    text: str


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str  # of its entry in the archive
    size: int  # in numbers


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(ValueError):
    """What a pickle holds is not part of a dictionary of tensors."""


def open_file(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file as read-only views of its memory map.

    Raises:
      ValueError: the file is damaged, holds anything but a dictionary of tensors, or is of a torch
        before 1.6.
    """
    path = Path(path)
    try:
        return _Archive(path).tensors()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from error
    except _Refused as error:
        raise ValueError(
            f"{path}: {error}; expected what torch.save writes of a dictionary of tensors. Convert "
            "it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'model.safetensors')."
        ) from error


class _Archive:
    """The entries of a file, none of which is compressed."""

    def __init__(self, path: Path):
        self._entries: dict[str, zipfile.ZipInfo] = {}
        with path.open("rb") as file:
            check_no_pointer(path, file.read(8))
        try:
            _check_directory(path)
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise _Refused(f"is no zip archive ({error!s:.200})") from error
        for entry in entries:
            # Every name begins with that of the archive when it was written.
            name = entry.filename.partition("/")[2]
            if name in self._entries:
                raise _Refused(f"has two entries {name[:200]!r}")
            self._entries[name] = entry
        self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))

    def tensors(self) -> dict[str, np.ndarray]:
        if "byteorder" in self._entries and self._bytes("byteorder")[:8].tobytes() != b"little":
            raise _Refused("holds numbers that do not begin with their lowest byte")
        pickle = self._bytes("data.pkl")
        if pickle.size > MAX_PICKLE_BYTES:
            raise _Refused(f"has a data.pkl of {pickle.size} bytes, above {MAX_PICKLE_BYTES}")
        found = _Machine().run(pickle.tobytes())
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise _Refused(f"holds {_shown(found)}, no dictionary with names")
        other = [name for name, value in found.items() if not isinstance(value, _Tensor)]
        if other:
            kind = type(found[other[0]]).__name__
            raise _Refused(f"holds {other[0][:200]!r}, which is no tensor but {kind}")
        views = {name: self._view(name, tensor) for name, tensor in found.items()}
        numbers: collections.Counter[str] = collections.Counter()
        for name, tensor in found.items():
            key, size = tensor.storage.key, tensor.storage.size
            numbers[key] += views[name].size
            if numbers[key] > _MOST_SHARED * size:
                raise _Refused(
                    f"has tensors of more than {_MOST_SHARED} times the {size} numbers of their "
                    f"storage, up to {name[:200]!r}"
                )
        return views

    def _view(self, name: str, tensor: _Tensor) -> np.ndarray:
        storage, shape = tensor.storage, tensor.shape
        data = self._bytes(f"data/{storage.key}")
        if data.size != storage.size * storage.dtype.itemsize:
            raise _Refused(
                f"tensor {name[:200]!r} says {storage.size} numbers of {storage.dtype}, and its "
                f"entry has {data.size} bytes"
            )
        # Where a tensor is empty, its strides reach nothing.
        steps = zip(shape, tensor.strides, strict=True)
        last = tensor.offset + sum((size - 1) * stride for size, stride in steps if size)
        if math.prod(shape) and last >= storage.size:
            raise _Refused(f"tensor {name[:200]!r} of shape {shape} reaches beyond its storage")
        if math.prod(shape) > storage.size:
            raise _Refused(
                f"tensor {name[:200]!r} of shape {shape} and strides {tensor.strides} repeats the "
                f"{storage.size} numbers of its storage, as expand() does; save its .contiguous()"
            )
        if not math.prod(shape):
            return np.zeros(shape, storage.dtype)
        numbers = data.view(storage.dtype)[tensor.offset :]
        strides = tuple(stride * storage.dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)

    def _bytes(self, name: str) -> np.ndarray:
        """Returns the bytes of an entry, u8[size]."""
        entry = self._entries.get(name)
        if entry is None:
            raise _Refused(f"has no entry {name[:200]!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise _Refused(f"has a compressed entry {name[:200]!r}")
        header = self._data[entry.header_offset :][: _LOCAL_HEADER.size].tobytes()
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise _Refused(f"has an entry {name[:200]!r} that is not where its directory says")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        data = self._data[start : start + entry.file_size]
        if data.size != entry.file_size or entry.compress_size != entry.file_size:
            raise _Refused(f"has an entry {name[:200]!r} that ends beyond the file")
        return data


def _check_directory(path: Path) -> None:
    """Raises _Refused where the list of an archive's entries is long: it is read as a whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _END.size - _LOCATOR.size - _END_64.size, 0))
        end = file.read()
    signature, num_bytes = _END.unpack(end[-_END.size :]) if len(end) >= _END.size else (b"", 0)
    if signature != b"PK\x05\x06":
        raise _Refused("is no zip archive, or is cut off")
    longer = end[: -_END.size]
    if (
        len(longer) == _END_64.size + _LOCATOR.size
        and longer[-_LOCATOR.size :][:4] == b"PK\x06\x07"
    ):
        _, num_bytes = _END_64.unpack(longer[: _END_64.size])
    if num_bytes > _MAX_DIRECTORY_BYTES:
        raise _Refused(f"has a directory of {num_bytes} bytes, above {_MAX_DIRECTORY_BYTES}")


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs the instructions of a pickle that build dictionaries, tuples, lists and tensors."""

    def __init__(self):
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._acts: dict[str, Callable[[Any], None]] = {
            "PROTO": self._check_protocol,
            "MARK": lambda argument: self._stack.append(_MARK),
            "GLOBAL": self._name,
            "EMPTY_DICT": lambda argument: self._stack.append({}),
            "EMPTY_LIST": lambda argument: self._stack.append([]),
            "TUPLE": lambda argument: self._stack.append(tuple(self._marked())),
            "APPEND": lambda argument: self._append([self._stack.pop()]),
            "APPENDS": lambda argument: self._append(self._marked()),
            "SETITEM": lambda argument: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda argument: self._set_items(self._marked()),
            "BINPERSID": lambda argument: self._stack.append(_storage(self._stack.pop())),
            "REDUCE": lambda argument: self._reduce(),
            "BUILD": lambda argument: self._build(),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "BINGET": self._get,
            "LONG_BINGET": self._get,
        }

    def run(self, pickle: bytes) -> Any:
        """Returns the object that a pickle describes."""
        try:
            for operation, argument, _ in pickletools.genops(pickle):
                if operation.name != "STOP":
                    self._step(operation.name, argument)
            (result,) = self._stack
        except _Refused:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
            raise _Refused(f"has a damaged data.pkl ({error!r:.200})") from error
        return result

    def _step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            start = len(self._stack) - _TUPLES[name]
            if start < 0:
                raise IndexError("an empty stack")
            self._stack[start:] = [tuple(self._stack[start:])]
        elif name in self._acts:
            self._acts[name](argument)
        else:
            raise _Refused(f"has an instruction {name} in its data.pkl")

    def _marked(self) -> list[Any]:
        """Takes everything above the last mark off the stack, and the mark."""
        start = len(self._stack) - 1
        while self._stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise IndexError("no mark")
        taken = self._stack[start + 1 :]
        del self._stack[start:]
        return taken

    def _check_protocol(self, argument: int) -> None:
        if argument != _PROTOCOL:
            raise _Refused(f"has a data.pkl of protocol {argument}, not {_PROTOCOL}")

    def _name(self, argument: str) -> None:
        if argument not in _NAMES:
            raise _Refused(f"names {argument[:200]!r}, which no tensor needs")
        self._stack.append(_Name(argument))

    def _append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set_items(self, flat: list[Any]) -> None:
        # Other keys could have equal hashes on purpose, or nest deeper than hashing bears.
        if not all(isinstance(key, str) for key in flat[::2]):
            raise _Refused("has a dictionary with keys that are no text")
        self._top(dict).update(zip(flat[::2], flat[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise TypeError(f"no {kind.__name__} on the stack")
        return self._stack[-1]

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise _Refused("calls something that is no function of tensors")
        if called.text == _DICT and not arguments:
            self._stack.append({})
        elif called.text == _TENSOR:
            self._stack.append(_tensor(arguments))
        elif called.text == _PARAMETER and arguments and isinstance(arguments[0], _Tensor):
            self._stack.append(arguments[0])
        else:
            raise _Refused(f"calls {called.text!r} with {len(arguments)} arguments")

    def _build(self) -> None:
        """Leaves out the attributes of a dictionary of weights: its versions."""
        self._stack.pop()
        self._top(dict)


def _storage(identity: Any) -> _Storage:
    """Returns the storage that a tuple ("storage", class, key, device, size) identifies."""
    kind, cls, key, _, size = identity
    if kind != "storage" or not isinstance(cls, _Name) or cls.text not in _STORAGES:
        raise _Refused(f"has numbers of a kind {_shown(identity)} that is not read")
    if not isinstance(key, str) or not _is_size(size):
        raise _Refused(f"has a storage {_shown(identity)}")
    return _Storage(np.dtype(_STORAGES[cls.text]), key, size)


def _tensor(arguments: tuple[Any, ...]) -> _Tensor:
    if len(arguments) not in _ARGUMENTS:
        raise _Refused(f"makes a tensor of {len(arguments)} arguments")
    storage, offset, shape, strides = arguments[:4]
    is_sound = isinstance(storage, _Storage) and _is_size(offset)
    is_sound &= isinstance(shape, tuple) and isinstance(strides, tuple)
    if not is_sound or len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise _Refused(f"has a tensor of shape {_shown(shape)} and strides {_shown(strides)}")
    is_sound = all(map(_is_size, (*shape, *strides)))
    if not is_sound or math.prod(size or 1 for size in shape) > _MAX_NUMBERS:
        raise _Refused(f"has a tensor of shape {_shown(shape)} and strides {_shown(strides)}")
    return _Tensor(storage, offset, shape, strides)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBERS


def _shown(value: Any) -> str:
    return reprlib.repr(value)
