"""A smaller model of the same vocabulary as the drafter.

Its keys and values lie under the target's page ids, in arrays of its own. It has
seen all committed tokens but the last one or two: after full acceptance the last
draft token was never fed, so drafting starts with one or two tokens per row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache import paged
from specjax.decode.forward import forward, logits, make_batch
from specjax.drafters.base import Draft, Drafter
from specjax.models.base import ModelConfig
from specjax.sampling import choose_tokens, process_logits, target_probs
from specjax.seeded_noise import DRAFT, TARGET_TOKEN
from specjax.types import DELTA, REJECTION, Proposal

# Committed tokens the drafter may still have to see when a step begins.
MAX_CATCH_UP = 2


def drafter(
    config: ModelConfig, *, num_speculative_tokens: int, dtype, uses_rejection: bool
) -> Drafter:
    """Returns a drafter that samples from a model, one token at a time.

    Under `greedy` and `seeded` it draws with the target's own noise, so that equal
    distributions propose equal tokens; under `delta` its most likely token, which
    is what that rule accepts most; under `rejection` with noise of its own.

    Args:
      uses_rejection: whether the distributions are kept, f32[rows, K, vocab].
    """
    depth = num_speculative_tokens

    def init(rows: int, num_pages: int, page_size: int):
        del rows
        return paged.init_pages(config, num_pages, page_size, dtype)

    def prefill(params, state, batch, max_tokens_per_row: int):
        _, state = forward(
            params, config, state, batch, max_tokens_per_row=max_tokens_per_row
        )
        return state

    def draft(params, state, decode_state, num_tokens: Array) -> Draft:
        cache = decode_state.cache
        rows = decode_state.rows
        # A row that is one token behind after full acceptance, or new, is in reach;
        # one that is further behind sits out.
        behind = cache.lengths + 1 - decode_state.drafter_lengths
        takes_part = (
            decode_state.is_active & (behind <= MAX_CATCH_UP) & (num_tokens > 0)
        )
        num_tokens = jnp.where(takes_part, num_tokens, 0)

        def propose(index, pages, history, lengths, counts, max_tokens_per_row):
            """Feeds counts tokens per row from position lengths; proposes draft number index."""
            batch = make_batch(
                history,
                cache.block_table,
                lengths,
                counts,
                num_tokens=rows * max_tokens_per_row,
                page_size=cache.page_size,
                num_slots=cache.num_slots,
            )
            hidden, pages = forward(
                params, config, pages, batch, max_tokens_per_row=max_tokens_per_row
            )
            last = jnp.maximum(batch.row_starts[1:] - 1, 0)
            scores = logits(params, config, hidden[last])  # f32[rows, vocab]
            positions = (
                cache.lengths + index
            )  # of the last token fed: the root, then drafts
            token, probs = _draw(
                scores, decode_state, positions, history, uses_rejection
            )
            is_drafted = index < num_tokens
            target = jnp.where(is_drafted, positions + 1, history.shape[1])
            history = history.at[jnp.arange(rows), target].set(token, mode="drop")
            return pages, history, token, probs

        first = jnp.where(takes_part, behind, 0)
        pages, history, token, probs = propose(
            0,
            state,
            decode_state.history,
            decode_state.drafter_lengths,
            first,
            MAX_CATCH_UP,
        )
        token_ids = jnp.zeros((rows, depth), jnp.int32).at[:, 0].set(token)
        all_probs = jnp.zeros((rows, depth, *probs.shape[1:])).at[:, 0].set(probs)

        def body(index, carry):
            pages, history, token_ids, all_probs = carry
            counts = (index < num_tokens).astype(jnp.int32)
            pages, history, token, probs = propose(
                index, pages, history, cache.lengths + index, counts, 1
            )
            return (
                pages,
                history,
                token_ids.at[:, index].set(token),
                all_probs.at[:, index].set(probs),
            )

        carry = pages, history, token_ids, all_probs
        pages, history, token_ids, all_probs = jax.lax.fori_loop(
            1, jnp.max(num_tokens, initial=1), body, carry
        )
        proposal = Proposal(
            token_ids=token_ids,
            num_tokens=num_tokens,
            probs=all_probs if uses_rejection else None,
        )
        # The last draft token is proposed but not fed.
        written = jnp.where(
            takes_part, cache.lengths + num_tokens, decode_state.drafter_lengths
        )
        return Draft(proposal, pages, written)

    return Drafter(init=init, prefill=prefill, draft=draft, has_probs=uses_rejection)


def _draw(
    scores: Array, decode_state, positions: Array, history: Array, uses_rejection: bool
):
    """Returns a token i32[rows] and the distribution it was drawn from, f32[rows, vocab] or f32[rows, 0]."""
    rows = scores.shape[0]
    row_ids = jnp.arange(rows, dtype=jnp.int32)
    sampling = decode_state.sampling
    certain = dataclasses.replace(
        sampling,
        temperature=jnp.where(decode_state.rules == DELTA, 0.0, sampling.temperature),
    )
    role = jnp.where(decode_state.rules == REJECTION, DRAFT, TARGET_TOKEN)
    token = choose_tokens(
        scores, certain, row_ids, positions, history, role=role
    ).token_ids
    if not uses_rejection:
        return token, jnp.zeros((rows, 0))
    processed = process_logits(scores, sampling, row_ids, positions, history)
    return token, target_probs(processed, sampling, row_ids)
