"""When a tree pays: chains, trees and n-gram drafts on the embedded pair, held-out files.

    python -m benchmarks.trees > docs/benchmarks/trees.json

Mean acceptance length and speed against plain decoding, batch 1, per temperature. The
best static trees are fitted on other files than all is timed on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import specjax
from specjax.api.requests import derive_seed
from specjax.cli.bench import embedded, measuring
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.heads.loading import load_drafter
from specjax.models.base import Model
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.sampling import row_values
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.trees.best_static import best_tree

TEMPERATURES = (0.0, 0.8)
CHAINS = range(1, 9)
BUDGETS = (4, 8, 16, 32)  # nodes, root included
# Children per depth: trees of 4, 7, 17 and 31 nodes.
WIDTHS = ((3,), (2, 1, 1), (4, 1, 1, 1), (2, 2, 2, 2))
GROWN = {4: (2, 3), 8: (3, 4), 16: (4, 5), 32: (4, 6)}  # budget: tree_top_k, depth
NUM_MATCHES = (1, 2, 4)
NUM_FITTED = embedded.NUM_FILES  # files; as many others are timed
MAX_RANK = 8
MAX_DEPTH = 8
ROUNDS = 3


def conditional_acceptance(
    target: Model,
    draft: Model,
    texts: list[list[list[int]]],
    prompt_length: int,
    seed: int,
) -> dict[float, np.ndarray]:
    """Returns how often the draft's i-th choice is the target's, given that no earlier one is.

    By temperature, f64[MAX_RANK]; under shared noise, along texts that the target wrote
    at that temperature.

    Args:
      texts: per temperature in turn, prompt and output of `seed`.
    """
    conditional = {}
    for temperature, of_temperature in zip(TEMPERATURES, texts, strict=True):
        ranks = np.concatenate(
            [_ranks(draft, text, prompt_length, temperature, seed) for text in of_temperature]
        )
        at_least = np.array([(ranks >= rank).sum() for rank in range(MAX_RANK)])
        exactly = np.array([(ranks == rank).sum() for rank in range(MAX_RANK)])
        conditional[temperature] = exactly / np.maximum(at_least, 1)
    return conditional


def _ranks(
    draft: Model,
    text: Sequence[int],
    prompt_length: int,
    temperature: float,
    seed: int,
) -> np.ndarray:
    """Returns which of the draft's choices each output token of a text is, i64[n]."""
    config = draft.config

    def attend(layer, q, k, v, cache, sinks=None):
        options = config.attention_options(layer)
        return dense_causal_attention(q, k, v, sinks=sinks, **options), cache

    ids = jnp.asarray(text)
    hidden, _ = family_of(config).forward(
        draft.params,
        config,
        ids[None],
        jnp.arange(len(text))[None],
        attend,
        (None,) * config.num_layers,
    )
    places = jnp.arange(prompt_length - 1, len(text) - 1)
    scores = family_of(config).logits(draft.params, config, hidden[0, places])
    if temperature:
        values = row_values(
            SamplingParams(temperature=temperature),
            prompt_length=prompt_length,
            eos_token_ids=(),
            seed=derive_seed(seed, 0),
            engine_config=EngineConfig(),
        )
        seeds = jnp.tile(jnp.asarray(values["seeds"])[None, :], (len(places), 1))
        keys = token_keys(seeds, places + 1, TARGET_TOKEN)
        scores = scores / temperature + gumbel_noise(keys, scores.shape[1])
    chosen = jnp.take_along_axis(scores, ids[places + 1][:, None], axis=1)
    return np.asarray(jnp.sum(scores > chosen, axis=1))


def configurations(conditional: np.ndarray) -> dict[str, SpeculationConfig | None]:
    """Returns the compared configurations by name; None: plain decoding."""
    fixed: dict[str, Any] = {"policy": "fixed"}
    model: dict[str, Any] = fixed | {"method": "draft_model", "model": "demo"}
    found: dict[str, SpeculationConfig | None] = {"plain": None}
    for k in CHAINS:
        found[f"chain, K = {k}"] = SpeculationConfig(**model, num_speculative_tokens=k)
    for widths in WIDTHS:
        name = f"children per depth {', '.join(map(str, widths))}"
        found[name] = SpeculationConfig(**model, speculative_token_tree=widths)
    for budget in BUDGETS:
        shape = best_tree(conditional, num_nodes=budget, max_depth=MAX_DEPTH).shape
        found[f"best static tree of {budget} nodes"] = SpeculationConfig(
            **model, speculative_token_tree=shape.rank_paths[1:]
        )
    for budget, (top_k, depth) in GROWN.items():
        found[f"grown tree of {budget} nodes"] = SpeculationConfig(
            **model,
            tree_top_k=top_k,
            num_draft_nodes=budget - 1,
            num_speculative_tokens=depth,
        )
    for count in NUM_MATCHES:
        found[f"n-gram, {count} matches, K = 4"] = SpeculationConfig(
            **fixed,
            method="ngram",
            prompt_lookup_matches=count,
            num_speculative_tokens=4,
        )
    return found


def num_nodes(target: Model, draft: Model, config: SpeculationConfig | None) -> int:
    """Returns the most nodes verified per step, root included."""
    if config is None:
        return 1
    source = "ngram" if config.method == "ngram" else draft
    return load_drafter(source, target, config).num_nodes(config.depth)


def measure(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    configs: Mapping[str, SpeculationConfig | None],
    rounds: int,
) -> list[dict[str, Any]]:
    """Returns one row per configuration: nodes, mean acceptance length, speed against plain."""
    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=embedded.NEW_TOKENS,
        ignore_eos=True,
        seed=0,
    )
    num_tokens = len(prompts) * embedded.NEW_TOKENS

    def once(config: SpeculationConfig | None) -> tuple[float, float]:
        drafter = draft if config and config.method == "draft_model" else None
        return embedded.continue_prompts(target, drafter, prompts, sampling, config)

    rows = []
    for name, config in configs.items():
        plain_s, own_s, length = [], [], 0.0
        # Plain decoding beside every configuration: machines change while this runs.
        for round_number in range(rounds + 1):
            before, _ = once(None)
            after, length = once(config)
            if round_number:  # the first compiles
                plain_s.append(before)
                own_s.append(after)
        rows.append(
            {
                "draft": name,
                "num_nodes": num_nodes(target, draft, config),
                "mean_acceptance_length": length,
                "speedup": measuring.ratio(plain_s, own_s),
                "tokens_per_s": num_tokens / measuring.median(own_s),
            }
        )
        print(f"temperature {temperature}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """Returns all figures."""
    target = specjax.load_model("demo")
    draft = specjax.load_model("demo-draft")
    prompts = [
        target.tokenizer.encode(text)[: embedded.PROMPT_TOKENS]
        for text in embedded.held_out_texts(2 * NUM_FITTED)
    ]
    # In turn, so that both halves have long and short files.
    fitted, timed = prompts[::2], prompts[1::2]
    texts = [
        [
            [*completion.prompt_token_ids, *completion.token_ids]
            for completion in specjax.generate(
                target,
                fitted,
                sampling=SamplingParams(
                    temperature=temperature,
                    max_tokens=2 * embedded.NEW_TOKENS,
                    ignore_eos=True,
                    seed=1,
                ),
            )
        ]
        for temperature in TEMPERATURES
    ]
    conditional = conditional_acceptance(target, draft, texts, embedded.PROMPT_TOKENS, seed=1)
    return {
        "environment": measuring.environment(),
        "rounds": rounds,
        "files": {"fitted": len(fitted), "timed": len(timed)},
        "conditional_acceptance": {k: v.tolist() for k, v in conditional.items()},
        "figures": {
            temperature: measure(
                target,
                draft,
                timed,
                temperature,
                configurations(conditional[temperature]),
                rounds,
            )
            for temperature in TEMPERATURES
        },
    }


def as_markdown(document: Mapping[str, Any]) -> str:
    """Returns the figures of `run`, as JSON has them, as one table."""
    lines = [
        "| draft | "
        + " | ".join(
            f"nodes, T = {t} | tokens per step | tokens/s | against plain"
            for t in document["figures"]
        )
        + " |",
        "|---" * (1 + 4 * len(document["figures"])) + "|",
    ]
    for rows in zip(*document["figures"].values(), strict=True):
        cells = [
            f"{row['num_nodes']} | {row['mean_acceptance_length']:.2f} | "
            f"{row['tokens_per_s']:.0f} | {row['speedup']:.2f}"
            for row in rows
        ]
        lines.append(f"| {rows[0]['draft']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    figures = run()
    print(json.dumps(figures, indent=1))
    print(as_markdown(figures), file=sys.stderr)
