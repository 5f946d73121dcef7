"""Reads and checks values of a config.json, for the parse functions of families.

A value that is invalid for its key raises ValueError; a missing key without a default raises
KeyError.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any, TypeGuard

from specjax.models import two_places
from specjax.models.base import Json, RopeConfig

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1  # largest dimension, and so largest token id or position


def rope(
    raw: Json,
    max_positions: int,
    layer_type: str | None = None,
    *,
    default_theta: float = 10000.0,
) -> RopeConfig:
    """Returns the rope of `rope_scaling` and `rope_theta` (4.x), or of `rope_parameters` (5.x).

    Args:
      max_positions: for the forms that fall back on it.
      layer_type: "sliding_attention" or "full_attention": whose rope to read where
        `rope_parameters` has an object per layer type, as Gemma 3 has. Without such objects the
        one rope holds for every type. None: a family whose layers all rotate alike.
      default_theta: used if the config has no rope_theta.
    """
    scaling = two_places.rope_object(raw, layer_type)
    kind = two_places.rope_type(scaling)
    # Frequencies are powers of theta, and yarn divides by its logarithm.
    theta = number(scaling, two_places.THETA, default_theta, above=1.0)
    original = size(scaling, two_places.ORIGINAL, max_positions)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=number(scaling, "factor"))
    if kind == "llama3":
        low = number(scaling, "low_freq_factor")
        high = number(scaling, "high_freq_factor")
        if low >= high:
            raise ValueError(
                f"low_freq_factor={low} must be below high_freq_factor={high}; correct the config."
            )
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=number(scaling, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        if "factor" not in scaling:  # it may be null, not absent
            raise KeyError("factor")
        factor = number(scaling, "factor", max_positions / original)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=number(scaling, "beta_fast", 32.0),
            beta_slow=number(scaling, "beta_slow", 1.0),
            truncate=flag(scaling, "truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    hint = (
        " Its frequencies depend on the current length, which would change keys that "
        "are already cached."
        if kind == "dynamic"
        else ""
    )
    raise ValueError(
        f"rope type {kind!r} is not supported; expected default, linear, llama3 or yarn.{hint}"
    )


def rope_context(raw: Json, own: RopeConfig, max_positions: int) -> int:
    """Returns the most tokens of a text whose rope stretches, at least `max_positions`.

    yarn: the original length times the factor. linear: the same, where no original length is said
    `max_positions` times the factor, as vLLM has it. Others say it in max_position_embeddings, and
    so do configs that say less there than the original length.
    """
    if own.kind not in ("linear", "yarn"):
        return max_positions
    original = own.original_max_position_embeddings
    if own.kind == "linear":
        original = size(raw, two_places.ORIGINAL, max_positions)
    if original > max_positions:
        return max_positions
    return min(max(max_positions, int(original * own.factor)), MAX_SIZE)


def _yarn_attention_factor(scaling: Json, factor: float) -> float | None:
    """Returns the factor on cos and sin, given directly or by mscale; None: the paper's rule."""
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor")
    mscale, mscale_all_dim = (
        number(scaling, key) if scaling.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    if not (mscale and mscale_all_dim):
        return None
    stretch = math.log(factor) if factor > 1 else 0.0
    return (0.1 * mscale * stretch + 1.0) / (0.1 * mscale_all_dim * stretch + 1.0)


def layer_windows(
    raw: Json, implied_types: Sequence[str], default_window: int | None = None
) -> tuple[int | None, ...]:
    """Returns a window per layer, () when no layer has one.

    Args:
      implied_types: "sliding_attention" or "full_attention" for each layer, used if the
        config has no layer_types.
      default_window: in tokens, used if the config has no sliding_window.
    """
    num_layers = len(implied_types)
    types = raw.get("layer_types") or list(implied_types)
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types={shown(types)} must be a list of names.")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types has {len(types)} entries and unknown types {unknown[:10]}; "
            f"expected {num_layers} of sliding_attention or full_attention."
        )
    if "sliding_attention" not in types:
        return ()
    window = raw.get("sliding_window", default_window)
    if not is_int(window) or not 1 <= window <= MAX_SIZE:
        raise ValueError(
            f"layers slide but sliding_window={shown(window)}; expected a positive number of "
            "tokens, or full_attention in layer_types."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def require(raw: Json, key: str, allowed: tuple, default: Any) -> None:
    """Raises ValueError unless the value of a key, or its default, is in `allowed`."""
    value = raw.get(key, default)
    if value not in allowed:
        raise ValueError(
            f"{key}={shown(value)} is not supported; expected {' or '.join(map(repr, allowed))}."
        )


def divide(hidden_size: int, num_heads: int) -> int:
    """Returns the size of a head, for a config without head_dim."""
    if hidden_size % num_heads:
        raise ValueError(
            f"{hidden_size=} is not a multiple of {num_heads=}; correct the config or "
            "give head_dim."
        )
    return hidden_size // num_heads


def token_ids(raw: Json, vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-sequence token ids of a config, which has one, several or none."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    checked = [token_id("eos_token_id", each, vocab_size) for each in ids]
    return tuple(each for each in checked if each is not None)


def token_id(key: str, value: Any, vocab_size: int) -> int | None:
    """Returns a token id, None for null."""
    if value is None:
        return None
    if not is_int(value) or not 0 <= value < vocab_size:
        raise ValueError(
            f"{key}={shown(value)} is no token; expected a whole number from 0 to "
            f"{vocab_size - 1}, as {vocab_size=}."
        )
    return value


def size(
    raw: Json,
    key: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_SIZE,
    is_zero_none: bool = False,
) -> int:
    """Returns a whole number; with a default, null counts as a missing key."""
    value = raw[key] if default is None else raw.get(key)
    if default is not None and (value is None or (is_zero_none and value == 0)):
        return default
    if not is_int(value) or not least <= value <= most:
        raise ValueError(
            f"{key}={shown(value)} must be a whole number from {least} to {most}; "
            "correct the config."
        )
    return value


def number(
    raw: Json,
    key: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    most: float = 1e30,
) -> float:
    """Returns a finite number above a limit; with a default, null counts as a missing key."""
    value = raw[key] if default is None else raw.get(key)
    if default is not None and value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not above < value <= most:
        raise ValueError(
            f"{key}={shown(value)} must be a number above {above:g} and at most "
            f"{most:g}; correct the config."
        )
    return float(value)


def optional_number(
    raw: Json,
    key: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    most: float = 1e30,
) -> float | None:
    """Returns a finite number above a limit; null gives None, a missing key the default."""
    if raw.get(key, default) is None:
        return None
    return number(raw, key, default, above=above, most=most)


def flag(raw: Json, key: str, default: bool) -> bool:
    """Returns true or false; null counts as a missing key."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}={shown(value)} must be true or false.")
    return value


def is_int(value: Any) -> TypeGuard[int]:
    """Returns whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Returns the text of a value for a message, cut short, since an untrusted one may be long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return reprlib.repr(value)
