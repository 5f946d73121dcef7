"""Draws draft tokens from a drafter's distribution, by the verification rule of each row."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling import first_argmax, process_logits, target_probs
from specjax.sampling.argmax import block_bounds
from specjax.sampling.distinct import NOT_FOUND, best_distinct, without
from specjax.sampling.processing import History, either, scaler, usage
from specjax.sampling.row_sampling import RowSampling
from specjax.sampling.seeded_noise import (
    DRAFT,
    TARGET_TOKEN,
    gumbel_bound,
    gumbel_noise,
    node_role,
    token_keys,
)
from specjax.types import DELTA, is_by_law


class Siblings(NamedTuple):
    """Draws without replacement from one distribution per node, in draw order."""

    token_ids: Array  # i32[num_tokens, count], distinct
    probs: Array | None  # f32[num_tokens, vocab], distribution of the first; None: not kept


def noise_keys(
    sampling: RowSampling,
    rules: Array,
    row_ids: Array,
    positions: Array,
    roots: Array,
    nodes: Array,
) -> Array:
    """Returns the key of each node's draw, u32[num_tokens, 2].

    Under `greedy`, `seeded` and `delta` it is the key of the target's own choice at the
    next position, the same for all nodes there. Rules by law get noise of their own for
    every node of every step.

    Args:
      rules: i32[rows].
      positions: i32[num_tokens], of the nodes whose children are drawn.
      roots: i32[num_tokens], the root's position.
      nodes: i32[num_tokens], each node's index in its row.
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

    The tokens are the largest values of log q plus Gumbel noise, in descending order: a
    draw without replacement. Under `delta`, and at temperature 0, they are the likeliest
    tokens. Where fewer than `count` tokens have positive probability, the others are drawn
    evenly among those left.

    Rows under a rule by law draw from the same float32 probabilities that the rule
    reads: a token that underflows there counts as one without probability.

    Args:
      logits, sampling, row_ids, positions, history: as for `process_logits`.
      rules: i32[rows].
      keys: u32[num_tokens, 2], from `noise_keys`.
      keeps_probs: whether rows may be under a rule by law.

    Source: Kool et al. 2019 (arXiv:1903.06059), section 2; the order is what
    verification by rejection needs (Jeon et al. 2024, arXiv:2402.14160).
    """
    process = lambda: process_logits(logits, sampling, row_ids, positions, history)
    used = usage(sampling, row_ids, positions)
    is_processed = used.edits | used.filters | keeps_probs
    is_random = (sampling.temperature[row_ids] > 0) & (rules[row_ids] != DELTA)
    values = either(is_processed, process, lambda: logits)
    # Unprocessed logits are scaled block by block: a separate pass costs as much as the noise.
    divide = scaler(logits, sampling, row_ids)
    scale = lambda part: jnp.where(is_processed, part, divide(part))
    probs = None
    if keeps_probs:
        probs = target_probs(values, sampling, row_ids)
        is_own = (is_random & is_by_law(rules[row_ids]))[:, None]
        values = jnp.where(is_own, jnp.log(probs), values)
    has_noise = is_random.astype(jnp.float32)[:, None]

    def score(part: Array, token_ids: Array) -> Array:
        return scale(part) + has_noise * gumbel_noise(keys, token_ids)

    def bound(part: Array, token_ids: Array) -> Array:
        return scale(part) + has_noise * gumbel_bound(keys, token_ids)

    token_ids, scores = best_distinct(
        values,
        score,
        lambda: lax.cond(
            jnp.any(is_random),
            lambda: block_bounds(values, bound),
            lambda: block_bounds(values, lambda part, _: scale(part)),
        ),
        count,
        may_be_sparse=is_processed,
    )
    return Siblings(_filled(token_ids, scores == -jnp.inf, values, keys), probs)


def _filled(token_ids: Array, is_out: Array, values: Array, keys: Array) -> Array:
    """Returns token_ids i32[n, count], replaced where is_out by other tokens in noise order."""

    def fill() -> Array:
        def noise(part: Array, ids: Array) -> Array:
            return part + gumbel_noise(keys, ids)

        even = jnp.zeros_like(values)
        drawn = jnp.where(is_out, NOT_FOUND, token_ids)
        others = lambda found: first_argmax(even, without(noise, found))[0]

        def find(place: Array, found: Array) -> Array:
            here = jnp.arange(found.shape[1])[None, :] == place
            return jnp.where(here & is_out, others(found)[:, None], found)

        return lax.fori_loop(0, token_ids.shape[1], find, drawn)

    return lax.cond(jnp.any(is_out), fill, lambda: token_ids)
