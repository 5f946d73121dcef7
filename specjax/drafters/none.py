"""The empty drafter, which proposes nothing: plain decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import Draft, Drafter, by_none
from specjax.types import DecoderParams, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnedOff:
    """The empty state of a drafter that was turned off.

    It differs from the state () of a drafter without state, as their executables differ.
    """


def drafter() -> Drafter:
    """Returns the empty drafter, for K = 0."""

    def draft(params: DecoderParams, state: Any, decode_state: Any, num_tokens: Array) -> Draft:
        del params
        nothing = jnp.zeros((decode_state.rows, 0), jnp.int32)
        proposal = Proposal(token_ids=nothing, num_tokens=jnp.zeros_like(num_tokens))
        return Draft(proposal, state, decode_state.drafter_lengths)

    # At K = 0 the state may belong to another drafter; row buckets must not index it by row.
    return Drafter(draft, state_axes=by_none)
