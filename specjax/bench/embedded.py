"""What speculation brings on the embedded pair: held-out Python files, batch 1."""

from __future__ import annotations

from typing import Any

import specjax
from specjax.bench import measuring
from specjax.config import SamplingParams
from specjax.demo import corpus

NUM_FILES = 8
PROMPT_TOKENS = 48
NEW_TOKENS = 96
DEPTHS = (1, 2, 3, 4)


def held_out_texts() -> list[str]:
    """Returns the longest NUM_FILES files of this Python's library that training kept apart."""
    held_out = [file for file in corpus.source_files() if file.is_held_out]
    return [
        file.text
        for file in sorted(held_out, key=lambda file: -len(file.text))[:NUM_FILES]
    ]


def speculation(rounds: int) -> dict[str, Any]:
    """Returns speed against plain decoding and mean acceptance length, per K and temperature."""
    target = specjax.load_model("demo")
    drafter = specjax.load_drafter("demo", target)
    prompts = [
        target.tokenizer.encode(text)[:PROMPT_TOKENS]
        for text in held_out_texts(NUM_FILES)
    ]
    figures: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(
            temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0
        )
        lengths: dict[int, float] = {}

        def run(depth: int):
            for prompt in prompts:
                out = specjax.generate(
                    target,
                    prompt,
                    drafter=drafter if depth else None,
                    num_speculative_tokens=depth,
                    sampling=sampling,
                )
                totals[depth] = totals.get(depth, 0.0) + out.stats.run_s
                counts.setdefault(depth, []).append(out.stats.acceptance)

        totals: dict[int, float] = {}
        counts: dict[int, list] = {}
        per_round: dict[int, list[float]] = {depth: [] for depth in (0, *DEPTHS)}
        for round_number in range(rounds + 1):
            for depth in per_round:
                totals.clear()
                run(depth)
                if round_number:  # the first compiles
                    per_round[depth].append(totals[depth])
        for depth in DEPTHS:
            steps = sum(c.num_steps for c in counts[depth])
            lengths[depth] = 1 + sum(c.num_accepted for c in counts[depth]) / steps
        figures[f"embedded_t{temperature:g}_mean_acceptance_length"] = lengths
        figures[f"embedded_t{temperature:g}_speedup"] = {
            depth: measuring.ratio(per_round[0], per_round[depth]) for depth in DEPTHS
        }
        figures[f"embedded_t{temperature:g}_plain_tokens_per_s"] = (
            len(prompts) * NEW_TOKENS / measuring.median(per_round[0])
        )
    return figures
