"""A burst: several steps on the device without the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import in_a_loop
from specjax.decode.state import DecodeState, follow, put_rows, take_rows
from specjax.decode.step import step
from specjax.decode.step_spec import StepSpec
from specjax.types import RUNNING, BurstPlan, DecoderParams, StepInfo


def burst(
    spec: StepSpec,
    max_steps: int,
    params: DecoderParams,
    state: DecodeState,
    plan: BurstPlan,
    any_shard: Callable[[Array], Array] = lambda flag: flag,
) -> tuple[DecodeState, StepInfo, Array]:
    """Follows the plan, then runs steps until plan.num_steps, or every row is done, or one is and
    work waits.

    Args:
      max_steps: static, rows of the report; plan.num_steps is at most this.
      any_shard: turns a shard's bool[] into that of all shards, which must agree
        on when to stop.

    Returns:
      The state, StepInfo with a leading [max_steps] axis of which the first
      num_steps_run entries are filled, for the rows that ran, and num_steps_run i32[].
    """
    whole = state = follow(state, plan)
    if plan.row_ids is not None:
        state = take_rows(whole, spec.drafter, plan.row_ids)
    shapes = jax.eval_shape(lambda s: step(spec, params, s)[1], state)
    report = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), shapes)

    def proceeds(carry) -> Array:
        index, _, _, goes_on = carry
        return goes_on & (index < plan.num_steps)

    def body(carry):
        index, state, report, _ = carry
        state, info = step(spec, params, state)
        report = jax.tree.map(
            lambda all_steps, one: jax.lax.dynamic_update_index_in_dim(all_steps, one, index, 0),
            report,
            info,
        )
        has_work = any_shard(jnp.any(state.is_active))
        has_ended = any_shard(jnp.any(info.finish != RUNNING))
        return (
            index + 1,
            state,
            report,
            has_work & ~(has_ended & plan.stop_when_finished),
        )

    start = (jnp.int32(0), state, report, any_shard(jnp.any(state.is_active)))
    with in_a_loop():
        num_steps, state, report, _ = jax.lax.while_loop(proceeds, body, start)
    if plan.row_ids is not None:
        state = put_rows(whole, spec.drafter, plan.row_ids, state)
    return state, report, num_steps
