"""Losses, the optimiser and one training step."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
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


def schedule(peak: float, num_steps: int, warmup: int, decay: int) -> optax.Schedule:
    """Rises for `warmup` steps, stays, falls to zero over the last `decay`, if any."""
    rise = optax.linear_schedule(0.0, peak, warmup)
    if not decay:
        return rise
    fall = optax.linear_schedule(peak, 0.0, decay)
    return optax.join_schedules([rise, fall], [num_steps - decay])


def optimizer(
    num_steps: int, warmup: int, decay: int, scale: float = 1.0
) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for embeddings and norms.

    Source: Jordan 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    rate = lambda peak: schedule(scale * peak, num_steps, warmup, decay)

    def kinds(params: Params) -> Params:
        is_matrix = lambda path, leaf: leaf.ndim == 2 and path[-1].key != "embed_tokens"
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "matrix" if is_matrix(path, leaf) else "other", params
        )

    transforms: dict[Hashable, optax.GradientTransformation] = {
        "matrix": optax.contrib.muon(
            rate(0.02),
            weight_decay=0.05,
            muon_weight_dimension_numbers=cast(Any, _output_first),
        ),
        "other": optax.adam(rate(0.005), b1=0.9, b2=0.98),
    }
    return optax.partition(transforms, kinds)


def _output_first(params: Params) -> Any:
    """Says to Muon that matrices are [out, in].

    It scales updates by sqrt(max(1, out / in)), so it must know which is which; its
    orthogonalisation is the same for a matrix and its transpose.
    """
    out_in = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree.map(lambda _: out_in, params)


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
