"""Chooses the token that each node samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.implementations import NotForThis, by_platform, call_best, named_for
from pallas_kernels.names import IMPLEMENTATIONS
from pallas_kernels.seeded_sample import seeded_sample
from specjax.sampling.argmax import (
    Score,
    as_it_is,
    bounded_argmax,
    first_argmax,
    sparse_argmax,
)
from specjax.sampling.processing import (
    History,
    check_shapes,
    either,
    process_logits,
    scaler,
    usage,
    usage_by_token,
)
from specjax.sampling.row_sampling import RowSampling
from specjax.sampling.seeded_noise import (
    TARGET_TOKEN,
    gumbel_bound,
    gumbel_noise,
    token_keys,
)
from specjax.sampling.vocabulary import WHOLE, Vocabulary

# Search(values, score, bound) -> index and score of the best.
Search: TypeAlias = Callable[[Array, Score, Score], tuple[Array, Array]]


class Choice(NamedTuple):
    """The token each node samples."""

    token_ids: Array  # i32[num_tokens], inside the vocabulary even where invalid
    is_invalid: Array  # bool[num_tokens]: logits held NaN or +inf, or no token could be chosen


def choose_tokens(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    role: int | Array = TARGET_TOKEN,
    processed: Array | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Choice:
    """Draws a token per node by argmax of processed logits plus seeded Gumbel noise.

    The noise is a function of (row's seed, position of the new token, role, token id), so the
    same logits give the same token in any batch, step or draft, and over slices of a
    vocabulary. Rows of temperature 0 take the argmax; the lowest id wins a tie.

    A batch in which no row uses a feature costs only an argmax. With temperatures alone it
    costs argmax and noise, and on a TPU one read of the logits.

    Args:
      logits: f32[num_tokens, vocab], or this device's slice of them.
      row_ids, positions, history, vocabulary: as for `process_logits`.
      role: purpose of the draw, from `seeded_noise`; i32[] or i32[num_tokens].
      processed: `process_logits` of the same arguments, if already computed.
    """
    return choose_and(
        lambda choice, processed: choice,
        logits,
        sampling,
        row_ids,
        positions,
        history,
        role=role,
        processed=processed,
        vocabulary=vocabulary,
    )


def choose_and(
    describe: Callable[[Choice, Array | None], Any],
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    role: int | Array = TARGET_TOKEN,
    processed: Array | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Any:
    """Returns describe(choice, processed logits), called in the branch that makes the choice.

    Args:
      describe: gets the choice of `choose_tokens`, and the processed logits, or None where
        all tokens are plain; returns the same shapes either way.
    """
    check_shapes(logits, sampling, row_ids, positions, history)
    row = jnp.minimum(row_ids, sampling.rows - 1)
    by_token = usage_by_token(sampling, row_ids, positions)
    width = logits.shape[1]
    best_of = functools.partial(_best_of, vocabulary)

    def race(values: Array, scale: Callable[[Array], Array], search: Search) -> Choice:
        keys = token_keys(sampling.seeds[row], positions + 1, role)
        temperature = sampling.temperature[row]
        # A factor instead of a select: XLA's code for a select over logarithms is slow on CPU.
        is_random = (temperature > 0).astype(jnp.float32)[:, None]

        def score_of(part: Array, token_ids: Array) -> Array:
            return scale(part) + is_random * gumbel_noise(keys, token_ids)

        def bound_of(part: Array, token_ids: Array) -> Array:
            return scale(part) + is_random * gumbel_bound(keys, token_ids)

        score, bound = (vocabulary.by_index(of_ids, width) for of_ids in (score_of, bound_of))

        def by_op(name: str) -> Choice:
            if not vocabulary.is_whole:
                raise NotForThis(f"{name} takes a whole vocabulary, not a part of one.")
            # Scaled logits have their largest at 0; temperature 1 leaves them unchanged.
            own = is_random[:, 0] if scale is as_it_is else temperature
            sample = seeded_sample(values, keys, own, implementation=name)
            return Choice(sample.token_ids, sample.is_invalid)

        # Only on a CPU do two logarithms per token take most of the time.
        def by_xla() -> Choice:
            return best_of(
                lambda values: by_platform(
                    values,
                    cpu=lambda values: search(values, score, bound),
                    default=lambda values: first_argmax(values, score),
                ),
                values,
            )

        # Both paths below use the same implementation, so that tokens do not depend on the path.
        *names, _ = IMPLEMENTATIONS["seeded_sample"]  # the last is the reference
        races = {name: functools.partial(by_op, name) for name in names} | {"xla": by_xla}
        return call_best("seeded_sample", races, named_for("seeded_sample", None))

    def scale_and_race() -> Choice:
        return race(logits, scaler(logits, sampling, row, vocabulary), bounded_argmax)

    def process_and_race() -> Any:
        used = usage(sampling, row_ids, positions)
        values = processed
        if values is None:
            values = process_logits(
                logits, sampling, row_ids, positions, history, vocabulary=vocabulary
            )

        def checked(choice: Choice) -> Choice:
            is_bad = vocabulary.any(jnp.any(~(logits < jnp.inf), axis=1))
            return choice._replace(is_invalid=choice.is_invalid | is_bad)

        def greedy() -> Choice:
            choice = best_of(first_argmax, values)
            return either(used.masks, lambda: checked(choice), lambda: choice)

        choice = either(
            used.temperature,
            # A filter, or a maximum over blocks that drops NaN, may have hidden a NaN or +inf.
            lambda: checked(race(values, as_it_is, _few_or_bounded)),
            greedy,
        )
        return describe(choice, values)

    paths, path = [lambda: describe(best_of(first_argmax, logits), None)], 0
    if not isinstance(by_token.temperature, bool):
        paths.append(lambda: describe(scale_and_race(), None))
        path = by_token.temperature.astype(jnp.int32)
    is_processed = by_token.edits | by_token.filters
    if not isinstance(is_processed, bool):
        path = jnp.where(is_processed, len(paths), path)
        paths.append(process_and_race)
    return lax.switch(jnp.max(path, initial=0), paths)


def _few_or_bounded(values: Array, score: Score, bound: Score) -> tuple[Array, Array]:
    """Draws noise only for tokens that can be chosen, where a filter has left few."""
    return sparse_argmax(values, score, lambda values: bounded_argmax(values, score, bound))


def _best_of(
    vocabulary: Vocabulary, search: Callable[[Array], tuple[Array, Array]], values: Array
) -> Choice:
    """Returns the choice of what `search` finds in values [num_tokens, width]: index and score."""
    token_ids, largest = vocabulary.best(*search(values), values.shape[1])
    return Choice(token_ids, ~jnp.isfinite(largest))


def target_probs(
    processed: Array, sampling: RowSampling, row_ids: Array, vocabulary: Vocabulary = WHOLE
) -> Array:
    """Returns the sampled distribution, f32[num_tokens, vocab], rows sum to 1.

    It is one-hot at the argmax for temperature 0, and where the logits are invalid, so
    that no NaN reaches a verification rule.

    Args:
      processed: from `process_logits`; this device's slice of it if the vocabulary is split,
        as the result is.
    """
    row = jnp.minimum(row_ids, sampling.rows - 1)
    width = processed.shape[1]
    token_ids, best = vocabulary.best(*first_argmax(processed), width)
    is_certain = (sampling.temperature[row] == 0) | ~jnp.isfinite(best)
    one_hot = vocabulary.one_hot(token_ids, width)
    return jnp.where(is_certain[:, None], one_hot, vocabulary.softmax(processed))
