"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.choosing import Choice, choose_and
from specjax.sampling.processing import History, present_rows, process_logits
from specjax.sampling.row_sampling import RowSampling


class LogProbs(NamedTuple):
    """Natural log-probabilities; zeros when no row of the batch asks for any.

    `raw` is of the model's logits as they came: temperature 1, no bias, no filter.
    `processed` is of the distribution that is sampled; for a row of temperature 0,
    of the logits after bias and penalties at temperature 1. The top entries are
    computed when any row of the batch has num_logprobs > 0, most likely first; a filter may
    leave fewer than max_logprobs, then the rest are -inf.
    """

    raw: Array  # f32[num_tokens], of the chosen token
    raw_top_ids: Array  # i32[num_tokens, max_logprobs]
    raw_top: Array  # f32[num_tokens, max_logprobs]
    processed: Array  # f32[num_tokens], of the chosen token
    processed_top_ids: Array  # i32[num_tokens, max_logprobs]
    processed_top: Array  # f32[num_tokens, max_logprobs]


def no_logprobs(num_tokens: int, max_logprobs: int) -> LogProbs:
    """Returns the zeros of a batch that asks for no log-probabilities."""
    one, many = jnp.zeros(num_tokens), jnp.zeros((num_tokens, max_logprobs))
    ids = jnp.zeros((num_tokens, max_logprobs), jnp.int32)
    return LogProbs(one, ids, many, one, ids, many)


def token_logprobs(
    logits: Array,
    token_ids: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    max_logprobs: int,
    processed: Array | None = None,
) -> LogProbs:
    """Returns the log-probabilities of token_ids i32[num_tokens], one per node.

    Args:
      logits, row_ids, positions, history: as for `process_logits`.
      max_logprobs: EngineConfig.max_logprobs; a vocabulary may be smaller.
      processed: `process_logits` of the same arguments, if there already.
    """

    def nothing() -> LogProbs:
        return no_logprobs(logits.shape[0], max_logprobs)

    def score() -> LogProbs:
        sampled = processed
        if sampled is None:
            sampled = process_logits(logits, sampling, row_ids, positions, history)
        needs_top = _most_logprobs(sampling, row_ids) > 0
        of = lambda values: _score(values, token_ids, needs_top, max_logprobs)
        return LogProbs(*of(logits), *of(sampled))

    return lax.cond(_most_logprobs(sampling, row_ids) >= 0, score, nothing)


def _most_logprobs(sampling: RowSampling, row_ids: Array) -> Array:
    """Returns the largest num_logprobs of the rows in a batch, i32[]; -1 is none."""
    is_present = present_rows(sampling, row_ids)
    return jnp.max(jnp.where(is_present, sampling.num_logprobs, -1))


def _score(
    logits: Array, token_ids: Array, needs_top: Array, max_logprobs: int
) -> tuple[Array, Array, Array]:
    """Returns logprobs of token_ids f32[n], and ids and logprobs of the most likely."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    total = largest + jnp.log(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1) - total

    def top() -> tuple[Array, Array]:
        count = min(max_logprobs, logits.shape[1])
        values, ids = lax.top_k(logits, count)
        missing = ((0, 0), (0, max_logprobs - count))
        padded = jnp.pad(values - total, missing, constant_values=-jnp.inf)
        return jnp.pad(ids, missing), padded

    shape = (logits.shape[0], max_logprobs)
    ids, values = lax.cond(
        needs_top,
        top,
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape)),
    )
    return chosen[:, 0], ids, values


def choose_and_score(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    max_logprobs: int,
) -> tuple[Choice, LogProbs]:
    """`choose_tokens` and their `token_logprobs`, processing the logits once for both.

    A batch that asks for no log-probabilities keeps the short paths of choose_tokens.
    """

    def describe(choice: Choice, processed: Array | None) -> tuple[Choice, LogProbs]:
        if processed is None:
            return choice, no_logprobs(logits.shape[0], max_logprobs)
        return choice, token_logprobs(
            logits,
            choice.token_ids,
            sampling,
            row_ids,
            positions,
            history,
            max_logprobs=max_logprobs,
            processed=processed,
        )

    return choose_and(
        describe,
        logits,
        sampling,
        row_ids,
        positions,
        history,
        needs_processed=_most_logprobs(sampling, row_ids) >= 0,
    )
