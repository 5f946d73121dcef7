"""Kept states: hidden states of committed tokens, in windows, for what learns from them.

Verification and prefill compute these states anyway. The host points rows at windows, between
steps; a row that has a window writes the states of its tokens there as they are committed. It
never reads them inside a step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from specjax.types import TokenBatch


class KeptShape(NamedTuple):
    """How much is kept: a static part of a decoder's configuration.

    Attributes:
      num_windows: over all data shards, a multiple of their number.
      length: tokens of a window.
    """

    num_windows: int
    length: int

    def num_bytes(self, num_layers: int, hidden_size: int, dtype: DTypeLike) -> int:
        """Returns the bytes of the windows of so many layers, over all data shards."""
        numbers = self.num_windows * self.length * num_layers * hidden_size
        return numbers * jnp.dtype(dtype).itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Windows of hidden states.

    Place i of a window holds the states of the token at position start + i of its row. What a
    window held before stays until it is written over: the host knows which places are filled.
    """

    # Per kept layer dtype[num_windows, length, hidden_size]; over a mesh each data shard has its
    # own windows.
    states: tuple[Array, ...]
    windows: Array  # i32[rows], the row's window within its shard; num_windows where it has none
    starts: Array  # i32[rows], the position whose states go to place 0

    @property
    def num_windows(self) -> int:
        return self.states[0].shape[0]

    @property
    def length(self) -> int:
        return self.states[0].shape[1]


def empty(
    shape: KeptShape, *, rows: int, num_layers: int, hidden_size: int, dtype: DTypeLike
) -> Kept:
    """Returns windows to which no row writes."""
    size = shape.num_windows, shape.length, hidden_size
    return Kept(
        states=tuple(jnp.zeros(size, dtype) for _ in range(num_layers)),
        windows=jnp.full(rows, shape.num_windows, jnp.int32),
        starts=jnp.zeros(rows, jnp.int32),
    )


def keep_committed(
    kept: Kept, roots: Array, counts: Array, places: Array, states: tuple[Array, ...]
) -> Kept:
    """Returns the windows with the states of the tokens that one step fed and committed.

    Args:
      roots: i32[rows], position of the first.
      counts: i32[rows], 0 in rows that did nothing.
      places: i32[rows, most], index of each token in `states`.
      states: [num_tokens, hidden_size] each.
    """
    ahead = jnp.arange(places.shape[1], dtype=jnp.int32)[None, :]
    positions = roots[:, None] + ahead
    is_there = ahead < counts[:, None]
    row = jnp.broadcast_to(jnp.arange(len(roots))[:, None], places.shape)
    own = tuple(x[places.ravel()] for x in states)
    return _put(kept, row.ravel(), positions.ravel(), is_there.ravel(), own)


def keep_prompt(kept: Kept, batch: TokenBatch, row_ids: Array, states: tuple[Array, ...]) -> Kept:
    """Returns the windows with the states of prompt tokens.

    Args:
      batch: of places; see `prefill`.
      row_ids: i32[places], the row of each; `rows` for an unused place.
      states: [num_tokens, hidden_size] each.
    """
    is_there = batch.row_ids < row_ids.shape[0]
    row = row_ids[jnp.minimum(batch.row_ids, row_ids.shape[0] - 1)]
    return _put(kept, row, batch.positions, is_there, states)


def _put(
    kept: Kept, row: Array, positions: Array, is_there: Array, states: tuple[Array, ...]
) -> Kept:
    """Writes the states of tokens, [num_tokens], where they are there and have a place."""
    row = jnp.minimum(row, len(kept.windows) - 1)
    place = positions - kept.starts[row]
    # One past the last window is dropped; a place below 0 would count from the end.
    has_place = is_there & (place >= 0) & (place < kept.length)
    window = jnp.where(has_place, kept.windows[row], kept.num_windows)
    put = lambda old, new: old.at[window, place].set(new.astype(old.dtype), mode="drop")
    return dataclasses.replace(kept, states=tuple(map(put, kept.states, states)))


def pointed(kept: Kept, windows: np.ndarray, starts: np.ndarray) -> Kept:
    """Returns the same states with rows pointed at other windows, for work sent from now on.

    Args:
      windows, starts: i32[rows], as in `Kept`; put where those in use lie.
    """
    put = lambda old, new: jax.device_put(np.asarray(new, np.int32), old.sharding)
    return dataclasses.replace(
        kept, windows=put(kept.windows, windows), starts=put(kept.starts, starts)
    )
