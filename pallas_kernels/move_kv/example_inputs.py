"""Named cases of moving keys and values."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Slots to move between, in pages of two key heads of 128."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_layers: int = 2
    page_size: int = 16
    num_pages: int = 8
    dtype: str = "float32"


EXAMPLES = {
    "one": Example(sources=(20,), targets=(17,)),
    # Nodes 2, 5 and 6 of a row become 1, 2 and 3; the last is dropped.
    "path": Example(sources=(34, 37, 38, 3, 0), targets=(33, 34, 35, 3, 128)),
    "path_bfloat16": Example(
        sources=(34, 37, 38, 3, 0), targets=(33, 34, 35, 3, 128), dtype="bfloat16"
    ),
    "between_pages": Example(sources=(15, 16, 47), targets=(14, 15, 16), num_layers=3),
}


def make_inputs(example: Example, seed: int = 0) -> tuple[tuple[Any, ...], dict]:
    """Returns the arguments and the options of `move_kv` for this case."""
    rng = np.random.default_rng(seed)
    shape = layout.page_shape(example.num_pages, example.page_size, 2, 128)
    pages = [
        tuple(jnp.asarray(rng.standard_normal(shape), example.dtype) for _ in range(2))
        for _ in range(example.num_layers)
    ]
    slots = (jnp.asarray(each, jnp.int32) for each in (example.sources, example.targets))
    return (pages, *slots), {}
