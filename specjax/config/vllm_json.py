"""Converts vLLM's `--speculative-config` to fields of SpeculationConfig.

docs/speculative-config.md has the table: which key means what here, and which has no
use and why.
"""

from __future__ import annotations

import itertools
import json
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.config.keywords import advice, meant
from specjax.config.names import BY_NAME, SELF_DRAFTING, suggestion

# Over the hidden states of a target.
HEADS = ("eagle", "eagle3", "mtp", "dflash", "dspark", "medusa", "mlp_speculator")
METHODS = (*BY_NAME, "draft_model", *HEADS)
_NAME = "speculative_config"
_SAME_KEY = 0.75  # similarity from which an unknown key counts as misspelt rather than new


class Reading(NamedTuple):
    """The result of reading a JSON config."""

    fields: dict[str, Any]  # of SpeculationConfig
    warnings: tuple[str, ...]  # about keys that have no effect


def read(given: str | Mapping[str, Any], defaults: Mapping[str, Any]) -> Reading:
    """Returns the fields that a `--speculative-config` sets; null sets nothing.

    Args:
      given: JSON, or what JSON was read to.
      defaults: every field of SpeculationConfig, with its default.

    Raises:
      ValueError: not a JSON object; a key that is misspelt, that means something else
        here or that contradicts another; or a value that has no meaning.
    """
    left = {key: value for key, value in _parse(given).items() if value is not None}
    if "tensor_parallel_size" in left:
        raise ValueError(
            f"'tensor_parallel_size' is no key of {_NAME}: the target's is the mesh's "
            "tensor axis; the drafter's is 'draft_tensor_parallel_size'."
        )
    _rename(left)
    _set_method(left)
    _set_rule(left)
    _set_lookup(left, defaults)
    useless = dict(_USELESS)
    if left.get("method") in ("ngram", "history"):
        useless["max_model_len"] = "matching has no context of its own"
    if left.get("method") in SELF_DRAFTING:
        useless["max_model_len"] = "the drafter has the target's own context"
    fields = {key: left.pop(key) for key in list(left) if key in defaults.keys() - useless.keys()}
    # A switch that is off needs no warning.
    reasons = [
        f"{key} ({useless[key]})"
        for key in sorted(left.keys() & useless.keys())
        if left[key] is not False
    ]
    unknown = sorted(left.keys() - useless.keys())
    _refuse_misspelt(unknown, {*defaults, *_OTHER_NAMES, *_ALSO_READ, *useless})
    warnings = []
    if reasons:
        warnings.append(f"{_NAME}: has no use for {'; '.join(reasons)}.")
    if unknown:
        told = (f"{key}{advice(key, (), left[key])}" for key in unknown)
        warnings.append(f"{_NAME}: ignored unknown keys {', '.join(told)}.")
    return Reading(fields, tuple(warnings))


def _refuse_misspelt(unknown: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError for keys that mean or resemble known ones; others may be new in vLLM."""
    names = {key: meant(key, known, _SAME_KEY) for key in unknown}
    wrong = [f"{key!r} (did you mean {name!r}?)" for key, name in names.items() if name]
    if wrong:
        raise ValueError(f"{_NAME} has no key {', '.join(wrong)}; correct it.")


def check_method(method: Any) -> None:
    """Raises ValueError for a method that specjax does not have, and says what to use."""
    if method is None:
        return
    instead = ""
    if isinstance(method, str):
        if method in METHODS:
            return
        instead = _INSTEAD.get("mtp" if method.endswith("_mtp") else method, "")
        instead = instead or suggestion(method, (*METHODS, "suffix", "ngram_gpu"))
    raise ValueError(
        f"method={method!r} is not available{instead}; this version has 'ngram' and 'history', "
        "which need no weights, 'self-int8' and 'self-int4', which are the target in few bits, "
        "'draft_model', a smaller model of the target's vocabulary, and "
        f"heads over the target, {', '.join(map(repr, HEADS))}."
    )


def _parse(given: str | Mapping[str, Any]) -> dict[str, Any]:
    value: Any = given
    if isinstance(given, str):
        try:
            value = json.loads(given, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_NAME} is no JSON: {error}; got {given!r}.") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{_NAME} must be a JSON object, got {type(value).__name__}.")
    if not all(isinstance(key, str) for key in value):
        raise ValueError(f"{_NAME} has keys that are no strings: {list(value)!r:.200}.")
    return dict(value)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; raises ValueError for a key that stands in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{_NAME} has the key {twice!r} twice; leave one out.")
    return found


def _rename(left: dict[str, Any]) -> None:
    """Turns the older names of keys into those of fields."""
    for old, new in _OTHER_NAMES.items():
        if old in left:
            value = left.pop(old)
            if left.setdefault(new, value) != value:
                raise ValueError(
                    f"{_NAME}: {old!r} is {value!r} and {new!r} is {left[new]!r}, which "
                    "mean the same; leave one out."
                )


def _set_method(left: dict[str, Any]) -> None:
    """Infers the method from the model, as vLLM does."""
    if "method" not in left and "model" in left:
        is_ngram = left["model"] in ("ngram", "[ngram]")
        left["method"] = "ngram" if is_ngram else "draft_model"
    if left.get("method") == "ngram_gpu":
        left["method"] = "ngram"  # matching runs on the device in any case
    if left.get("method") == "suffix":
        left["method"] = "history"  # the longest suffix, over own and shared text
    if left.get("method") == "mimo_mtp":
        left["method"] = "mtp"


def _set_rule(left: dict[str, Any]) -> None:
    """Turns vLLM's keys for sampling and accepting drafts into `verification`."""
    how = _choice(left, "draft_sample_method", ("greedy", "probabilistic"))
    method = _choice(left, "rejection_sample_method", tuple(_RULES))
    method = _choice(left, "acceptance_method", tuple(_OLD_RULES)) or method
    if method is None:
        if "synthetic_acceptance_length" in left:
            raise ValueError(
                "synthetic_acceptance_length is for rejection_sample_method='synthetic'; "
                "set that, or leave it out."
            )
        if how is not None:
            left["draft_sample_method"] = how  # left over: it has no effect
        return
    rule = (_RULES | _OLD_RULES)[method]
    if how == "greedy" and rule in ("rejection", "block"):
        # Without a draft distribution both rules are the same.
        rule = "delta"
    elif how is not None and rule == "seeded":
        left["draft_sample_method"] = how
    if left.setdefault("verification", rule) != rule:
        raise ValueError(
            f"{_NAME}: verification={left['verification']!r} contradicts "
            f"{method!r}, which is {rule!r} here; leave one out."
        )
    if method == "synthetic":
        _set_synthetic_rates(left)


def _set_synthetic_rates(left: dict[str, Any]) -> None:
    """Turns vLLM's unconditional rates, or a mean length, into conditional rates by depth."""
    given = left.pop("synthetic_acceptance_rates", None)
    length = left.pop("synthetic_acceptance_length", None)
    if (given is None) == (length is None):
        raise ValueError(
            "rejection_sample_method='synthetic' needs one of synthetic_acceptance_rates, "
            "as in [0.8, 0.6, 0.4], and synthetic_acceptance_length, as in 2.8."
        )
    depth = left.get("num_speculative_tokens")
    rates = _rates_of_length(length, depth) if given is None else _checked(given, depth)
    before = [1.0, *rates]
    conditional = [rate / last if last else 0.0 for last, rate in zip(before, rates, strict=False)]
    left["synthetic_acceptance_rates"] = conditional


def _rates_of_length(length: Any, depth: Any) -> list[float]:
    """Returns rates of least variance with a mean acceptance length, the target's token counted.

    As vLLM spends it: 3.7 of K = 4 accepts two tokens always, and a third in 7 of 10 steps.
    """
    is_number = _is_count(depth) and _is_number(length)
    if not is_number or not 1 <= length <= depth + 1:
        raise ValueError(
            f"synthetic_acceptance_length={length!r} must be a number from 1 to K + 1, with "
            f"num_speculative_tokens={depth!r} for K, which must be given."
        )
    return [min(max(float(length) - 1 - place, 0.0), 1.0) for place in range(depth)]


def _checked(rates: Any, depth: Any) -> list[float]:
    is_list = isinstance(rates, list | tuple) and len(rates) > 0
    is_right = is_list and all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
    if not is_right or any(a < b for a, b in itertools.pairwise(rates)):
        raise ValueError(
            f"synthetic_acceptance_rates={rates!r} must list numbers from 0 to 1, none above "
            "the one before: how often drafts are accepted up to each place."
        )
    if depth is not None and len(rates) != depth:
        raise ValueError(
            f"synthetic_acceptance_rates={rates!r} must be as many as "
            f"num_speculative_tokens={depth!r}."
        )
    return [float(rate) for rate in rates]


def _set_lookup(left: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Sets the missing one of two n-gram bounds so that its default does not contradict."""
    low, high = left.get("prompt_lookup_min"), left.get("prompt_lookup_max")
    if low is None and _is_count(high):
        left["prompt_lookup_min"] = min(high, defaults["prompt_lookup_min"])
    if high is None and _is_count(low):
        left["prompt_lookup_max"] = max(low, defaults["prompt_lookup_max"])


def _choice(left: dict[str, Any], key: str, allowed: tuple[str, ...]) -> str | None:
    """Removes and returns a key that must have one of some values; None if it is absent."""
    value = left.pop(key, None)
    if value is not None and value not in allowed:
        raise ValueError(
            f"{_NAME}: {key}={value!r} is unknown; expected one of {', '.join(allowed)}."
        )
    return value


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# By rejection_sample_method; the last two are older names.
_RULES = {
    "standard": "rejection",
    "block": "block",
    "synthetic": "synthetic",
    "strict": "seeded",
    "probabilistic": "rejection",
}
_OLD_RULES = {
    "rejection_sampler": "rejection",
    "typical_acceptance_sampler": "typical",
}
_OTHER_NAMES = {
    "disable_by_batch_size": "speculation_max_rows",
    "speculative_disable_by_batch_size": "speculation_max_rows",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "posterior_threshold": "typical_epsilon",
    "posterior_alpha": "typical_delta",
}
# Keys that are converted to fields, or refused with their own message.
_ALSO_READ = (
    "rejection_sample_method",
    "acceptance_method",
    "draft_sample_method",
    "synthetic_acceptance_length",
    "tensor_parallel_size",
)
_INSTEAD = {
    "mtp": ": specjax loads no target of that family; 'mtp' is for MiMo-7B and for `speculators`",
    "custom_class": ": pass a drafter of your own as drafter=",
    "extract_hidden_states": ": it gathers training data and drafts nothing",
}
_OWN_FORMAT = "weights are taken as the folder has them"
_COMPILED = "XLA compiles every step, and picks its own kernels"
_SUFFIX = "drafts read on from the longest match, of corpus_tokens of text"
_USELESS = {
    "draft_sample_method": "under 'seeded' a draft model draws with the target's own noise",
    "quantization": _OWN_FORMAT,
    "draft_load_config": _OWN_FORMAT,
    "kv_cache_dtype": "a drafter's keys and values have the target's dtype",
    "revision": "name a folder of that revision as 'model'",
    "code_revision": "no code is loaded with a model",
    "enforce_eager": _COMPILED,
    "attention_backend": _COMPILED,
    "moe_backend": _COMPILED,
    "use_local_argmax_reduction": "it changes no draft",
    "disable_padded_drafter_batch": "rows are laid end to end, without padding",
    "disable_mqa_scorer": "one forward verifies all drafts in any case",
    "disable_logprobs": "SamplingParams.logprobs decides",
    "disable_log_stats": "results carry their statistics",
    "use_heterogeneous_vocab": "a draft model may have a vocabulary of its own in any case",
    "enable_adaptive_verification": "max_drafts_per_step bounds what is verified",
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
    "target_model_config": "vLLM fills it in itself",
    "target_parallel_config": "vLLM fills it in itself",
    "draft_model_config": "vLLM fills it in itself",
    "draft_parallel_config": "vLLM fills it in itself",
}
