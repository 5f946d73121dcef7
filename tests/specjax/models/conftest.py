"""Folders to load: goldens to copy and change, and a writer of safetensors."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"
_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
}


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        begin, data = len(data), data + tensor.tobytes()
        offsets = [begin, len(data)]
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # aligned, as an array that could be kept
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def write_safetensors():
    return write_file


@pytest.fixture
def golden():
    """Returns the folder of a golden checkpoint, which must not be changed."""
    return lambda name: GOLDENS / name


@pytest.fixture
def golden_copy(tmp_path):
    """Returns a copy of a golden checkpoint with `options` written over its config."""

    def copy(name: str, **options) -> Path:
        folder = Path(shutil.copytree(GOLDENS / name, tmp_path / name))
        config = json.loads((folder / "config.json").read_text()) | options
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy
