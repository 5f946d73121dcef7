#!/usr/bin/env bash
# jax 0.10.2 (CPU). Slots of padding tokens in a cache of keys and values.
#
# Guess: with mode="drop", a write to index -1 is dropped like one past the end, since -1 is what
# other libraries pad slots with.
# Seen: -1 is the last slot, and its value is overwritten; only an index past the end is dropped.
# Reads of an index past the end differ too: x[i] gives the last value, jnp.take the least integer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp

slots = jnp.arange(4)
padded_with_minus_one = slots.at[jnp.array([-1])].set(9, mode="drop")
padded_past_the_end = slots.at[jnp.array([4])].set(9, mode="drop")
print(padded_with_minus_one, padded_past_the_end, slots[9], jnp.take(slots, 9))
assert padded_with_minus_one.tolist() == [0, 1, 2, 9]
assert padded_past_the_end.tolist() == [0, 1, 2, 3]
assert int(slots[9]) == 3 and int(jnp.take(slots, 9)) == -(2**31)
PYTHON
