"""Named cases of sampling with seeded noise, shared by tests and benchmarks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

INF, NAN = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A batch: what its rows are drawn with."""

    temperature: tuple[float, ...]  # per row
    vocab: int
    thresholds: tuple[float, ...] | None = None  # per row
    has_bias: bool = False
    has_ties: bool = False  # logits are whole numbers
    special: tuple[tuple[int, int, float], ...] = ()  # row, token id, logit
    empty: tuple[int, ...] = ()  # rows of -inf
    dtype: str = "float32"


EXAMPLES = {
    "one_row": Example(temperature=(0.8,), vocab=1000),
    "one_token": Example(temperature=(0.0, 1.0), vocab=1),
    "few_tokens": Example(temperature=(0.0, 1.0, 0.5), vocab=5),
    "greedy": Example(temperature=(0.0,) * 3, vocab=700),
    "greedy_tiles": Example(temperature=(0.0,) * 3, vocab=35_000),
    "mixed": Example(temperature=(0.0, 0.3, 1.0, 2.0, 0.0), vocab=1500),
    "cold": Example(temperature=(1e-3, 1e-30), vocab=640),
    "two_blocks": Example(temperature=(0.0, 1.0, 0.7) * 4, vocab=300),
    "greedy_block_first": Example(temperature=(*[0.0] * 8, 1.0), vocab=513),
    "random_block_first": Example(temperature=(*[0.9] * 8, *[0.0] * 8), vocab=512),
    "whole_tile": Example(temperature=(1.0,) * 8, vocab=16_384),
    "past_a_tile": Example(temperature=(1.0, 0.0) * 9, vocab=17_001),
    "ties": Example(temperature=(0.0,) * 8, vocab=3000, has_ties=True),
    "bias": Example(temperature=(1.0, 0.0, 0.5), vocab=2100, has_bias=True),
    "thresholds": Example(temperature=(1.0, 0.6, 0.0), vocab=900, thresholds=(-2.0, -0.5, 3.0)),
    "one_left": Example(temperature=(1.0, 0.2), vocab=1100, thresholds=(0.0, 0.0)),
    "nothing_left": Example(temperature=(1.0, 0.0, 1.0), vocab=130, thresholds=(0.1, INF, -INF)),
    "bias_and_thresholds": Example(
        temperature=(1.0,) * 9, vocab=1300, thresholds=(-1.0,) * 9, has_bias=True
    ),
    "not_finite": Example(
        temperature=(1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0),
        vocab=1200,
        special=(
            *((0, 700, NAN), (1, 1199, NAN), (2, 0, INF), (3, 1100, INF)),
            *((6, 5, -INF), (7, 6, -INF)),
        ),
        empty=(4, 5),
    ),
    # Rivals whose ids are equal modulo every power of two up to 512: a lane of a kernel
    # sees both, and the one with the higher bound of its noise is not always the better.
    "rivals": Example(
        temperature=(1.0,) * 40,
        vocab=1024,
        special=tuple(
            (row, *rival) for row in range(40) for rival in ((7, 30.0), (519, 29.0 + row % 8 / 4))
        ),
    ),
    "far_rivals": Example(
        temperature=(1.0, 0.0) * 4,
        vocab=17_000,
        special=tuple((row, 7 + 512 * rival, 30.0) for row in range(8) for rival in (0, 1, 32, 33)),
    ),
    "bfloat16": Example(temperature=(1.0, 0.0) * 5, vocab=1400, dtype="bfloat16"),
    "bfloat16_bias": Example(temperature=(0.5, 1.0), vocab=1025, has_bias=True, dtype="bfloat16"),
}


def make_inputs(example: Example, seed: int = 0) -> tuple[tuple[Array, ...], dict]:
    """Returns the arguments and the options of `seeded_sample` for this case.

    A bias forbids a third of the tokens, among them the one whose logit is largest.
    """
    rng = np.random.default_rng(seed)
    shape = len(example.temperature), example.vocab
    logits = rng.normal(0.0, 3.0, shape)
    if example.has_ties:
        logits = np.round(logits)
    for row, token_id, value in example.special:
        logits[row, token_id] = value
    logits[list(example.empty)] = -INF
    bias = thresholds = None
    if example.has_bias:
        bias = np.where(rng.random(shape) < 1 / 3, -INF, rng.normal(0.0, 1.0, shape))
        bias[np.arange(shape[0]), logits.argmax(axis=1)] = -INF
        bias = jnp.asarray(bias, jnp.float32)
    if example.thresholds is not None:
        thresholds = jnp.asarray(example.thresholds, jnp.float32)
    arguments = (
        jnp.asarray(logits, example.dtype),
        jnp.asarray(rng.integers(0, 2**32, (shape[0], 2)), jnp.uint32),
        jnp.asarray(example.temperature, jnp.float32),
    )
    return arguments, {"bias": bias, "thresholds": thresholds}
