"""The tables of a report's page: one function per stage, from results to lines of Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.cli.bench.device_report.sizes import NGRAM
from specjax.runtime.amounts import amount

Results = Mapping[str, Mapping[str, Any]]  # by the case's name
SYNTHETIC = "(synthetic acceptance)"


class Section(NamedTuple):
    """A part of the page.

    Attributes:
      note: a paragraph before the table.
    """

    title: str
    note: str
    table: Callable[[Results], list[str]]


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with so many significant digits, and thousands set apart; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # first: 999.6 is 1,000
    if 1e-3 <= abs(rounded) < 10**digits:
        return f"{rounded:#.{digits}g}".rstrip(".")
    return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.1e}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def device(results: Results) -> list[str]:
    rows = []
    for found in results.values():
        rows.append(("copy of a large array", f"{found['copy_bytes_per_s'] / 1e9:,.1f} GB/s"))
        if found["read_bytes_per_s"] is not None:
            rows.append(("reading a large array", f"{found['read_bytes_per_s'] / 1e9:,.1f} GB/s"))
        product = f"product of matrices, {found['product_dtype']}"
        rows.append((product, f"{found['flops_per_s'] / 1e12:,.2f} TFLOP/s"))
        if (published := found["published"]) is not None:
            rows.append(("memory, as published", f"{published['bytes_per_s'] / 1e9:,.0f} GB/s"))
            rows.append(
                ("products, as published", f"{published['flops_per_s'] / 1e12:,.0f} TFLOP/s")
            )
    return table(("", "speed"), rows)


def numerics(results: Results) -> list[str]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for found in results.values():
        groups[found["op"], found["implementation"]].append(found)
    rows = []
    for (op, implementation), all_of in groups.items():
        agree = sum(found["agrees"] for found in all_of)
        by_tolerance: dict[str, list[float | None]] = defaultdict(list)
        for found in all_of:
            by_tolerance[_allowed(found)].append(found["largest_error"])
        errors = "; ".join(
            f"{_largest(errors)}, {allowed}" for allowed, errors in by_tolerance.items()
        )
        rows.append((f"`{op}`", implementation, f"{agree} of {len(all_of)}", errors))
    return table(
        ("op", "implementation", "examples that agree", "largest error, and what is allowed"), rows
    )


def _allowed(found: Mapping[str, Any]) -> str:
    relative = found["relative_tolerance"]
    return f"{found['tolerance']:g}" + (f" + {relative:.2g} x" if relative else "")


def _largest(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return "not finite" if len(known) < len(errors) else number(max(known), 2)


def memory(results: Results) -> list[str]:
    heads = (
        "models",
        "rows",
        "context",
        "K",
        "step",
        "planned",
        "seen",
        "planned / seen",
        "seen by",
    )
    return table(
        heads,
        (
            (
                name,
                found["rows"],
                found["max_context"],
                found["k"],
                found["step"],
                amount(found["planned_bytes"]),
                "hidden by an earlier peak"
                if found["seen_bytes"] is None
                else amount(found["seen_bytes"]),
                number(found["planned_over_seen"]),
                found["seen_by"],
            )
            for name, found in results.items()
        ),
    )


def block_sizes(results: Results) -> list[str]:
    return table(
        ("shape", "queries", "keys at once", "by default", "us"),
        (
            (
                name,
                found["queries"],
                found["tile_tokens"],
                f"{found['default_queries']}, {found['default_tile_tokens']}",
                number(1e6 * found["seconds"]),
            )
            for name, found in results.items()
        ),
    )


def kernel_times(results: Results) -> list[str]:
    return table(
        ("call", "dtype", "us", "moved", "GB/s", "of the memory"),
        (
            (
                name,
                found["dtype"],
                number(1e6 * found["seconds"], 4),
                amount(found["moved_bytes"]),
                number(found["bytes_per_s"] / 1e9),
                percent(found["of_peak"]),
            )
            for name, found in results.items()
        ),
    )


def embedded_pair(results: Results) -> list[str]:
    heads = (
        *("texts", "mode", "tokens/s", "against K = 0", "mean acceptance length", "mean K"),
        "texts equal to K = 0",
    )
    return table(
        heads,
        (
            (
                found["num_prompts"],
                mode,
                number(each["tokens_per_s"], 4),
                number(each["speedup"]),
                number(each["mean_acceptance_length"]),
                number(each["mean_k"], 2),
                f"{each['texts_as_plain']} of {found['num_prompts']}",
            )
            for found in results.values()
            for mode, each in found["modes"].items()
        ),
    )


def models(results: Results) -> list[str]:
    rates = list(
        dict.fromkeys(
            rate
            for found in results.values()
            for step in found["steps"]
            for rate in step["synthetic_acceptance_tokens_per_s"]
        )
    )
    heads = ["models", "rows", "context", "K", "ms per step", "roofline, ms", "of the roofline"]
    heads += ["plain tokens/s", *[f"tokens/s at rate {rate} {SYNTHETIC}" for rate in rates]]
    rows = []
    for found in results.values():
        mark = "*" if found["shares_pages"] else ""
        for step in found["steps"]:
            synthetic = step["synthetic_acceptance_tokens_per_s"]
            rows.append(
                (
                    f"{found['target']} + {found['drafter']}",
                    f"{found['rows']}{mark}",
                    found["context"],
                    _depth(step),
                    number(1e3 * step["step_s"], 4),
                    number(1e3 * step["roofline_s"]),
                    percent(step["of_roofline"]),
                    number(step["plain_tokens_per_s"], 4),
                    *[number(synthetic.get(rate), 4) for rate in rates],
                )
            )
    lines = table(heads, rows)
    if any(found["shares_pages"] for found in results.values()):
        lines += ["", "\\* The pages of all rows do not fit: rows share some."]
    return lines


def _depth(step: Mapping[str, Any]) -> str:
    """Returns K, and how many tokens were drafted where they were fewer."""
    depth, drafted = step["num_speculative_tokens"], step["drafted_per_row"]
    return f"{depth}" if drafted == depth else f"{depth} ({drafted:.2f} drafted)"


def prefill(results: Results) -> list[str]:
    return table(
        ("model", "tokens", "pieces", "seconds", "tokens/s", "TFLOP/s", "of the products"),
        (
            (
                found["target"],
                found["tokens"],
                f"{found['pieces']} of {found['piece_tokens']}",
                number(found["seconds"]),
                number(found["tokens_per_s"], 4),
                number(found["flops_per_s"] / 1e12),
                percent(found["of_peak"]),
            )
            for found in results.values()
        ),
    )


SECTIONS = {
    "device": Section("The device", "", device),
    "numerics": Section(
        "Numerics of kernels",
        "Each example runs by the implementation and by the definition of the op.",
        numerics,
    ),
    "memory": Section(
        "Memory", "Bytes of steps beside weights and pages, by the plan and as seen.", memory
    ),
    "block sizes": Section(
        "Block sizes",
        "The fastest of the TPU kernel's block sizes. They are in `block_sizes.json` beside this "
        "page; copied over the file of that name in `pallas_kernels/tree_attention`, they are "
        "used.",
        block_sizes,
    ),
    "kernel times": Section(
        "Times of kernels",
        "Seconds of one call among many in one program; medians. Moved are the bytes that a call "
        "cannot avoid; above 100 % they lie in a cache.",
        kernel_times,
    ),
    "embedded pair": Section(
        "The embedded pair",
        "Held-out Python files, continued by the embedded pair of models: real acceptance.",
        embedded_pair,
    ),
    "models": Section(
        "Models with random weights",
        "Seconds of a step are measured. Random weights have no acceptance of their own: tokens "
        "per second of drafts follow from these seconds and an assumed rate for every draft "
        f"token, and are marked {SYNTHETIC}. Random text repeats nothing: beside {NGRAM}, rows "
        "draft K tokens of their text whether or not something matches.",
        models,
    ),
    "prefill": Section(
        "Prefill",
        "One prompt, in the largest pieces that the engine feeds. Above 100 % its products are "
        "faster than those of the square matrices that were timed.",
        prefill,
    ),
}
