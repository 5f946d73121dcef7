"""specjax inspect: what a folder holds, and whether it drafts for a target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from specjax.cli.parser import add_aux_layer_ids

# Names of figures whose text differs from their name with spaces.
_LABELS = {
    "kv_heads": "heads of keys and values",
    "kv_numbers_per_token": "keys and values per token",
    "stored_numbers_per_token": "other numbers stored per token",
    "drafts_tokens": "tokens that it drafts",
    "captures": "captured layers",
}
_SHARE = "of_target_tokens"  # shown beside what it is the whole of


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `specjax`."""
    parser = commands.add_parser(
        "inspect",
        help="what a folder of a model or a drafter holds, and whether it fits a target",
        description="Reads config.json, the tokenizer, and names and shapes of all tensors; no "
        "weights. An error says what does not fit.",
    )
    parser.set_defaults(run=run, command_parser=parser)
    parser.add_argument("folder", metavar="FOLDER", help="a folder or hub name")
    parser.add_argument(
        "--target", metavar="T", help="folder or hub name of the model that it would draft for"
    )
    add_aux_layer_ids(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    # Not before: this imports jax.
    from specjax.heads.inspection import inspect

    found = inspect(arguments.folder, arguments.target, aux_layer_ids=arguments.aux_layer_ids)
    print(json.dumps(found, indent=2) if arguments.json else render(found))
    return 0


def render(found: Mapping[str, Any]) -> str:
    """Returns what was found as lines of text, a name and a value each."""
    labels = {name: _LABELS.get(name, name.replace("_", " ")) for name in found if name != _SHARE}
    share_of = "drafts_tokens" if "drafts_tokens" in found else "vocabulary"
    width = max(map(len, labels.values())) + 2
    return "\n".join(
        f"{labels[name]:{width}}{line}" if not place else " " * width + line
        for name in labels
        for place, line in enumerate(_lines(name, found[name], found.get(_SHARE, 0), share_of))
    )


def _lines(name: str, value: Any, whole: int, share_of: str) -> list[str]:
    if name == "notes":
        return value
    if whole and name == share_of:
        return [f"{value:,} of the target's {whole:,}"]
    if isinstance(value, list):
        return [", ".join(map(str, value))]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if name == "stored_in_int8":
        return [f"{value:,} matrices, multiplied out when they are loaded"]
    if name.startswith("bytes"):
        return [f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"]
    return [f"{value:,}" if isinstance(value, int) else str(value)]
