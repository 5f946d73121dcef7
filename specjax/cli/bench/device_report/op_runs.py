"""Each op on its example inputs, by an implementation and by the definition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.move_kv import example_inputs as moving
from pallas_kernels.move_kv import move_kv
from pallas_kernels.ngram_match import example_inputs as matching
from pallas_kernels.ngram_match import ngram_match
from pallas_kernels.path_attention import example_inputs as paths
from pallas_kernels.path_attention import path_attention
from pallas_kernels.seeded_sample import example_inputs as sampling
from pallas_kernels.seeded_sample import seeded_sample
from pallas_kernels.tree_attention import example_inputs as trees
from pallas_kernels.tree_attention import self_test, tree_attention
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from pallas_kernels.write_kv import example_inputs as writing
from pallas_kernels.write_kv import write_kv

Arrays = list[np.ndarray]
REFERENCE = "reference"
LOGPROB_TOLERANCE = 1e-5  # sums of thousands of float32 numbers, in different orders
# Rows of a TPU's tile by the dtype of pages; a page takes whole ones.
_SUBLANES = {"float32": 8, "bfloat16": 16, "int8": 32, "float8_e4m3fn": 32}


class OpRun(NamedTuple):
    """An op and its examples.

    Attributes:
      examples: names of examples by implementation.
      both: (implementation, example) to what it returns and what the definition does.
      tolerance: (implementation, example) to the absolute and relative difference allowed.
    """

    examples: Callable[[str], list[str]]
    both: Callable[[str, str], tuple[Arrays, Arrays]]
    tolerance: Callable[[str, str], tuple[float, float]]


def _as_numpy(tree: Any) -> Arrays:
    return [np.asarray(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]


def _attention_example(implementation: str, name: str) -> trees.Example:
    """Returns an example of attention, for a kernel of a TPU in pages of whole tiles.

    The kernel of a GPU, which has bfloat16 alone, has the cases of its self-test too.
    """
    if implementation == self_test.KERNEL:
        own = self_test.CASES.get(name)
        return own or dataclasses.replace(trees.EXAMPLES[name], dtype="bfloat16")
    example = trees.EXAMPLES[name]
    if not implementation.startswith("mosaic_tpu"):
        return example
    page_size = max(example.page_size, _SUBLANES[example.page_dtype or example.dtype])
    return dataclasses.replace(example, head_dim=max(example.head_dim, 128), page_size=page_size)


def _attention_names(implementation: str) -> list[str]:
    names = list(trees.EXAMPLES)
    return [*self_test.CASES, *names] if implementation == self_test.KERNEL else names


def _attention(implementation: str, name: str) -> tuple[Arrays, Arrays]:
    example = _attention_example(implementation, name)
    arguments, options = trees.make_inputs(example)
    num_tokens = sum(example.num_new)
    if implementation in ("mosaic_tpu", "mosaic_gpu", "xla"):
        op = functools.partial(tree_attention, **options, implementation=implementation)
    else:
        interpret = pltpu.InterpretParams()
        op = functools.partial(tree_attention_mosaic_tpu, **options, interpret=interpret)
    exact = functools.partial(tree_attention, **options, implementation=REFERENCE)
    found, expected = jax.jit(op)(*arguments), jax.jit(exact)(*trees.widened(arguments))
    return _as_numpy(found[:num_tokens]), _as_numpy(expected[:num_tokens])


def _attention_tolerance(implementation: str, name: str) -> tuple[float, float]:
    if implementation == self_test.KERNEL:
        return self_test.ABSOLUTE, self_test.RELATIVE
    return trees.TOLERANCE[_attention_example(implementation, name).dtype], 0.0


def _paths(implementation: str, name: str) -> tuple[Arrays, Arrays]:
    example = trees.EXAMPLES[name]
    arguments, options = trees.make_inputs(example)
    kept = {key: options[key] for key in ("scale", "softcap", "window", "sinks")}
    num_tokens = sum(example.num_new)

    def run(arguments: tuple, by: str) -> Arrays:
        q, k_pages, v_pages, table, _, lengths = arguments
        row_ids, positions, offsets = paths.by_token(example, q.shape[0])
        op = functools.partial(path_attention, path_offsets=offsets, implementation=by, **kept)
        out = jax.jit(op)(q, k_pages, v_pages, table, row_ids, lengths, positions)
        return _as_numpy(out[:num_tokens])

    return run(arguments, implementation), run(trees.widened(arguments), REFERENCE)


def _simple(
    op: Callable[..., Any], module: Any, implementation: str, name: str
) -> tuple[Arrays, Arrays]:
    """Runs an op whose inputs are arguments and options of its module's make_inputs."""
    arguments, options = module.make_inputs(module.EXAMPLES[name])

    def run(by: str) -> Arrays:
        found = jax.jit(functools.partial(op, implementation=by, **options))(*arguments)
        # A token, too, is right or wrong: any difference is above the tolerance.
        return _as_numpy(found)

    return run(implementation), run(REFERENCE)


def _of_module(op: Callable[..., Any], module: Any, tolerance: float = 0.0) -> OpRun:
    return OpRun(
        lambda implementation: list(module.EXAMPLES),
        functools.partial(_simple, op, module),
        lambda implementation, example: (tolerance, 0.0),
    )


_PATHS = [name for name, example in trees.EXAMPLES.items() if paths.is_covered(example)]
RUNS: Mapping[str, OpRun] = {
    "tree_attention": OpRun(_attention_names, _attention, _attention_tolerance),
    "path_attention": OpRun(lambda implementation: _PATHS, _paths, _attention_tolerance),
    "write_kv": _of_module(write_kv, writing),
    "move_kv": _of_module(move_kv, moving),
    "ngram_match": _of_module(ngram_match, matching),
    "seeded_sample": _of_module(seeded_sample, sampling, LOGPROB_TOLERANCE),
}
