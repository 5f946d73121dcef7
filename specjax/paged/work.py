"""Bytes and operations of a model's forward over pages, on one device. Nothing runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.models.abstract import abstract_weights
from specjax.models.base import ModelConfig
from specjax.models.families import family_of
from specjax.paged import kv_cache


class Peaks(Protocol):
    """Of one chip; `specjax.configs.devices.DeviceFigures` is one."""

    @property
    def bytes_per_s(self) -> float: ...

    @property
    def flops_per_s(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What one forward of a model does, on one chip.

    Attributes:
      weight_bytes: read once per forward, however many tokens it has.
      token_flops: operations per token in products with weights.
      context_bytes: keys and values read per token of context, once per row.
      context_flops: operations per token and token of its context.
      layer_windows: tokens that each layer sees back, None where all; () is all in every
        layer. Layers have equal parts of context_bytes and context_flops.
      num_layers: whose operations are launched one by one.
    """

    weight_bytes: float
    token_flops: float
    context_bytes: float
    context_flops: float
    layer_windows: tuple[int | None, ...] = ()
    num_layers: int = 0

    def of(self, rows: int, tokens: int, context: int) -> Work:
        """Returns what `tokens` tokens of `rows` rows with `context` tokens each take."""
        seen = self.seen(context)
        return Work(
            self.weight_bytes + rows * seen * self.context_bytes,
            tokens * (self.token_flops + seen * self.context_flops),
        )

    def seen(self, context: int) -> float:
        """Returns the tokens of a row that a layer sees back, the mean of all layers."""
        if not self.layer_windows:
            return context
        clipped = [min(context, window or context) for window in self.layer_windows]
        return sum(clipped) / len(clipped)


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one chip."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, device: Peaks) -> float:
        """Returns the least that it takes, in s."""
        return max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s)


@functools.lru_cache(maxsize=64)
def model_work(
    config: ModelConfig,
    dtype: Any,
    chips: int,
    num_weights: int | None = None,
    kv_dtype: Any = None,
) -> ModelWork:
    """Returns what a forward does on one chip of those that a model is split over.

    Args:
      kv_dtype: of keys and values; None is that of the weights.
      num_weights: in all leaves, where that is known; counting them takes 0.1 s.
    """
    itemsize = jnp.dtype(dtype).itemsize
    count = num_weights
    if count is None:
        weights = abstract_weights(config, dtype)
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    work = family_of(config).work(config, count)
    kept = itemsize if kv_dtype is None else jnp.dtype(kv_dtype).itemsize
    kv = kv_cache.numbers_per_token(config, kv_shards=chips)
    return ModelWork(
        weight_bytes=work.weights_read * itemsize / chips,
        token_flops=2 * work.token_products / chips,
        context_bytes=kv * kept / chips,
        context_flops=2 * work.context_products / chips,
        layer_windows=work.layer_windows,
        num_layers=config.num_layers,
    )
