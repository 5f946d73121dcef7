"""Measures the gain of speculation on the embedded pair: held-out Python files, batch 1."""

from __future__ import annotations

from typing import Any

import specjax
from specjax.cli.bench import measuring
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.demo import corpus
from specjax.engine.request import AcceptanceCounts

NUM_FILES = 8
PROMPT_TOKENS = 48
NEW_TOKENS = 96
DEPTHS = (1, 2, 3, 4)


def held_out_texts(num_files: int = NUM_FILES) -> list[str]:
    """Returns the longest files of this Python's library that training kept apart."""
    held_out = [file for file in corpus.source_files() if file.is_held_out]
    return [file.text for file in sorted(held_out, key=lambda file: -len(file.text))[:num_files]]


def speculation(rounds: int) -> dict[str, Any]:
    """Returns speed against plain decoding and mean acceptance length, per K and temperature."""
    target = specjax.load_model("demo")
    drafter = specjax.load_drafter("demo", target)
    prompts = [target.tokenizer.encode(t)[:PROMPT_TOKENS] for t in held_out_texts()]
    figures: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(
            temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0
        )
        seconds: dict[int, list[float]] = {depth: [] for depth in (0, *DEPTHS)}
        lengths: dict[int, float] = {}
        for round_number in range(rounds + 1):
            for depth in seconds:
                config = SpeculationConfig(num_speculative_tokens=depth, policy="fixed")
                run_s, lengths[depth] = continue_prompts(
                    target, drafter, prompts, sampling, config if depth else None
                )
                if round_number:  # the first compiles
                    seconds[depth].append(run_s)
        name = f"embedded_t{temperature:g}"
        figures[f"{name}_mean_acceptance_length"] = {k: lengths[k] for k in DEPTHS}
        figures[f"{name}_speedup"] = {
            depth: measuring.ratio(seconds[0], seconds[depth]) for depth in DEPTHS
        }
        figures[f"{name}_plain_tokens_per_s"] = (
            len(prompts) * NEW_TOKENS / measuring.median(seconds[0])
        )
    return figures


def continue_prompts(
    target, drafter, prompts, sampling, config: SpeculationConfig | None
) -> tuple[float, float]:
    """Continues the prompts one by one; returns seconds and mean acceptance length.

    Args:
      config: None: plain decoding.
    """
    counts = AcceptanceCounts()
    seconds = 0.0
    for prompt in prompts:
        out = specjax.generate(
            target,
            prompt,
            drafter=drafter if config else None,
            speculative_config=config,
            sampling=sampling,
        )
        counts.merge(out.stats.acceptance)
        seconds += out.stats.run_s
    return seconds, counts.mean_acceptance_length
