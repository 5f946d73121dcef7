"""Twenty steps of GRPO by trainers in the layouts of other libraries.

A trainer's part that knows specjax is `make_decoder` and `sample`: two calls. The policy, its loss
and its update are the trainer's, on its own tree.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import tiny_llama, tiny_llama_config
from test_given_trees import COMPILED
from trainers_models import (
    LinenLlama,
    NnxLlama,
    maxtext_logits,
    maxtext_shapes,
    tunix_logits,
    tunix_shapes,
)

import specjax
from specjax.models.base import RopeConfig
from specjax.models.dense import sequence_logits
from specjax.models.layouts.tables import leaves_of, nested

CONFIG = tiny_llama_config()
MAXTEXT = tiny_llama_config(head_dim=16, rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0))
TUNIX = tiny_llama_config(family="qwen3", qk_norm=True, tie_word_embeddings=True)
NUM_STEPS, NUM_SAMPLES, MAX_TOKENS = 20, 16, 12
PROMPTS = [[5, 9, 2], [7, 3, 11]]
ENGINE = specjax.EngineConfig(
    page_size=8, max_rows=16, burst_steps=12, max_context=32, row_buckets=(16,), token_bucket=16
)


# The two calls of a trainer


def make_decoder(config, layout):
    return specjax.build_decoder(config, engine=ENGINE, layout=layout)


def sample(decoder, policy, seed):
    return specjax.rollout(
        decoder,
        policy,
        PROMPTS,
        num_samples=NUM_SAMPLES,
        sampling=specjax.SamplingParams(max_tokens=MAX_TOKENS, seed=seed),
    )


# Policies: config, weights, and logits(weights, token_ids)


def drawn(shapes):
    rng = np.random.default_rng(0)
    near = lambda path: float(path.endswith((".scale", "norm.w")))
    values = {path: near(path) + 0.1 * rng.standard_normal(size) for path, size in shapes.items()}
    return nested({path: jnp.asarray(value, jnp.float32) for path, value in values.items()})


def of_nnx():
    graph, state = nnx.split(NnxLlama(CONFIG, nnx.Rngs(0)))
    return CONFIG, "nnx", state, lambda state, ids: nnx.merge(graph, state)(ids)


def of_linen(is_scanned):
    model = LinenLlama(CONFIG, is_scanned)
    variables = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    return CONFIG, "linen", variables, model.apply


def of_maxtext():
    logits = lambda tree, ids: maxtext_logits(leaves_of(tree), MAXTEXT, ids, jnp)
    return MAXTEXT, "maxtext", {"params": drawn(maxtext_shapes(MAXTEXT))}, logits


def of_tunix():
    logits = lambda tree, ids: tunix_logits(leaves_of(tree), TUNIX, ids, jnp)
    return TUNIX, "tunix", drawn(tunix_shapes(TUNIX)), logits


def of_own_names():
    """A list of layers, every array a Param."""
    params = tiny_llama(0).params
    policy = jax.tree.map(nnx.Param, {**params, "layers": [*params["layers"]]})

    def logits(tree, ids):
        ours = specjax.convert(tree, "specjax", CONFIG)
        return sequence_logits(ours, CONFIG, ids)

    return CONFIG, "specjax", policy, logits


POLICIES = {
    "own names": of_own_names,
    "nnx": of_nnx,
    "linen": functools.partial(of_linen, False),
    "linen scanned": functools.partial(of_linen, True),
    "maxtext": of_maxtext,
    "tunix": of_tunix,
}


def loss(policy, logits, token_ids, mask, advantage):
    """Returns GRPO's loss for samples of this policy, and their log-probabilities."""
    first = token_ids.shape[1] - MAX_TOKENS
    log_probs = jax.nn.log_softmax(logits(policy, token_ids))[:, first - 1 : -1]
    chosen = jnp.take_along_axis(log_probs, token_ids[:, first:, None], axis=2)[:, :, 0]
    ratio = jnp.exp(chosen - jax.lax.stop_gradient(chosen))
    return -jnp.mean(ratio * advantage[:, None] * mask), chosen


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_grpo_on_the_trainers_own_tree(name, capsys):
    config, layout, policy, logits = POLICIES[name]()
    optimiser = optax.adam(1e-2)
    opt_state = optimiser.init(policy)

    @jax.jit
    def update(policy, opt_state, token_ids, mask, advantage):
        gradient = jax.grad(loss, has_aux=True)
        found, chosen = gradient(policy, logits, token_ids, mask, advantage)
        updates, opt_state = optimiser.update(found, opt_state)
        return optax.apply_updates(policy, updates), opt_state, chosen

    decoder = make_decoder(config, layout)
    rewards, gaps, moved, num_compiled = [], [], [], []
    for step in range(NUM_STEPS):
        COMPILED.clear()
        batch = sample(decoder, policy, seed=step)
        num_compiled.append(len(COMPILED))
        even = (batch.completion_ids % 2 == 0) & batch.completion_mask
        reward = jnp.mean(even, axis=1)
        groups = reward.reshape(-1, NUM_SAMPLES)
        advantage = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
        # All prompts have one length, so no text is padded on the left.
        policy, opt_state, chosen = update(
            policy, opt_state, batch.token_ids, batch.completion_mask, advantage
        )
        gaps.append(float(jnp.max(jnp.abs(chosen - batch.logprobs.raw) * batch.completion_mask)))
        rewards.append(float(jnp.mean(reward)))
        moved.append(batch.metrics["weights_bytes_moved"])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(policy))
    with capsys.disabled():
        print(
            f"\n{name}: reward {rewards[0]:.2f} to {rewards[-1]:.2f}, gap {max(gaps):.1e}, "
            f"{moved[0]:,} of {size:,} bytes per step, compiled {num_compiled}"
        )
    assert max(gaps) < 5e-5
    assert num_compiled[2:] == [0] * (NUM_STEPS - 2)
    assert len(set(moved)) == 1
    assert moved[0] == 0 if layout == "specjax" else 0 < moved[0] < size
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
