#!/usr/bin/env bash
# safetensors 0.8.0, jax 0.10.2. A file with 64-bit integers, read by safetensors.flax.
#
# Guess: numbers that do not fit are an error, or at least a warning.
# Seen: they become their low 32 bits without a word: 2**40 + 5 is 5, and 2**31 is -2**31.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q safetensors==0.8.0 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import pathlib
import tempfile
import warnings

import numpy as np
import safetensors.flax
import safetensors.numpy

warnings.simplefilter("error")
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "ids.safetensors")
    safetensors.numpy.save_file({"ids": np.array([3, 2**31, 2**40 + 5])}, file)
    read = safetensors.flax.load_file(file)["ids"]
print(read, read.dtype)
assert str(read.dtype) == "int32" and read.tolist() == [3, -(2**31), 5]
PYTHON
