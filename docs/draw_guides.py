"""Draws the pictures of the guides, each with a dark twin: `python docs/draw_guides.py`."""

from __future__ import annotations

import json
from itertools import pairwise

from drawing import DOCS, SERIES, Pen, axes, legend, table, write

# A tree of the guide to verification, by the parent of each node; node 0 is the root.
PARENTS = (-1, 0, 0, 1, 2, 2)
NODES = ("def", " main", " run", "(", "(", "_")

# Per chip of `tpu:v5e:2x2`, in bytes: benchmarks/planning.md, Llama 3.1 8B with its EAGLE-3 head.
CHIP = 16e9
PARTS = (
    ("weights and state", 4_869_895_680, "blue"),
    ("largest step", 548_537_344, "orange"),
    ("code of all steps", 2_536_748_032, "purple"),
    ("1,704 pages of keys and values", 1_704 * 128 * 36_864, "green"),
)


def token(pen: Pen) -> str:
    """How a token travels: the stages, and one step of one row."""
    pen.text(24, 34, "how a token travels", bold=True, size=16)
    y, height = 64, 44
    pen.box(246, y - 22, 452, height + 74, edge="rule")
    pen.text(
        472,
        y + height + 40,
        "a burst: repeated on the device, up to 32 times",
        anchor="middle",
        colour="faint",
        size=13,
    )
    stages = (
        ("prompt", 24, "grey"),
        ("prefill", 136, "grey"),
        ("draft", 262, "orange"),
        ("verify", 372, "blue"),
        ("accept", 482, "blue"),
        ("commit", 592, "green"),
        ("output", 730, "grey"),
    )
    for index, (name, x, colour) in enumerate(stages):
        pen.box(x, y, 88, height, colour)
        pen.text(x + 44, y + 27, name, anchor="middle", colour="on", bold=True)
        if index:
            pen.line([(stages[index - 1][1] + 90, y + 22), (x - 2, y + 22)], tip=True)
    pen.line(
        [
            (636, y + height + 2),
            (636, y + height + 20),
            (306, y + height + 20),
            (306, y + height + 3),
        ],
        tip=True,
    )

    pen.text(24, 222, "one step of one row, K = 3", bold=True)
    rows = (
        (
            258,
            "the drafter proposes",
            (("    return", "grey"), (" self", "orange"), (".", "orange"), ("_name", "orange")),
        ),
        (
            306,
            "the target's own choice after each",
            (("", None), (" self", "blue"), (".", "blue"), ("_items", "blue"), ("", None)),
        ),
        (
            354,
            "kept",
            (("    return", "grey"), (" self", "green"), (".", "green"), ("_items", "blue")),
        ),
    )
    for y, what, tokens in rows:
        pen.text(24, y + 21, what, size=13, colour="faint")
        x = 262
        for text, colour in tokens:
            if colour:
                pen.box(x, y, 104, 32, colour)
                pen.text(x + 52, y + 21, text.strip(), anchor="middle", colour="on", mono=True)
            x += 112
    pen.text(718, 279, "✗ not what it chose", size=13, colour="orange")
    pen.text(718, 327, "one forward", size=13, colour="blue")
    pen.text(718, 375, "3 tokens, one step", size=13, colour="green")
    return pen.svg(
        880,
        410,
        "How a token travels: prompt, prefill, draft to commit in a loop, output",
    )


def tree(pen: Pen) -> str:
    """A draft tree, and which nodes each node sees."""
    places = ((170, 60), (90, 140), (250, 140), (90, 220), (200, 220), (300, 220))
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            (x0, y0), (x1, y1) = places[parent], places[node]
            pen.line([(x0, y0 + 19), (x1, y1 - 19)], width=2)
    path = (0, 2, 5)
    for node, (x, y) in enumerate(places):
        colour = "green" if node in path else "grey"
        pen.box(x - 42, y - 18, 84, 36, colour)
        pen.text(x, y + 5, f"{node} {NODES[node].strip()}", anchor="middle", colour="on", mono=True)
    pen.text(24, 276, "node 0 is the newest token of the text;", size=13, colour="faint")
    pen.text(24, 294, "green: the path to node 5", size=13, colour="faint")
    left, top, cell = 470, 60, 32
    pen.text(left + 3 * cell, 30, "sees node", anchor="middle", size=13, colour="faint")
    for column in range(len(PARENTS)):
        pen.text(
            left + column * cell + 14,
            top - 10,
            str(column),
            anchor="middle",
            size=13,
            colour="faint",
        )
    pen.text(left + 6 * cell + 20, top - 10, "ancestor_bits", size=13, colour="faint", mono=True)
    for node in range(len(PARENTS)):
        seen = ancestors(node)
        y = top + node * cell
        colour = "green" if node == path[-1] else "blue"
        pen.text(left - 14, y + 19, f"node {node}", anchor="end", size=13)
        for other in range(len(PARENTS)):
            pen.box(left + other * cell, y, 28, 28, colour if other in seen else "rule", radius=4)
        bits = "".join("1" if other in seen else "0" for other in reversed(range(len(PARENTS))))
        pen.text(left + 6 * cell + 20, y + 19, f"0b{bits}", mono=True)
    pen.text(left - 66, 276, "every node sees the whole text before it;", size=13, colour="faint")
    pen.text(left - 66, 294, "of the new nodes, itself and its ancestors", size=13, colour="faint")
    return pen.svg(820, 316, "A draft tree of six nodes, and the ancestor bits of each")


def ancestors(node: int) -> set[int]:
    """Returns a node and its ancestors."""
    return set() if node < 0 else {node} | ancestors(PARENTS[node])


def k_over_load(pen: Pen) -> str:
    """Speed beside plain decoding by rows and K, of recorded step costs."""
    record = json.loads((DOCS / "benchmarks/scheduling.json").read_text(encoding="utf-8"))
    steps = {
        (each["rows"], each["num_speculative_tokens"]): each["step_s"]
        for each in record["costs"]["embedded"]["steps"]
        if each["max_drafts"] is None and each["context_tokens"] == 64 * each["rows"]
    }
    rows = sorted({row for row, _ in steps})
    ks = sorted({k for _, k in steps})
    pen.text(24, 34, "times as fast as plain decoding, by how many rows decode", bold=True, size=16)
    legend(pen, 24, 62, [f"K = {k}" for k in ks])
    for panel, rate in enumerate((0.5, 0.8)):
        left, top, width, height = 60 + panel * 400, 110, 340, 220
        pen.text(left, top - 18, f"{rate:.0%} of drafts stand", size=13)
        at = axes(pen, left, top, width, height, most=2.0, ticks=(0, 0.5, 1, 1.5, 2))
        x_of = {row: left + 20 + i * (width - 40) / (len(rows) - 1) for i, row in enumerate(rows)}
        speed = {
            (row, k): sum(rate**j for j in range(k + 1)) * steps[row, 0] / steps[row, k]
            for row in rows
            for k in ks
        }
        for k, colour in zip(ks, SERIES, strict=False):
            pen.line([(x_of[row], at(speed[row, k])) for row in rows], colour, width=2)
        for row in rows:
            best = max(ks, key=lambda k: speed[row, k])
            pen.dot(x_of[row], at(speed[row, best]), 5, SERIES[ks.index(best)])
            pen.text(x_of[row], top + height + 20, str(row), anchor="middle", size=12)
        pen.text(
            left + width / 2, top + height + 40, "rows", anchor="middle", size=12, colour="faint"
        )
    pen.text(
        24,
        396,
        "Dot: the best K. Step costs of the earlier embedded pair on two CPU cores, 64 tokens "
        "a row: benchmarks/scheduling.json.",
        size=12,
        colour="faint",
    )
    return pen.svg(
        840,
        412,
        "Speed of each K beside plain decoding, by number of rows, at two acceptance rates",
    )


def acceptance(pen: Pen) -> str:
    """The share of steps that accept the j-th draft token, by drafter."""
    names = (
        "draft model or history, row by row (hybrid)",
        "draft model",
        "EAGLE-3",
        "DSpark",
        "n-gram",
    )
    header = "| drafter | mean acceptance length, K = 1"
    pen.text(24, 34, "share of steps that accept the first j draft tokens", bold=True, size=16)
    legend(pen, 24, 62, ["hybrid", *names[1:]])
    for panel, (which, temperature) in enumerate(((0, "0"), (1, "0.8"))):
        left, top, width, height = 66 + panel * 400, 110, 340, 220
        pen.text(left, top - 18, f"temperature {temperature}", size=13)
        at = axes(pen, left, top, width, height, most=100, ticks=(0, 25, 50, 75, 100), unit=" %")
        x_of = [left + 30 + place * (width - 60) / 3 for place in range(4)]
        cells = {line[0]: line for line in table("drafters", header, which)}
        for name, colour in zip(names, SERIES, strict=False):
            lengths = [1.0, *map(float, cells[name][1:5])]
            shares = [100 * (after - before) for before, after in pairwise(lengths)]
            pen.line(
                [(x, at(share)) for x, share in zip(x_of, shares, strict=True)], colour, width=2
            )
            for x, share in zip(x_of, shares, strict=True):
                pen.dot(x, at(share), 3.5, colour)
        for place, x in enumerate(x_of, start=1):
            pen.text(x, top + height + 20, f"j = {place}", anchor="middle", size=12)
    note = "Mean acceptance length with K = j less that with K = j - 1, embedded target, batch 1: "
    pen.text(24, 380, f"{note}benchmarks/drafters.md.", size=12, colour="faint")
    return pen.svg(840, 396, "Acceptance by position in the draft, of five drafters")


def memory(pen: Pen) -> str:
    """What one chip holds, of a plan."""
    left, width, y = 24, 792, 60
    pen.text(
        left,
        34,
        "16 GB of a TPU v5e: Llama 3.1 8B and its EAGLE-3 head over four chips",
        bold=True,
        size=16,
    )
    pen.box(left, y, width, 52, edge="rule")
    x = left
    for index, (name, num_bytes, colour) in enumerate(PARTS):
        length = width * num_bytes / CHIP
        pen.box(x, y, length, 52, colour)
        pen.text(
            x + length / 2,
            y + 32,
            f"{num_bytes / 1e9:.1f}" + " GB" * (length > 60),
            anchor="middle",
            colour="on",
            bold=True,
            size=14 if length > 60 else 12,
        )
        pen.box(left + (index % 2) * 400, 136 + (index // 2) * 26, 12, 12, colour, radius=3)
        pen.text(left + 20 + (index % 2) * 400, 147 + (index // 2) * 26, name)
        x += length
    pen.text(
        left,
        212,
        "A plan, not a measurement: 64 rows of at most 16,384 tokens, bfloat16; "
        "benchmarks/planning.md.",
        size=12,
        colour="faint",
    )
    return pen.svg(840, 230, "How a plan divides the memory of one chip")


DRAWN = {
    "pictures/token": token,
    "pictures/tree": tree,
    "pictures/k-over-load": k_over_load,
    "pictures/acceptance": acceptance,
    "pictures/memory": memory,
}

if __name__ == "__main__":
    write(DRAWN)
