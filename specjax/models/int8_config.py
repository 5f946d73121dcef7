"""Says in config.json that weights are stored in int8, and checks what other files say there.

The keys of `quantization_config` are those of compressed-tensors, whose format "int-quantized" has
an int8 tensor `X.weight` and the scales `X.weight_scale` in place of each matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from specjax.models.base import Json
from specjax.models.config_values import shown

KEY, OLD_KEY = "quantization_config", "compression_config"
INT8 = "int8"
METHOD, FORMAT = "compressed-tensors", "int-quantized"
# Of the same layout; the second is the first's name where activations are not quantised.
_FORMATS = FORMAT, "naive-quantized"
CHANNEL, TENSOR = "channel", "tensor"
_ACTIVATIONS = "input_activations", "output_activations"
_READ = (
    f"those of {METHOD} in format {FORMAT!r} are: symmetric weights of 8 bits and type int, with a "
    "scale per channel or per tensor. Or use an export in BF16, F16 or F32"
)


def strategies(raw: Json) -> set[str]:
    """Returns for what the stored weights have one scale, "channel" or "tensor".

    They are none where config.json, `raw`, speaks of no quantised weights.

    Raises:
      ValueError: the weights are quantised in another way.
    """
    said = _said(raw)
    if not said:
        return set()
    if not isinstance(said, dict):
        raise _refused("unknown", f"{KEY}={shown(said)}")
    method = said.get("quant_method")
    if method != METHOD:
        raise _refused(shown(method) if method else "unknown", f"quant_method={shown(method)}")
    if said.get("format") not in _FORMATS:
        raise _refused(METHOD, f"format={shown(said.get('format'))}")
    # Rotations of hidden states that the layers make as they run, and weights with left-out zeros.
    for name in ("transform_config", "sparsity_config"):
        inner = said.get(name) or {}
        if not isinstance(inner, dict) or inner.get("config_groups") or _is_sparse(inner):
            raise _refused(METHOD, f"{name}={shown(inner)}")
    return {_strategy(name, group) for name, group in _groups(said) if group.get("weights")}


def _said(raw: Json) -> Any:
    """Returns what a config.json says of quantised weights, by the key of today or its old one."""
    said, old = raw.get(KEY), raw.get(OLD_KEY)
    if said and old and said != old:
        raise ValueError(f"{KEY} and {OLD_KEY} differ; leave {OLD_KEY} out, which is its old name.")
    return said or old


def _is_sparse(said: Json) -> bool:
    return said.get("format", "dense") != "dense"


def _groups(said: Json) -> Iterator[tuple[str, Json]]:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(METHOD, f"config_groups={shown(groups)}")
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise _refused(METHOD, f"config_groups.{shown(name)}={shown(group)}")
        yield name, group


def _strategy(name: str, group: Json) -> str:
    """Returns for what the weights of a group have one scale."""
    weights = group["weights"]
    if group.get("format") not in (None, *_FORMATS) or not isinstance(weights, dict):
        raise _refused(METHOD, f"{shown(name)} with format={shown(group.get('format'))}")
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None and size in (None, -1):
        strategy = TENSOR if size is None else CHANNEL
    wanted: tuple[tuple[str, Any, tuple], ...] = (
        ("num_bits", weights.get("num_bits", 8), (8,)),
        ("type", weights.get("type", "int"), ("int",)),
        ("symmetric", weights.get("symmetric", True), (True,)),
        ("dynamic", weights.get("dynamic", False), (False,)),
        ("strategy", strategy, (CHANNEL, TENSOR)),
    )
    for key, value, allowed in wanted:
        # 1 would equal True, and a list is no key of anything.
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise _refused(METHOD, f"{shown(name)} with {key}={shown(value)}")
    assert isinstance(strategy, str)
    return strategy


def _refused(method: str, what: str) -> ValueError:
    return ValueError(
        f"{KEY} asks for quantised weights ({method}: {what}), which are not read; {_READ}."
    )


def warning_of(raw: Json, path: Path) -> str | None:
    """Returns what a config.json asks for beside weights in int8, None where that is nothing.

    Args:
      raw: the contents of `path`, as `strategies` takes them.
    """
    said = _said(raw)
    if not strategies(raw) or not isinstance(said, dict):
        return None
    named = [
        f"{name}.{key}" for name, group in _groups(said) for key in _ACTIVATIONS if group.get(key)
    ]
    named += ["kv_cache_scheme"] if said.get("kv_cache_scheme") else []
    if not named:
        return None
    return (
        f"{path} asks for few bits of what is computed, too ({', '.join(named)}). The weights are "
        "read, and what is computed keeps its full precision: results differ slightly from those "
        "of the runtime that the file was made for."
    )


def config_of(names: Collection[str]) -> Json:
    """Returns the `quantization_config` of files whose matrices are in int8.

    Args:
      names: of the tensors in int8.
    """
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": CHANNEL,
        "dynamic": False,
    }
    group = {
        # Names of torch's classes; embeddings have a scale per token.
        "targets": ["Linear", "Embedding"],
        # Said here, too: left out, weights-only groups would mean packed ones to some readers.
        "format": FORMAT,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    # A head that is the embedding has no weights of its own.
    ignored = [] if "lm_head.weight" in names else ["lm_head"]
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
