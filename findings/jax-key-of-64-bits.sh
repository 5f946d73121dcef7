#!/usr/bin/env bash
# jax 0.10.2 (CPU). Seeds of requests are often 64 bits long.
#
# Guess: different 64-bit seeds give different keys, or an error as fold_in gives for them.
# Seen: jax.random.key(s) keeps the low 32 bits: 1 and 2**32 + 1 are the same key. fold_in raises
# OverflowError for 2**32 + 1.
# So two requests whose seeds agree in their low half draw the same tokens, without a word.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import jax

data = lambda seed: jax.random.key_data(jax.random.key(seed)).tolist()
print(data(1), data(2**32 + 1), data(2))
assert data(1) == data(2**32 + 1) != data(2)
try:
    jax.random.fold_in(jax.random.key(0), 2**32 + 1)
except OverflowError as error:
    print("fold_in:", error)
else:
    raise SystemExit("fold_in took it")
PYTHON
