"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.choosing import Choice, choose_and, choose_tokens
from specjax.sampling.packing import pack, take, unpack
from specjax.sampling.processing import (
    History,
    is_plain,
    own_rows,
    process_logits,
    scaler,
)
from specjax.sampling.row_sampling import RowSampling
from specjax.sampling.vocabulary import WHOLE, Vocabulary


class LogProbs(NamedTuple):
    """Natural log-probabilities; zeros when no row of the batch asks for any.

    `raw` is of the model's unchanged logits: temperature 1, no bias, no filter.
    `tempered` is of these logits divided by the row's temperature, and nothing else: a
    policy-gradient loss can compute it from logits alone.
    `processed` is of the sampled distribution. For a row of temperature 0 it is of the
    logits after bias and penalties at temperature 1, and `tempered` equals `raw`. The top
    entries are computed when any row of the batch has num_logprobs > 0, most likely
    first; a filter may leave fewer than max_logprobs, then the rest are -inf. `entropy` is
    of the distribution of `processed`, for rows with has_entropy; 0 for others.

    `surplus` and `variance` are for rows with is_checked, 0 at temperature 0: the
    log-probability of the chosen token less its expectation over draws, and the expected
    square of that. Sums of the surplus of exact draws are a martingale.
    """

    raw: Array  # f32[num_tokens], of the chosen token
    raw_top_ids: Array  # i32[num_tokens, max_logprobs]
    raw_top: Array  # f32[num_tokens, max_logprobs]
    processed: Array  # f32[num_tokens], of the chosen token
    processed_top_ids: Array  # i32[num_tokens, max_logprobs]
    processed_top: Array  # f32[num_tokens, max_logprobs]
    tempered: Array  # f32[num_tokens], of the chosen token
    entropy: Array  # f32[num_tokens], nats
    surplus: Array  # f32[num_tokens], log p(chosen) + entropy of p
    variance: Array  # f32[num_tokens], of log p(x) for x drawn from p


class _Scores(NamedTuple):
    """Log-probabilities under one distribution."""

    chosen: Array  # f32[num_tokens]
    top_ids: Array  # i32[num_tokens, max_logprobs]
    top: Array  # f32[num_tokens, max_logprobs]


class _Shape(NamedTuple):
    """Entropy, surplus and variance of a distribution, as in LogProbs."""

    entropy: Array
    surplus: Array
    variance: Array


class _Asked(NamedTuple):
    """The log-probabilities that the rows of a batch ask for, by token."""

    num_logprobs: Array  # i32[num_tokens], -1: none
    has_entropy: Array  # bool[num_tokens]
    is_checked: Array  # bool[num_tokens]: random draws of rows with is_checked
    is_plain: Array  # bool[num_tokens], from processing.is_plain

    @property
    def anything(self) -> Array:
        return jnp.any((self.num_logprobs >= 0) | self.has_entropy | self.is_checked)


def _asked(sampling: RowSampling, row_ids: Array, positions: Array) -> _Asked:
    row, is_own = own_rows(sampling, row_ids)
    is_checked = sampling.is_checked & (sampling.temperature > 0)
    asked = sampling.num_logprobs, sampling.has_entropy, is_checked
    num_logprobs, has_entropy, is_checked = take(asked, row)
    return _Asked(
        jnp.where(is_own, num_logprobs, -1),
        has_entropy & is_own,
        is_checked & is_own,
        is_plain(sampling, row_ids, positions),
    )


def no_logprobs(num_tokens: int, max_logprobs: int) -> LogProbs:
    """Returns the zeros of a batch that asks for no log-probabilities."""
    none = _no_scores(num_tokens, max_logprobs)
    return LogProbs._make([*none, *none, none.chosen, *_no_shape(num_tokens)])


def token_logprobs(
    logits: Array,
    token_ids: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    max_logprobs: int,
    processed: Array | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> LogProbs:
    """Returns the log-probabilities of token_ids i32[num_tokens], one per node.

    Args:
      logits, row_ids, positions, history, vocabulary: as for `process_logits`.
      max_logprobs: EngineConfig.max_logprobs; a vocabulary may be smaller.
      processed: `process_logits` of the same arguments, if already computed.
    """
    if not sampling.uses.reports:
        return no_logprobs(token_ids.shape[0], max_logprobs)
    asked = _asked(sampling, row_ids, positions)

    def edited() -> tuple[_Scores, _Shape]:
        values = processed
        if values is None:
            values = process_logits(
                logits, sampling, row_ids, positions, history, vocabulary=vocabulary
            )
        return _of_edited(values, token_ids, asked, max_logprobs, vocabulary)

    def told() -> LogProbs:
        own = lax.cond(
            jnp.all(asked.is_plain),
            lambda: _nothing(token_ids.shape[0], max_logprobs),
            edited,
        )
        return _together(logits, token_ids, sampling, row_ids, asked, *own, vocabulary=vocabulary)

    return _if_asked(asked, told, token_ids.shape[0], max_logprobs)


def choose_and_score(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    max_logprobs: int,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Choice, LogProbs]:
    """Returns `choose_tokens` and `token_logprobs` of the tokens, processing the logits once.

    Where no row edits or filters logits, no processed copy is stored: choose_tokens takes
    its short paths, and sums are over the logits themselves.
    """
    size = logits.shape[0], max_logprobs
    if not sampling.uses.reports:
        where = sampling, row_ids, positions, history
        return choose_tokens(logits, *where, vocabulary=vocabulary), no_logprobs(*size)
    asked = _asked(sampling, row_ids, positions)

    def describe(choice: Choice, processed: Array | None) -> tuple[Choice, tuple[_Scores, _Shape]]:
        if processed is None:
            return choice, _nothing(*size)
        own = lax.cond(
            asked.anything,
            lambda: _of_edited(processed, choice.token_ids, asked, max_logprobs, vocabulary),
            lambda: _nothing(*size),
        )
        return choice, own

    choice, own = choose_and(
        describe, logits, sampling, row_ids, positions, history, vocabulary=vocabulary
    )

    def told() -> LogProbs:
        where = logits, choice.token_ids, sampling, row_ids, asked
        return _together(*where, *own, vocabulary=vocabulary)

    return choice, _if_asked(asked, told, *size)


def _if_asked(
    asked: _Asked, told: Callable[[], LogProbs], num_tokens: int, max_logprobs: int
) -> LogProbs:
    """Returns told(), called only if any token asks for anything, else zeros."""
    nothing = no_logprobs(num_tokens, max_logprobs)
    # Packed, a branch returns one array instead of eleven.
    packed = jax.eval_shape(pack, nothing)
    return unpack(
        lax.cond(
            asked.anything,
            lambda: pack(told()),
            lambda: jnp.zeros(packed.shape, packed.dtype),
        ),
        nothing,
    )


def _of_edited(
    processed: Array,
    token_ids: Array,
    asked: _Asked,
    max_logprobs: int,
    vocabulary: Vocabulary,
) -> tuple[_Scores, _Shape]:
    """Returns the scores under processed logits, for tokens that are not plain."""
    most = jnp.max(asked.num_logprobs)
    scores = lax.cond(
        most >= 0,
        lambda: _scores(processed, token_ids, most > 0, max_logprobs, vocabulary),
        lambda: _no_scores(token_ids.shape[0], max_logprobs),
    )
    return scores, _shape(lambda: processed, token_ids, asked, ~asked.is_plain, vocabulary)


def _together(
    logits: Array,
    token_ids: Array,
    sampling: RowSampling,
    row_ids: Array,
    asked: _Asked,
    own: _Scores,
    own_shape: _Shape,
    *,
    vocabulary: Vocabulary,
) -> LogProbs:
    """Returns all LogProbs; `own`, from `_of_edited`, is used for tokens that are not plain.

    Plain tokens use `tempered`, so that their bits do not depend on other rows of the batch.
    """
    row, is_own = own_rows(sampling, row_ids)
    temperature = sampling.temperature[row]
    is_divided = is_own & (temperature > 0) & (temperature != 1)
    most = jnp.max(asked.num_logprobs)
    max_logprobs = own.top.shape[1]
    of = lambda values, needs_top: _scores(values, token_ids, needs_top, max_logprobs, vocabulary)
    scaled = lambda: scaler(logits, sampling, row, vocabulary)(logits)

    def scores() -> tuple[_Scores, _Scores, Array]:
        raw = of(logits, most > 0)
        # The top tokens after the temperature are needed only for plain tokens.
        needs_top = (most > 0) & jnp.any(is_divided & asked.is_plain)
        tempered = lax.cond(
            jnp.any(is_divided),
            lambda: _choose(is_divided, of(scaled(), needs_top), raw),
            lambda: raw,
        )
        return raw, _choose(asked.is_plain, tempered, own), tempered.chosen

    none = _no_scores(token_ids.shape[0], max_logprobs)
    raw, processed, tempered = lax.cond(most >= 0, scores, lambda: (none, none, none.chosen))
    plain_shape = _shape(scaled, token_ids, asked, asked.is_plain, vocabulary)
    shape = _choose(asked.is_plain, plain_shape, own_shape)
    return LogProbs._make([*raw, *processed, tempered, *shape])


def _choose(mask: Array, one: Any, other: Any) -> Any:
    """Returns `one` for the tokens in mask bool[num_tokens]; pytrees of [num_tokens, ...]."""
    along = lambda leaf: mask.reshape(-1, *[1] * (leaf.ndim - 1))
    return jax.tree.map(lambda a, b: jnp.where(along(a), a, b), one, other)


def _shape(
    make: Callable[[], Array],
    token_ids: Array,
    asked: _Asked,
    mask: Array,
    vocabulary: Vocabulary,
) -> _Shape:
    """Returns the _Shape of some logits for tokens in mask; 0 where it is not asked for.

    Args:
      make: returns the logits f32[num_tokens, vocab]; called only if they are needed.
    """
    nothing = _no_shape(token_ids.shape[0])
    has_entropy, is_checked = asked.has_entropy & mask, asked.is_checked & mask
    entropy = lax.cond(
        jnp.any(has_entropy),
        lambda: jnp.where(has_entropy, _entropy(make(), vocabulary), 0.0),
        lambda: nothing.entropy,
    )
    check = lax.cond(
        jnp.any(is_checked),
        lambda: _surplus(make(), token_ids, is_checked, vocabulary),
        lambda: (nothing.surplus, nothing.variance),
    )
    return _Shape(entropy, *check)


def _entropy(processed: Array, vocabulary: Vocabulary) -> Array:
    """Returns the entropies f32[num_tokens] of some logits, in nats."""
    log_probs = vocabulary.log_softmax(processed)
    probs = jnp.exp(log_probs)
    # Tokens of probability 0 add nothing; 0 * -inf would be NaN.
    return -vocabulary.sum(jnp.sum(probs * jnp.where(probs > 0, log_probs, 0.0), axis=1))


def _surplus(
    processed: Array, token_ids: Array, is_checked: Array, vocabulary: Vocabulary
) -> tuple[Array, Array]:
    """Returns surplus and variance f32[num_tokens], 0 where not is_checked."""
    log_probs = vocabulary.log_softmax(processed)
    probs = jnp.exp(log_probs)
    # Tokens of probability 0 add nothing; 0 * -inf would be NaN.
    finite = jnp.where(probs > 0, log_probs, 0.0)
    mean = vocabulary.sum(jnp.sum(probs * finite, axis=1, keepdims=True))
    variance = vocabulary.sum(jnp.sum(probs * (finite - mean) ** 2, axis=1))
    chosen = vocabulary.take(log_probs, token_ids[:, None])
    surplus = (chosen - mean)[:, 0]
    keep = lambda values: jnp.where(is_checked, values, 0.0)
    return keep(surplus), keep(variance)


def _scores(
    logits: Array,
    token_ids: Array,
    needs_top: Array,
    max_logprobs: int,
    vocabulary: Vocabulary,
) -> _Scores:
    """Returns the log-probabilities of token_ids and of the most likely tokens."""
    width = logits.shape[1]
    largest = vocabulary.max(jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True)
    total = largest + jnp.log(vocabulary.sum(weights))
    chosen = vocabulary.take(logits, token_ids[:, None]) - total

    def top() -> tuple[Array, Array]:
        count = min(max_logprobs, vocabulary.size(width))
        ids, values = vocabulary.top(logits, count)
        missing = ((0, 0), (0, max_logprobs - count))
        padded = jnp.pad(values - total, missing, constant_values=-jnp.inf)
        return jnp.pad(ids, missing), padded

    none = _no_scores(logits.shape[0], max_logprobs)
    return _Scores(chosen[:, 0], *lax.cond(needs_top, top, lambda: none[1:]))


def _no_scores(num_tokens: int, max_logprobs: int) -> _Scores:
    top_ids = jnp.zeros((num_tokens, max_logprobs), jnp.int32)
    return _Scores(jnp.zeros(num_tokens, jnp.float32), top_ids, top_ids.astype(jnp.float32))


def _no_shape(num_tokens: int) -> _Shape:
    zeros = jnp.zeros(num_tokens, jnp.float32)
    return _Shape(zeros, zeros, zeros)


def _nothing(num_tokens: int, max_logprobs: int) -> tuple[_Scores, _Shape]:
    return _no_scores(num_tokens, max_logprobs), _no_shape(num_tokens)
