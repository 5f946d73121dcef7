"""Random models that are small enough for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.base import Model, ModelConfig
from specjax.models.families import family_of

# Large enough that attention and logits depend on the text.
WEIGHT_STD = 0.2


def tiny_model(seed: int = 0, **fields: Any) -> Model:
    """Returns a random Llama of two layers, with float32 weights and without a tokenizer.

    Equal arguments give equal weights. Its tokens depend on the whole text before them. Nothing
    is compiled to make it.

    Args:
      seed: of its weights.
      fields: of `specjax.ModelConfig`. The defaults are vocab_size=61, hidden_size=32,
        intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8 and
        max_position_embeddings=512, and for the others those of `ModelConfig`.
    """
    return random_model(tiny_config(**fields), seed)


def tiny_config(**fields: Any) -> ModelConfig:
    """Returns the config of `tiny_model`."""
    defaults = {
        "architecture": "llama",
        "family": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(defaults | fields))


def random_model(config: ModelConfig, seed: int) -> Model:
    """Returns a model of normal float32 weights, and norms near one; compiles nothing."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = WEIGHT_STD * rng.standard_normal(leaf.shape)
        if path[-1].key.endswith("norm"):
            values += 1
        return jnp.asarray(values, leaf.dtype)

    init = lambda key: family_of(config).init(key, config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(fill, shapes)
    return Model(config=config, params=params, name=f"tiny-{config.family}-{seed}")
