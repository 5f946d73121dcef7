"""Named cases of writing keys and values."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Tokens of a step, and the pages that they are written to."""

    num_tokens: int
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    num_pages: int = 8
    dtype: str = "float32"
    has_dropped: bool = False  # one token has no slot
    in_order: bool = False  # slots follow each other, as those of a prompt


EXAMPLES = {
    "one_token": Example(num_tokens=1),
    "some_tokens": Example(num_tokens=7, has_dropped=True),
    "prompt": Example(num_tokens=40, in_order=True),
    "bfloat16": Example(num_tokens=40, dtype="bfloat16", has_dropped=True),
    "pages_of_128": Example(num_tokens=9, page_size=128, num_pages=4, dtype="bfloat16"),
}


def make_inputs(example: Example, seed: int = 0) -> tuple[tuple[Any, ...], dict]:
    """Returns the arguments and the options of `write_kv` for this case."""
    rng = np.random.default_rng(seed)
    shape = layout.page_shape(
        example.num_pages, example.page_size, example.kv_heads, example.head_dim
    )
    new = example.num_tokens, example.kv_heads, example.head_dim
    arrays = [jnp.asarray(rng.standard_normal(s), example.dtype) for s in (shape, shape, new, new)]
    num_slots = example.num_pages * example.page_size
    slots = rng.permutation(num_slots)[: example.num_tokens]
    if example.in_order:
        slots = 5 + np.arange(example.num_tokens)
    if example.has_dropped:
        slots[example.num_tokens // 2] = num_slots
    return (*arrays, jnp.asarray(slots, jnp.int32)), {}
