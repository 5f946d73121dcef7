"""Step costs and acceptance kept from one run to the next, in the user's cache directory.

A file belongs to one device kind, models, dtypes, mesh and versions; any other gets
nothing from it. Shipped ones, in configs/coefficients/, are read where the user's own
is missing.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.decode.decoder import Decoder
from specjax.policy.ledger import Ledger
from specjax.policy.step_cost import StepCosts
from specjax.policy.survival import Survival
from specjax.runtime import compilation_cache, kept_files
from specjax.version import __version__

FORMAT = 2
MOST_CATCH_UP_S = 1e3  # per token, that means anything
MOST_BURST_S = 10.0  # beside its steps, that means anything
MOST_KINDS = 16  # of sampling, whose acceptance and ledger a file holds
# What reading a file that is damaged or hostile may raise, beside OSError.
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)
SHIPPED = "specjax.configs.coefficients"


def key_of(decoder: Decoder) -> dict[str, Any]:
    """Returns what step costs belong to, readable and as a digest of the rest.

    How many rows and tokens there is room for is no part of it: costs are by bucket and
    context.
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
    """Returns where the user's own file of a key lies; None where nothing is to be kept."""
    root = compilation_cache.user_cache_dir(os.environ)
    return None if root is None else root / "step_costs" / _name(key)


@dataclasses.dataclass
class Known:
    """What is known of a pair's speed: step costs, and acceptance and a ledger by kind of
    sampling."""

    costs: StepCosts
    acceptance: dict[str, dict[str, list[float]]] = dataclasses.field(
        default_factory=dict
    )  # Survival.to_record
    ledgers: dict[str, Ledger] = dataclasses.field(default_factory=dict)  # likewise

    def copy(self) -> Known:
        """Returns one that is added to apart from this."""
        ledgers = {kind: own.copy() for kind, own in self.ledgers.items()}
        return Known(self.costs.copy(), {**self.acceptance}, ledgers)

    def take(self, other: Known, kinds: Collection[str] = ()) -> None:
        """Takes over what another knows and this lacks, or knows less of.

        Args:
          kinds: of sampling, of which this has learned since the two were the same; their
            ledgers stay (Ledger.take).
        """
        self.costs.take(other.costs)
        for kind, record in other.acceptance.items():
            if kind not in kinds or kind not in self.acceptance:
                self.acceptance[kind] = record
        for kind, ledger in other.ledgers.items():
            if kind not in kinds or kind not in self.ledgers:
                self.ledgers[kind] = ledger.copy()

    def add(self, document: Mapping[str, Any]) -> None:
        """Takes in what `to_document` returned.

        Raises:
          ValueError, KeyError, TypeError: it means nothing; nothing is taken in.
        """
        kinds = dict(document.get("acceptance", {})), dict(document.get("ledgers", {}))
        if max(map(len, kinds)) > MOST_KINDS:
            raise ValueError(f"it knows more than {MOST_KINDS} kinds of sampling")
        catch_up_s = document["catch_up_s"]
        if catch_up_s is not None and not 0 <= catch_up_s < MOST_CATCH_UP_S:
            raise ValueError(f"catch_up_s={reprlib.repr(catch_up_s)} means nothing")
        burst_s = float(document.get("burst_s", 0.0))
        if not 0 <= burst_s < MOST_BURST_S:
            raise ValueError(f"burst_s={burst_s} means nothing")
        acceptance, ledgers = kinds
        for record in acceptance.values():
            Survival.of_record(record, 1)
        ledgers = {kind: Ledger.of_record(record) for kind, record in ledgers.items()}
        steps, bursts = document["steps"], document.get("bursts", [])
        StepCosts().add_records(steps, bursts=bursts)  # all of them, or none
        self.costs.add_records(steps, bursts=bursts)
        self.costs.catch_up_s = catch_up_s
        self.costs.start_burst(burst_s)
        self.acceptance |= acceptance
        self.ledgers |= ledgers

    def to_document(self) -> dict[str, Any]:
        """Returns it for JSON."""
        catch_up_s = self.costs.catch_up_s
        return {
            "catch_up_s": catch_up_s
            if catch_up_s is None
            else min(catch_up_s, MOST_CATCH_UP_S / 2),
            "burst_s": min(self.costs.burst_s, MOST_BURST_S / 2),
            "steps": self.costs.to_records(),
            "bursts": self.costs.to_bursts(),
            "acceptance": self.acceptance,
            "ledgers": {kind: own.to_record() for kind, own in self.ledgers.items()},
        }


def load(decoder: Decoder, known: Known) -> bool:
    """Adds what was kept of earlier runs; returns whether there was anything.

    A file that cannot be read is named in a warning, and counts as none.
    """
    return read(key_of(decoder), known)


def read(key: dict[str, Any], known: Known) -> bool:
    """Does what `load` does, from the file of a key."""
    own = path_of(key)
    for source in (own, resources.files(SHIPPED) / _name(key)):
        if source is None or not source.is_file():
            continue
        try:
            kept = kept_files.read_json(source)
            if kept["format"] != FORMAT or kept["key"] != key:
                continue
            known.add(kept)
        except (*UNREADABLE, OSError) as error:
            warnings.warn(
                f"step costs in {source} cannot be read and are left out: {error}; delete the "
                "file, or measure again with `specjax bench --calibrate`.",
                stacklevel=2,
            )
            continue
        return True
    return False


def save(decoder: Decoder, known: Known) -> Path | None:
    """Keeps what is known for later runs; returns the file, None where none may be written."""
    key = key_of(decoder)
    return write(key, path_of(key), known)


def write(key: dict[str, Any], path: Path | None, known: Known) -> Path | None:
    """Does what `save` does, to the file of a key."""
    if path is None or not known.costs.measured:
        return None
    document = {
        "format": FORMAT,
        "key": key,
        "date": datetime.date.today().isoformat(),
        "fit_error": round(known.costs.fit_error(), 4),
    } | known.to_document()
    return path if kept_files.write_json(path, document) else None


def _described(drafter: Any) -> str:
    """Returns what tells one drafter from another, in another process too."""
    kind = f"{type(drafter).__module__}.{type(drafter).__qualname__}"
    return f"{kind} {drafter!r}" if dataclasses.is_dataclass(drafter) else kind


def _name(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{digest[:24]}.json"
