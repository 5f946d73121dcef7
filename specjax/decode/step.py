"""One speculative step: draft -> verify -> accept -> commit."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.decode.absorb import Committed, absorbing_rows
from specjax.decode.commit import commit, longest_path
from specjax.decode.draft import draft
from specjax.decode.kept import keep_committed
from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.decode.submit import submit
from specjax.decode.verify import verify
from specjax.drafters import none
from specjax.paged.forward import Part
from specjax.types import DecoderParams, StepInfo


def advance(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    beside: Part | None = None,
) -> tuple[DecodeState, StepInfo, Committed | None]:
    """Advances every active row by 1 to K + 1 tokens.

    Args:
      beside: prompt tokens of rows that are not active, for the target to take along.

    Returns:
      The state, a report, and with spec.read what was committed, for the caller to absorb.
    """
    drafter = spec.drafter if spec.num_speculative_tokens else none.drafter()
    state, drafted = draft(
        drafter,
        params,
        state,
        spec.num_speculative_tokens,
        spec.config.vocab_size,
        # Drafting needs the hidden state of the token before the root; a root at 0 has none.
        least_root=1 if spec.taps else 0,
    )
    proposed = drafted.proposal
    if spec.max_drafts_per_shard is not None:
        proposal = submit(proposed, state.rules, spec.max_drafts_per_shard)
        drafted = drafted._replace(proposal=proposal)
    depth = jnp.where(state.is_active, longest_path(proposed), 0)
    cache, verification = verify(spec, params.target, state, drafted.proposal, beside)
    state = dataclasses.replace(state, cache=cache)
    roots = state.cache.lengths
    absorbing = absorbing_rows(spec, state, drafted)
    state, info = commit(state, drafter, drafted, verification, absorbing)
    info = dataclasses.replace(info, proposed_depth=depth)
    if verification.tapped is None or verification.places is None:
        return state, info, None
    tapped, places = verification.tapped, verification.places
    if spec.kept:
        states = spec.of_kept(tapped.batch)
        kept = keep_committed(state.kept, roots, info.num_committed, places, states)
        state = dataclasses.replace(state, kept=kept)
    absorbed = spec.absorbed(tapped.batch)
    return state, info, Committed(roots, info.num_committed, places, absorbed, tapped.beside)
