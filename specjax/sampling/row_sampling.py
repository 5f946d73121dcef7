"""Sampling parameters as arrays, one entry per row of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config.engine import EngineConfig
from specjax.config.sampling import OF_MODEL, SamplingParams

# Larger than any vocabulary: a scatter with mode="drop" drops it. -1 would wrap around.
DROPPED_ID = 2**30
NO_STOP_ID = -1  # equals no token id

# Lower temperatures are treated as 0: they leave only the argmax.
MIN_TEMPERATURE = 1e-5


class Uses(NamedTuple):
    """What rows may ask of a compiled step; the rest is not compiled into it."""

    random: bool = True  # a temperature above 0
    edits: bool = True  # logits changed before the temperature: masks, bias, penalties
    filters: bool = True  # top_k, top_p, min_p
    reports: bool = True  # log-probabilities, entropies, self-checks

    def __or__(self, other: Uses) -> Uses:  # type: ignore[override]
        return Uses(*(own or its for own, its in zip(self, other)))


EVERYTHING = Uses()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSampling:
    """`SamplingParams` of each row as dynamic values.

    A feature runs for the whole batch when any row with tokens in the batch uses it.

    Attributes:
      uses: static; rows must ask for no more.
    """

    uses: Uses = dataclasses.field(default=EVERYTHING, metadata={"static": True})

    temperature: Array  # f32[rows], 0 is greedy
    top_k: Array  # i32[rows], 0 is off
    top_p: Array  # f32[rows], 1 is off
    min_p: Array  # f32[rows], 0 is off
    repetition_penalty: Array  # f32[rows], over prompt and output; 1 is off
    presence_penalty: Array  # f32[rows], over the output; 0 is off
    frequency_penalty: Array  # f32[rows], over the output, per occurrence; 0 is off
    bias_token_ids: Array  # i32[rows, max_bias], padded with DROPPED_ID
    bias_values: Array  # f32[rows, max_bias], added; -inf forbids a token
    allowed_token_ids: Array  # i32[rows, max_allowed], padded with DROPPED_ID
    has_allowed: Array  # bool[rows], whether only allowed_token_ids may be chosen
    stop_token_ids: Array  # i32[rows, max_stop], padded with NO_STOP_ID; end-of-sequence ids too
    min_tokens: Array  # i32[rows], output tokens before which no stop token is chosen
    prompt_lengths: Array  # i32[rows]: the output starts at this position
    seeds: Array  # u32[rows, 2]
    num_logprobs: Array  # i32[rows]: -1 none, 0 the chosen token's, k also the k most likely
    has_entropy: Array  # bool[rows], whether the entropy of every draw is reported
    is_checked: Array  # bool[rows], whether draws are tested against their distribution

    @property
    def rows(self) -> int:
        return self.temperature.shape[0]

    @classmethod
    def empty(cls, rows: int, engine_config: EngineConfig) -> RowSampling:
        """Returns rows that are greedy and use no feature."""
        values: dict[str, Any] = empty_row_values(rows, engine_config)
        return cls(**jax.tree.map(jnp.asarray, values))


def row_values(
    params: SamplingParams,
    *,
    prompt_length: int,
    eos_token_ids: Sequence[int],
    seed: int | tuple[int, int],
    engine_config: EngineConfig,
) -> dict[str, np.ndarray]:
    """Returns one row's fields of `RowSampling` as numpy arrays; runs on the host.

    Args:
      params: what they leave open has the library's values.
      prompt_length: tokens, at least 1.
      eos_token_ids: stop tokens of the model, unless `params.ignore_eos`.
      seed: two 32-bit words, or a number below 2**64.

    Raises:
      ValueError: more ids than a capacity of engine_config holds, a bad seed, or
        parameters that `SamplingParams.validate` refuses.
    """
    params.validate(eos_token_ids=eos_token_ids)
    filled = params.filled({})
    own = {name: getattr(filled, name) for name in OF_MODEL}
    if params.logprobs is not None and params.logprobs > engine_config.max_logprobs:
        raise ValueError(
            f"logprobs={params.logprobs} exceeds "
            f"EngineConfig.max_logprobs={engine_config.max_logprobs!r}; "
            "lower the one or raise the other."
        )
    values = _empty_values((), engine_config)
    scalars = own | {
        "temperature": own["temperature"] if own["temperature"] >= MIN_TEMPERATURE else 0.0,
        "top_k": max(own["top_k"], 0),
        "has_allowed": params.allowed_token_ids is not None,
        "min_tokens": params.min_tokens,
        "prompt_lengths": prompt_length,
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "has_entropy": params.entropy,
        "is_checked": params.self_check,
    }
    for name, value in scalars.items():
        values[name][...] = value
    bias = _bias(params)
    _fill(values["bias_token_ids"], list(bias), "bias", "max_bias_entries")
    values["bias_values"][: len(bias)] = list(bias.values())
    allowed = sorted(set(() if params.allowed_token_ids is None else params.allowed_token_ids))
    _fill(values["allowed_token_ids"], allowed, "allowed", "max_allowed_tokens")
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    _fill(values["stop_token_ids"], list(dict.fromkeys(stops)), "stop", "max_stop_tokens")
    values["seeds"][...] = seed_words(seed)
    return values


def uses_of(values: Mapping[str, Any]) -> Uses:
    """Returns what rows ask for.

    Args:
      values: fields of RowSampling on the host, of one row or several.
    """
    differs = lambda name: np.any(np.asarray(values[name]) != _EMPTY[name])
    is_random = differs("temperature")
    return Uses(
        random=bool(is_random),
        edits=any(map(differs, _EDITS)),
        filters=bool(is_random and any(map(differs, ("top_k", "top_p", "min_p")))),
        reports=any(map(differs, ("num_logprobs", "has_entropy", "is_checked"))),
    )


def seed_words(seed: int | tuple[int, int]) -> tuple[int, int]:
    """Returns the two 32-bit words of a seed, the low one first."""
    words = (seed & 0xFFFFFFFF, seed >> 32) if isinstance(seed, int) else tuple(seed)
    if len(words) != 2 or not all(0 <= word < 2**32 for word in words):
        raise ValueError(f"{seed=} must be a number from 0 to 2**64 - 1, or two words below 2**32.")
    return words


def empty_row_values(rows: int, engine_config: EngineConfig) -> dict[str, np.ndarray]:
    """Returns the fields of `RowSampling.empty` as numpy arrays; runs on the host."""
    return _empty_values((rows,), engine_config)


def reset_rows(sampling: RowSampling, mask: Array) -> RowSampling:
    """Makes the rows of mask bool[rows] `empty` again, so that they use no feature."""
    changes = {}
    for name, value in _EMPTY.items():
        field = getattr(sampling, name)
        is_reset = mask.reshape((-1,) + (1,) * (field.ndim - 1))
        changes[name] = jnp.where(is_reset, value, field)
    return dataclasses.replace(sampling, **changes)


# Values of the fields in an empty row.
_EMPTY: dict[str, Any] = {
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "repetition_penalty": np.float32(1),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "bias_token_ids": np.int32(DROPPED_ID),
    "bias_values": np.float32(0),
    "allowed_token_ids": np.int32(DROPPED_ID),
    "has_allowed": np.bool_(False),
    "stop_token_ids": np.int32(NO_STOP_ID),
    "min_tokens": np.int32(0),
    "prompt_lengths": np.int32(0),
    "seeds": np.uint32(0),
    "num_logprobs": np.int32(-1),
    "has_entropy": np.bool_(False),
    "is_checked": np.bool_(False),
}

# Fields that change logits before the temperature.
_EDITS = (
    "has_allowed",
    "bias_values",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _empty_values(leading: tuple[int, ...], engine_config: EngineConfig) -> dict[str, np.ndarray]:
    """Returns every field with the given shape before its own."""
    widths = {
        "bias_token_ids": engine_config.max_bias_entries,
        "bias_values": engine_config.max_bias_entries,
        "allowed_token_ids": engine_config.max_allowed_tokens,
        "stop_token_ids": engine_config.max_stop_tokens,
        "seeds": 2,
    }
    return {
        name: np.full((*leading, widths[name]) if name in widths else leading, value, value.dtype)
        for name, value in _EMPTY.items()
    }


def _bias(params: SamplingParams) -> Mapping[int, float]:
    """Merges logit_bias and bad_token_ids, so that no token takes two entries."""
    bias = {int(token): float(value) for token, value in params.logit_bias.items()}
    return bias | {int(token): -np.inf for token in params.bad_token_ids}


def _fill(field: np.ndarray, ids: Sequence[int], what: str, capacity: str) -> None:
    if len(ids) > field.shape[0]:
        raise ValueError(
            f"{len(ids)} {what} token ids exceed EngineConfig.{capacity}="
            f"{field.shape[0]}; raise it, or send fewer."
        )
    field[: len(ids)] = ids
