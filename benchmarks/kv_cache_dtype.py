"""Measures how int8 and fp8 keys and values change the distribution of the next token.

    python -m benchmarks.kv_cache_dtype

The embedded model reads held-out text through pages of each dtype. After every token the
distribution of the next one is compared with that of pages in the weights' dtype: the
Kullback-Leibler divergence of the second from the first, in nats, at temperature 1, and whether
the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.config.engine import KV_CACHE_DTYPES, KvCacheDtype
from specjax.decode.kv_scales import measure_kv_scales
from specjax.models.base import Model, ModelConfig, Params
from specjax.paged import kv_cache
from specjax.paged.forward import forward, logits, make_batch

LENGTH, PAGE_SIZE = 512, 32
PROMPT_TOKENS, NEW_TOKENS = 64, 256


@functools.partial(jax.jit, static_argnames=("config", "name"))
def log_distributions(
    params: Params, config: ModelConfig, token_ids: Array, name: str | None
) -> Array:
    """Returns f32[rows, length, vocab], logarithms of what follows each token.

    Args:
      token_ids: i32[rows, length], length a multiple of PAGE_SIZE.
      name: EngineConfig.kv_cache_dtype.
    """
    rows, length = token_ids.shape
    dtype = kv_cache.pages_dtype(name, jax.tree.leaves(params)[0].dtype)
    table = kv_cache.own_pages(rows, length // PAGE_SIZE)
    pages = kv_cache.init_pages(config, table.size, PAGE_SIZE, dtype)
    scales = None if name is None else measure_kv_scales(params, config, dtype)
    batch = make_batch(
        token_ids,
        jnp.asarray(table),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, length, jnp.int32),
        num_tokens=rows * length,
        page_size=PAGE_SIZE,
        num_slots=table.size * PAGE_SIZE,
    )
    hidden, _ = forward(params, config, pages, batch, max_tokens_per_row=length, kv_scales=scales)
    scores = logits(params, config, hidden).astype(jnp.float32)
    return jax.nn.log_softmax(scores).reshape(rows, length, -1)


def compare(model: Model, token_ids: np.ndarray, name: str) -> dict[str, float]:
    """Returns the effect of a dtype of pages on texts i32[rows, length].

    Returns:
      mean_kl, percentile_99_kl and most_kl in nats, same_likeliest as a share of all tokens,
      and mean_loss_change in nats per token of the text.
    """
    read = lambda name: np.asarray(
        log_distributions(model.params, model.config, jnp.asarray(token_ids), name)
    ).astype(np.float64)
    exact, kept = read(None), read(name)
    divergences = (np.exp(exact) * (exact - kept)).sum(-1)
    following = token_ids[:, 1:, None]
    losses = [-np.take_along_axis(each[:, :-1], following, -1) for each in (exact, kept)]
    return {
        "mean_kl": float(divergences.mean()),
        "percentile_99_kl": float(np.percentile(divergences, 99)),
        "most_kl": float(divergences.max()),
        "same_likeliest": float((exact.argmax(-1) == kept.argmax(-1)).mean()),
        "mean_loss_change": float((losses[1] - losses[0]).mean()),
    }


def same_texts(
    model: Model, name: KvCacheDtype | None, texts: np.ndarray, new_tokens: int
) -> float:
    """Returns the share of sampled texts that are the same with and without drafts.

    A text may differ: rounding depends on the shape of a matmul, and two tokens may be nearly tied.
    A key that rounds to another number of the pages differs by more than its last bit.

    Args:
      texts: i32[rows, length], cut into prompts.
    """
    prompts = texts.reshape(-1, PROMPT_TOKENS).tolist()
    given: dict[str, Any] = {
        "sampling": specjax.SamplingParams(temperature=0.8, max_tokens=new_tokens, seed=0),
        "engine": specjax.EngineConfig(kv_cache_dtype=name),
    }
    plain = specjax.generate(model, prompts, drafter=None, **given)
    config = specjax.SpeculationConfig(num_speculative_tokens=3, policy="fixed")
    drafted = specjax.generate(model, prompts, drafter="demo", speculative_config=config, **given)
    pairs = zip(plain, drafted, strict=True)
    return sum(one.token_ids == other.token_ids for one, other in pairs) / len(prompts)


def held_out(model: Model, num_texts: int) -> np.ndarray:
    """Returns the beginnings of held-out texts, i32[num_texts, LENGTH]."""
    texts = embedded.held_out_texts(num_texts)
    return np.array([model.tokenizer.encode(text)[:LENGTH] for text in texts], np.int32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_cache_dtype")
    parser.add_argument("--texts", type=int, default=8)
    options = parser.parse_args(argv)
    model = specjax.load_model("demo")
    texts = held_out(model, options.texts)
    document: dict[str, Any] = {
        "environment": measuring.environment(),
        "tokens": int(texts.size),
        "dtypes": {name: compare(model, texts, name) for name in KV_CACHE_DTYPES},
        "same_texts": {
            str(name): same_texts(model, name, texts, NEW_TOKENS)
            for name in (None, *KV_CACHE_DTYPES)
        },
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
