"""Facts that a config.json says in two places: which is used, and what is said of the other.

docs/two-places.md has the table. What is used is what transformers 5.24 uses, wherever that is no
accident; a place that says another thing is warned of by name, or the config is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from specjax.models.base import Json
from specjax.runtime.stack_level import of_the_caller

THETA, ORIGINAL = "rope_theta", "original_max_position_embeddings"
EAGLE_TYPE = "eagle"  # the model_type of a head that vLLM has converted
# What the object of a rope may say beside its type, theta and partial_rotary_factor.
_KEYS_OF_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("mscale", "mscale_all_dim", ORIGINAL),
    ),
}


def warn(what: str, decision: str) -> None:
    """Warns that a fact stands in two places that differ."""
    warnings.warn(
        f"config.json has {what:.600}; {decision}. Take the other away, or correct it.",
        stacklevel=of_the_caller(),
    )


def rope_object(raw: Json, layer_type: str | None = None) -> Json:
    """Returns the object of a rope, with `rope_theta` and `original_max_position_embeddings` that
    stand beside it.

    `rope_scaling` is used before `rope_parameters`, whose theta it has if none is said elsewhere; a
    theta within the object before one beside it; an original length beside it before one within.

    Args:
      layer_type: as for `config_values.rope`.

    Raises:
      ValueError: an object is none, or places contradict each other and none is meant.
    """
    scaling = _scaling(raw)
    is_per_type = any(isinstance(value, dict) for value in scaling.values())
    if is_per_type:
        scaling = _of_layer_type(scaling, layer_type)
    kind = rope_type(scaling)
    inner, outer = scaling.get(THETA), raw.get(THETA)
    if None not in (inner, outer) and inner != outer:
        warn(
            f"{THETA}={outer!r:.50} beside {THETA}={inner!r:.50} in the rope's object",
            "the inner one is used",
        )
    found = scaling | {THETA: outer if inner is None else inner}
    if kind in ("llama3", "yarn") and not is_per_type and raw.get(ORIGINAL) is not None:
        inner, outer = scaling.get(ORIGINAL), raw[ORIGINAL]
        if inner not in (None, outer):
            warn(
                f"{ORIGINAL}={outer!r:.50} beside {ORIGINAL}={inner!r:.50} in the rope's object",
                "the outer one is used",
            )
        found[ORIGINAL] = outer
    for holder in (scaling, raw):
        if (partial := holder.get("partial_rotary_factor")) not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor={partial!r:.50} is not supported; expected 1.0."
            )
    _check_keys(scaling, kind)
    return found


def rope_type(scaling: Json) -> Any:
    """Returns the type of a rope, by its new key or its old one."""
    new, old = scaling.get("rope_type"), scaling.get("type")
    if None not in (new, old) and new != old:
        raise ValueError(
            f"rope_type={new!r:.50} and type={old!r:.50} of one rope differ; leave type out."
        )
    return new or old or "default"


def _scaling(raw: Json) -> Json:
    """Returns `rope_scaling`, else `rope_parameters`."""
    found = {key: raw.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise ValueError(f"{key}={value!r:.100} must be an object.")
    scaling, parameters = found.values()
    if not scaling or not parameters:
        return scaling or parameters
    if any(isinstance(value, dict) for value in (*scaling.values(), *parameters.values())):
        raise ValueError(
            "rope_scaling stands beside rope_parameters per layer type; leave one of them out."
        )
    # transformers has its own default of theta here, which no file means.
    inner = parameters.get(THETA) if raw.get(THETA) is None else None
    used = scaling if inner is None else {THETA: inner} | scaling
    kinds = rope_type(parameters), rope_type(scaling)
    lost = [] if kinds[0] in ("default", kinds[1]) else ["rope_type"]
    lost += [
        key
        for key, value in parameters.items()
        if key not in ("rope_type", "type") and value not in (None, (raw | used).get(key))
    ]
    if lost:
        warn(
            f"rope_scaling beside rope_parameters, which says another {', '.join(lost)}",
            "rope_scaling is used",
        )
    return used


def _of_layer_type(by_type: Json, layer_type: str | None) -> Json:
    """Returns the rope parameters of a layer type."""
    if layer_type is None:
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(by_type)}) are not supported; "
            "expected one set for all layers."
        )
    own = by_type.get(layer_type)
    if not isinstance(own, dict):
        raise ValueError(
            f"rope_parameters has {', '.join(by_type)} and no object {layer_type!r}; add it."
        )
    return own


def _check_keys(scaling: Json, kind: Any) -> None:
    """Warns of keys that a type of rope has no use for; of unknown types no keys are known."""
    if not isinstance(kind, str) or kind not in _KEYS_OF_ROPE:
        return
    known = {"rope_type", "type", THETA, "partial_rotary_factor", *_KEYS_OF_ROPE[kind]}
    unknown = [key for key, value in scaling.items() if key not in known and value is not None]
    if unknown:
        warnings.warn(
            f"config.json: the object of a rope of type {kind!r} has {', '.join(unknown)[:300]}, "
            "which is not used.",
            stacklevel=of_the_caller(),
        )


def by_one_name(raw: Json, names: Mapping[str, str]) -> Json:
    """Returns a config with each value under the name that the family reads.

    Args:
      names: other name of a key -> the name that is read.

    Raises:
      ValueError: both are there and differ.
    """
    found = raw | {}
    for other, key in names.items():
        value = raw.get(other)
        if value is None:
            continue
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{key}={raw[key]!r:.50} and {other}={value!r:.50} are one fact and differ; leave "
                f"{other} out, or correct it."
            )
        found[key] = value
    return found


def with_inner_model(raw: Json) -> Json:
    """Returns the config.json of an EAGLE head, which vLLM has converted, with the keys of the
    `model` within it; others as they are.

    Those at the top are used first, as in vLLM.
    """
    inner = raw.get("model")
    if raw.get("model_type") != EAGLE_TYPE or not isinstance(inner, dict):
        return raw
    top = {key: raw[key] for key in raw if key not in ("model", "architectures", "model_type")}
    if differ := [key for key in top if inner.get(key) not in (None, top[key])]:
        warn(f"another {', '.join(differ)} at the top than in its model", "the top is used")
    is_eagle3 = raw.get("method") == "eagle3" or "eagle3" in str(inner.get("architectures")).lower()
    name = "LlamaForCausalLMEagle3" if is_eagle3 else "EAGLEModel"
    return {**inner, **top, "architectures": [name], "model_type": EAGLE_TYPE}
