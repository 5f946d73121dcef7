"""Writes the card of a head: README.md, with the facts that a hub and a reader ask for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from specjax.heads.loading import LoadedDrafter
from specjax.heads.namings.eagle_files import PARALLEL_EAGLE, drops_embedding
from specjax.heads.namings.head_writing import Kind, OfTarget
from specjax.runtime.version import __version__

# The first lines of a card that a save wrote.
CARD_START = "---\nlibrary_name: specjax\n"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FOLDER = "path/to/this/folder"
# The names of servers' methods, where they have one.
_OF_SGLANG = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK"}


def text_of(
    head: LoadedDrafter,
    kind: Kind,
    naming: str,
    target: OfTarget,
    card: Mapping[str, Any],
    *,
    stored: str | None = None,
) -> str:
    """Returns the card of a head.

    Args:
      naming: of its files.
      stored: "int8", which no server reads in heads; None: the dtype that the weights have.
      card: facts of its training, by name; mappings and lists in it are written out.
    """
    parts = [
        _front_matter(kind, target),
        f"# {_line(head.name) or kind.title}\n",
        f"For speculative decoding with {_line(target.name or 'its target')}: {kind.title}.\n",
        _table("| head | |", _facts(head, kind, naming, target, stored)),
    ]
    if card:
        parts += ["## Training\n", _table("| training | |", _rows(card))]
    return "\n".join([*parts, "## Use\n", *_uses(head, kind, naming, target, stored)])


def _front_matter(kind: Kind, target: OfTarget) -> str:
    lines = [CARD_START]
    if target.name is not None and HUB_NAME.fullmatch(target.name):
        lines.append(f"base_model: {target.name}\n")
    method = dict.fromkeys([kind.method, kind.title.lower().replace(" ", "-")])
    tags = ["speculative-decoding", "draft-model", *method]
    return "".join([*lines, "tags:\n", *(f"- {tag}\n" for tag in tags), "---\n"])


def _facts(
    head: LoadedDrafter, kind: Kind, naming: str, target: OfTarget, stored: str | None
) -> Iterator[tuple[str, str]]:
    spec: Any = head.spec
    config, most = spec.config, spec.most_drafts
    leaves = jax.tree.leaves(head.params)
    dtypes = sorted({str(leaf.dtype) for name, leaf in _named(head.params) if name != "target_ids"})
    yield "kind", kind.title
    yield "target", target.name or "not named"
    yield "reads", _captured(config.aux_layers, target)
    if config.vocab_size != config.target_vocab_size:
        yield "vocabulary", f"{config.vocab_size:,} of the target's {config.target_vocab_size:,}"
    else:
        yield "vocabulary", f"{config.vocab_size:,}"
    if most is not None:
        yield "drafts at most", f"{most} tokens"
    yield "parameters", f"{sum(leaf.size for leaf in leaves):,}"
    yield "bytes", f"{sum(leaf.nbytes for leaf in leaves):,} ({', '.join(dtypes)})"
    if stored is not None:
        yield "stored in", f"{stored}, with a scale per output of a matrix"
    yield "naming of the files", naming
    yield "written by", f"specjax {__version__}"


def _named(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            yield name, leaf


def _captured(layers: Sequence[int], target: OfTarget) -> str:
    text = f"the inputs of the target's layers {', '.join(map(str, layers))} (from 0)"
    depth = None if target.config is None else target.config.num_layers
    if depth in layers:
        text += f"; {depth} is what follows the last one, after the final norm"
    return text


def _rows(card: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values, those of a mapping under the name that it has."""
    for name, value in card.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{name}, ")
        else:
            yield f"{prefix}{name}", _shown(value)


def _shown(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(head: str, rows: Any) -> str:
    cell = lambda text: _line(text).replace("|", "\\|")  # a bar would end it
    lines = [f"| {cell(name)} | {cell(value)} |" for name, value in rows]
    return "\n".join([head, "|---|---|", *lines]) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _uses(
    head: LoadedDrafter, kind: Kind, naming: str, target: OfTarget, stored: str | None
) -> Iterator[str]:
    spec: Any = head.spec
    named = target.name or "path/to/target"
    name = shlex.quote(named)
    yield _code(
        "python",
        f"target = specjax.load_model({named!r})",
        f"drafter = specjax.load_drafter({_FOLDER!r}, target)",
        "specjax.generate(target, prompts, drafter=drafter)",
    )
    readers = kind.namings[naming].readers if stored is None else ()
    if any(reader.startswith("vLLM") for reader in readers):
        said = {
            "method": kind.method,
            "model": _FOLDER,
            "num_speculative_tokens": spec.most_drafts or 3,
        }
        if kind is PARALLEL_EAGLE:
            said["parallel_drafting"] = True
        yield _code("bash", f"vllm serve {name} --speculative-config '{json.dumps(said)}'")
    if "SGLang" in readers and not drops_embedding(spec.config):
        yield _code(
            "bash",
            f"python -m sglang.launch_server --model-path {name} \\",
            f"  --speculative-algorithm {_OF_SGLANG[kind.method]} \\",
            f"  --speculative-draft-model-path {_FOLDER}",
        )


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```\n"])
