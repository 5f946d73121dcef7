"""What a rollout returns: a pytree of arrays, ready for a policy-gradient loss."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.surroundings import in_own_settings

# Rollout.finish_reasons: why a completion ends.
UNFINISHED, STOP, LENGTH, ERROR = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutLogProbs:
    """Natural log-probabilities of the completion's tokens, under the weights that sampled them.

    Each is what one convention of trainers expects; 0 where completion_mask is not set.

        behaviour  of the distribution that was sampled: bias, penalties, temperature, top-k,
                   top-p and min-p applied. What importance sampling divides by.
        tempered   of the logits over the temperature, and nothing else: what tunix's own
                   sampler returns, and what a loss computes again from logits. Where top-k
                   or top-p cut words off it is below `behaviour`.
        raw        of the model's logits, temperature 1.

    At temperature 0 a token is certain, which no gradient can use: `tempered` is `raw`
    then, and `behaviour` is of the logits after bias and penalties at temperature 1.
    """

    behaviour: Array  # f32[num_samples, completion_width]
    tempered: Array  # likewise
    raw: Array  # likewise


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "lengths",
        "finish_reasons",
        "logprobs",
        "entropy",
        "top_ids",
        "top_logprobs",
        "params_versions",
        "num_drafted",
        "num_accepted",
        "num_steps",
        "prompt_index",
        "seeds",
        "metrics",
    ],
    meta_fields=["is_exact"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Samples of a batch of prompts: prompt by prompt, the samples of one beside each other.

    Prompts end at the right edge of prompt_ids, completions begin at the left edge of
    completion_ids, so that the two side by side are one text with padding around it. A
    stop token is part of the completion. Padding is token 0; the masks say where.

    A rollout that stopped at a budget goes on where it is passed in place of prompts.
    """

    prompt_ids: Array  # i32[num_samples, prompt_width]
    prompt_mask: Array  # bool[num_samples, prompt_width]
    completion_ids: Array  # i32[num_samples, completion_width]
    completion_mask: Array  # bool[num_samples, completion_width]
    lengths: Array  # i32[num_samples], of the completions
    finish_reasons: Array  # i32[num_samples], UNFINISHED, STOP, LENGTH or ERROR
    logprobs: RolloutLogProbs
    # f32[num_samples, completion_width], nats, of the distribution of `behaviour`; None
    # unless SamplingParams.entropy asks.
    entropy: Array | None
    # The most likely tokens under `behaviour`, i32 and f32[num_samples, completion_width, k];
    # None unless SamplingParams.logprobs asks for k of them.
    top_ids: Array | None
    top_logprobs: Array | None
    params_versions: (
        Array  # i32[num_samples, completion_width], of the weights that sampled it
    )
    num_drafted: Array  # i32[num_samples], draft tokens that were verified
    num_accepted: Array  # i32[num_samples], of them, those that stood
    num_steps: Array  # i32[num_samples], of the target
    prompt_index: Array  # i32[num_samples]
    seeds: Array  # u32[num_samples, 2], what the tokens are a function of, with weights and prompt
    metrics: dict[str, Any]  # numbers by name, for a logger: see docs/rollouts.md
    is_exact: bool  # whether these are samples of the policy, and not of a lossy rule

    @property
    def num_samples(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    @in_own_settings
    def is_finished(self) -> bool:
        """Whether every completion has ended; waits for the device."""
        return not np.any(np.asarray(self.finish_reasons) == UNFINISHED)

    @property
    @in_own_settings
    def is_truncated(self) -> Array:
        """Which completions did not come to an end of their own, bool[num_samples]."""
        return (self.finish_reasons == LENGTH) | (self.finish_reasons == UNFINISHED)

    @property
    @in_own_settings
    def acceptance_rates(self) -> Array:
        """Accepted of drafted tokens, f32[num_samples]; 0 where nothing was drafted."""
        return self.num_accepted / jnp.maximum(1, self.num_drafted)

    @property
    def token_ids(self) -> Array:
        """Prompts and completions side by side, i32[num_samples, prompt_width + completion_width]."""
        return jnp.concatenate([self.prompt_ids, self.completion_ids], axis=1)

    @property
    def token_mask(self) -> Array:
        """Where token_ids are text, bool likewise."""
        return jnp.concatenate([self.prompt_mask, self.completion_mask], axis=1)
