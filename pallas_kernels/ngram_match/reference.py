"""N-gram matching, defined: every place is compared token by token, then all are sorted."""

import jax
import jax.numpy as jnp
from jax import Array


def ngram_match_reference(
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

    def agreeing(text: Array, num_text: Array, own: Array, num_own: Array) -> Array:
        """Returns how many tokens before each place of a text are the last of a row's own."""

        def at(end: Array) -> Array:
            back = 1 + jnp.arange(max_match)
            before, last = text[end - back], own[num_own - back]
            is_there = (end >= back) & (num_own >= back) & (last >= 0)
            return jnp.cumprod((before == last) & is_there).sum()

        ends = jnp.arange(text.shape[0])
        return jnp.where(ends < num_text, jax.vmap(at)(ends), 0)

    def of_row(own: Array, num_own: Array) -> tuple[Array, Array, Array]:
        lengths = agreeing(own, num_own, own, num_own)
        starts, in_corpus = jnp.arange(len(own)), jnp.zeros(len(own), bool)
        if corpus is not None and num_corpus_tokens is not None:
            others = agreeing(corpus, num_corpus_tokens, own, num_own)
            lengths = jnp.concatenate([lengths, others])
            starts = jnp.concatenate([starts, jnp.arange(len(corpus))])
            in_corpus = jnp.concatenate([in_corpus, jnp.ones(len(corpus), bool)])
        lengths = jnp.where(lengths >= min_match, lengths, 0)
        missing = max(num_matches - len(lengths), 0)
        order = jnp.lexsort((-starts, in_corpus, -lengths))[:num_matches]
        is_found = lengths[order] > 0
        return (
            jnp.pad(jnp.where(is_found, starts[order], 0), (0, missing)),
            jnp.pad(lengths[order], (0, missing)),
            jnp.pad(in_corpus[order] & is_found, (0, missing)),
        )

    starts, lengths, in_corpus = jax.vmap(of_row)(history, num_tokens)
    return starts.astype(jnp.int32), lengths.astype(jnp.int32), in_corpus
