"""Losses and one training step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax.models.base import ModelConfig, Params
from specjax.models.dense import sequence_logits


def text_loss(params: Params, config: ModelConfig, windows: Array) -> Array:
    """Returns the mean cross-entropy per token, in nats, of windows i32[rows, length + 1]."""
    logits = sequence_logits(params, config, windows[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]))


def distillation_loss(
    draft: Params,
    draft_config: ModelConfig,
    target: Params,
    target_config: ModelConfig,
    token_ids: Array,  # i32[rows, length]
    temperature: float = 0.8,
    likeliest_weight: float = 0.3,
) -> Array:
    """Returns how far the draft is from the target along some text, in nats per token.

    A mixture of the cross-entropy to the target's distribution, which is what keeps
    drafts when sampling, and that to its likeliest token, which is what keeps them
    at temperature 0. Which text is no label here: both models see the same.

    Source: Zhou et al. 2023, "DistillSpec" (arXiv:2310.08461).
    """
    target_logits = jax.lax.stop_gradient(sequence_logits(target, target_config, token_ids))
    draft_logits = sequence_logits(draft, draft_config, token_ids)
    to_distribution = optax.softmax_cross_entropy(
        draft_logits / temperature, jax.nn.softmax(target_logits / temperature)
    )
    to_likeliest = optax.softmax_cross_entropy_with_integer_labels(
        draft_logits, jnp.argmax(target_logits, axis=-1)
    )
    return jnp.mean((1 - likeliest_weight) * to_distribution + likeliest_weight * to_likeliest)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def update(loss, optimiser, params, opt_state, batch):
    """Returns params and optimiser state after one step, and the loss before it.

    Args:
      loss: loss(params, batch) -> f32[]; static, so pass one object for all steps.
      optimiser: an optax transformation; static likewise.
    """
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimiser.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value
