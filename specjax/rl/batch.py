"""The result of a rollout: a pytree of arrays for a policy-gradient loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specjax.config.sampling import SamplingParams
from specjax.runtime.jax_settings import own_arithmetic

# Rollout.finish_reasons: why a completion ends.
UNFINISHED, STOP, LENGTH, ERROR, ENVIRONMENT = range(5)


class _Beside(NamedTuple):
    """Fields of a Rollout that are no arrays. Any two compare equal.

    So jax can map over two rollouts with different metrics, and a jitted loss is not
    recompiled for the rollout of another step.
    """

    sampling: SamplingParams | None
    metrics: dict[str, Any]
    errors: dict[int, str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Beside)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, _Beside)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutLogProbs:
    """Natural log-probabilities of the completion's tokens, under the weights that sampled them.

    Trainers differ in which of them they expect. They are 0 outside completion_mask.

        behaviour  of the sampled distribution: bias, penalties, temperature, top-k, top-p and
                   min-p applied. Importance sampling divides by it.
        tempered   of the logits divided by the temperature, and nothing else: the value that
                   tunix's own sampler returns and that a loss computes from logits. It is
                   below `behaviour` where top-k or top-p exclude tokens.
        raw        of the model's logits, temperature 1.

    At temperature 0 a token is certain, which gives no gradient: there `tempered` equals
    `raw`, and `behaviour` is of the logits after bias and penalties at temperature 1.
    """

    behaviour: Array  # f32[num_samples, completion_width]
    tempered: Array  # f32[num_samples, completion_width]
    raw: Array  # f32[num_samples, completion_width]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutTurns:
    """The turns of dialogues: in each, the policy writes, and an environment replies.

    The reply to a turn is text before the next turn; the last turn has none.
    """

    # i32[num_samples, completion_width], the turn of each token, that of a reply the turn that
    # it answers; -1 outside completion_mask.
    index: Array
    counts: Array  # i32[num_samples], turns that the policy began
    finish_reasons: Array  # i32[num_samples, max_turns], of every turn; UNFINISHED where none
    rewards: Array  # f32[num_samples, max_turns], of every turn; 0 where none


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rollout:
    """Samples of a batch of prompts, in the order of prompts; samples of a prompt are adjacent.

    Prompts end at the right edge of prompt_ids, and completions begin at the left edge of
    completion_ids, so that the two concatenated are one text with padding around it. A
    stop token is part of the completion. Padding is token 0; the masks exclude it.

    To continue a rollout that stopped at a budget, pass it in place of prompts.

    All its leaves lead with num_samples, so that `jax.tree.map` can slice, concatenate and
    reshape it. `sampling` and `metrics` do not belong to single samples and are no leaves:
    mapping keeps those of the first rollout, and inside jit they are left out, because jit
    would return those of the call that it was compiled for.
    """

    prompt_ids: Array  # i32[num_samples, prompt_width]
    prompt_mask: Array  # bool[num_samples, prompt_width]
    completion_ids: Array  # i32[num_samples, completion_width]
    completion_mask: Array  # bool[num_samples, completion_width]
    # bool[num_samples, completion_width], which tokens the policy wrote; completion_mask is True
    # for an environment's as well.
    loss_mask: Array
    lengths: Array  # i32[num_samples], of the completions
    # i32[num_samples], UNFINISHED, STOP, LENGTH, ERROR, or ENVIRONMENT if that failed
    finish_reasons: Array
    logprobs: RolloutLogProbs
    # f32[num_samples, completion_width], nats, of the distribution of `behaviour`; None
    # unless SamplingParams.entropy is set.
    entropy: Array | None
    # The k most likely tokens under `behaviour`, i32 and f32[num_samples, completion_width, k],
    # for k = SamplingParams.logprobs; None unless that is set.
    top_ids: Array | None
    top_logprobs: Array | None
    params_versions: Array  # i32[num_samples, completion_width], of the weights that sampled it
    num_drafted: Array  # i32[num_samples], draft tokens that were verified
    num_accepted: Array  # i32[num_samples], draft tokens that were accepted
    num_steps: Array  # i32[num_samples], of the target
    prompt_index: Array  # i32[num_samples]
    seeds: Array  # u32[num_samples, 2]; with weights and prompt they determine the tokens
    is_exact: bool  # whether samples are distributed as the policy; False for a lossy rule
    turns: RolloutTurns | None = None  # None if no environment replied
    # Sampling parameters without the seed; None inside jit and after it.
    sampling: SamplingParams | None = None
    # Numbers by name, for a logger: see docs/rollouts.md. Empty inside jit and after it.
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    # What was wrong, by sample, where finish_reasons are ERROR or ENVIRONMENT since this call.
    # Empty inside jit and after it.
    errors: dict[int, str] = dataclasses.field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[bool, _Beside]]:
        """Returns the arrays by name, and the other fields; see jax.tree_util."""
        keys = map(jax.tree_util.GetAttrKey, _ARRAYS)
        arrays = (getattr(self, name) for name in _ARRAYS)
        beside = self.is_exact, _Beside(self.sampling, self.metrics, self.errors)
        return tuple(zip(keys, arrays, strict=True)), beside

    @classmethod
    def tree_unflatten(cls, beside: tuple[bool, _Beside], arrays: Any) -> Rollout:
        """Returns a rollout of the given arrays; see jax.tree_util."""
        is_exact, notes = beside
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
            notes = _Beside(None, {}, {})
        return cls(
            **dict(zip(_ARRAYS, arrays, strict=True)),
            is_exact=is_exact,
            sampling=notes.sampling,
            metrics=notes.metrics,
            errors=notes.errors,
        )

    def __repr__(self) -> str:
        """Returns a line of figures without the arrays; waits for the device."""
        try:
            return f"Rollout({', '.join(self._figures())})"
        except Exception:  # traced, freed, or mapped to what is no array
            return f"Rollout(of {type(self.lengths).__name__})"

    @own_arithmetic()
    def _figures(self) -> list[str]:
        parts = [
            f"{self.num_samples} samples",
            f"prompts of {self.prompt_ids.shape[1]} and completions of "
            f"{self.completion_ids.shape[1]} tokens, {np.mean(self.lengths):.1f} on average",
        ]
        versions = np.asarray(self.params_versions)[np.asarray(self.completion_mask)]
        if versions.size:
            low, high = versions.min(), versions.max()
            parts.append(f"weights {low}" if low == high else f"weights {low} to {high}")
        if drafted := int(np.sum(self.num_drafted)):
            parts.append(f"{int(np.sum(self.num_accepted)) / drafted:.0%} of drafts accepted")
        if unfinished := int(np.sum(np.asarray(self.finish_reasons) == UNFINISHED)):
            parts.append(f"{unfinished} unfinished")
        if self.errors:
            parts.append(f"{len(self.errors)} failed")
        return parts if self.is_exact else [*parts, "not of the policy's own distribution"]

    @property
    def num_samples(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    @own_arithmetic()
    def is_finished(self) -> bool:
        """Whether every completion has ended; waits for the device."""
        return not np.any(np.asarray(self.finish_reasons) == UNFINISHED)

    @property
    @own_arithmetic()
    def is_truncated(self) -> Array:
        """Which completions were cut at their length or are unfinished, bool[num_samples]."""
        return (self.finish_reasons == LENGTH) | (self.finish_reasons == UNFINISHED)

    @property
    @own_arithmetic()
    def acceptance_rates(self) -> Array:
        """Accepted / drafted tokens, f32[num_samples]; 0 where nothing was drafted."""
        return self.num_accepted / jnp.maximum(1, self.num_drafted)

    @own_arithmetic()
    def continued(
        self,
        replies: Sequence[Sequence[int] | None],
        *,
        rewards: Sequence[float] | np.ndarray | None = None,
        width: int | None = None,
    ) -> Rollout:
        """Returns these dialogues with replies; pass them to `rollout` in place of prompts.

        Args:
          replies: token ids per sample; None where a dialogue is over.
          rewards: of the turns that have just ended, one per sample; None: 0.
          width: of the completions in the result; None: that of this one, or what the longest
            dialogue needs for `max_tokens` more. The same value in each call keeps a jitted
            loss from being recompiled.

        Raises:
          ValueError: a turn that has not ended, or failed, has a reply; or the width does not
            suffice.
        """
        from specjax.rl.replies import continued  # which needs this module

        return continued(self, replies, rewards, width)

    @property
    def token_ids(self) -> Array:
        """Prompts and completions side by side, i32[num_samples, prompt_width +
        completion_width]."""
        return jnp.concatenate([self.prompt_ids, self.completion_ids], axis=1)

    @property
    def token_mask(self) -> Array:
        """Which token_ids are text, not padding; bool of their shape."""
        return jnp.concatenate([self.prompt_mask, self.completion_mask], axis=1)


# Fields of Rollout that are no leaves; all others are leaves, or trees of them.
_NO_ARRAYS = ("is_exact", "sampling", "metrics", "errors")
_ARRAYS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name not in _NO_ARRAYS)
