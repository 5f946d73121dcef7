"""Fingerprints of weights: equal for equal numbers alone."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.training.fingerprints import weights_fingerprint


def test_any_number_and_any_place_changes_it():
    rng = np.random.default_rng(0)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        leaf = jnp.asarray(rng.normal(size=(5, 7)), dtype)
        params = {"a": leaf, "b": (jnp.zeros(3), jnp.arange(4))}
        known = {weights_fingerprint(params)}
        assert weights_fingerprint(jax.tree.map(jnp.copy, params)) in known
        others = [
            leaf.at[2, 3].multiply(1.01),
            leaf.at[2, 3].set(leaf[2, 4]).at[2, 4].set(leaf[2, 3]),
            leaf[::-1],
            leaf.T,
            leaf * -1,
        ]
        for other in others:
            found = weights_fingerprint(params | {"a": other})
            assert found not in known
            known.add(found)
        assert weights_fingerprint({"c": leaf, "b": params["b"]}) not in known
