"""N-gram drafting (prompt lookup): what followed these last few tokens before, follows again.

Example, n = 2:   history  a b c d a b      the last two tokens, a b, stood at 0
                                   ^ root   so the draft is  c d a b c ...
A draft that runs past the end of the text reads on in itself, so a text that has
begun to repeat is drafted to any length.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.config import MAX_DRAFT_NODES
from specjax.drafters.base import Draft, Drafter
from specjax.trees.merging import merge
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
    max_length = history.shape[1]
    # One maximum finds the longest match and, among those, the latest.
    best = jnp.max(_match_keys(history, num_tokens, max_match), axis=1)
    return best % max_length, best // max_length >= min_match


def matches(
    history: Array,
    num_tokens: Array,
    *,
    min_match: int,
    max_match: int,
    num_matches: int,
) -> tuple[Array, Array]:
    """Finds several earlier occurrences, the longest first and the latest among equals.

    The first is what `match` finds. Occurrences differ in where they end; what
    follows them may be the same, which trees.merging.merge undoes.

    Args:
      history, num_tokens, min_match, max_match: as for `match`.
      num_matches: how many to look for.

    Returns:
      starts i32[rows, num_matches], the positions after the matches, 0 where none
      was found; and is_found bool[rows, num_matches], never true after false.

    Cost: max_match + num_matches passes over rows * max_length.

    Raises:
      ValueError: num_matches is below 1.
    """
    if num_matches < 1:
        raise ValueError(f"{num_matches=} must be at least 1.")
    max_length = history.shape[1]
    keys = _match_keys(history, num_tokens, max_match)
    # One maximum after the other: XLA's top_k of integers sorts the whole on CPU.
    found = [jnp.max(keys, axis=1)]
    for _ in range(1, num_matches):
        is_left = keys < found[-1][:, None]
        found.append(jnp.max(jnp.where(is_left, keys, 0), axis=1))
    best = jnp.stack(found, axis=1)
    is_found = best // max_length >= min_match
    return jnp.where(is_found, best % max_length, 0), is_found


def _match_keys(history: Array, num_tokens: Array, max_match: int) -> Array:
    """Returns i32[rows, max_length]: tokens matched before each end * max_length + end.

    0 where no token matches. No two ends of a row have the same key but 0.
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
    return matched * max_length + ends * (matched > 0)


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
      num_drafts: most draft tokens of a tree; None is room for all continuations.

    Source: prompt lookup decoding (Saxena 2023) and vLLM's `ngram`, whose
    prompt_lookup_min and prompt_lookup_max are min_match and max_match. Several
    continuations in one tree: REST (arXiv:2311.08252), section 3.
    """
    depth = num_speculative_tokens
    budget = tree_budget(num_matches, depth, num_drafts)

    def draft(params, state, decode_state, num_tokens: Array) -> Draft:
        del params
        history, length = decode_state.history, decode_state.cache.lengths + 1
        bounds = dict(min_match=min_match, max_match=max_match)
        if num_matches == 1:
            start, is_found = match(history, length, **bounds)
            proposal = Proposal(
                token_ids=continuations(history, length, start[:, None], depth)[:, 0],
                num_tokens=jnp.where(is_found, num_tokens, 0),
            )
            return Draft(proposal, state, length)
        starts, is_found = matches(history, length, **bounds, num_matches=num_matches)
        grown = merge(
            continuations(history, length, starts, depth),
            jnp.where(is_found, num_tokens[:, None], 0),
            num_drafts=budget,
        )
        proposal = Proposal(
            token_ids=grown.token_ids, num_tokens=grown.num_tokens, tree=grown.tree
        )
        return Draft(proposal, state, length)

    return Drafter(
        init=lambda rows, num_pages, page_size: (),
        prefill=lambda params, state, batch, max_tokens_per_row: state,
        draft=draft,
    )


def tree_budget(num_matches: int, depth: int, num_drafts: int | None) -> int:
    """Returns the most draft tokens of a tree of several matches, each followed to a depth."""
    return min(num_matches * depth, num_drafts or MAX_DRAFT_NODES)


def continuations(history: Array, length: Array, starts: Array, depth: int) -> Array:
    """Returns what stands from each start on, i32[rows, n, depth], reading on in itself.

    Args:
      length: i32[rows], tokens of text; starts: i32[rows, n], below it.
    """
    period = jnp.maximum(length[:, None] - starts, 1)[:, :, None]
    source = starts[:, :, None] + jnp.arange(depth)[None, None, :] % period
    found = jnp.take_along_axis(history, source.reshape(history.shape[0], -1), axis=1)
    return found.reshape(source.shape)
