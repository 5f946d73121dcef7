"""Named cases of tree attention, shared by tests and benchmarks."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import layout

# Largest difference from the definition that tests allow, by dtype. float32: sums in another
# order. bfloat16: the result is rounded to 8 bits, of numbers below 4.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A step: what each row holds already, and what it adds."""

    lengths: tuple[int, ...]  # per row: tokens final before this step
    num_new: tuple[int, ...]  # per row: new tokens
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    first_key: int = 0
    parents: tuple[int, ...] | None = None  # one tree for all rows that have tokens
    # New nodes of the tree; the others were written before, as in a tree fed level by level.
    nodes: tuple[int, ...] | None = None
    causal: tuple[int, ...] = ()  # rows whose tokens are in order, beside rows of trees
    softcap: float | None = None
    has_sinks: bool = False
    padding: int = 0  # flat tokens past the last row
    most_new: int | None = None  # max_tokens_per_row; None: the most that any row has
    spare_pages: int = 3  # pages that no row holds
    dtype: str = "float32"
    # int8 or float8_e4m3fn with scales, or bfloat16 below float32; None: dtype
    page_dtype: str | None = None


EXAMPLES = {
    "decode": Example(lengths=(0, 5, 63, 64, 130), num_new=(1, 1, 1, 1, 1)),
    "chain": Example(lengths=(3, 60, 127, 200), num_new=(5, 5, 5, 5)),
    "ragged": Example(lengths=(9, 0, 62, 31), num_new=(3, 4, 0, 1), padding=3),
    "nothing_new": Example(lengths=(9, 0), num_new=(0, 0), padding=2),
    "prefill": Example(lengths=(0,), num_new=(100,)),
    "mixed": Example(lengths=(70, 12, 0), num_new=(1, 64, 90), padding=1),
    # Prompts that share a bucket: long beside short ones, an unused place, more than fit a piece.
    "shared_bucket": Example(
        lengths=(0, 70, 9, 0, 12), num_new=(130, 1, 20, 0, 64), padding=41, most_new=256
    ),
    "page_8": Example(lengths=(7, 8, 71), num_new=(2, 1, 9), page_size=8),
    "page_32_multi_query": Example(
        lengths=(31, 32), num_new=(4, 1), page_size=32, kv_heads=1, heads=4
    ),
    "page_64_all_heads": Example(
        lengths=(63, 64, 10), num_new=(2, 2, 2), page_size=64, kv_heads=4, heads=4
    ),
    "page_128": Example(lengths=(127, 300), num_new=(3, 1), page_size=128),
    "head_80": Example(lengths=(20, 90), num_new=(2, 1), head_dim=80),
    "head_128": Example(lengths=(20, 90), num_new=(2, 1), head_dim=128, kv_heads=2),
    "window": Example(lengths=(0, 5, 100, 200), num_new=(7, 1, 6, 2), window=20),
    "window_of_one": Example(lengths=(0, 70), num_new=(2, 2), window=1),
    "first_key": Example(lengths=(0, 1, 100, 200), num_new=(7, 1, 6, 2), first_key=1),
    "first_key_of_trees_and_prompts": Example(
        lengths=(13, 5, 70, 17),
        num_new=(6, 70, 6, 9),
        parents=(-1, 0, 0, 1, 2, 2),
        causal=(1, 3),
        first_key=18,
    ),
    "first_key_in_a_window": Example(
        lengths=(0, 5, 100, 30), num_new=(7, 1, 6, 2), window=20, first_key=17
    ),
    "tree": Example(lengths=(0, 13, 61, 128), num_new=(6, 6, 6, 0), parents=(-1, 0, 0, 1, 2, 2)),
    "level_of_a_tree": Example(
        lengths=(0, 13, 61, 128),
        num_new=(3, 3, 0, 3),
        parents=(-1, 0, 0, 1, 2, 2),
        nodes=(3, 4, 5),
    ),
    "tree_window": Example(
        lengths=(0, 13, 61, 128),
        num_new=(6, 6, 6, 0),
        parents=(-1, 0, 0, 1, 2, 2),
        window=34,
    ),
    "wide_tree": Example(
        lengths=(3, 100), num_new=(40, 40), parents=(-1, *(i // 3 for i in range(39)))
    ),
    "trees_and_prompts": Example(
        lengths=(13, 5, 100, 0),
        num_new=(6, 70, 6, 9),
        parents=(-1, 0, 0, 1, 2, 2),
        causal=(1, 3),
    ),
    "trees_and_prompts_window": Example(
        lengths=(13, 5, 100, 60),
        num_new=(6, 70, 6, 9),
        parents=(-1, 0, 0, 1, 2, 2),
        causal=(1, 3),
        window=40,
        padding=3,
    ),
    "tree_of_70_nodes": Example(
        lengths=(3, 100, 20),
        num_new=(70, 70, 0),
        parents=(-1, *((i - 1) // 2 for i in range(1, 70))),
    ),
    "prompt_beside_few": Example(lengths=(130, 0, 77, 5), num_new=(1, 130, 8, 9)),
    "head_256": Example(lengths=(20, 90), num_new=(9, 1), head_dim=256, kv_heads=2),
    "wide_group": Example(lengths=(20, 90), num_new=(70, 1), head_dim=128, heads=32, kv_heads=1),
    "softcap": Example(lengths=(0, 70), num_new=(5, 3), softcap=1.5),
    "sinks": Example(lengths=(0, 70), num_new=(5, 3), has_sinks=True),
    "sinks_tree_bfloat16": Example(
        lengths=(13, 100),
        num_new=(6, 6),
        parents=(-1, 0, 0, 1, 2, 2),
        has_sinks=True,
        softcap=20.0,
        dtype="bfloat16",
    ),
    "float32_over_bfloat16": Example(
        lengths=(0, 70, 31, 17), num_new=(5, 3, 1, 20), page_dtype="bfloat16"
    ),
    "int8": Example(lengths=(0, 70, 31), num_new=(5, 3, 1), page_size=32, page_dtype="int8"),
    "fp8_tree_bfloat16": Example(
        lengths=(13, 100, 0),
        num_new=(6, 6, 6),
        parents=(-1, 0, 0, 1, 2, 2),
        page_size=32,
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
    "bfloat16": Example(lengths=(5, 63, 130), num_new=(3, 1, 4), dtype="bfloat16"),
}


def make_inputs(example: Example, seed: int = 0) -> tuple[tuple[Array, ...], dict]:
    """Returns the arguments and the options of `tree_attention` for this case.

    Rows hold shuffled pages, with a spare one at the end; what was never written,
    in pages or in the padding of `q`, is NaN.
    """
    rng = np.random.default_rng(seed)
    size = example.page_size
    num_keys = np.asarray(example.num_new)
    if example.parents is not None and example.nodes is not None:
        num_keys = np.where(num_keys > 0, len(example.parents), 0)
    ends = np.add(example.lengths, num_keys)
    pages_held = -(-ends // size) + 1
    num_pages = int(pages_held.sum()) + example.spare_pages
    free = list(rng.permutation(num_pages))
    block_table = np.full((len(ends), pages_held.max() + 1), layout.NO_PAGE, np.int32)
    shape = layout.page_shape(num_pages, size, example.kv_heads, example.head_dim)
    num_slots = num_pages * size
    slots = np.full(num_slots, False)
    for row, (end, held) in enumerate(zip(ends, pages_held, strict=True)):
        block_table[row, :held] = [free.pop() for _ in range(held)]
        at = np.arange(end)
        slots[block_table[row, at // size] * size + at % size] = True
    written = slots.reshape(num_pages, 1, size, 1)
    k, v = (np.where(written, rng.standard_normal(shape), np.nan) for _ in range(2))
    num_tokens = sum(example.num_new)
    q = rng.standard_normal((num_tokens, example.heads, example.head_dim))
    q = np.pad(q, ((0, example.padding), (0, 0), (0, 0)), constant_values=np.nan)
    row_starts = np.cumsum([0, *example.num_new]).astype(np.int32)
    bits = None
    if example.parents is not None:
        tree = pack_ancestors(example.parents)
        if example.nodes is not None:
            tree = tree[list(example.nodes)]
        # Bits of causal rows are not read.
        nobody = np.full((max(example.num_new), tree.shape[1]), 0xF0F0F0F0, np.uint32)
        bits = [
            (nobody if row in example.causal else tree)[:count]
            for row, count in enumerate(example.num_new)
        ]
        bits = np.pad(np.concatenate(bits), ((0, example.padding), (0, 0)))
    is_causal = sinks = None
    if example.causal:
        is_causal = jnp.asarray(np.isin(np.arange(len(ends)), example.causal))
    if example.has_sinks:
        sinks = jnp.asarray(rng.normal(0.0, 2.0, example.heads), jnp.float32)
    page_dtype, scales = jnp.dtype(example.page_dtype or example.dtype), (None, None)
    if page_dtype.itemsize == 1:
        # So that some numbers are beyond the largest.
        scales = rng.uniform(2.0, 4.0, (2, example.kv_heads)) / layout.LARGEST[page_dtype]
        scales = [jnp.asarray(scale, jnp.float32) for scale in scales]
        k, v = (
            _quantized(array, scale, page_dtype)
            for array, scale in zip((k, v), scales, strict=True)
        )
    arguments = (
        jnp.asarray(q, example.dtype),
        *(jnp.asarray(array, page_dtype) for array in (k, v)),
        jnp.asarray(block_table),
        jnp.asarray(row_starts),
        jnp.asarray(example.lengths, jnp.int32),
    )
    options = dict(
        ancestor_bits=None if bits is None else jnp.asarray(bits),
        is_causal=is_causal,
        num_new_keys=(None if example.nodes is None else jnp.asarray(num_keys, jnp.int32)),
        sinks=sinks,
        k_scale=scales[0],
        v_scale=scales[1],
        scale=example.head_dim**-0.5,
        softcap=example.softcap,
        window=example.window,
        first_key=example.first_key,
        max_tokens_per_row=example.most_new or max(*example.num_new, 1),
    )
    return arguments, options


def widened(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns arguments of bfloat16 as float32, for a definition that does not round."""
    return tuple(
        array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array for array in arguments
    )


def _quantized(pages: np.ndarray, scale: Array, dtype: jnp.dtype) -> Array:
    """Returns pages [num_pages, kv_heads, page_size, head_dim] by their heads' scales."""
    tokens = np.moveaxis(pages, 1, 2)
    new = layout.quantize(jnp.asarray(tokens).reshape(-1, *tokens.shape[2:]), scale, dtype)
    return jnp.moveaxis(new.reshape(tokens.shape), 2, 1)


def pack_ancestors(parents: Sequence[int]) -> np.ndarray:
    """Returns u32[num_nodes, words]: bit j where j is the node or its ancestor."""
    bits = np.zeros((len(parents), -(-len(parents) // 32)), np.uint32)
    for node, parent in enumerate(parents):
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node // 32] |= np.uint32(1 << node % 32)
    return bits
