"""Fields of EngineConfig as options, and the config that they make."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from specjax.cli.parser import number_of_bytes, whole_numbers
from specjax.config.engine import (
    ACTIVATION_DTYPES,
    GATES,
    KV_CACHE_DTYPES,
    NUMERICS,
    EngineConfig,
)

_WHOLE: dict[str, Any] = {"type": int, "metavar": "N"}
_OTHERS: dict[str, dict[str, Any]] = {
    "row_buckets": {"type": whole_numbers, "metavar": "N,N,..."},
    "kv_cache_dtype": {"choices": KV_CACHE_DTYPES},
    "numerics": {"choices": NUMERICS},
    "activation_dtype": {"choices": ACTIVATION_DTYPES},
    "logit_bytes": {"type": number_of_bytes, "metavar": "N"},
    "memory_bytes": {"type": number_of_bytes, "metavar": "N"},
    "batch_safety_margin": {"type": float, "metavar": "PERCENT"},
    "speculation_weight_fraction": {"type": float, "metavar": "F"},
    "gate": {"choices": GATES},
}


def add_options(parser: argparse.ArgumentParser, helps: Mapping[str, str], **defaults: Any) -> None:
    """Adds an option per field.

    Args:
      helps: by field.
      defaults: of fields, where they are not those of EngineConfig.
    """
    group = parser.add_argument_group("engine")
    for name, text in helps.items():
        default = defaults.get(name, getattr(EngineConfig(), name))
        group.add_argument(
            "--" + name.replace("_", "-"),
            default=default,
            help=text + ("" if default is None else " (default %(default)s)"),
            **_OTHERS.get(name, _WHOLE),
        )


def config_of(arguments: argparse.Namespace, names: Iterable[str]) -> EngineConfig:
    """Returns the config that the options of these fields describe."""
    return EngineConfig(**{name: getattr(arguments, name) for name in names})
