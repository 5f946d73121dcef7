"""N-gram matching: the public function, its checks, its implementations."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout
from pallas_kernels.implementations import call_best, named_for
from pallas_kernels.ngram_match.reference import ngram_match_reference
from pallas_kernels.ngram_match.xla import ngram_match_xla


class NgramMatches(NamedTuple):
    """Earlier occurrences of each row's last tokens, best first; [rows, num_matches] each."""

    starts: Array  # i32, index of the token after the occurrence; 0 where there is none
    lengths: Array  # i32, length of the match; 0 where there is none, which come last
    in_corpus: Array  # bool: whether `starts` is an index into the corpus


def ngram_match(
    history: Array,  # i32[rows, max_length]
    num_tokens: Array,  # i32[rows]
    *,
    corpus: Array | None = None,  # i32[corpus_length]
    num_corpus_tokens: Array | None = None,  # i32[]
    min_match: int,
    max_match: int,
    num_matches: int = 1,
    implementation: str | None = None,
) -> NgramMatches:
    """Finds earlier occurrences of each row's last tokens, in its own text or in a corpus.

    The longest occurrence is the best; among equals the row's own text comes first, then the
    latest. Occurrences differ in where they end; the tokens after them may be the same.

    Work: history and corpus are read once per num_matches, (rows * max_length + corpus_length)
    * 4 bytes, and rows * (max_length + corpus_length) * (max_match + num_matches) comparisons.

    Args:
      history: token ids; a negative number is no token, and matches nothing.
      num_tokens: how many entries of each row's history are text.
      corpus: text that all rows share, besides their own. Sequences must be separated by a
        negative number, so that no match spans two of them.
      num_corpus_tokens: how many entries of corpus are text. Together with corpus.
      min_match: shortest match, in tokens.
      max_match: most tokens that are compared.
      num_matches: number of occurrences to find.
      implementation: "xla" or "reference"; None picks the best for this case.

    Raises:
      ValueError: shapes or dtypes disagree, sizes are below 1 or too large to count.

    Source: prompt lookup decoding (Saxena 2023); with a corpus REST (arXiv:2311.08252),
    section 3.
    """
    if history.ndim != 2 or num_tokens.shape != history.shape[:1]:
        raise ValueError(
            f"{history.shape=} and {num_tokens.shape=} must be [rows, max_length] and [rows]."
        )
    layout.validate_int32(history=history, num_tokens=num_tokens)
    if (corpus is None) != (num_corpus_tokens is None):
        raise ValueError("corpus and num_corpus_tokens go together.")
    size = history.shape[1]
    if corpus is not None and num_corpus_tokens is not None:
        if corpus.ndim != 1 or num_corpus_tokens.ndim != 0:
            raise ValueError(
                f"{corpus.shape=} and {num_corpus_tokens.shape=} must be [corpus_length] and []."
            )
        layout.validate_int32(corpus=corpus, num_corpus_tokens=num_corpus_tokens)
        size += corpus.shape[0]
    if not 1 <= min_match <= max_match or num_matches < 1:
        raise ValueError(
            f"{num_matches=} must be at least 1, and 1 <= {min_match=} <= {max_match=}."
        )
    if (max_match + 1) * size > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{max_match=} over {size} places is more than int32 counts; shorten either."
        )
    arguments = (history, num_tokens, corpus, num_corpus_tokens)
    options = dict(min_match=min_match, max_match=max_match, num_matches=num_matches)
    implementation = named_for("ngram_match", implementation)
    implementations = {
        "xla": functools.partial(ngram_match_xla, *arguments, **options),
        "reference": functools.partial(ngram_match_reference, *arguments, **options),
    }
    return NgramMatches(*call_best("ngram_match", implementations, implementation))
