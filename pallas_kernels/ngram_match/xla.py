"""N-gram matching for any device: one comparison of everything per token of the n-gram.

A kernel has nothing to save: compiled for v5e (libtpu 0.0.42, jax 0.10.2, 256 rows of 16,384
tokens) the history is copied once to VMEM, one fusion compares it there and takes the maximum,
and no array of its size is written.
"""

import jax.numpy as jnp
from jax import Array


def ngram_match_xla(
    history: Array,  # i32[rows, max_length]
    num_tokens: Array,  # i32[rows]
    corpus: Array | None,  # i32[corpus_length]
    num_corpus_tokens: Array | None,  # i32[]
    *,
    min_match: int,
    max_match: int,
    num_matches: int,
) -> tuple[Array, Array, Array]:
    """See `ngram_match`."""
    last = _last_tokens(history, num_tokens, max_match)
    counts = num_tokens[:, None]
    texts = [(history, counts, _agreeing(history, counts, last))]
    if corpus is not None and num_corpus_tokens is not None:
        own = corpus[None, :], num_corpus_tokens[None, None]
        # Before those of the row: the later place is the better of equals.
        texts.insert(0, (*own, _agreeing(*own, last)))
    size = sum(text.shape[1] for text, _, _ in texts)
    first, keys = 0, []
    for text, _, agreeing in texts:
        # One maximum finds the longest match and, among those, the last place.
        place = first + jnp.arange(text.shape[1], dtype=jnp.int32)[None, :]
        keys.append(jnp.where(agreeing > 0, agreeing * size + place, 0))
        first += text.shape[1]
    # One maximum after the other: XLA's top_k of integers sorts the whole on CPU.
    largest = lambda each: jnp.stack([jnp.max(k, axis=1) for k in each]).max(axis=0)
    found = [largest(keys)]
    for _ in range(1, num_matches):
        below = found[-1][:, None]
        found.append(largest([jnp.where(k < below, k, 0) for k in keys]))
    best = jnp.stack(found, axis=1)
    lengths, place = best // size, best % size
    is_found = lengths >= min_match
    own_first = size - history.shape[1]
    in_corpus = is_found & (place < own_first)
    starts = jnp.where(in_corpus, place, place - own_first)
    return (
        jnp.where(is_found, starts, 0),
        jnp.where(is_found, lengths, 0),
        in_corpus,
    )


def _last_tokens(history: Array, num_tokens: Array, count: int) -> Array:
    """Returns the last tokens of each row, the very last first, i32[rows, count]; -1 where none
    is."""
    index = num_tokens[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)[None, :]
    last = jnp.take_along_axis(history, jnp.maximum(index, 0), axis=1)
    return jnp.where(index >= 0, last, -1)


def _agreeing(text: Array, num_text: Array, last: Array) -> Array:
    """Returns how many tokens before each place are the last of each row, i32[rows, length].

    Args:
      text: i32[rows or 1, length]; num_text: i32[rows or 1, 1], its tokens.
      last: i32[rows, max_match], from `_last_tokens`.
    """
    length = text.shape[1]
    ends = jnp.arange(length, dtype=jnp.int32)[None, :]
    agrees = jnp.broadcast_to(ends < num_text, (last.shape[0], length))
    agreeing = jnp.zeros_like(agrees, jnp.int32)
    for back in range(1, last.shape[1] + 1):
        own = last[:, back - 1, None]
        shifted = jnp.pad(text, ((0, 0), (back, 0)))[:, :length]
        agrees = agrees & (shifted == own) & (ends >= back) & (own >= 0)
        agreeing += agrees.astype(jnp.int32)
    return agreeing
