"""Named cases of n-gram matching."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Random texts over few words, so that they match often."""

    rows: int = 3
    max_length: int = 64
    words: int = 3
    min_match: int = 1
    max_match: int = 3
    num_matches: int = 1
    corpus_length: int = 0  # 0: no corpus


EXAMPLES = {
    "short": Example(max_length=20),
    "long": Example(rows=8, max_length=600, words=20, min_match=2, max_match=4),
    "several": Example(num_matches=4, words=4),
    "rare": Example(words=1000),
    "corpus": Example(corpus_length=300, num_matches=3, words=8),
}


def make_inputs(example: Example, seed: int = 0) -> tuple[tuple[Any, ...], dict]:
    """Returns the arguments and the options of `ngram_match` for this case.

    Sequences of a corpus are of 50 tokens, with -1 between them.
    """
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(0, example.words, shape).astype(np.int32)
    history = jnp.asarray(draw(example.rows, example.max_length))
    num_tokens = rng.integers(1, example.max_length + 1, example.rows)
    options: dict[str, Any] = {
        "min_match": example.min_match,
        "max_match": example.max_match,
        "num_matches": example.num_matches,
    }
    if example.corpus_length:
        corpus = draw(example.corpus_length)
        corpus[50::51] = -1
        options["corpus"] = jnp.asarray(corpus)
        options["num_corpus_tokens"] = jnp.int32(example.corpus_length - 7)
    return (history, jnp.asarray(num_tokens, jnp.int32)), options
