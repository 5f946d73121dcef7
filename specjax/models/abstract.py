"""Shapes and dtypes of weights, without loading any."""

from __future__ import annotations

from typing import Any

import jax

from specjax.models.base import ModelConfig
from specjax.models.families import family_of


def abstract_weights(config: ModelConfig, dtype: Any) -> Any:
    """Returns shapes and dtypes of a model's weights."""
    init = family_of(config).init
    return jax.eval_shape(lambda key: init(key, config, dtype), jax.random.key(0))
