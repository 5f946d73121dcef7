"""Computes bytes and operations of a model's forward over pages, on one device."""

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
    """Peak figures of one chip; `specjax.configs.devices.DeviceFigures` implements it."""

    @property
    def bytes_per_s(self) -> float: ...

    @property
    def flops_per_s(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens of a row in one forward that drafts all tokens of a step, by K.

    They are `fixed` + `per_draft` * K, at least 1 and at most `most`.
    """

    fixed: int
    per_draft: int = 0
    most: int | None = None

    def tokens(self, num_speculative_tokens: int) -> int:
        """Returns how many tokens of a row are fed for so many draft tokens."""
        count = max(self.fixed + self.per_draft * num_speculative_tokens, 1)
        return count if self.most is None else min(count, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Costs of a forward of a model on one chip.

    Attributes:
      weight_bytes: bytes of weights, read once per forward for any number of tokens.
      token_flops: operations per token in products with weights.
      context_bytes: bytes of keys and values per token of context, read once per row.
      context_flops: operations per pair of a token and a token of its context.
      token_bytes: bytes that are read and written per token beside these.
      layer_windows: sliding window of each layer in tokens, None without; (): none in any
        layer. Layers have equal parts of context_bytes and context_flops.
      num_layers: number of layers; each launches its operations separately.
      block: of a drafter that drafts all tokens of a step in one forward, the tokens of a row in
        it; None: a forward of one token per row for each draft token.
    """

    weight_bytes: float
    token_flops: float
    context_bytes: float
    context_flops: float
    token_bytes: float = 0.0
    layer_windows: tuple[int | None, ...] = ()
    num_layers: int = 0
    block: Block | None = None

    def forward_tokens(self, num_speculative_tokens: int) -> int:
        """Returns the tokens of a row in one forward that drafts, at a K."""
        return 1 if self.block is None else self.block.tokens(num_speculative_tokens)

    def num_forwards(self, num_speculative_tokens: int) -> int:
        """Returns the forwards, one after the other, that draft so many tokens."""
        return num_speculative_tokens if self.block is None else min(num_speculative_tokens, 1)

    def of_forward(self, rows: int, context: int, num_speculative_tokens: int) -> Work:
        """Returns the work of one of these forwards in `rows` rows of `context` tokens, at a K."""
        return self.of(rows, rows * self.forward_tokens(num_speculative_tokens), context)

    def of(self, rows: int, tokens: int, context: int) -> Work:
        """Returns the work of a forward of `tokens` tokens in `rows` rows of `context` tokens."""
        seen = self.seen(context)
        return Work(
            self.weight_bytes + rows * seen * self.context_bytes + tokens * self.token_bytes,
            tokens * (self.token_flops + seen * self.context_flops),
        )

    def seen(self, context: int) -> float:
        """Returns the tokens of context that a layer reads, as the mean over layers."""
        if not self.layer_windows:
            return context
        clipped = [min(context, window or context) for window in self.layer_windows]
        return sum(clipped) / len(clipped)


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes and operations on one chip."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, device: Peaks) -> float:
        """Returns the least seconds that it takes, by the device's peak figures."""
        return max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s)


@functools.lru_cache(maxsize=64)
def model_work(
    config: ModelConfig,
    dtype: Any,
    chips: int,
    num_weights: int | None = None,
    kv_dtype: Any = None,
) -> ModelWork:
    """Returns the costs of a forward on one of the `chips` that a model is split over.

    Args:
      kv_dtype: of keys and values; None: that of the weights.
      num_weights: numbers in all leaves, if known; counting them takes 0.1 s.
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
