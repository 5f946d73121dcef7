"""Measures the cost of drawing tokens beside a step: `python -m benchmarks.noise`.

Choosing the tokens of 8 nodes by `seeded` verification, with and without filters,
against taking the argmax, next to a step of the 60M-parameter model: all in one
process, in turn, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import specjax
from specjax.cli.bench import bare, embedded, measuring
from specjax.cli.bench.quick import BURST_STEPS, Decoding
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.configs.models import SHAPES
from specjax.drafters.draws import draw_siblings
from specjax.models import llama
from specjax.models.dense import sequence_logits
from specjax.sampling import RowSampling, choose_tokens, first_argmax, row_values
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.types import SEEDED

NUM_TOKENS = 8
NUM_CALLS = 8
VOCABULARIES = (32_000, 128_000)
CONTEXTS = {1: 128, 8: 240}
COPY_PENALTY = 10.0

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(),
    "top_k=50": SamplingParams(top_k=50),
    "top_p=0.95": SamplingParams(top_p=0.95),
}
ALL_SCORES = "all scores"
NUM_SIBLINGS = 3
SIBLINGS = f"{NUM_SIBLINGS} siblings"


def embedded_logits() -> Array:
    """Returns the embedded model's logits, each after 32 tokens of a held-out file.

    f32[NUM_TOKENS, vocab].
    """
    model = specjax.load_model("demo")
    prompts = [model.tokenizer.encode(text)[:32] for text in embedded.held_out_texts()]
    token_ids = jnp.asarray(prompts[:NUM_TOKENS])
    logits = sequence_logits(model.params, model.config, token_ids)
    return logits[:, -1].astype(jnp.float32)


def widened(logits: Array, vocab: int) -> Array:
    """Returns f32[n, vocab]: copies of a smaller vocabulary, all but the first unlikely."""
    copies = -(-vocab // logits.shape[1])
    wide = jnp.tile(logits, (1, copies))[:, :vocab]
    is_copy = jnp.arange(vocab)[None, :] >= logits.shape[1]
    return wide - COPY_PENALTY * is_copy


def all_logits(vocab: int) -> dict[str, Array]:
    """Returns f32[NUM_TOKENS, vocab] by kind."""
    rng = np.random.default_rng(0)
    normal = jnp.asarray(rng.normal(0, 1, (NUM_TOKENS, vocab)), jnp.float32)
    return {
        "flat": normal,
        "peaked": 4 * normal,
        "embedded": widened(embedded_logits(), vocab),
    }


def row_sampling(params: SamplingParams) -> RowSampling:
    """Returns NUM_TOKENS rows with seeds of their own."""
    config = EngineConfig()
    rows = [
        row_values(params, prompt_length=1, eos_token_ids=(), seed=seed, engine_config=config)
        for seed in range(NUM_TOKENS)
    ]
    return RowSampling(**jax.tree.map(lambda *own: jnp.asarray(np.stack(own)), *rows))


def score_everything(
    logits: Array, sampling: RowSampling, row_ids: Array, positions: Array, _: Array
) -> Array:
    """Returns token ids i32[n] of `seeded` as it is defined: two logarithms per word."""
    keys = token_keys(sampling.seeds[row_ids], positions + 1, TARGET_TOKEN)

    def score(part: Array, token_ids: Array) -> Array:
        return part + gumbel_noise(keys, token_ids)

    return first_argmax(logits, score)[0]


def draw_three(
    logits: Array,
    sampling: RowSampling,
    row_ids: Array,
    positions: Array,
    history: Array,
) -> Array:
    """Returns i32[n, NUM_SIBLINGS], what a draft model proposes after each node under `seeded`."""
    return draw_siblings(
        logits,
        sampling,
        row_ids,
        positions,
        history,
        rules=jnp.full(NUM_TOKENS, SEEDED),
        keys=token_keys(sampling.seeds[row_ids], positions + 1, TARGET_TOKEN),
        count=NUM_SIBLINGS,
        keeps_probs=False,
    ).token_ids


def chooser(choose: Callable[..., Any], logits: Array, sampling: RowSampling) -> Callable[[], Any]:
    """Returns a function that draws NUM_CALLS times, each at another position."""
    compiled = jax.jit(choose)
    rows = jnp.arange(NUM_TOKENS)
    history = jnp.zeros((NUM_TOKENS, 64), jnp.int32)
    positions = [jnp.full(NUM_TOKENS, 10 + i, jnp.int32) for i in range(NUM_CALLS)]
    return lambda: [compiled(logits, sampling, rows, where, history) for where in positions][-1]


def contenders(vocab: int) -> dict[str, Callable[[], Any]]:
    """Returns the timed functions, by "kind of logits/sampling"."""
    found = {}
    for kind, logits in all_logits(vocab).items():
        for name, params in SAMPLINGS.items():
            sampling = row_sampling(params)
            found[f"{kind}/{name}"] = chooser(choose_tokens, logits, sampling)
        sampling = row_sampling(SAMPLINGS["seeded"])
        found[f"{kind}/{SIBLINGS}"] = chooser(draw_three, logits, sampling)
        found[f"{kind}/{ALL_SCORES}"] = chooser(score_everything, logits, sampling)
    return found


def steps() -> dict[str, Callable[[], Any]]:
    """Returns plain decoding of the 60M-parameter model by "step/number of rows"."""
    config = SHAPES["bench_60m"]
    params = llama.init(jax.random.key(0), config)
    return {
        f"step/{rows}": bare.forward_loop(
            params,
            config,
            Decoding(params, rows=rows, context=context).state,
            BURST_STEPS,
        )
        for rows, context in CONTEXTS.items()
    }


def run(rounds: int, vocab: int) -> list[dict[str, Any]]:
    """Returns one record per kind of logits and sampling.

    Each holds milliseconds of choosing, what they are more than greedy's, and that
    as a fraction of a step of 1 and of 8 rows.
    """
    choosing, step = contenders(vocab), steps()
    seconds = measuring.interleaved({**choosing, **step}, rounds)
    step_s = {name: [s / BURST_STEPS for s in seconds[name]] for name in step}
    records = []
    for contender in choosing:
        kind, name = contender.split("/")
        chosen_s, greedy_s = (
            [s / NUM_CALLS for s in seconds[key]] for key in (contender, f"{kind}/greedy")
        )
        more_s = [a - b for a, b in zip(chosen_s, greedy_s, strict=True)]
        record: dict[str, Any] = {
            "vocabulary": vocab,
            "logits": kind,
            "sampling": name,
            "ms": 1e3 * measuring.median(chosen_s),
            "more_ms": 1e3 * measuring.median(more_s),
        }
        for step_name, of_step in step_s.items():
            record[f"{step_name}_ms"] = 1e3 * measuring.median(of_step)
            record[f"of_{step_name}"] = measuring.ratio(more_s, of_step)
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as a Markdown table."""
    lines = [
        "| vocabulary | logits | sampling | ms | ms more than greedy | of a step, 1 row "
        "| of a step, 8 rows |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['vocabulary']} | {r['logits']} | {r['sampling']} | {r['ms']:.2f} "
        f"| {r['more_ms']:.2f} | {r['of_step/1']:.1%} | {r['of_step/8']:.1%} |"
        for r in records
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=9, help="default 9")
    options = parser.parse_args(argv)
    records = []
    for vocab in VOCABULARIES:
        print(f"measuring: vocabulary {vocab}", file=sys.stderr)
        records += run(options.rounds, vocab)
    if options.json:
        print(json.dumps({"environment": measuring.environment(), "records": records}, indent=2))
        return 0
    steps_ms = {rows: f"{records[0][f'step/{rows}_ms']:.1f}" for rows in CONTEXTS}
    print(f"{measuring.environment()}, milliseconds of a step by rows: {steps_ms}")
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
