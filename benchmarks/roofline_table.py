"""The page of recorded ratios, and the line of a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = """# Bytes of a step over those that must move

A step of decoding takes as long as its bytes take to cross the memory bus, if nothing else is in
the way. This page compares the bytes of compiled steps with the fewest that would do. Nothing here
ran on a chip: the programs are compiled for described TPUs, and their instructions are counted.

![Times the bytes that a step must move](roofline.svg#gh-light-mode-only)
![Times the bytes that a step must move](roofline-dark.svg#gh-dark-mode-only)

**Bytes** are those in main memory of one chip, in one step of a burst: instructions that run in
the branches of an ordinary step, where no row asks for penalties, filters or log-probabilities.
What stays in fast memory is free. The bytes of kernels that read pages follow from the context.

**The minimum** is: each weight once per forward (an embedding that is only looked up is free), the
keys and values of each row's context once, new keys and values once. A chain of K draft tokens, or
a tree of depth K, adds K forwards of the draft model. N-gram drafts add nothing. A head adds its
forwards, the weights that absorb a step, and the captured states of all nodes, written and read
once. Logits count as nothing. Weights and caches that are split count by their share of a chip.

**Operations** are launched per step, **collectives** are among them; their MB are what each chip
receives. Programs of few layers are compiled, and what a layer adds is added for all others. Where
layers of a draft model stay in fast memory from one forward to the next, all of its layers are
compiled: a ratio below 1 says that some of them are not read again.

Rows have 2,048 or 8,192 tokens each, weights and pages are bfloat16. Chains have K = 4; trees of
the draft model (Llama 3.2 1B, for Llama) have 8 nodes and depth 4, n-gram trees 9 nodes. The
EAGLE-3 head has the sizes of the published one for Llama 3.1 8B, and a chain of 4. The DFlash head
has five layers, the target's head, and a block of 8: 7 drafts, each drawn over a chip's own slice.
`Gemma-like-4B` has the sizes and windows of Gemma 3 4B. Llama 3.1 8B does not fit into one v5e;
its programs do, and are counted all the same.

What is above the minimum is mostly this: a row's last page is read whole; attention over a window
begins at a page, which costs the Gemma-like shape half a page in five of six layers; logits
are written and read, over chips read twice.

Record and check:

```sh
python -m benchmarks.roofline --record
python -m benchmarks.roofline --check --only "Qwen3-0.6B, plain, 32 rows, v5e x1"
```

A check fails where a ratio or the number of operations is 5 % above the recorded one, where there
are more collectives, or where a page array, a weight or the logits of a whole vocabulary are copied
or gathered and were not before. `.ci/run` checks a few.

"""


def page(record: Mapping[str, Any]) -> str:
    """Returns the page of a record."""
    lines = [
        "| step | ratio at 2k | at 8k | GB at 2k | minimum | operations | collectives | MB |",
        "|---|---" + "|---" * 6 + "|",
    ]
    lines += [_row(name, found) for name, found in record.items()]
    compilers = sorted({found["compiled_by"] for found in record.values()})
    flags = [f"- {name}: {flag}" for name, found in record.items() for flag in found["flags"]] or [
        "None in the recorded steps."
    ]
    return "\n".join(
        [
            _HEAD + "## Ratios\n",
            "Of the cases that the command knows, these are recorded:\n",
            *lines,
            f"\nCompiled by {'; '.join(compilers)}.",
            "\n## Copies of pages, weights and logits\n",
            *flags,
            "",
        ]
    )


def line(name: str, found: Mapping[str, Any]) -> str:
    """Returns the figures of a case in a line."""
    ratios = ", ".join(f"{one['ratio']:.3f}" for one in found["contexts"].values())
    return (
        f"{name}: {ratios}; {found['operations']} operations, {found['collectives']} collectives"
        + "".join(f"; {flag}" for flag in found["flags"])
    )


def _row(name: str, found: Mapping[str, Any]) -> str:
    near, far = found["contexts"].values()
    cells = [
        name,
        f"{near['ratio']:.3f}",
        f"{far['ratio']:.3f}",
        f"{near['bytes'] / 1e9:.2f}",
        f"{near['minimum'] / 1e9:.2f}",
        f"{found['operations']:,}",
        f"{found['collectives']}",
        f"{found['collective_bytes'] / 1e6:.1f}",
    ]
    return f"| {' | '.join(cells)} |"
