"""Score: log-probabilities of given text, by the forward and the sampling of decoding."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.decode.step_spec import StepSpec
from specjax.models.base import Params
from specjax.paged import kv_cache
from specjax.paged.forward import forward, make_batch, own_logits
from specjax.paged.token_buckets import equal_chunk, in_buckets, round_up
from specjax.sampling import RowSampling, token_logprobs

CHUNK = 64  # tokens of each row that are fed at once


class Scores(NamedTuple):
    """Log-probabilities of every token of a text but the first, at its position; 0 elsewhere.

    Natural logarithms, f32[rows, max_length] each; see sampling.LogProbs.
    """

    processed: Array
    tempered: Array
    raw: Array
    entropy: Array


class _Tokens(NamedTuple):
    """Inputs of scoring for flat tokens; leading [num_tokens]."""

    hidden: Array
    following: Array
    row_ids: Array
    positions: Array


def score(
    spec: StepSpec,
    params: Params,
    history: Array,
    num_tokens: Array,
    sampling: RowSampling,
    *,
    page_size: int,
    dtype: Any,
    kv_scales: Array | None = None,
    num_tensor_shards: int = 1,
) -> Scores:
    """Returns the log-probabilities of texts, each token given those before it.

    The call allocates pages of its own: a pool of rows * max_length tokens.

    Args:
      history: i32[rows, max_length], max_length a multiple of page_size.
      num_tokens: i32[rows], how many tokens of each row are text.
      sampling: parameters that the text was, or would be, sampled with.
      dtype: of keys and values.
      kv_scales: of int8 and fp8 pages, `PagedKVCache.scales`.
      num_tensor_shards: number of shards that heads are split over; this is one of them.
    """
    rows, max_length = history.shape
    table = kv_cache.own_pages(rows, max_length // page_size)
    # The pool is this shard's own, and holds only its heads.
    own_heads = spec.config.num_kv_heads // num_tensor_shards
    own = dataclasses.replace(spec.config, num_kv_heads=own_heads)
    pages = kv_cache.init_pages(own, table.size, page_size, dtype)
    flat = round_up(rows * CHUNK, spec.token_bucket)
    size = spec.token_bucket or equal_chunk(flat, spec.logit_bytes // (4 * spec.config.vocab_size))
    flat = round_up(flat, size)
    # The last token of a text is not fed: nothing follows it.
    num_fed = jnp.maximum(num_tokens - 1, 0)

    def describe(nothing: tuple, part: _Tokens) -> tuple[tuple, Scores]:
        scores, vocabulary = own_logits(params, spec.config, part.hidden, spec.tensor_axis)
        told = token_logprobs(
            scores,
            part.following,
            sampling,
            part.row_ids,
            part.positions,
            history,
            max_logprobs=1,
            vocabulary=vocabulary,
        )
        return nothing, Scores(told.processed, told.tempered, told.raw, told.entropy)

    def feed(index: Array, carry: tuple[Any, ...]) -> tuple[Any, Scores]:
        pages, scores = carry
        first = jnp.minimum(index * CHUNK, num_fed)
        batch = make_batch(
            history,
            jnp.asarray(table),
            first,
            jnp.minimum(num_fed - first, CHUNK),
            num_tokens=flat,
            page_size=page_size,
            num_slots=table.size * page_size,
        )
        hidden, pages = forward(
            params,
            spec.config,
            pages,
            batch,
            max_tokens_per_row=CHUNK,
            token_bucket=spec.token_bucket,
            tensor_axis=spec.tensor_axis,
            kv_scales=kv_scales,
        )
        row = jnp.minimum(batch.row_ids, rows - 1)
        after = jnp.minimum(batch.positions + 1, max_length - 1)
        tokens = _Tokens(hidden, history[row, after], batch.row_ids, batch.positions)
        told = in_buckets(describe, (), tokens, size, batch.row_starts[-1])[1]
        # Padding has a row id past the last, and is dropped.
        put = lambda whole, new: whole.at[batch.row_ids, after].set(new, mode="drop")
        return pages, Scores(*map(put, scores, told))

    nothing = Scores(*[jnp.zeros(history.shape)] * len(Scores._fields))
    num_chunks = (jnp.max(num_fed, initial=0) + CHUNK - 1) // CHUNK
    return lax.fori_loop(0, num_chunks, feed, (pages, nothing))[1]
