"""The stage "embedded pair": real text with and without drafts, by batch."""

from __future__ import annotations

import functools
from typing import Any

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.device_report.cases import Case, Context, Results, Stage
from specjax.cli.bench.device_report.sizes import MODES, ReportSize
from specjax.cli.table import Row, number
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig

PLAIN, LEARNING = MODES[0], MODES[-1]
TEMPERATURE = 0.8
CONFIGS: dict[str, SpeculationConfig | None] = {
    PLAIN: None,
    "K = 2": SpeculationConfig(num_speculative_tokens=2, policy="fixed"),
    "K = 4": SpeculationConfig(num_speculative_tokens=4, policy="fixed"),
    "goodput": SpeculationConfig(num_speculative_tokens=4, policy="goodput"),
}


def cases(size: ReportSize, platform: str) -> list[Case]:
    del platform
    return [Case(f"batch {rows}", functools.partial(measure, rows)) for rows in size.batches]


def prompts_of(encode: Any, count: int) -> list[list[int]]:
    """Returns token ids of parts of held-out files, each of another place."""
    texts = embedded.held_out_texts()
    length = embedded.PROMPT_TOKENS
    parts = []
    encoded = [encode(text[: 16 * length * (1 + count // len(texts))]) for text in texts]
    for index in range(count):
        tokens = encoded[index % len(texts)]
        first = length * (index // len(texts)) % max(len(tokens) - length, 1)
        parts.append(tokens[first : first + length])
    return parts


def measure(rows: int, context: Context) -> dict[str, Any]:
    """Returns tokens per second and mean acceptance length of each mode, in turn."""
    target = specjax.load_model("demo")
    drafter = specjax.load_drafter("demo", target)
    prompts = prompts_of(target.tokenizer.encode, rows)
    sampling = SamplingParams(
        temperature=TEMPERATURE, max_tokens=context.size.new_tokens, ignore_eos=True, seed=0
    )
    modes = context.size.modes

    def run(mode: str) -> Any:
        config = CONFIGS[mode]
        return specjax.generate(
            target,
            prompts,
            drafter=drafter if config else None,
            speculative_config=config,
            sampling=sampling,
            # All texts are equally long: no step has fewer rows.
            engine=EngineConfig(max_rows=rows, row_buckets=()),
        )

    for mode in modes:
        # The first call compiles, and the policy that chooses K learns from some more.
        for _ in range(context.size.learning_calls if mode == LEARNING else 1):
            run(mode)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    last = {}
    for _ in range(context.size.rounds):
        for mode in modes:
            last[mode] = run(mode)
            seconds[mode].append(last[mode].stats.run_s)
    return {
        "num_prompts": rows,
        "new_tokens": context.size.new_tokens,
        "temperature": TEMPERATURE,
        "modes": {mode: _figures(mode, seconds, last) for mode in modes},
    }


def _figures(mode: str, seconds: dict[str, list[float]], last: dict[str, Any]) -> dict[str, Any]:
    out, plain = last[mode], last[PLAIN]
    is_drafting = CONFIGS[mode] is not None
    return {
        "tokens_per_s": out.stats.num_output_tokens / measuring.median(seconds[mode]),
        "speedup": measuring.ratio(seconds[PLAIN], seconds[mode]),
        "mean_acceptance_length": out.stats.mean_acceptance_length if is_drafting else 1.0,
        "mean_k": _mean_depth(out.stats.decisions),
        # Rounding flips a near-tie now and then where products of other sizes are summed.
        "texts_as_plain": sum(
            one.token_ids == other.token_ids for one, other in zip(out, plain, strict=True)
        ),
    }


def _mean_depth(decisions: Any) -> float | None:
    """Returns the mean K over steps."""
    steps = sum(each.num_steps for each in decisions)
    drafted = sum(each.num_steps * each.num_speculative_tokens for each in decisions)
    return drafted / steps if steps else None


def table(results: Results) -> list[Row]:
    return [
        {
            "texts": found["num_prompts"],
            "mode": mode,
            "tokens/s": number(each["tokens_per_s"], 4),
            "against K = 0": number(each["speedup"]),
            "mean acceptance length": number(each["mean_acceptance_length"]),
            "mean K": number(each["mean_k"], 2),
            "texts equal to K = 0": f"{each['texts_as_plain']} of {found['num_prompts']}",
        }
        for found in results.values()
        for mode, each in found["modes"].items()
    ]


STAGE = Stage(
    "embedded pair",
    0.15,
    cases,
    "The embedded pair",
    table,
    "Held-out Python files, continued by the embedded pair of models: real acceptance.",
)
