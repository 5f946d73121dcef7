"""A burst: several steps on the device without the host."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import in_a_loop
from specjax.decode.absorb import (
    WINDOW,
    Waiting,
    absorb_committed,
    absorb_waiting,
    no_waiting,
    wait,
)
from specjax.decode.state import DecodeState, follow, put_rows, take_rows
from specjax.decode.step import advance
from specjax.decode.step_spec import StepSpec
from specjax.sampling.packing import pack, unpack
from specjax.types import RUNNING, BurstPlan, DecoderParams, StepInfo


class _Progress(NamedTuple):
    """Values that a burst carries from step to step."""

    num_steps: Array  # i32[], steps that ran
    state: DecodeState
    report: Array  # i32[max_steps, rows, width], StepInfo of each step, packed
    goes_on: Array  # bool[]


def burst(
    spec: StepSpec,
    max_steps: int,
    params: DecoderParams,
    state: DecodeState,
    plan: BurstPlan,
) -> tuple[DecodeState, StepInfo, Array]:
    """Applies the plan, then runs up to plan.num_steps steps.

    It stops early when no row is active, or, with plan.stop_when_finished, when a row ends.

    Args:
      max_steps: static, length of the report; plan.num_steps is at most this.

    Returns:
      The state, StepInfo with a leading [max_steps] axis of which the first
      num_steps_run entries are filled, for the rows that ran, and num_steps_run i32[].
    """
    whole = state = follow(state, plan)
    if plan.row_ids is not None:
        state = take_rows(whole, spec.drafter, plan.row_ids)
    # jit keeps its trace: the shapes of the report and the loops take one trace together.
    advance_once = jax.jit(functools.partial(advance, spec), inline=True)
    with in_a_loop():
        info, committed = jax.eval_shape(lambda s: advance_once(params, s)[1:], state)
    packed = jax.eval_shape(pack, info)
    report = jnp.zeros((max_steps, *packed.shape), packed.dtype)

    def proceeds(at: _Progress) -> Array:
        return at.goes_on & (at.num_steps < plan.num_steps)

    def noted(at: _Progress, state: DecodeState, info: StepInfo) -> _Progress:
        report = jax.lax.dynamic_update_index_in_dim(at.report, pack(info), at.num_steps, 0)
        has_work = spec.most_of_shards(jnp.any(state.is_active))
        has_ended = spec.most_of_shards(jnp.any(info.finish != RUNNING))
        goes_on = has_work & ~(has_ended & plan.stop_when_finished)
        return _Progress(at.num_steps + 1, state, report, goes_on)

    def one_step(at: _Progress) -> _Progress:
        state, info, committed = advance_once(params, at.state)
        if committed is not None:
            state = absorb_committed(spec, params, state, committed)
        return noted(at, state, info)

    def one_window(at: _Progress) -> _Progress:
        """Runs K = 0 steps and absorbs all of them at once, which saves passes of the drafter."""
        most = min(WINDOW, max_steps)
        assert committed is not None

        def body(carry: tuple[_Progress, Waiting]) -> tuple[_Progress, Waiting]:
            at, waiting = carry
            state, info, new = advance_once(params, at.state)
            assert new is not None
            return noted(at, state, info), wait(waiting, new)

        has_room = lambda carry: proceeds(carry[0]) & (carry[1].num_steps < most)
        waiting = no_waiting(at.state, committed, most)
        at, waiting = jax.lax.while_loop(has_room, body, (at, waiting))
        return at._replace(state=absorb_waiting(spec, params, at.state, waiting))

    waits = bool(spec.taps) and not spec.num_speculative_tokens
    begun = _Progress(jnp.int32(0), state, report, spec.most_of_shards(jnp.any(state.is_active)))
    with in_a_loop():
        end = jax.lax.while_loop(proceeds, one_window if waits else one_step, begun)
    state = end.state
    if plan.row_ids is not None:
        state = put_rows(whole, spec.drafter, plan.row_ids, state)
    return state, unpack(end.report, info), end.num_steps
