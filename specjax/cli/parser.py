"""An argument parser whose errors are one line, and say what may have been meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from specjax.config.names import suggestion

EXIT_BAD_INPUT = 2
_BAD_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Its errors are one line, like all errors of this program.

    What is misspelt is told by the parser of the command that it was given to.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(arguments, "command_parser", self)
            parser.error(f"unrecognized arguments: {parser.described(unknown)}")
        return arguments

    def described(self, unknown: Sequence[str]) -> str:
        """Returns arguments that are unknown, each option with what it may have meant."""
        options = [name for action in self._actions for name in action.option_strings]
        shown = []
        for argument in unknown:
            name = argument.partition("=")[0]
            is_option = name.startswith("--")
            meant = suggestion(name, options) if is_option else ""
            shown.append(argument + meant)
        return " ".join(shown)

    def error(self, message: str) -> NoReturn:
        wrong = _BAD_CHOICE.search(message)
        if wrong is not None:
            choices = [choice.strip(" '") for choice in wrong[2].split(",")]
            message += suggestion(wrong[1], choices)
        self.exit(EXIT_BAD_INPUT, f"specjax: error: {message}; see {self.prog} -h\n")


def at_least(least: int):
    """Returns what parses a whole number that is at least `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return number

    return parse
