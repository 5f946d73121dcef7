"""Texts that a drafter learns from, and what the target says along them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.base import ModelConfig, Params
from specjax.models.dense import sequence_hidden
from specjax.models.families import family_of

# Queries of a text whose attention scores exist at once.
QUERIES_AT_ONCE = 512
LEAST_TOKENS = 8  # of a text that a drafter learns from while it is used


def in_parts(call: Callable[[Any], Any], arrays: Any, size: int) -> Any:
    """Returns call(arrays), computed for `size` places of their second axis at a time.

    Args:
      call: from arrays [rows, size, ...] to arrays [rows, size, ...] of the same places; zeros fill
        the last part.
      arrays: a tree of [rows, length, ...].
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    num_parts = -(-length // size)

    def cut(x: Array) -> Array:  # [num_parts, rows, size, ...]
        wide = jnp.pad(x, ((0, 0), (0, num_parts * size - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(wide.reshape(len(x), num_parts, size, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(joined, jax.lax.map(call, jax.tree.map(cut, arrays)))


class TextBatch(NamedTuple):
    """Texts, each from the left edge of its row; arrays of [rows, length] unless said, of jax or
    numpy.

    Attributes:
      token_ids: i32. What stands after a text is not read.
      lengths: i32[rows], tokens of each text.
      is_learned: bool, tokens that the drafter learns to propose: those of a completion, or all.
    """

    token_ids: Any
    lengths: Any
    is_learned: Any

    @property
    def is_text(self) -> Array:
        """bool[rows, length], False for what stands after a text."""
        return jnp.arange(self.token_ids.shape[1])[None] < self.lengths[:, None]


def compacted(token_ids: Array, mask: Array, is_learned: Array) -> TextBatch:
    """Returns texts without the padding inside and around them.

    Args:
      token_ids: i32[rows, length].
      mask: bool[rows, length], True for text.
      is_learned: bool[rows, length].
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    take = lambda x: jnp.take_along_axis(x, order, axis=1)
    return TextBatch(take(token_ids), jnp.sum(mask, axis=1), take(is_learned & mask))


@dataclasses.dataclass(frozen=True)
class Target:
    """The frozen target while a drafter learns; its arrays may be traced.

    Attributes:
      params: no gradient reaches them.
    """

    config: ModelConfig
    params: Params

    def embed(self, token_ids: Array) -> Array:
        """Returns the embeddings of tokens i32[...], [..., hidden_size]."""
        return family_of(self.config).embed(self.params, self.config, token_ids, None)

    def logits(self, hidden: Array) -> Array:
        """Returns f32[..., vocab] of normed outputs [..., hidden_size]."""
        return family_of(self.config).logits(self.params, self.config, hidden, None)


class Along(NamedTuple):
    """Texts, and the target's hidden states along them, [rows, length, hidden_size] each.

    Attributes:
      target: no gradient reaches its weights.
      taps: of the layers that the drafter reads.
      hidden: the normed output, which the target's head reads.
    """

    target: Target
    text: TextBatch
    taps: tuple[Array, ...]
    hidden: Array


def states_along(target: Target, text: TextBatch, taps: tuple[int, ...]) -> Along:
    """Returns what the target computes along texts; no gradient passes.

    Args:
      taps: layers as `DrafterSpec.taps` names them.
    """
    hidden, tapped = sequence_hidden(
        target.params,
        target.config,
        text.token_ids,
        text.is_text,
        taps=taps,
        queries_at_once=QUERIES_AT_ONCE,
    )
    stopped: Any = jax.lax.stop_gradient((tapped, hidden))
    return Along(target, text, *stopped)
