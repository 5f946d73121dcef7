"""How good the pair is: `python -m benchmarks.demo.evaluate`.

Prints the loss on held-out files and the mean acceptance length of chains of K
drafted tokens behind prompts from those files, measured on the exported weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo import corpus, learning, pair
from benchmarks.demo.checkpoint_files import from_tensors, read_safetensors
from benchmarks.demo.continuing import choose_prompts, continue_prompts
from specjax.demo import WEIGHTS_FOLDER
from specjax.models.base import ModelConfig, Params
from specjax.models.dense import sequence_logits

CONFIGS = {"target": pair.TARGET, "draft": pair.DRAFT}
NUM_PROMPTS = 64
PROMPT_LENGTH = 64
NUM_TOKENS = 128


def load_pair(folder: Path) -> tuple[dict, Tokenizer]:
    """Returns float32 weights as rounded in the files, and the shared tokenizer."""
    params = {}
    for name, config in CONFIGS.items():
        tensors = read_safetensors(folder / name / "model.safetensors")
        params[name] = from_tensors(tensors, config.num_layers)
    return params, Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))


def held_out_loss(params: Params, config: ModelConfig, token_ids: np.ndarray, length: int) -> float:
    """Returns nats per token over windows of `length`."""
    loss = jax.jit(learning.text_loss, static_argnums=1)
    rows = 2048 // length
    num_batches = (len(token_ids) - length - 1) // length // rows
    losses = [
        float(loss(params, config, corpus.windows(token_ids, step, rows, length)))
        for step in range(num_batches)
    ]
    return sum(losses) / len(losses)


def acceptance_probabilities(
    params: dict, token_ids: np.ndarray, start: int, temperature: float
) -> np.ndarray:
    """Returns f64[rows, length - start]: how likely each of the target's tokens is kept.

    Given that speculation commits token x, the draft had proposed and kept it with
    probability min(1, draft(x) / target(x)): the step draws a maximal coupling. So
    the target's own text tells everything about a chain of drafts along it.
    """
    logits_of = jax.jit(sequence_logits, static_argnums=1)
    logits = [
        np.asarray(logits_of(params[name], config, token_ids))[:, start - 1 : -1]
        for name, config in CONFIGS.items()
    ]
    chosen = token_ids[:, start:, None]
    if temperature == 0:
        return (np.argmax(logits[1], axis=-1) == chosen[..., 0]).astype(np.float64)
    logprobs = [np.asarray(jax.nn.log_softmax(each / temperature)) for each in logits]
    of_target, of_draft = (np.take_along_axis(each, chosen, axis=-1)[..., 0] for each in logprobs)
    return np.minimum(1.0, np.exp(of_draft - of_target, dtype=np.float64))


def mean_acceptance_length(kept: np.ndarray, k: int, rng: np.random.Generator) -> float:
    """Returns committed tokens per step of chains of k drafts.

    Args:
      kept: f64[rows, length], probability that the token at a position is kept.
    """
    num_accepted, num_steps = 0, 0
    for row in rng.random(kept.shape) < kept:
        position = 0
        while position + k < len(row):
            draft = row[position : position + k]
            accepted = k if draft.all() else int(np.argmin(draft))
            num_accepted += accepted
            num_steps += 1
            position += accepted + 1
    return 1 + num_accepted / num_steps


def evaluate(folder: Path) -> dict:
    """Returns held-out losses and mean acceptance lengths as a JSON-like dict."""
    params, tokenizer = load_pair(folder)
    held_out = [file for file in corpus.source_files() if file.is_held_out]
    token_ids = corpus.encode(held_out, tokenizer)
    results: dict = {}
    for name, config in CONFIGS.items():
        results[f"held_out_loss_{name}"] = {
            length: round(held_out_loss(params[name], config, token_ids, length), 3)
            for length in (256, 512, 1024)
        }
    prompts = choose_prompts(held_out, tokenizer, NUM_PROMPTS, PROMPT_LENGTH)
    for temperature in (0.0, 0.8):
        text_ids = continue_prompts(
            params["target"],
            pair.TARGET,
            prompts,
            NUM_TOKENS,
            jnp.full(NUM_PROMPTS, temperature),
            jax.random.key(0),
        )
        kept = acceptance_probabilities(params, np.asarray(text_ids), PROMPT_LENGTH, temperature)
        rng = np.random.default_rng(0)
        results[f"mean_acceptance_length_t{temperature}"] = {
            k: round(mean_acceptance_length(kept, k, rng), 3) for k in (2, 4, 6)
        }
    return results


def sample(folder: Path, prompt: str, num_tokens: int = 96) -> list[str]:
    """Returns the target's text behind a prompt at temperatures 0 and 0.8."""
    params, tokenizer = load_pair(folder)
    prompts = np.asarray([tokenizer.encode(prompt).ids] * 2, np.int32)
    token_ids = continue_prompts(
        params["target"],
        pair.TARGET,
        prompts,
        num_tokens,
        jnp.asarray([0.0, 0.8]),
        jax.random.key(0),
    )
    return [tokenizer.decode(row) for row in np.asarray(token_ids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS_FOLDER)
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.weights), indent=1))
    for text in sample(arguments.weights, arguments.prompt):
        print("-" * 80)
        print(text)


if __name__ == "__main__":
    main()
