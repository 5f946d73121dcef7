"""Parts of the equations of heads over a target, in numpy, for tests that write them out."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing import tiny_model

TARGET = tiny_model()
VOCAB = TARGET.config.vocab_size


def wide(params):
    """Returns weights in float64, and whole numbers as they are."""
    is_whole = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.integer)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, None if is_whole(leaf) else np.float64), params
    )


def rms(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, layer):
    return (silu(x @ layer["gate_proj"].T) * (x @ layer["up_proj"].T)) @ layer["down_proj"].T


def rotated(x, positions, theta):
    """x [n, heads, d]; entry i of the first half turns with entry i of the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = first * np.cos(angles) - second * np.sin(angles)
    return np.concatenate([turned, second * np.cos(angles) + first * np.sin(angles)], axis=-1)


def attention_of(q, k, v, is_seen):
    """Returns [n, heads * d] of q [n, heads, d] over k, v [m, kv_heads, d]; is_seen [n, m]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(is_seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
