"""An argument parser with one-line errors that suggest the intended option."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from specjax.config.keywords import INSTEAD, OPTIONS, RENAMED, holder
from specjax.config.names import closest, suggestion

Value = TypeVar("Value")

EXIT_BAD_INPUT = 2
_BAD_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors, like all errors of this program.

    Each command's parser reports the options that it does not know.
    An abbreviated option is unknown too: the next version may have another that begins so.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(arguments, "command_parser", self)
            parser.error(f"unrecognized arguments: {parser.described(unknown)}")
        return arguments

    def described(self, unknown: Sequence[str]) -> str:
        """Returns the unknown arguments as text, each option with the closest known one."""
        options = {
            _as_keyword(name): name for action in self._actions for name in action.option_strings
        }
        shown = []
        for argument in unknown:
            hint = ""
            if argument.startswith("-"):
                hint = _hint(_as_keyword(argument.partition("=")[0]), options)
            shown.append(argument + hint)
        return " ".join(shown)

    def error(self, message: str) -> NoReturn:
        wrong = _BAD_CHOICE.search(message)
        if wrong is not None:
            choices = [choice.strip(" '") for choice in wrong[2].split(",")]
            message += suggestion(wrong[1], choices)
        self.exit(EXIT_BAD_INPUT, f"specjax: error: {message}; see {self.prog} -h\n")


def _hint(name: str, options: Mapping[str, str]) -> str:
    """Returns what to write in place of an unknown option, or nothing.

    Args:
      options: those that are known, by keyword.
    """
    for near in f"{OPTIONS.get(name, '')} {RENAMED.get(name, '')}".split():
        if near in options:
            return f" (did you mean {options[near]!r}?)"
    if name in INSTEAD:
        return f" ({INSTEAD[name]})"
    if (argument := holder(name)) is not None and argument in options:
        return f" (write {options[argument]} '{{\"{name}\": ...}}')"
    begun = [known for known in options if known.startswith(name)]
    near = begun[0] if len(begun) == 1 else closest(name, options)
    return "" if near is None else f" (did you mean {options[near]!r}?)"


def _as_keyword(option: str) -> str:
    """Returns --max-tokens as the keyword of Python, max_tokens."""
    return option.lstrip("-").replace("-", "_")


def json_or_file(text: str) -> str:
    """Returns JSON, as it is given or as a file holds it."""
    if text.lstrip()[:1] in ("{", "["):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON, as {{...}}, nor a file of it: {reason.lower()}"
        ) from None


def checked(
    parse: Callable[[str], Value], is_right: Callable[[Value], bool], wrong: str
) -> Callable[[str], Value]:
    """Returns a function that parses an argument, for `type` of an option.

    Args:
      parse: may raise ValueError or OverflowError.
      wrong: what is said, after the text, where that fails or the value is not right.
    """

    def parsed(text: str) -> Value:
        with contextlib.suppress(ValueError, OverflowError):
            value = parse(text)
            if is_right(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")

    return parsed


def at_least(least: int) -> Callable[[str], int]:
    """Returns a function that parses a whole number of at least `least`."""
    return checked(
        int, lambda number: number >= least, f"must be a whole number of at least {least}"
    )


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_WRONG = "must be whole numbers with commas, as 2,16,29"
whole_numbers = checked(_whole_numbers, lambda numbers: True, _WRONG)
layer_ids = checked(_whole_numbers, lambda numbers: len(numbers) > 0, _WRONG)
number_of_bytes = checked(
    lambda text: int(float(text)),
    lambda number: number >= 1,
    "must be a finite number of bytes, at least 1, as 16e9",
)


def add_aux_layer_ids(group: Any, help: str | None = None) -> None:
    """Adds --aux-layer-ids to a parser or a group of its options."""
    group.add_argument(
        "--aux-layer-ids",
        type=layer_ids,
        metavar="IDS",
        help=help
        or "layers of the model whose inputs a head over it captures, as 2,16,29 (default: as its "
        "files say)",
    )
