"""Measures the gap between a rollout's log-probabilities and a trainer's, in bfloat16.

    python -m benchmarks.policy_gap

Three models in bfloat16, rollouts with drafts: the embedded target and draft model, and random
weights of 60M parameters. `specjax.policy_logprobs` gives the trainer's side, with hidden states in
the weights' dtype and in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.config.engine import ActivationDtype
from specjax.configs.models import SHAPES
from specjax.models.base import Model
from specjax.models.families import family_of

NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 16, 64
NUM_TEXTS = 64
# Log ratios are counted below each of these, and past the last.
EDGES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def models() -> Iterator[Model]:
    """Yields the models, in float32."""
    yield specjax.load_model("demo")
    yield specjax.load_model("demo-draft")
    config = SHAPES["bench_60m"]
    params = family_of(config).init(jax.random.key(0), config, std=0.06)
    yield Model(config, params, name="60M, random")


def prompts(model: Model) -> list[list[int]]:
    """Returns prompts of PROMPT_TOKENS: held-out text, or random ids without a tokenizer."""
    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, model.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    texts = embedded.held_out_texts(NUM_PROMPTS)
    return [model.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]


def changed_texts(activation_dtype: ActivationDtype | None) -> int:
    """Returns how many of NUM_TEXTS sampled texts differ with and without drafts."""
    model = specjax.load_model("demo")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    given: dict[str, Any] = {
        "sampling": specjax.SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, seed=0, n=NUM_TEXTS // NUM_PROMPTS
        ),
        "engine": specjax.EngineConfig(max_rows=16, activation_dtype=activation_dtype),
    }
    model, own = dataclasses.replace(model, params=params), prompts(model)
    config = specjax.SpeculationConfig(num_speculative_tokens=3, policy="fixed")
    plain = specjax.generate(model, own, **given)
    drafted = specjax.generate(model, own, drafter="ngram", speculative_config=config, **given)
    pairs = zip(plain, drafted, strict=True)
    return sum(one.token_ids != other.token_ids for one, other in pairs)


def gaps(
    model: Model, activation_dtype: ActivationDtype | None, prompts: Sequence[Any]
) -> np.ndarray:
    """Returns trainer's less sampler's log-probability of every sampled token, f32[num_tokens]."""
    engine = specjax.EngineConfig(
        max_rows=8,
        max_context=PROMPT_TOKENS + NEW_TOKENS,
        activation_dtype=activation_dtype,
    )
    decoder = specjax.build_decoder(
        model, dtype=jnp.bfloat16, drafter="ngram", num_speculative_tokens=3, engine=engine
    )
    sampling = specjax.SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, seed=0)
    batch = specjax.rollout(
        decoder, model.params, prompts, num_samples=NUM_SAMPLES, sampling=sampling
    )
    told = jax.jit(
        lambda params, batch: specjax.policy_logprobs(decoder, params, batch, temperature=1.0)
    )(model.params, batch)
    mask = np.asarray(batch.completion_mask)
    return np.asarray(told.tempered - batch.logprobs.tempered)[mask]


def histogram(ratios: np.ndarray) -> list[float]:
    """Returns the share of log ratios between each two of 0, EDGES and infinity."""
    counts, _ = np.histogram(np.abs(ratios), [0.0, *EDGES, np.inf])
    return (counts / max(len(ratios), 1)).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in measuring.environment().items()))
    edges = [f"< {edge:g}" for edge in EDGES] + [f">= {EDGES[-1]:g}"]
    columns = ["model", "hidden states", "tokens", "mean gap", "largest", "mean ratio", *edges]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for model in models():
        for kept in (None, "float32"):
            ratios = gaps(model, kept, prompts(model))
            cells = [
                model.name,
                kept or "bfloat16",
                f"{len(ratios):,}",
                f"{np.abs(ratios).mean():.2g}",
                f"{np.abs(ratios).max():.2g}",
                f"{np.exp(ratios).mean():.5f}",
                *(f"{share:.1%}" for share in histogram(ratios)),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    print("\nTexts that drafts change, in bfloat16, of the embedded target:")
    for kept in (None, "float32"):
        print(f"hidden states in {kept or 'bfloat16'}: {changed_texts(kept)} of {NUM_TEXTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
