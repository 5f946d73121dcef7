#!/usr/bin/env bash
# jax 0.10.2 (CPU). Draws from logits in bfloat16.
#
# Guess: 2,000 draws from 32,000 equal logits are spread over all 32,000 ids, whatever the dtype.
# Seen: in bfloat16 no draw is above id 1,000 (mean 129); in float32 the mean is near 16,000.
# Why: the noise has the dtype of the logits. It has so few values that many tokens share the
# largest, and argmax takes the first of them. Cast logits to float32 before drawing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

means = {}
for dtype in (jnp.bfloat16, jnp.float32):
    logits = jnp.zeros(32_000, dtype)
    ids = jax.random.categorical(jax.random.key(0), logits, shape=(2_000,))
    means[dtype.dtype.name] = int(ids.mean())
    print(f"{dtype.dtype.name}: mean {ids.mean():.0f}, largest {ids.max()}")
assert means["bfloat16"] < 1_000 < 14_000 < means["float32"] < 18_000, means
PYTHON
