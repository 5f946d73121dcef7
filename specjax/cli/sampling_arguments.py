"""Every sampling parameter as an option, and as a key of a line of --prompts."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from specjax.cli.parser import checked, whole_numbers
from specjax.config.keywords import advice
from specjax.config.sampling import OF_MODEL, SamplingParams

DEFAULTS = SamplingParams()


def _bias_entry(text: str) -> tuple[int, float]:
    token_id, value = text.split("=")
    return int(token_id), float(value)


bias_entry = checked(
    _bias_entry, lambda entry: True, "is no logit bias; expected ID=VALUE, as in 42=-1.5"
)


class Option(typing.NamedTuple):
    """How one field of SamplingParams is written on the command line."""

    field: str
    help: str
    metavar: str
    parse: Callable[[str], Any]
    is_repeated: bool = False


OPTIONS = (
    Option("temperature", "0 picks the most likely token", "T", float),
    Option("top_k", "sample among the K most likely tokens; 0 is off", "K", int),
    Option("top_p", "sample among the likeliest that make up P", "P", float),
    Option("min_p", "drop tokens below P times the likeliest", "P", float),
    Option("repetition_penalty", "divides logits of tokens seen", "R", float),
    Option("presence_penalty", "subtracted once for tokens generated", "X", float),
    Option("frequency_penalty", "subtracted per time generated", "X", float),
    Option("logit_bias", "added to a token's logit", "ID=VALUE", bias_entry, True),
    Option("bad_token_ids", "never generate these", "IDS", whole_numbers),
    Option("allowed_token_ids", "generate only these", "IDS", whole_numbers),
    Option("min_tokens", "nothing stops it before this many", "N", int),
    Option("max_tokens", "most tokens to generate", "N", int),
    Option("stop_token_ids", "stop after one of these", "IDS", whole_numbers),
    Option("stop", "stop before this text", "TEXT", str, True),
    Option("seed", "the same seed gives the same text", "SEED", int),
    Option("n", "samples per prompt", "N", int),
    Option("logprobs", "log-probabilities of the chosen and K more, or of all (-1)", "K", int),
)

# Help of the switches that are on, or off, unless their option is given.
_OFF = {
    "skip_special_tokens": "keep special tokens in the text, as the [TOOL_CALLS] of a tool call",
    "spaces_between_special_tokens": "with --no-skip-special-tokens, no space between them",
    "speculate": 'plain decoding, as "speculate": false of one prompt',
}
_ON = {
    "include_stop_str_in_output": "end the text after the --stop that ended it",
    "ignore_eos": "go on after the end-of-text token",
    "self_check": "report how far the draws are from what their distribution has on average",
    "entropy": "with --logprobs, the entropy in nats of what each token was drawn from",
}
SWITCHES = (*_ON, *_OFF)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option per field; one that is not given leaves no trace in the result."""
    group = parser.add_argument_group(
        "sampling",
        '"the model\'s" is what its generation_config.json says; the embedded model samples at '
        "temperature 0.5.",
    )
    for option in OPTIONS:
        default = OF_MODEL.get(option.field, getattr(DEFAULTS, option.field))
        of_model = "the model's, else " if option.field in OF_MODEL else ""
        shown = "" if default in (None, (), {}) else f" (default {of_model}{default})"
        group.add_argument(
            "--" + option.field.replace("_", "-"),
            type=option.parse,
            metavar=option.metavar,
            action="append" if option.is_repeated else "store",
            default=argparse.SUPPRESS,
            help=option.help + (", repeatable" if option.is_repeated else "") + shown,
        )
    for on, switches in ((True, _ON), (False, _OFF)):
        for name, text in switches.items():
            group.add_argument(
                ("--" if on else "--no-") + name.replace("_", "-"),
                dest=name,
                action="store_true" if on else "store_false",
                default=argparse.SUPPRESS,
                help=text,
            )


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of SamplingParams that the command line names."""
    fields = [*(option.field for option in OPTIONS), *SWITCHES]
    given = {name: getattr(arguments, name) for name in fields if name in arguments}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a JSON object sets, in the types that Python wants.

    Ranges are checked with the request, which fails alone.

    Raises:
      ValueError: a key that is no sampling parameter, or a value of another kind.
    """
    return {key: _field_from_json(key, value) for key, value in given.items()}


def _field_from_json(key: str, value: Any) -> Any:
    kinds = {field.name for field in dataclasses.fields(SamplingParams)}
    if key not in kinds:
        expected = f"; expected prompt or messages, and any of {', '.join(sorted(kinds))}."
        raise ValueError(f"{key!r} is no sampling parameter{advice(key, kinds, value) or expected}")
    if key == "logit_bias":
        return _bias_from_json(value)
    if key == "stop":
        is_right = isinstance(value, str) or _is_list_of(value, str)
        expected = "a string or a list of strings"
    elif key.endswith("_token_ids"):
        is_right, expected = _is_list_of(value, int), "a list of whole numbers"
    elif key in SWITCHES:
        is_right, expected = isinstance(value, bool), "true or false"
    else:
        is_right, expected = isinstance(value, int | float), "a number"
    if not is_right and not (value is None and getattr(DEFAULTS, key) is None):
        raise ValueError(f"{key} is {value!r}, expected {expected}.")
    return value


def _bias_from_json(value: Any) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"logit_bias is {value!r}, expected an object from token id to number, as in "
            '{"42": -1.5}.'
        ) from None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
