"""N-gram drafting (prompt lookup): proposes the tokens that followed the last few tokens before.

Example, n = 2:   history  a b c d a b      the last two tokens, a b, are also at 0
                                   ^ root   so the draft is  c d a b c ...
A draft that reaches the end of the text continues with its own tokens, so a text that
has begun to repeat is drafted to any length.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.ngram_match import ngram_match
from specjax.config.speculation import MAX_DRAFT_NODES
from specjax.drafters.base import Draft, Drafter
from specjax.trees.merging import merge
from specjax.types import DecoderParams, Proposal


def drafter(
    *,
    num_speculative_tokens: int,
    min_match: int,
    max_match: int,
    num_matches: int = 1,
    num_drafts: int | None = None,
) -> Drafter:
    """Returns a drafter without weights or state.

    Args:
      num_matches: continuations that are drafted; more than one make a tree.
      num_drafts: most draft tokens of a tree; None: room for all continuations.

    Source: prompt lookup decoding (Saxena 2023) and vLLM's `ngram`, whose
    prompt_lookup_min and prompt_lookup_max are min_match and max_match. Several
    continuations in one tree: REST (arXiv:2311.08252), section 3.
    """
    depth = num_speculative_tokens
    budget = tree_budget(num_matches, depth, num_drafts)

    def draft(params: DecoderParams, state: Any, decode_state: Any, num_tokens: Array) -> Draft:
        del params
        history, length = decode_state.history, decode_state.cache.lengths + 1
        found = ngram_match(
            history,
            length,
            min_match=min_match,
            max_match=max_match,
            num_matches=num_matches,
        )
        is_found = found.lengths > 0
        drafted = continuations(history, length, found.starts, depth)
        if num_matches == 1:
            proposal = Proposal(
                token_ids=drafted[:, 0],
                num_tokens=jnp.where(is_found[:, 0], num_tokens, 0),
            )
            return Draft(proposal, state, length)
        grown = merge(
            drafted,
            jnp.where(is_found, num_tokens[:, None], 0),
            num_drafts=budget,
        )
        proposal = Proposal(token_ids=grown.token_ids, num_tokens=grown.num_tokens, tree=grown.tree)
        return Draft(proposal, state, length)

    return Drafter(draft)


def tree_budget(num_matches: int, depth: int, num_drafts: int | None) -> int:
    """Returns the most draft tokens of a tree of num_matches continuations of `depth` tokens."""
    return min(num_matches * depth, num_drafts or MAX_DRAFT_NODES)


def continuations(history: Array, length: Array, starts: Array, depth: int) -> Array:
    """Returns the tokens from each start on, repeated past the end, i32[rows, n, depth].

    Args:
      length: i32[rows], tokens of text; starts: i32[rows, n], below it.
    """
    period = jnp.maximum(length[:, None] - starts, 1)[:, :, None]
    source = starts[:, :, None] + jnp.arange(depth)[None, None, :] % period
    found = jnp.take_along_axis(history, source.reshape(history.shape[0], -1), axis=1)
    return found.reshape(source.shape)
