"""N-gram drafting (prompt lookup): what followed these last few tokens before, follows again.

Example, n = 2:   history  a b c d a b      the last two tokens, a b, stood at 0
                                   ^ root   so the draft is  c d a b c ...
A draft that runs past the end of the text reads on in itself, so a text that has
begun to repeat is drafted to any length.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import Draft, Drafter
from specjax.types import Proposal


def match(
    history: Array, num_tokens: Array, *, min_match: int, max_match: int
) -> tuple[Array, Array]:
    """Finds the longest earlier occurrence of each row's last tokens, the latest among equals.

    Args:
      history: i32[rows, max_length]; num_tokens: i32[rows], how many of it are text.
      min_match, max_match: fewest and most tokens that must agree.

    Returns:
      start i32[rows], the position after the match, where the continuation stands;
      and is_found bool[rows].
    """
    rows, max_length = history.shape
    ends = jnp.arange(max_length)[None, :]  # a match covers history[end - n : end]
    agrees = (ends >= 1) & (ends < num_tokens[:, None])
    matched = jnp.zeros((rows, max_length), jnp.int32)
    for back in range(1, max_match + 1):
        last = jnp.take_along_axis(
            history, jnp.maximum(num_tokens - back, 0)[:, None], axis=1
        )
        shifted = jnp.pad(history, ((0, 0), (back, 0)))[:, :max_length]
        agrees = agrees & (shifted == last) & (ends >= back)
        matched += agrees
    # One maximum finds the longest match and, among those, the latest.
    best = jnp.max(matched * max_length + ends * (matched > 0), axis=1)
    return best % max_length, best // max_length >= min_match


def drafter(*, num_speculative_tokens: int, min_match: int, max_match: int) -> Drafter:
    """Returns a drafter without weights or state.

    Source: prompt lookup decoding (Saxena 2023) and vLLM's `ngram`, whose
    prompt_lookup_min and prompt_lookup_max are min_match and max_match.
    """

    def draft(params, state, decode_state, num_tokens: Array) -> Draft:
        del params
        length = decode_state.cache.lengths + 1
        start, is_found = match(
            decode_state.history, length, min_match=min_match, max_match=max_match
        )
        ahead = jnp.arange(num_speculative_tokens)[None, :]
        source = start[:, None] + ahead % jnp.maximum(length - start, 1)[:, None]
        token_ids = jnp.take_along_axis(decode_state.history, source, axis=1)
        proposal = Proposal(
            token_ids=token_ids, num_tokens=jnp.where(is_found, num_tokens, 0)
        )
        return Draft(proposal, state, length)

    return Drafter(
        init=lambda rows, num_pages, page_size: (),
        prefill=lambda params, state, batch, max_tokens_per_row: state,
        draft=draft,
    )
