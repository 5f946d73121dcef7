"""A mixed step: rows decode, with drafts or plainly, beside prompt tokens of other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode.absorb import absorb_committed
from specjax.decode.prefill import prompt_batch, take_prompt
from specjax.decode.state import DecodeState, follow, put_rows, take_rows
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
    num_tokens: int,
) -> tuple[DecodeState, StepInfo, Array]:
    """Follows the plan, runs one step, and feeds prompt tokens through the same matmuls.

    The weights are read once for both, so that prefill hardly delays decoding rows.

    Args:
      spec: spec of the step; its K may be 0.
      prompt_spec: spec for the prompts, with the drafter that is fed them.
      plan: covers all rows, or with plan.row_ids those that decode.
      row_ids, counts, num_tokens: as for `prefill`; none of these rows is active.

    Returns:
      The same as `burst`, for one step.
    """
    whole = own = follow(state, plan)
    batch = prompt_batch(prompt_spec, whole, row_ids, counts, num_tokens)
    # The axes of the drafter's state are the same at every K, and spec has no drafter at K = 0.
    drafter = prompt_spec.drafter
    if plan.row_ids is not None:
        own = take_rows(whole, drafter, plan.row_ids)
    own, info, committed = advance(spec, params, own, Part(batch, num_tokens))
    taps = ()
    if committed is not None:
        own = absorb_committed(spec, params, own, committed)
        taps = committed.beside
    state = own
    if plan.row_ids is not None:
        state = put_rows(whole, drafter, plan.row_ids, own)
    state = take_prompt(prompt_spec, params, state, batch, row_ids, counts, num_tokens, taps=taps)
    return state, jax.tree.map(lambda leaf: leaf[None], info), jnp.int32(1)
