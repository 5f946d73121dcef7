"""A mixed step: rows decode plainly while the prompts of others are prefilled beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.absorb import absorb_committed
from specjax.decode.prefill import prompt_batch, take_prompt
from specjax.decode.state import DecodeState, follow
from specjax.decode.step import advance
from specjax.decode.step_spec import StepSpec
from specjax.paged.forward import Part
from specjax.types import BurstPlan, DecoderParams, StepInfo


def mixed_step(
    spec: StepSpec,
    prompt_spec: StepSpec,
    params: DecoderParams,
    state: DecodeState,
    plan: BurstPlan,
    row_ids: Array,
    counts: Array,
    *,
    max_tokens_per_row: int,
) -> tuple[DecodeState, StepInfo, Array]:
    """Follows the plan, runs one step, and feeds prompt tokens through the same matmuls.

    The weights are read once for both, so that prefill does not delay decoding rows.

    Args:
      spec: spec of the step; K = 0, since the prompt's tokens already fill the matmuls.
      prompt_spec: spec for the prompt, with the drafter that is fed it.
      plan: covers all rows.
      row_ids, counts, max_tokens_per_row: as for `prefill`; none of these rows is active.

    Returns:
      The same as `burst`, for one step.
    """
    state = follow(state, plan)
    batch = prompt_batch(prompt_spec, state, row_ids, counts, max_tokens_per_row)
    state, info, committed = advance(spec, params, state, Part(batch, max_tokens_per_row))
    taps = ()
    if committed is not None:
        state = absorb_committed(spec, params, state, committed)
        taps = committed.beside
    state = take_prompt(
        prompt_spec, params, state, batch, row_ids, counts, max_tokens_per_row, taps=taps
    )
    return state, jax.tree.map(lambda leaf: leaf[None], info), jnp.int32(1)
