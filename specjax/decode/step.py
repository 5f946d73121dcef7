"""One speculative step: draft -> verify -> accept -> commit."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.decode.commit import commit, longest_path
from specjax.decode.draft import draft
from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.decode.submit import submit
from specjax.decode.verify import verify
from specjax.paged.forward import Part
from specjax.types import DecoderParams, StepInfo


def step(
    spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    beside: Part | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Advances every active row by 1 to K + 1 tokens.

    Args:
      beside: prompt tokens of rows that are not active, for the target to take along.
    """
    state, drafted = draft(
        spec.drafter,
        params,
        state,
        spec.num_speculative_tokens,
        spec.config.vocab_size,
    )
    proposed = drafted.proposal
    if spec.max_drafts_per_shard is not None:
        proposal = submit(proposed, state.rules, spec.max_drafts_per_shard)
        drafted = drafted._replace(proposal=proposal)
    depth = jnp.where(state.is_active, longest_path(proposed), 0)
    cache, verification = verify(spec, params.target, state, drafted.proposal, beside)
    state = dataclasses.replace(state, cache=cache)
    state, info = commit(state, spec.drafter, drafted, verification)
    return state, dataclasses.replace(info, proposed_depth=depth)
