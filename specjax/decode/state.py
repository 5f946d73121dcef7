"""The state that a step reads and returns, and how requests enter and leave its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.kept import Kept
from specjax.drafters import base
from specjax.drafters.base import Drafter
from specjax.drafters.none import TurnedOff
from specjax.paged.kv_cache import PagedKVCache
from specjax.sampling import RowSampling, Uses, reset_rows
from specjax.types import BurstPlan, HostArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The rows of a batch. Row r has lengths[r] + 1 committed tokens; the last is its root.

    `history` holds them at their positions. A chain's drafts of the current step follow
    them, so that a node's own prefix is history[row, : position + 1]; a tree's drafts
    are in its proposal.
    """

    cache: PagedKVCache
    drafter: Any  # the drafter's own pytree
    # i32[rows], tokens whose KV is final in the drafter's cache; at most lengths, or one
    # more where the last token of shared pages is to be fed again
    drafter_lengths: Array
    history: Array  # i32[rows, max_length]
    sampling: RowSampling
    max_lengths: Array  # i32[rows], tokens, prompt included, at which a row ends
    # i32[rows], most tokens to draft for the row, from the plan; 0 is plain decoding
    draft_caps: Array
    rules: Array  # i32[rows], types.GREEDY .. types.SYNTHETIC
    is_active: Array  # bool[rows], decoding: not empty, not prefilling, not ended
    kept: Any = ()  # Kept where the decoder keeps hidden states and its drafter is on

    @property
    def rows(self) -> int:
        return self.history.shape[0]

    def for_uses(self, uses: Uses) -> DecodeState:
        """Returns the state whose rows ask for no more than `uses` of the code that reads it."""
        return dataclasses.replace(self, sampling=dataclasses.replace(self.sampling, uses=uses))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """Requests that enter rows; every array leads with [places].

    Under a mesh each shard has its share of the places, with row ids of its own.
    """

    row_ids: HostArray  # i32, distinct; `rows` for an unused place
    history: HostArray  # i32[places, max_length], the prompt and the output so far
    sampling: RowSampling
    max_lengths: HostArray
    rules: HostArray
    # Tokens whose keys and values the row's pages already hold, for the target and for the
    # drafter. The drafter's count is at most the target's, except that the target's is one
    # less where the last token of shared pages is fed again (Scheduler.feeds_shared_again).
    lengths: HostArray
    drafter_lengths: HostArray


def admit(state: DecodeState, drafter: Drafter, admission: Admission) -> DecodeState:
    """Puts requests into rows, replacing their content, and notifies the drafter.

    The rows stay inactive until a burst's plan activates them; the prompt tokens that
    their pages lack are prefilled before.
    """

    def put(old: Array, new: HostArray) -> Array:
        return old.at[admission.row_ids].set(new, mode="drop")

    names = ("history", "sampling", "max_lengths", "rules")
    fields = {
        name: jax.tree.map(put, getattr(state, name), getattr(admission, name)) for name in names
    }
    lengths = put(state.cache.lengths, admission.lengths)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=lengths),
        drafter=drafter.enter_rows(
            state.drafter, jnp.asarray(admission.row_ids), jnp.asarray(admission.drafter_lengths)
        ),
        drafter_lengths=put(state.drafter_lengths, admission.drafter_lengths),
        is_active=put(state.is_active, jnp.zeros_like(admission.row_ids, bool)),
        **fields,
    )


def follow(state: DecodeState, plan: BurstPlan) -> DecodeState:
    """Empties and activates rows as the plan says; sets their pages and draft caps from it."""
    # Sampling features of a row's last request must not stay enabled in an empty row.
    sampling = reset_rows(state.sampling, ~plan.keep)
    return dataclasses.replace(
        with_table(state, plan.block_table),
        sampling=sampling,
        draft_caps=jnp.asarray(plan.draft_caps),
        is_active=(state.is_active | plan.activate) & plan.keep,
    )


def with_table(state: DecodeState, block_table: HostArray) -> DecodeState:
    """Returns the state with the host's block table."""
    cache = dataclasses.replace(state.cache, block_table=jnp.asarray(block_table))
    return dataclasses.replace(state, cache=cache)


def without_drafter(state: DecodeState) -> DecodeState:
    """Returns the state with the drafter turned off, which frees the drafter's memory, and that of
    the hidden states that are kept for it."""
    return dataclasses.replace(state, drafter=TurnedOff(), kept=())


def has_drafter(state: DecodeState) -> bool:
    """Returns whether the drafter is on."""
    return not isinstance(state.drafter, TurnedOff)


def remember_text(drafter: Drafter, state: DecodeState, pieces: Any) -> DecodeState:
    """Returns the state after the drafter took in pieces of text from the host."""
    assert drafter.remember is not None, "the drafter has no use for text"
    return dataclasses.replace(state, drafter=drafter.remember(state.drafter, pieces))


def take_rows(state: DecodeState, drafter: Drafter, row_ids: Array) -> DecodeState:
    """Returns the state of only the rows row_ids i32[n]; ids past the last row give empty rows.

    All rows share the pages, which are not copied.
    """
    rows = state.rows
    row = jnp.minimum(row_ids, rows - 1)
    own = {name: jax.tree.map(lambda x: x[row], getattr(state, name)) for name in _BY_ROW}
    cache = dataclasses.replace(
        state.cache,
        block_table=state.cache.block_table[row],
        lengths=state.cache.lengths[row],
    )
    own["is_active"] &= row_ids < rows
    part = base.take_rows(drafter, state.drafter, row)
    kept = state.kept
    if isinstance(kept, Kept):
        kept = dataclasses.replace(kept, windows=kept.windows[row], starts=kept.starts[row])
    return dataclasses.replace(state, cache=cache, drafter=part, kept=kept, **own)


def put_rows(
    state: DecodeState, drafter: Drafter, row_ids: Array, part: DecodeState
) -> DecodeState:
    """Returns `state` with the rows row_ids and the pages replaced by those of `part`."""

    def put(whole: Array, own: Array) -> Array:
        return whole.at[row_ids].set(own, mode="drop")

    fields = {
        name: jax.tree.map(put, getattr(state, name), getattr(part, name)) for name in _BY_ROW
    }
    cache = dataclasses.replace(
        state.cache,
        pages=part.cache.pages,
        lengths=put(state.cache.lengths, part.cache.lengths),
    )
    drafter_state = base.put_rows(drafter, state.drafter, row_ids, part.drafter)
    kept = state.kept
    if isinstance(kept, Kept):  # a step writes states alone
        kept = dataclasses.replace(kept, states=part.kept.states)
    return dataclasses.replace(state, cache=cache, drafter=drafter_state, kept=kept, **fields)


# Fields of DecodeState, besides the cache and the drafter, whose arrays lead with rows.
_BY_ROW = (
    "drafter_lengths",
    "history",
    "sampling",
    "max_lengths",
    "draft_caps",
    "rules",
    "is_active",
)
