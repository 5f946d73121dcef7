"""The files that save_pretrained writes: of models, and of every kind of head in every naming."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from frozen_steps import TARGETS, published_heads
from helpers import first_layer

import specjax


def contents() -> dict[str, bytes]:
    found = {}
    for name, model, options in saved():
        with tempfile.TemporaryDirectory() as folder:
            specjax.save_pretrained(model, folder, **options)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    data = path.read_bytes()
                    if path.name == "README.md":  # a card, which says who wrote it
                        data = data.replace(specjax.__version__.encode(), b"")
                    found[f"{name}: {path.relative_to(folder)}"] = data
    return found


def saved() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields what is saved: a name, a model or head, and options of save_pretrained."""
    for family, make in TARGETS.items():
        yield family, make(), {}
    llama = TARGETS["llama"]()
    yield "llama in int8", llama, {"stored": "int8"}
    yield "llama in bfloat16", in_bfloat16(llama), {}
    yield "llama in several files", llama, {"max_file_bytes": 20_000}
    yield "draft model", specjax.load_drafter(first_layer(llama), llama), {}
    yield "embedded target", specjax.load_model("demo"), {}
    heads = published_heads()
    for name, case in heads.items():
        for naming in case.namings:
            options = {"naming": naming, "target": case.target}
            yield f"{name} as {naming}", case.load(), options
    case = heads["EAGLE-3, plain"]
    yield "EAGLE-3, plain in int8", case.load(), {"stored": "int8", "target": case.target}


def in_bfloat16(model: specjax.Model) -> specjax.Model:
    narrow = lambda leaf: leaf.astype(jnp.bfloat16)
    return dataclasses.replace(model, params=jax.tree.map(narrow, model.params))
