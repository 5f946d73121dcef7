"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.choosing import Choice, choose_tokens
from specjax.sampling.processing import process_logits
from specjax.sampling.row_sampling import RowSampling


class LogProbs(NamedTuple):
    """Natural log-probabilities; zeros when no row of the batch asks for any.

    `raw` is of the model's logits as they came: temperature 1, no bias, no filter.
    `processed` is of the distribution that is sampled; for a row of temperature 0,
    of the logits after bias and penalties at temperature 1. The top entries are
    computed when any row has num_logprobs > 0, most likely first; a filter may
    leave fewer than max_logprobs, then the rest are -inf.
    """

    raw: Array  # f32[num_tokens], of the chosen token
    processed: Array  # f32[num_tokens], of the chosen token
    top_ids: Array  # i32[num_tokens, max_logprobs]
    top_raw: Array  # f32[num_tokens, max_logprobs]
    processed_top_ids: Array  # i32[num_tokens, max_logprobs]
    processed_top: Array  # f32[num_tokens, max_logprobs]


def token_logprobs(
    logits: Array,
    token_ids: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: Array,
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
    num_tokens = logits.shape[0]

    def zeros() -> LogProbs:
        one, many = jnp.zeros(num_tokens), jnp.zeros((num_tokens, max_logprobs))
        ids = jnp.zeros((num_tokens, max_logprobs), jnp.int32)
        return LogProbs(one, one, ids, many, ids, many)

    def score() -> LogProbs:
        sampled = processed
        if sampled is None:
            sampled = process_logits(logits, sampling, row_ids, positions, history)
        raw, top_ids, top_raw = _score(logits, token_ids, sampling, max_logprobs)
        return LogProbs(
            raw,
            *_reorder(
                _score(sampled, token_ids, sampling, max_logprobs), top_ids, top_raw
            ),
        )

    return lax.cond(jnp.any(sampling.num_logprobs >= 0), score, zeros)


def _reorder(scored: tuple[Array, Array, Array], top_ids: Array, top_raw: Array):
    processed, processed_top_ids, processed_top = scored
    return processed, top_ids, top_raw, processed_top_ids, processed_top


def _score(
    logits: Array, token_ids: Array, sampling: RowSampling, max_logprobs: int
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
        jnp.any(sampling.num_logprobs > 0),
        top,
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape)),
    )
    return chosen[:, 0], ids, values


def choose_and_score(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: Array,
    *,
    max_logprobs: int,
) -> tuple[Choice, LogProbs]:
    """`choose_tokens` and their `token_logprobs`, processing the logits once for both.

    A batch that asks for no log-probabilities keeps the short paths of choose_tokens.
    """

    def both() -> tuple[Choice, LogProbs]:
        processed = process_logits(logits, sampling, row_ids, positions, history)
        choice = choose_tokens(
            logits, sampling, row_ids, positions, history, processed=processed
        )
        return choice, score(choice, processed)

    def choose() -> tuple[Choice, LogProbs]:
        choice = choose_tokens(logits, sampling, row_ids, positions, history)
        return choice, score(choice, None)

    def score(choice: Choice, processed: Array | None) -> LogProbs:
        return token_logprobs(
            logits,
            choice.token_ids,
            sampling,
            row_ids,
            positions,
            history,
            max_logprobs=max_logprobs,
            processed=processed,
        )

    return lax.cond(jnp.any(sampling.num_logprobs >= 0), both, choose)
