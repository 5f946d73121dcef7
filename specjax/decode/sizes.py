"""The fixed sizes of a run."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.configs import devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The static sizes of a decode state, over all shards."""

    rows: int
    page_size: int
    num_pages: int
    pages_per_row: int
    burst_steps: int
    # Slots of a row past its last token, which hold the nodes of a tree until a path is
    # accepted; 0 for chains.
    tree_slots: int = 0
    dtype: Any = jnp.float32  # of keys and values

    @property
    def max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.pages_per_row * self.page_size


PLACES = 8  # rows that share one admission, and least rows that share one prefill call

# Prompt tokens at which a forward takes as long for its products as for reading the weights,
# where no figures of the device are known. On a CPU few tokens fill the processor.
CPU_RIDGE_TOKENS, USUAL_RIDGE_TOKENS = 16, 256
TOKENS_PER_PLACE = 64  # a bucket has one place for so many tokens, and PLACES at least
# Each prompt bucket is this many times the next smaller one, down to LEAST_BUCKET tokens.
BUCKET_RATIO, MOST_BUCKETS, LEAST_BUCKET = 4, 3, 16
LAUNCH_TOKENS = 16  # cost of a call besides its forward, in tokens
MOST_DEFAULT_TOKENS = 2**12  # of the largest bucket that is chosen by the device


class PromptShape(NamedTuple):
    """Static sizes of the prompt tokens in one call, per shard."""

    places: int  # most rows that are fed
    num_tokens: int  # the token bucket: tokens of all places together


@dataclasses.dataclass(frozen=True)
class PromptSizes:
    """Token buckets of prompts: a call feeds as many rows as its bucket holds.

    Attributes:
      buckets: token buckets, ascending.
      ridge_tokens: tokens of a forward up to which more tokens hardly cost more.
    """

    buckets: tuple[int, ...]
    ridge_tokens: int

    @classmethod
    def of(cls, max_tokens: int | None, device: Any, dtype: Any) -> PromptSizes:
        """Returns the sizes for a device.

        Args:
          max_tokens: EngineConfig.max_prefill_tokens; None: the least power of two that holds
            twice the ridge, so that products and not the weights limit long prompts.
          device: a jax.Device.
          dtype: of the weights.
        """
        ridge = ridge_tokens(device.platform, device.device_kind, jnp.dtype(dtype).itemsize)
        if max_tokens is None:
            max_tokens = default_tokens(ridge)
        smaller = (max_tokens // BUCKET_RATIO**power for power in range(1, MOST_BUCKETS))
        kept = (bucket for bucket in smaller if bucket >= LEAST_BUCKET)
        return cls((*reversed([*kept]), max_tokens), ridge)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return self.buckets[-1]

    def shapes(self, rows: int) -> list[PromptShape]:
        """Returns every shape for a number of rows per shard, ascending."""
        return [PromptShape(self.places(bucket, rows), bucket) for bucket in self.buckets]

    def places(self, bucket: int, rows: int) -> int:
        """Returns the most rows that share a bucket, of `rows` per shard."""
        return min(max(PLACES, bucket // TOKENS_PER_PLACE), bucket, rows)

    def best(self, num_tokens: int) -> int:
        """Returns the bucket with the least cost per token when num_tokens wait.

        That is the smallest bucket that holds them, or the largest that they fill.
        """
        larger = [bucket for bucket in self.buckets if bucket >= num_tokens]
        filled = [bucket for bucket in self.buckets if bucket <= num_tokens]
        cost = lambda bucket: self._cost(bucket) / min(bucket, num_tokens)
        return min([*larger[:1], *filled[-1:]], key=cost)

    def _cost(self, bucket: int) -> int:
        """Returns the cost of a call, in tokens of a large one."""
        return max(bucket, self.ridge_tokens) + LAUNCH_TOKENS


def default_tokens(ridge: int) -> int:
    """Returns the largest prompt bucket of a device, by the result of `ridge_tokens`."""
    return min(max(1 << (2 * ridge - 1).bit_length(), 256), MOST_DEFAULT_TOKENS)


def ridge_tokens(platform: str, device_kind: str, itemsize: int) -> int:
    """Returns the tokens at which a forward's products take as long as reading its weights.

    By the maker's peak figures (`specjax.configs.devices`), 2 operations per weight and token.

    Args:
      itemsize: bytes per weight.
    """
    if platform == "cpu":
        return CPU_RIDGE_TOKENS
    figures = devices.of_kind(device_kind)
    return USUAL_RIDGE_TOKENS if figures is None else ridge_of(figures, itemsize)


def ridge_of(figures: devices.DeviceFigures, itemsize: int) -> int:
    """Returns `ridge_tokens` of a device by its figures."""
    return round(figures.ridge * itemsize / 2)
