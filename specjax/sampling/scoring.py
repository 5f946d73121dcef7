"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.sampling.choosing import Choice, choose_and
from specjax.sampling.processing import History, own_rows, process_logits
from specjax.sampling.row_sampling import RowSampling


class LogProbs(NamedTuple):
    """Natural log-probabilities; zeros when no row of the batch asks for any.

    `raw` is of the model's logits as they came: temperature 1, no bias, no filter.
    `tempered` is of these divided by the row's temperature, and nothing else: what a
    policy-gradient loss can compute again from logits alone.
    `processed` is of the distribution that is sampled. For a row of temperature 0 it
    is of the logits after bias and penalties at temperature 1, and `tempered` is `raw`. The
    top entries are computed when any row of the batch has num_logprobs > 0, most likely
    first; a filter may leave fewer than max_logprobs, then the rest are -inf. `entropy` is
    of rows with has_entropy, over the distribution of `processed`; 0 of others.

    `surplus` and `variance` are of rows that check themselves, 0 at temperature 0:
    the log-probability of the chosen token over what a draw has on average, and the
    mean square of that. Surpluses of exact draws add up to a martingale.
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


def no_logprobs(num_tokens: int, max_logprobs: int) -> LogProbs:
    """Returns the zeros of a batch that asks for no log-probabilities."""
    one = jnp.zeros(num_tokens)
    top = _no_top(num_tokens, max_logprobs)
    return LogProbs(one, *top, one, *top, one, one, one, one)


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
) -> LogProbs:
    """Returns the log-probabilities of token_ids i32[num_tokens], one per node.

    Args:
      logits, row_ids, positions, history: as for `process_logits`.
      max_logprobs: EngineConfig.max_logprobs; a vocabulary may be smaller.
      processed: `process_logits` of the same arguments, if there already.
    """
    num_tokens = logits.shape[0]
    nothing = no_logprobs(num_tokens, max_logprobs)
    most = _most_logprobs(sampling, row_ids)
    is_checked = _is_checked(sampling, row_ids)
    has_entropy = _has_entropy(sampling, row_ids)

    def score() -> LogProbs:
        sampled = processed
        if sampled is None:
            sampled = process_logits(logits, sampling, row_ids, positions, history)
        of = lambda values: _score(values, token_ids, most > 0, max_logprobs)

        def scores() -> tuple[Array, ...]:
            raw, processed = of(logits), of(sampled)
            tempered = _tempered(logits, token_ids, sampling, row_ids, raw[0])
            return *raw, *processed, tempered

        entropy = lax.cond(
            jnp.any(has_entropy),
            lambda: jnp.where(has_entropy, _entropy(sampled), 0.0),
            lambda: nothing.entropy,
        )
        check = lax.cond(
            jnp.any(is_checked),
            lambda: _surplus(sampled, token_ids, is_checked),
            lambda: nothing[-2:],
        )
        described = lax.cond(most >= 0, scores, lambda: nothing[:7])
        return LogProbs._make([*described, entropy, *check])

    return lax.cond(_is_asked(sampling, row_ids), score, lambda: nothing)


def _is_asked(sampling: RowSampling, row_ids: Array) -> Array:
    """Returns whether any token of the batch needs more than its choice, bool[]."""
    is_described = _is_checked(sampling, row_ids) | _has_entropy(sampling, row_ids)
    return jnp.any(is_described) | (_most_logprobs(sampling, row_ids) >= 0)


def _has_entropy(sampling: RowSampling, row_ids: Array) -> Array:
    """Returns which tokens are of rows that ask for the entropy, bool[num_tokens]."""
    row, is_own = own_rows(sampling, row_ids)
    return sampling.has_entropy[row] & is_own


def _tempered(
    logits: Array, token_ids: Array, sampling: RowSampling, row_ids: Array, raw: Array
) -> Array:
    """Returns the log-probabilities f32[num_tokens] after the temperature alone; `raw` are those before."""
    row, is_own = own_rows(sampling, row_ids)
    temperature = sampling.temperature[row]
    is_divided = is_own & (temperature > 0) & (temperature != 1)

    def divided() -> Array:
        # Where it is raw, by 1: some rows may be greedy.
        by = jnp.where(is_divided, temperature, 1.0)[:, None]
        scaled = logits / by
        chosen = jnp.take_along_axis(scaled, token_ids[:, None], axis=1)
        chosen = chosen - jax.nn.logsumexp(scaled, axis=1, keepdims=True)
        return jnp.where(is_divided, chosen[:, 0], raw)

    return lax.cond(jnp.any(is_divided), divided, lambda: raw)


def _entropy(processed: Array) -> Array:
    """Returns the entropies f32[num_tokens] of some logits, in nats."""
    log_probs = jax.nn.log_softmax(processed, axis=1)
    probs = jnp.exp(log_probs)
    # 0 * -inf: what cannot be drawn adds nothing.
    return -jnp.sum(probs * jnp.where(probs > 0, log_probs, 0.0), axis=1)


def _is_checked(sampling: RowSampling, row_ids: Array) -> Array:
    """Returns which tokens are random draws of rows that check themselves, bool[num_tokens]."""
    row = jnp.minimum(row_ids, sampling.rows - 1)
    is_drawn = sampling.is_checked & (sampling.temperature > 0)
    return is_drawn[row] & (row_ids < sampling.rows)


def _surplus(
    processed: Array, token_ids: Array, is_checked: Array
) -> tuple[Array, Array]:
    """Returns surplus and variance f32[num_tokens], 0 where not is_checked."""
    log_probs = jax.nn.log_softmax(processed, axis=1)
    probs = jnp.exp(log_probs)
    # 0 * -inf: what cannot be drawn adds nothing.
    finite = jnp.where(probs > 0, log_probs, 0.0)
    mean = jnp.sum(probs * finite, axis=1, keepdims=True)
    variance = jnp.sum(probs * (finite - mean) ** 2, axis=1)
    chosen = jnp.take_along_axis(log_probs, token_ids[:, None], axis=1)
    surplus = (chosen - mean)[:, 0]
    keep = lambda values: jnp.where(is_checked, values, 0.0)
    return keep(surplus), keep(variance)


def _most_logprobs(sampling: RowSampling, row_ids: Array) -> Array:
    """Returns the largest num_logprobs of the rows in a batch, i32[]; -1 is none."""
    row, is_own = own_rows(sampling, row_ids)
    return jnp.max(jnp.where(is_own, sampling.num_logprobs[row], -1))


def _score(
    logits: Array, token_ids: Array, needs_top: Array, max_logprobs: int
) -> tuple[Array, Array, Array]:
    """Returns logprobs of token_ids f32[n], and ids and logprobs of the most likely."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    total = largest + jnp.log(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1) - total

    def top() -> tuple[Array, Array]:
        count = min(max_logprobs, logits.shape[1])
        values, ids = lax.top_k(logits, count)
        missing = ((0, 0), (0, max_logprobs - count))
        padded = jnp.pad(values - total, missing, constant_values=-jnp.inf)
        return jnp.pad(ids, missing), padded

    nothing = _no_top(logits.shape[0], max_logprobs)
    ids, values = lax.cond(needs_top, top, lambda: nothing)
    return chosen[:, 0], ids, values


def _no_top(num_tokens: int, max_logprobs: int) -> tuple[Array, Array]:
    shape = num_tokens, max_logprobs
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape)


def choose_and_score(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: History,
    *,
    max_logprobs: int,
) -> tuple[Choice, LogProbs]:
    """`choose_tokens` and their `token_logprobs`, processing the logits once for both.

    A batch that asks for no log-probabilities keeps the short paths of choose_tokens.
    """

    def describe(choice: Choice, processed: Array | None) -> tuple[Choice, LogProbs]:
        if processed is None:
            return choice, no_logprobs(logits.shape[0], max_logprobs)
        return choice, token_logprobs(
            logits,
            choice.token_ids,
            sampling,
            row_ids,
            positions,
            history,
            max_logprobs=max_logprobs,
            processed=processed,
        )

    return choose_and(
        describe,
        logits,
        sampling,
        row_ids,
        positions,
        history,
        needs_processed=_is_asked(sampling, row_ids),
    )
