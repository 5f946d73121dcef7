"""A smaller model of the same vocabulary as the drafter.

Its keys and values lie under the target's page ids, in arrays of its own. Drafting
begins by feeding what the drafter has not seen: after full acceptance one token,
because the last draft token is proposed but never fed.
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
        root = cache.lengths
        takes_part = decode_state.is_active & (num_tokens > 0)

        def feed(pages, history, positions, is_fed):
            """Feeds one token per row; returns hidden [rows, hidden_size] and the pages."""
            batch = make_batch(
                history,
                cache.block_table,
                positions,
                is_fed.astype(jnp.int32),
                num_tokens=rows,
                page_size=cache.page_size,
                num_slots=cache.num_slots,
            )
            hidden, pages = forward(params, config, pages, batch, max_tokens_per_row=1)
            # Rows that are not fed leave no gap among the flat tokens.
            return hidden[jnp.minimum(batch.row_starts[:-1], rows - 1)], pages

        # What was committed without the drafter seeing it: one token after full
        # acceptance, more after steps that did not draft.
        first = decode_state.drafter_lengths
        num_behind = jnp.max(jnp.where(takes_part, root - first, 0), initial=0)
        pages = jax.lax.fori_loop(
            0,
            num_behind,
            lambda index, pages: feed(
                pages,
                decode_state.history,
                first + index,
                takes_part & (first + index < root),
            )[1],
            state,
        )

        def propose(index, carry):
            """Feeds the root or the last draft token; proposes draft token number `index`."""
            pages, history, token_ids, all_probs = carry
            is_drafted = index < num_tokens
            hidden, pages = feed(pages, history, root + index, is_drafted)
            scores = logits(params, config, hidden)  # f32[rows, vocab]
            token, probs = _draw(
                scores, decode_state, root + index, history, uses_rejection
            )
            place = jnp.where(is_drafted, root + index + 1, history.shape[1])
            history = history.at[jnp.arange(rows), place].set(token, mode="drop")
            if uses_rejection:
                all_probs = all_probs.at[:, index].set(probs)
            return pages, history, token_ids.at[:, index].set(token), all_probs

        vocab = config.vocab_size if uses_rejection else 0
        nothing = jnp.zeros((rows, depth), jnp.int32), jnp.zeros((rows, depth, vocab))
        carry = (pages, decode_state.history, *nothing)
        most = jnp.max(num_tokens, initial=0)
        pages, _, token_ids, all_probs = jax.lax.fori_loop(0, most, propose, carry)
        proposal = Proposal(
            token_ids=token_ids,
            num_tokens=num_tokens,
            probs=all_probs if uses_rejection else None,
        )
        # The last draft token is proposed but not fed.
        return Draft(proposal, pages, jnp.where(takes_part, root + num_tokens, first))

    return Drafter(
        init=init,
        prefill=prefill,
        draft=draft,
        has_probs=uses_rejection,
        max_positions=config.max_position_embeddings,
    )


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
