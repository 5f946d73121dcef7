"""What the lossless tests share: prompts, plain decoding's output, and what a near-tie is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from helpers import race_scores

import specjax
from specjax.api.requests import derive_seed
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.sampling import RowSampling, process_logits, row_values
from specjax.sampling.seeded_noise import TARGET_TOKEN, token_keys

# A row may differ from where rounding decides: two best scores this close, or a
# token this close to a filter's threshold. Matmuls of different shapes round differently.
SCORE_TIE, THRESHOLD_TIE = 1e-4, 1e-5
MOST_TIES = 1e-3  # of all rows

NUM_PROMPTS = 50
MAX_TOKENS = 16

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.05,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={10: 1.5, 200: -2.0},
    max_tokens=MAX_TOKENS,
    seed=7,
)
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    "everything": EVERYTHING,
}


@functools.cache
def target():
    """Returns the embedded model."""
    return specjax.load_model("demo")


@functools.cache
def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    """Returns token ids from the standard library's source, of 5 to 60 tokens."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = ["argparse.py", "heapq.py", "json/decoder.py", "random.py", "textwrap.py"]
    cut = []
    for index in range(count):
        text = (folder / files[index % 5]).read_text()
        ids = target().tokenizer.encode(text)
        start = 97 * index % (len(ids) - 60)
        cut.append(ids[start : start + 5 + (11 * index) % 56])
    return cut


@functools.cache
def plain(sampling: str):
    """Returns plain decoding's output: what everything is held against."""
    return specjax.generate(target(), prompts(), sampling=SAMPLING[sampling])


def is_tie(completion, expected_ids) -> bool:
    """Whether rounding decides the first token in which a completion differs."""
    differs = next(
        i
        for i, (a, b) in enumerate(itertools.zip_longest(completion.token_ids, expected_ids))
        if a != b
    )
    params = SAMPLING["everything" if completion_is_sampled(completion) else "greedy"].filled({})
    prompt = completion.prompt_token_ids
    text = [*prompt, *expected_ids[:differs]]
    config = target().config
    architecture = family_of(config)

    def attend(layer, q, k, v, cache):
        return dense_causal_attention(q, k, v, scale=config.scale), cache

    ids = jnp.asarray(text)[None]
    hidden, _ = architecture.forward(
        target().params,
        config,
        ids,
        jnp.arange(len(text))[None],
        attend,
        (None,) * config.num_layers,
    )
    logits = architecture.logits(target().params, config, hidden[0, -1:])
    scores = []
    for nudge in (-THRESHOLD_TIE, 0.0, THRESHOLD_TIE):
        nudged = dataclasses.replace(params, top_p=min(params.top_p + nudge, 1.0))
        values = row_values(
            nudged,
            prompt_length=len(prompt),
            eos_token_ids=config.eos_token_ids,
            seed=derive_seed(completion.seed, completion.sample_index),
            engine_config=EngineConfig(),
        )
        row = RowSampling(**{name: jnp.asarray(value)[None] for name, value in values.items()})
        place = jnp.array([len(text) - 1])
        processed = process_logits(
            logits, row, jnp.zeros(1, jnp.int32), place, jnp.asarray(text)[None]
        )
        if params.temperature > 0:
            keys = token_keys(row.seeds, place + 1, TARGET_TOKEN)
            processed = race_scores(processed, keys)
        scores.append(np.asarray(processed[0]))
    best = np.sort(scores[1])[-2:]
    choices = {int(np.argmax(score)) for score in scores}
    return best[1] - best[0] < SCORE_TIE or len(choices) > 1


def completion_is_sampled(completion):
    return completion.seed == EVERYTHING.seed


def hold_against(actual, expected) -> int:
    """Asserts that completions differ at near-ties only; returns how many do."""
    differing = [
        (ours, theirs.token_ids)
        for ours, theirs in zip(actual, expected)
        if ours.token_ids != theirs.token_ids
    ]
    for ours, theirs in differing:
        assert is_tie(ours, theirs), (ours.prompt_index, ours.token_ids, theirs)
    return len(differing)
