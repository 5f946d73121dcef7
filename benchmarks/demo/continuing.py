"""Prompts, and plain cached generation for many rows at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tokenizers import Tokenizer

from benchmarks.demo.pair import END_OF_TEXT_ID
from specjax.demo.corpus import SourceFile
from specjax.models import llama
from specjax.models.base import ModelConfig, Params


def choose_prompts(
    files: list[SourceFile],
    tokenizer: Tokenizer,
    num_prompts: int,
    length: int,
    seed: int = 0,
) -> np.ndarray:
    """Returns i32[num_prompts, length]: pieces of the files, each file in its turn."""
    rng = np.random.default_rng(seed)
    encodings = tokenizer.encode_batch_fast([file.text for file in files])
    encoded = [np.asarray([END_OF_TEXT_ID, *each.ids], np.int32) for each in encodings]
    encoded = [ids for ids in encoded if len(ids) >= length]
    prompts = []
    while len(prompts) < num_prompts:
        for index in rng.permutation(len(encoded))[: num_prompts - len(prompts)]:
            ids = encoded[index]
            start = rng.integers(len(ids) - length + 1)
            prompts.append(ids[start : start + length])
    return np.stack(prompts)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens"))
def continue_prompts(
    params: Params,
    config: ModelConfig,
    prompts: Array,
    num_tokens: int,
    temperature: Array,
    key: Array,
) -> Array:
    """Returns i32[rows, length + num_tokens]: each prompt and what the model adds.

    Args:
      prompts: i32[rows, length].
      temperature: f32[rows]; 0 takes the likeliest token.
    """
    rows, length = prompts.shape
    total = length + num_tokens
    cache_shape = (rows, total, config.num_kv_heads, config.head_dim)
    caches = tuple(
        (jnp.zeros(cache_shape), jnp.zeros(cache_shape)) for _ in range(config.num_layers)
    )

    def run(caches, token_ids, start):
        """Returns the new caches and f32[rows, vocab] after the last token."""

        def attend(layer, q, k, v, cache):
            keys = jax.lax.dynamic_update_slice(cache[0], k, (0, start, 0, 0))
            values = jax.lax.dynamic_update_slice(cache[1], v, (0, start, 0, 0))
            query_positions = start + jnp.arange(q.shape[1])
            visible = jnp.arange(total)[None, :] <= query_positions[:, None]
            grouped = q.reshape(*q.shape[:2], config.num_kv_heads, -1, config.head_dim)
            scores = jnp.einsum("blkgd,bmkd->bkglm", grouped, keys) * config.scale
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            mixed = jnp.einsum("bkglm,bmkd->blkgd", weights, values)
            return mixed.reshape(q.shape), (keys, values)

        positions = jnp.broadcast_to(start + jnp.arange(token_ids.shape[1]), token_ids.shape)
        hidden, caches = llama.forward(params, config, token_ids, positions, attend, caches)
        return caches, llama.logits(params, config, hidden[:, -1])

    def choose(logits, step):
        noise = jax.random.gumbel(jax.random.fold_in(key, step), logits.shape)
        # At temperature 0 the noise is multiplied away and the largest logit wins.
        return jnp.argmax(logits + temperature[:, None] * noise, axis=-1)

    def step(index, carry):
        token_ids, caches, logits = carry
        new = choose(logits, index).astype(token_ids.dtype)[:, None]
        position = length + index
        token_ids = jax.lax.dynamic_update_slice(token_ids, new, (0, position))
        caches, logits = run(caches, new, position)
        return token_ids, caches, logits

    caches, logits = run(caches, prompts, 0)
    token_ids = jnp.pad(prompts, ((0, 0), (0, num_tokens)))
    token_ids, _, _ = jax.lax.fori_loop(0, num_tokens, step, (token_ids, caches, logits))
    return token_ids
