"""Step costs and acceptance kept from one run to the next, in the user's cache directory.

A file is read only for the device kind, models, dtypes, mesh and versions that wrote it.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.decode.decoder import Decoder
from specjax.decode.steps import Steps
from specjax.policy.ledger import Ledger
from specjax.policy.step_cost import StepCosts
from specjax.policy.survival import Survival
from specjax.runtime import compilation_cache, kept_files
from specjax.runtime.stack_level import of_the_caller
from specjax.runtime.version import __version__

FORMAT = 3
MOST_KINDS = 16  # most kinds of sampling in a file, each with its acceptance and ledger
# Exceptions that reading a damaged or hostile file may raise, beside OSError.
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def key_of(decoder: Steps) -> dict[str, Any]:
    """Returns the key of step costs: readable fields, and a digest of the models and settings.

    The capacity in rows and tokens is not part of it: bursts are stored with bucket and context.
    """
    device = jax.devices()[0]
    config = decoder.config
    mesh, sizes = config.mesh, config.sizes
    described = repr(
        (
            config.target,
            _described(config.drafter),
            tuple(map(int, config.rules)),
            config.max_drafts_per_shard,
            config.engine.numerics,
            config.engine.max_logprobs,
            config.engine.logit_bytes,
            *config.engine.kernels,
            *config.trusted_kernels,
            *([config.engine.kv_cache_dtype] if config.engine.kv_cache_dtype else []),
        )
    )
    kind = device.device_kind
    if device.platform == "cpu":
        kind = compilation_cache.processor()
    return {
        "device": kind,
        "num_devices": 1 if mesh is None else mesh.size,
        "mesh": {} if mesh is None else {str(k): v for k, v in mesh.shape.items()},
        "dtype": np.dtype(sizes.dtype).name,
        "page_size": sizes.page_size,
        "jax": jax.__version__,
        "specjax": __version__,
        "models": hashlib.sha256(described.encode()).hexdigest()[:16],
    }


def path_of(key: dict[str, Any]) -> Path | None:
    """Returns the path of the user's file for a key; None if there is no cache directory."""
    root = compilation_cache.user_cache_dir(os.environ)
    return None if root is None else root / "step_costs" / _name(key)


@dataclasses.dataclass
class Known:
    """Learned speed of a target and drafter: step costs; acceptance and ledger by kind of
    sampling."""

    costs: StepCosts
    acceptance: dict[str, dict[str, list[float]]] = dataclasses.field(
        default_factory=dict
    )  # Survival.to_record
    ledgers: dict[str, Ledger] = dataclasses.field(default_factory=dict)  # by kind of sampling

    def copy(self) -> Known:
        """Returns an independent copy."""
        ledgers = {kind: own.copy() for kind, own in self.ledgers.items()}
        return Known(self.costs.copy(), {**self.acceptance}, ledgers)

    def take(self, other: Known, kinds: Collection[str] = (), *, is_newer: bool = False) -> None:
        """Adds what another knows and this one lacks, or measured less of.

        Args:
          is_newer: as of StepCosts.take.
          kinds: kinds of sampling that this one learned about since the two were equal; it keeps
            their acceptance and ledgers (Ledger.take).
        """
        self.costs.take(other.costs, is_newer=is_newer)
        for kind, record in other.acceptance.items():
            if kind not in kinds or kind not in self.acceptance:
                self.acceptance[kind] = record
        for kind, ledger in other.ledgers.items():
            if kind not in kinds or kind not in self.ledgers:
                self.ledgers[kind] = ledger.copy()

    def add(self, document: Mapping[str, Any]) -> None:
        """Adds what `to_document` returned.

        Raises:
          ValueError, KeyError, TypeError: a field is missing or invalid; nothing was added.
        """
        kinds = dict(document.get("acceptance", {})), dict(document.get("ledgers", {}))
        if max(map(len, kinds)) > MOST_KINDS:
            raise ValueError(f"it knows more than {MOST_KINDS} kinds of sampling")
        acceptance, ledgers = kinds
        for record in acceptance.values():
            Survival.of_record(record, 1)
        ledgers = {kind: Ledger.of_record(record) for kind, record in ledgers.items()}
        self.costs.add_records(document["steps"])
        self.acceptance |= acceptance
        self.ledgers |= ledgers

    def to_document(self) -> dict[str, Any]:
        """Returns everything known, for JSON."""
        return {
            "steps": self.costs.to_records(),
            "acceptance": self.acceptance,
            "ledgers": {kind: own.to_record() for kind, own in self.ledgers.items()},
        }


def load(decoder: Decoder, known: Known) -> bool:
    """Adds the file of earlier runs to `known`; returns whether there was one.

    A file that cannot be read is skipped with a warning.
    """
    return read(key_of(decoder), known)


def read(key: dict[str, Any], known: Known) -> bool:
    """Like `load`, from the file of a key."""
    path = path_of(key)
    if path is None or not path.is_file():
        return False
    try:
        kept = kept_files.read_json(path)
        if kept["format"] != FORMAT or kept["key"] != key:
            return False
        known.add(kept)
    except (*UNREADABLE, OSError) as error:
        warnings.warn(
            f"step costs in {path} cannot be read and are left out: {error}; delete the "
            "file, or measure again with `specjax bench --calibrate`.",
            stacklevel=of_the_caller(),
        )
        return False
    return True


def save(decoder: Decoder, known: Known) -> Path | None:
    """Writes what is known for later runs; returns the file, or None if none was written."""
    key = key_of(decoder)
    return write(key, path_of(key), known)


def write(key: dict[str, Any], path: Path | None, known: Known) -> Path | None:
    """Like `save`, to the file of a key."""
    if path is None or not known.costs.measured:
        return None
    document = {
        "format": FORMAT,
        "key": key,
        "date": datetime.date.today().isoformat(),
    } | known.to_document()
    return path if kept_files.write_json(path, document) else None


def _described(drafter: Any) -> str:
    """Returns a string that identifies a drafter across processes."""
    kind = f"{type(drafter).__module__}.{type(drafter).__qualname__}"
    return f"{kind} {drafter!r}" if dataclasses.is_dataclass(drafter) else kind


def _name(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{digest[:24]}.json"
