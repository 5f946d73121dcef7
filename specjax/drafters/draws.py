"""What a drafter that has a distribution draws from it, by the rule of each row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.sampling import first_argmax, process_logits, target_probs
from specjax.sampling.processing import History
from specjax.sampling.row_sampling import RowSampling
from specjax.seeded_noise import (
    DRAFT,
    TARGET_TOKEN,
    gumbel_noise,
    node_role,
    token_keys,
)
from specjax.types import DELTA, is_by_law


class Siblings(NamedTuple):
    """Draws without replacement from one distribution per node, in draw order."""

    token_ids: Array  # i32[num_tokens, count], distinct
    probs: Array | None  # f32[num_tokens, vocab], the law of the first; None: not kept


def noise_keys(
    sampling: RowSampling,
    rules: Array,
    row_ids: Array,
    positions: Array,
    roots: Array,
    nodes: Array,
) -> Array:
    """Returns the key of each node's draw, u32[num_tokens, 2].

    `greedy`, `seeded` and `delta` look at the noise with which the target will choose
    at the next position, the same for all nodes there. A rule that needs the law of
    the draws gets noise of its own for every node of every step.

    Args:
      rules: i32[rows].
      positions: i32[num_tokens], of the nodes whose children are drawn.
      roots: i32[num_tokens], the root's position.
      nodes: i32[num_tokens], which node of its row each is.
    """
    is_own = is_by_law(rules[row_ids])
    return token_keys(
        sampling.seeds[row_ids],
        jnp.where(is_own, roots, positions + 1),
        jnp.where(is_own, node_role(DRAFT, nodes), TARGET_TOKEN),
    )


def draw_siblings(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    rules: Array,
    keys: Array,
    count: int,
    keeps_probs: bool,
) -> Siblings:
    """Draws `count` distinct tokens after each node.

    The largest of log q plus Gumbel noise, then the next: a draw without replacement
    in the order of the values. Under `delta`, and at temperature 0, the likeliest
    tokens. Where fewer than `count` tokens have any probability the others are drawn
    evenly among those left.

    Rows under a rule by law draw from the very float32 probabilities that the rule
    will be told: a token that underflows there is drawn as one without probability.

    Args:
      logits, sampling, row_ids, positions, history: as for `process_logits`.
      rules: i32[rows].
      keys: u32[num_tokens, 2], from `noise_keys`.
      keeps_probs: whether rows may be under a rule by law.

    Source: Kool et al. 2019 (arXiv:1903.06059), section 2; the order is what
    verification by rejection needs (Jeon et al. 2024, arXiv:2402.14160).
    """
    processed = process_logits(logits, sampling, row_ids, positions, history)
    probs, weights = None, processed
    if keeps_probs:
        probs = target_probs(processed, sampling, row_ids)
        is_own = is_by_law(rules[row_ids])[:, None]
        weights = jnp.where(is_own, jnp.log(probs), processed)
    is_random = (sampling.temperature[row_ids] > 0) & (rules[row_ids] != DELTA)
    noise = gumbel_noise(keys, logits.shape[1])
    scores = jnp.where(is_random[:, None], weights + noise, processed)
    token_ids = _best_distinct(scores, noise, count)
    return Siblings(token_ids, probs)


def _best_distinct(scores: Array, noise: Array, count: int) -> Array:
    """Returns the `count` best tokens in order, i32[n, count]; by noise alone where scores are -inf."""
    token = jnp.arange(scores.shape[0])
    found = []
    for _ in range(count):
        best, largest = first_argmax(scores)
        is_out = largest == -jnp.inf
        left = jax.lax.cond(
            jnp.any(is_out),
            lambda noise: first_argmax(noise)[0],
            lambda noise: jnp.zeros(noise.shape[0], jnp.int32),
            noise,
        )
        best = jnp.where(is_out, left, best)
        found.append(best)
        scores = scores.at[token, best].set(-jnp.inf)
        noise = noise.at[token, best].set(-jnp.inf)
    return jnp.stack(found, axis=1)
