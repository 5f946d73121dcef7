"""Which token each node samples."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.processing import process_logits, shift_and_scale, usage
from specjax.sampling.row_sampling import RowSampling
from specjax.seeded_noise import TARGET_TOKEN, race_scores, token_keys


class Choice(NamedTuple):
    """The token each node samples."""

    token_ids: Array  # i32[num_tokens], inside the vocabulary even where invalid
    is_invalid: Array  # bool[num_tokens]: the logits held NaN or +inf, or nothing could be chosen


def choose_tokens(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: Array,
    *,
    role: int | Array = TARGET_TOKEN,
    processed: Array | None = None,
) -> Choice:
    """Draws a token per node by argmax of processed logits plus seeded Gumbel noise.

    The noise belongs to (row's seed, position of the new token, role), so the same
    logits give the same token in whatever batch, step or draft they appear. Rows of
    temperature 0 take the argmax; the lowest id wins a tie.

    A batch in which no row uses a feature pays for an argmax only; one with
    temperatures alone for argmax and noise.

    Args:
      logits: f32[num_tokens, vocab].
      row_ids, positions, history: as for `process_logits`.
      role: whose draw this is, of `seeded_noise`; i32[] or i32[num_tokens].
      processed: `process_logits` of the same arguments, if there already.
    """
    row = jnp.minimum(row_ids, sampling.rows - 1)
    used = usage(sampling, row_ids, positions)

    def race(scaled: Array) -> tuple[Array, Array]:
        keys = token_keys(sampling.seeds[row], positions + 1, role)
        is_random = sampling.temperature[row] > 0
        scores = jnp.where(is_random[:, None], race_scores(scaled, keys), scaled)
        return first_argmax(scores)

    if processed is not None:
        token_ids, best = lax.cond(used.temperature, race, first_argmax, processed)
    else:
        branch = jnp.where(
            used.edits | used.filters, 2, jnp.where(used.temperature, 1, 0)
        )
        token_ids, best = lax.switch(
            branch,
            [
                first_argmax,
                lambda values: race(shift_and_scale(values, sampling, row)),
                lambda values: race(
                    process_logits(values, sampling, row_ids, positions, history)
                ),
            ],
            logits,
        )
    # A token that is not allowed may have hidden a NaN from the argmax.
    is_invalid = ~jnp.isfinite(best) | jnp.isnan(jnp.max(logits, axis=1))
    return Choice(token_ids, is_invalid)


def first_argmax(values: Array) -> tuple[Array, Array]:
    """Returns the lowest index of each row's maximum, i32[n], and the maximum, f32[n].

    Two vectorised reductions, several times faster on CPU than jnp.argmax. NaN
    makes the maximum NaN, which equals nothing: then the index is the last one.
    """
    best = jnp.max(values, axis=1)
    size = values.shape[1]
    index = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    is_best = values == best[:, None]
    first = jnp.min(jnp.where(is_best, index, size), axis=1)
    return jnp.minimum(first, size - 1), best


def target_probs(processed: Array, sampling: RowSampling, row_ids: Array) -> Array:
    """Returns the distribution that is sampled, f32[num_tokens, vocab], rows sum to 1.

    One-hot at the argmax for temperature 0, and where the logits are invalid: no
    NaN reaches a verification rule.
    """
    row = jnp.minimum(row_ids, sampling.rows - 1)
    token_ids, best = first_argmax(processed)
    is_certain = (sampling.temperature[row] == 0) | ~jnp.isfinite(best)
    one_hot = jax.nn.one_hot(token_ids, processed.shape[1], dtype=jnp.float32)
    return jnp.where(is_certain[:, None], one_hot, jax.nn.softmax(processed, axis=1))
