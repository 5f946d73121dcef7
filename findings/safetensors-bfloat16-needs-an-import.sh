#!/usr/bin/env bash
# safetensors 0.8.0, ml_dtypes 0.5.4. A file with one tensor in bfloat16, read into numpy.
#
# Guess: it can be read, or it cannot.
# Seen: it raises TypeError until any code of the process has imported ml_dtypes; then the same call
# reads it. A program that reads it beside jax fails as a script without jax.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q safetensors==0.8.0 ml_dtypes==0.5.4 numpy==2.4.6
"$work/venv/bin/python" - <<'PYTHON'
import json
import pathlib
import struct
import tempfile

from safetensors.numpy import load_file

with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "ones.safetensors")
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    header = json.dumps({"ones": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes.fromhex("803f803f"))
    try:
        load_file(file)
    except TypeError as error:
        print("before:", error)
    else:
        raise SystemExit("it was read without the import")
    import ml_dtypes

    ones = load_file(file)["ones"]
    print("after:", ones, ones.dtype)
    assert ones.dtype == ml_dtypes.bfloat16 and ones.astype(float).tolist() == [1, 1]
PYTHON
