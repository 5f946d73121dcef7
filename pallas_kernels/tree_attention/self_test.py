"""Whether a kernel of tree attention agrees with its definition on the device at hand.

    python -m pallas_kernels.tree_attention.self_test

prints one JSON document, {"fault": null} or what is wrong. A process of its own runs it: a kernel
that writes where it must not, or that waits for ever, then ends or blocks no other.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.example_inputs import Example, make_inputs, widened

Program = Callable[..., jax.Array]

KERNEL = "mosaic_gpu"
# What the kernel does in different ways: one matrix of queries and several, one warpgroup and
# two, masks by order, bits and window, parts of the context, and more tiles than buffers.
CASES = {
    "decoding": Example(
        lengths=(0, 5, 63, 64, 700), num_new=(1,) * 5, kv_heads=2, head_dim=128, dtype="bfloat16"
    ),
    "chains": Example(lengths=(3, 60, 127, 200), num_new=(5, 5, 0, 5), padding=2, dtype="bfloat16"),
    "trees of two words": Example(
        lengths=(3, 100),
        num_new=(40, 40),
        heads=4,
        head_dim=128,
        parents=(-1, *(node // 3 for node in range(39))),
        dtype="bfloat16",
    ),
    "trees and prompts, window": Example(
        lengths=(13, 5, 100, 60),
        num_new=(6, 70, 6, 9),
        kv_heads=2,
        head_dim=128,
        parents=(-1, 0, 0, 1, 2, 2),
        causal=(1, 3),
        window=40,
        padding=3,
        dtype="bfloat16",
    ),
    "prompt": Example(lengths=(960, 10), num_new=(200, 33), kv_heads=1, dtype="bfloat16"),
    "sinks and softcap": Example(
        lengths=(13, 100), num_new=(6, 6), has_sinks=True, softcap=20.0, dtype="bfloat16"
    ),
    "heads of 256": Example(
        lengths=(20, 90), num_new=(9, 1), head_dim=256, kv_heads=4, dtype="bfloat16"
    ),
    "pages of 128": Example(
        lengths=(127, 300), num_new=(3, 1), page_size=128, head_dim=128, dtype="bfloat16"
    ),
}
# Weights are rounded to 8 bits, a part in 512 each, and results again.
RELATIVE, ABSOLUTE = 2**-8, 8e-3


def find_fault(implementation: str = KERNEL) -> str | None:
    """Returns what is wrong with an implementation on jax's default device; None if nothing is.

    Cases compile at the same time, each in a thread, and run one after another.
    """
    with ThreadPoolExecutor(len(CASES)) as threads:
        compiled = {
            name: threads.submit(_compiled, example, implementation)
            for name, example in CASES.items()
        }
    for name, example in CASES.items():
        try:
            fault = _fault_of(example, *compiled[name].result())
        except Exception as error:  # of jax, Mosaic and the driver, of many kinds
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        if fault is not None:
            return f"{name}: {fault}"
    return None


def _compiled(example: Example, implementation: str) -> tuple[Program, Program]:
    """Returns an implementation, and the definition for arguments that are `widened`."""
    arguments, options = make_inputs(example)
    run = functools.partial(tree_attention, **options, implementation=implementation)
    exact = functools.partial(tree_attention, **options, implementation="reference")
    return (
        jax.jit(run).lower(*arguments).compile(),
        jax.jit(exact).lower(*widened(arguments)).compile(),
    )


def _fault_of(example: Example, run: Program, exact: Program) -> str | None:
    arguments, _ = make_inputs(example)
    num_tokens = sum(example.num_new)
    first, second = (np.asarray(run(*arguments), np.float32)[:num_tokens] for _ in range(2))
    expected = np.asarray(exact(*widened(arguments)))[:num_tokens]
    is_off = ~np.isclose(first, expected, RELATIVE, ABSOLUTE)  # NaN is never close
    if is_off.any():
        largest = np.abs(first - expected).max()
        return (
            f"{is_off.sum():,} of {is_off.size:,} numbers are not those of the reference; the "
            f"largest difference is {largest:.3g}, and {ABSOLUTE:g} is allowed"
        )
    if not np.array_equal(first, second):
        return "two runs gave different bits"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    del argv
    print(json.dumps({"fault": find_fault()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
