"""What the next step needs, and how requests enter and leave it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache import paged
from specjax.cache.paged import PagedKVCache
from specjax.sampling import RowSampling, reset_rows
from specjax.types import HostArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The rows of a batch. Row r has lengths[r] + 1 committed tokens; the last is its root.

    `history` holds them at their positions. Past them stand a chain's drafts of the
    step in flight, so that a node's own prefix is history[row, : position + 1]; a
    tree's are in its proposal.
    """

    cache: PagedKVCache
    drafter: Any  # the drafter's own pytree
    drafter_lengths: Array  # i32[rows], tokens whose KV is final in the drafter's cache; at most lengths
    history: Array  # i32[rows, max_length]
    sampling: RowSampling
    max_lengths: Array  # i32[rows], tokens, prompt included, at which a row ends
    draft_caps: (
        Array  # i32[rows], most tokens to draft for the row; 0 is plain decoding
    )
    rules: Array  # i32[rows], types.GREEDY .. types.SYNTHETIC
    is_active: Array  # bool[rows], decoding: not empty, not prefilling, not ended

    @property
    def rows(self) -> int:
        return self.history.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """Requests for the rows of `mask`; other rows' entries are ignored.

    Whole rows rather than indices, so that a mesh splits it like the state.
    """

    mask: HostArray  # bool[rows]
    history: HostArray  # i32[rows, max_length], the prompt
    sampling: RowSampling
    max_lengths: HostArray  # i32[rows]
    draft_caps: HostArray  # i32[rows]
    rules: HostArray  # i32[rows]


def exchange(
    state: DecodeState,
    release_mask: Array,
    admission: Admission,
    *,
    tree_slots: int = 0,
) -> tuple[DecodeState, Array]:
    """Empties the rows of release_mask bool[rows], then lets requests in.

    A new row gets pages for all the tokens it may ever hold, and tree_slots more, and
    is not active until a burst's plan activates it: its prompt is prefilled first.

    Returns:
      The state, and is_out_of_pages bool[]: when true nobody was admitted.
    """
    cache = paged.release(state.cache, release_mask)
    is_active = state.is_active & ~release_mask
    # An empty row must not switch on what its last request used.
    state = dataclasses.replace(
        state, sampling=reset_rows(state.sampling, release_mask)
    )
    cache, is_out = paged.allocate(
        cache, jnp.where(admission.mask, admission.max_lengths + tree_slots, 0)
    )
    mask = admission.mask & ~is_out

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    names = ("history", "sampling", "max_lengths", "draft_caps", "rules")
    drafter_lengths = jnp.where(mask | release_mask, 0, state.drafter_lengths)
    fields = {
        name: jax.tree.map(choose, getattr(admission, name), getattr(state, name))
        for name in names
    }
    return dataclasses.replace(
        state,
        cache=cache,
        is_active=is_active,
        drafter_lengths=drafter_lengths,
        **fields,
    ), is_out
