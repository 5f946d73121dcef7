#!/usr/bin/env bash
# torch 2.13.0, ml_dtypes 0.5.4 (the dtypes of jax), on a CPU. Weights or keys cast to float8_e4m3fn,
# whose largest number is 448.
#
# Guess: both libraries give the same for the same cast of 500.
# Seen: torch gives 448, ml_dtypes NaN, for every number above 464. To float8_e5m2 both give infinity
# from 61,440 on: there torch does not saturate either.
# So a checkpoint without NaN in one library has NaN after the same cast in the other: clamp first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 ml_dtypes==0.5.4 numpy==2.4.6
"$work/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

values = np.array([448, 464, 465, 500], np.float32)
in_torch = torch.tensor(values).to(torch.float8_e4m3fn).float().tolist()
in_jax = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
print("e4m3fn:", in_torch, in_jax)
assert in_torch == [448] * 4
assert in_jax[:2] == [448] * 2 and np.isnan(in_jax[2:]).all()

values = np.array([57_344, 61_440], np.float32)
in_torch = torch.tensor(values).to(torch.float8_e5m2).float().tolist()
in_jax = values.astype(ml_dtypes.float8_e5m2).astype(np.float32).tolist()
print("e5m2:", in_torch, in_jax)
assert in_torch == in_jax == [57_344, np.inf]
PYTHON
