"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import Draft, Drafter, by_none
from specjax.types import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnedOff:
    """What stands for the state of a drafter that was turned off: nothing.

    Told apart from a drafter without state: executables are of one or the other.
    """


def drafter() -> Drafter:
    """Returns the drafter of K = 0."""

    def draft(params, state, decode_state, num_tokens: Array) -> Draft:
        del params
        nothing = jnp.zeros((decode_state.rows, 0), jnp.int32)
        proposal = Proposal(token_ids=nothing, num_tokens=jnp.zeros_like(num_tokens))
        return Draft(proposal, state, decode_state.drafter_lengths)

    # Its state may be that of a drafter that is not asked: rows take no part of it.
    return Drafter(draft, state_axes=by_none)
