"""Log-probabilities of given text under a policy, and the gap between two sets of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config.keywords import keyword_check
from specjax.config.sampling import SamplingParams, SamplingSource
from specjax.models.base import Params
from specjax.rl.batch import Rollout, RolloutLogProbs
from specjax.rl.beginning import sampling_of
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.runtime.jax_settings import entrance
from specjax.sampling import RowSampling, empty_row_values, row_values
from specjax.types import DecoderParams


class Texts(NamedTuple):
    """Prompts and completions to score; padding may stand anywhere."""

    prompt_ids: Any  # i32[num_samples, prompt_width]
    prompt_mask: Any  # bool[num_samples, prompt_width]
    completion_ids: Any  # i32[num_samples, completion_width]
    completion_mask: Any  # bool[num_samples, completion_width]


@entrance("specjax.score", keyword_check)
def score(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    batch: Rollout | Texts,
    *,
    sampling: SamplingSource | None = None,
    params_version: int | None = None,
) -> RolloutLogProbs:
    """Returns the log-probabilities of completions under given weights, as a rollout reports them.

    Other libraries call this get_per_token_logps. It uses the forward that samples: the same
    kernels, pages and rounding. Under EngineConfig(numerics="invariant") a rollout's own
    weights give exactly its own log-probabilities.

    Args:
      params: as for `rollout`.
      params_version: as for `rollout`.
      batch: a Rollout, or any texts.
      sampling: parameters that the texts were sampled with, which `behaviour` and `tempered`
        depend on; None: those of a Rollout, else temperature 1.

    Returns:
      f32[num_samples, completion_width] each, 0 outside completion_mask, and outside a Rollout's
      loss_mask; with the sharding of completion_ids over its first axis if it is on a mesh, else
      on the decoder's mesh.

    Raises:
      ValueError: a text has no prompt or is longer than the decoder's rows.
    """
    check_decoder(decoder)
    if not isinstance(batch, Rollout | Texts):
        raise TypeError(f"batch is {batch!r:.100}; expected a Rollout or specjax.Texts.")
    sampling = sampling_of(batch, sampling)
    names = Texts._fields
    texts = Texts(*(np.asarray(getattr(batch, name)) for name in names))
    masks = texts.prompt_mask.astype(bool), texts.completion_mask.astype(bool)
    _check_ids(texts, masks, decoder.config.vocab_size)
    with decoder.using(params, params_version) as loop:
        sizes, engine = loop.decoder.sizes, loop.decoder.engine_config
        prompts = masks[0].sum(axis=1)
        lengths = prompts + masks[1].sum(axis=1)
        # Samples without a completion, such as refused ones, are not scored.
        scored = np.flatnonzero(masks[1].any(axis=1))
        _check(prompts, lengths, scored, sizes.max_length)
        columns = [np.zeros(masks[1].shape, np.float32) for _ in range(3)]
        spans = [span for index in scored.tolist() for span in _spans(batch, index, sampling)]
        for first in range(0, len(spans), sizes.rows):
            own = spans[first : first + sizes.rows]
            history = np.zeros((sizes.rows, sizes.max_length), np.int32)
            num_tokens = np.zeros(sizes.rows, np.int32)
            values: dict[str, Any] = empty_row_values(sizes.rows, engine)
            for place, (index, start, end) in enumerate(own):
                text = [
                    *texts.prompt_ids[index][masks[0][index]],
                    *texts.completion_ids[index][masks[1][index]][:end],
                ]
                history[place, : len(text)] = text
                num_tokens[place] = len(text)
                row = row_values(
                    dataclasses.replace(sampling, logprobs=0, seed=None, n=1),
                    prompt_length=int(prompts[index]) + start,
                    eos_token_ids=decoder.config.eos_token_ids,
                    seed=0,
                    engine_config=engine,
                )
                for name, value in row.items():
                    values[name][place] = value
            told = loop.score(history, num_tokens, RowSampling(**values))
            for column, scores in zip(columns, told[:3]):
                scores = np.asarray(scores)
                for place, (index, start, end) in enumerate(own):
                    written = np.flatnonzero(masks[1][index])[start:end]
                    prompt = int(prompts[index])
                    column[index, written] = scores[
                        place, prompt + start : prompt + len(written) + start
                    ]
        if isinstance(batch, Rollout):
            for column in columns:
                column[~np.asarray(batch.loss_mask)] = 0.0
    place = decoder.placing(getattr(batch.completion_ids, "sharding", None), len(texts.prompt_ids))
    put = jnp.asarray if place is None else lambda x: jax.device_put(x, place)
    behaviour, tempered, raw = map(put, columns)
    return RolloutLogProbs(behaviour=behaviour, tempered=tempered, raw=raw)


def _spans(
    batch: Rollout | Texts, index: int, sampling: SamplingParams
) -> list[tuple[int, int, int | None]]:
    """Returns what is scored together of a sample: (sample, first token, end) of its completion.

    That is all of it; or one turn after the other if penalties or min_tokens make the
    distribution depend on where a turn began.
    """
    depends = sampling.min_tokens or sampling.presence_penalty or sampling.frequency_penalty
    if not isinstance(batch, Rollout) or batch.turns is None or not depends:
        return [(index, 0, None)]
    turns = np.asarray(batch.turns.index)[index]
    turns = np.where(np.asarray(batch.loss_mask)[index], turns, -1)
    places = [np.flatnonzero(turns == turn) for turn in range(int(batch.turns.counts[index]))]
    return [(index, int(own[0]), int(own[-1]) + 1) for own in places if len(own)]


def _check_ids(texts: Texts, masks: Sequence[np.ndarray], vocab_size: int) -> None:
    """Raises ValueError for arrays of different shapes, or ids outside the vocabulary."""
    parts = (
        ("prompt", texts.prompt_ids, masks[0]),
        ("completion", texts.completion_ids, masks[1]),
    )
    for name, ids, mask in parts:
        if ids.ndim != 2 or mask.shape != ids.shape or len(ids) != len(masks[0]):
            raise ValueError(
                f"{name}_ids {ids.shape} and {name}_mask {mask.shape} must be "
                "[num_samples, width] each, of as many samples as the others."
            )
        text = ids[mask]
        if np.any((text < 0) | (text >= vocab_size)):
            raise ValueError(
                f"{name}_ids holds ids outside the vocabulary; expected 0 to {vocab_size - 1}."
            )


def _check(prompts: np.ndarray, lengths: np.ndarray, scored: np.ndarray, most: int) -> None:
    """Raises ValueError for texts that cannot be scored."""
    for index in scored[prompts[scored] < 1]:
        raise ValueError(
            f"text {index} has an empty prompt; the first token needs one before it, say the "
            "beginning-of-sequence token."
        )
    for index in scored[lengths[scored] > most]:
        raise ValueError(
            f"text {index} has {int(lengths[index])} tokens and the decoder's rows hold "
            f"{most}; raise EngineConfig.max_context."
        )


def logprob_gap(behaviour: Array, other: Array, mask: Array) -> dict[str, Array]:
    """Returns the gap between two sets of log-probabilities of the same tokens; pure, for jit.

    A trainer's forward rounds differently from the sampler's; importance sampling has to
    correct this gap.

    Args:
      behaviour: f32[num_samples, width], from the sampler.
      other: f32[num_samples, width], from the trainer.
      mask: bool[num_samples, width], which tokens count.

    Returns:
      f32[] each: `mean_gap` and `largest_gap` of |other - behaviour|; `mean_ratio` of the
      weights exp(other - behaviour), which is near 1; `kl` of the sampler from the trainer,
      estimated as the mean of ratio - 1 - log ratio, which is never negative.
    """
    # A few constants are sent to the device even if the program's transfer guard forbids it.
    with jax.transfer_guard("allow"):
        # A trainer may compute in 64 bits, or in 16.
        behaviour, other = (jnp.asarray(x, jnp.float32) for x in (behaviour, other))
        count = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)
        log_ratio = jnp.where(mask, other - behaviour, 0.0)
        mean = lambda values: jnp.sum(jnp.where(mask, values, 0.0)) / count
        gap = jnp.abs(log_ratio)
        return {
            "mean_gap": mean(gap),
            "largest_gap": jnp.max(gap, initial=0.0),
            "mean_ratio": mean(jnp.exp(log_ratio)),
            "kl": mean(jnp.expm1(log_ratio) - log_ratio),
        }
