"""Finds out how few layers of a model stand for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import SequenceKey

from specjax.models.abstract import abstract_weights
from specjax.models.base import ModelConfig

FEW_LAYERS, MORE_LAYERS = 2, 4  # compiled of a model whose layers are all alike


class LayerCounts(NamedTuple):
    """Numbers of first layers to compile in place of a whole model.

    Layers `few` to `more` are whole periods of a pattern that every later layer goes on with, so
    what they add to a step is what later layers add. Both are num_layers where no such pattern
    is short enough.
    """

    few: int
    more: int


def layers_to_compile(config: ModelConfig) -> LayerCounts:
    """Returns how many of a model's first layers to compile."""
    num_layers, kinds = config.num_layers, layer_kinds(config)
    if kinds is not None:
        found = [_counts(kinds, period) for period in range(1, num_layers)]
        fewest = min(found, key=lambda counts: counts.more, default=None)
        if fewest is not None and fewest.more < num_layers:
            return fewest
    return LayerCounts(num_layers, num_layers)


def layer_kinds(config: ModelConfig) -> list[Hashable] | None:
    """Returns one value per layer, equal for layers of equal weights and equal options.

    The options are the config's fields that begin `layer_`. The number of a layer is the first
    index of a tuple or list on the way to its weights; None where weights of layers lie
    elsewhere.
    """
    num_layers = config.num_layers
    options = [
        value
        for field in dataclasses.fields(config)
        if field.name.startswith("layer_") and len(value := getattr(config, field.name))
    ]
    weights: list[list[Hashable]] = [[] for _ in range(num_layers)]
    of_no_layer = set(_leaves(config.first_layers(0)))
    for path, leaf in _leaves(config).items():
        place = next((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), None)
        if place is not None and path[place].idx < num_layers:
            name = jax.tree_util.keystr((*path[:place], *path[place + 1 :]))
            weights[path[place].idx].append((name, leaf.shape))
        elif path not in of_no_layer:
            return None
    return [
        (tuple(own), *(values[index] for values in options)) for index, own in enumerate(weights)
    ]


def _leaves(config: ModelConfig) -> dict[tuple[Any, ...], jax.ShapeDtypeStruct]:
    found = jax.tree_util.tree_flatten_with_path(abstract_weights(config, jnp.float32))[0]
    return dict(found)


def _counts(kinds: Sequence[Hashable], period: int) -> LayerCounts:
    """Returns the layers to compile if the last layers repeat with this period."""
    later = range(len(kinds) - 1, period - 1, -1)
    differs = next((i for i in later if kinds[i] != kinds[i - period]), period - 1)
    # Of the last layer a prefill needs keys and values alone: it comes after one whole period.
    few = max(differs + 2, FEW_LAYERS)
    return LayerCounts(few, few + period * -(-(MORE_LAYERS - FEW_LAYERS) // period))
