"""Tokens of the embedded models: prompts x verification rules x drafters, greedy and seeded."""

from __future__ import annotations

import json
from typing import Any

import specjax
from specjax.config.names import DRAFTERS
from specjax.config.rules import VERIFICATION_RULES

PROMPTS_FILE = "demo_greedy.json"
NUM_PROMPTS, MAX_TOKENS, K = 12, 12, 4
# Some rules keep the distribution alone: their tokens depend on what is drafted, so on K.
SPECULATION = {
    "policy": "fixed",
    "num_speculative_tokens": K,
    "synthetic_acceptance_rates": (0.9, 0.6),
}
ENGINE = {"max_rows": 24, "row_buckets": (), "max_context": 64, "page_size": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{drafter: (drafter, {}) for drafter in DRAFTERS},
    "demo, tree": ("demo", {"speculative_token_tree": (2, 1, 1, 1)}),
    "demo, grown tree": ("demo", {"tree_top_k": 2}),
    "demo, history beside": ("demo", {"corpus_tokens": 256}),
}
TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}


def prompts() -> list[list[int]]:
    from freeze import FOLDER

    texts = json.loads((FOLDER.parent / "goldens" / PROMPTS_FILE).read_text())["texts"]
    return [text["prompt"] for text in texts[:NUM_PROMPTS]]


def contents() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (drafter, config) in CASES.items():
        found |= {f"{name}, {which}": text for which, text in tokens_of(drafter, config).items()}
    return found


def tokens_of(drafter: str, config: dict[str, Any]) -> dict[str, str]:
    """Returns the tokens of all prompts by rule and temperature, a line per prompt.

    A rule that the drafter cannot be verified by ends its requests with an error.
    """
    asked, sampling = prompts(), []
    groups = [(rule, name) for rule in VERIFICATION_RULES for name in TEMPERATURES]
    for rule, name in groups:
        sampling += [
            specjax.SamplingParams(
                temperature=TEMPERATURES[name],
                seed=seed,
                max_tokens=MAX_TOKENS,
                verification=rule,
            )
            for seed in range(len(asked))
        ]
    out = specjax.generate(
        "demo",
        asked * len(groups),
        drafter=drafter,
        sampling=sampling,
        speculative_config=SPECULATION | config,
        engine=ENGINE,
    )
    lines = [f"{one.finish_reason} {one.token_ids}" for one in out]
    of_group = lambda i: "\n".join(lines[i * len(asked) : (i + 1) * len(asked)])
    return {", ".join(group): of_group(i) for i, group in enumerate(groups)}
