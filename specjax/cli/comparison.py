"""What drafts brought: the same prompts again, with and without them, in the same run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli.prompts import PromptEntry
from specjax.config.names import DEMO
from specjax.config.speculation import SpeculationConfig

if TYPE_CHECKING:
    from specjax.api.generation import Generation
    from specjax.models.base import Model
    from specjax.runtime.progress import Report

SAME_TEXT = ("seeded", "greedy", "delta")  # rules whose text is that of plain decoding
TURNS = 3  # of each
LONG_S = 2.0  # seconds of texts that are decoded once more alone


def check(arguments: argparse.Namespace, config: SpeculationConfig) -> None:
    """Raises ValueError where --compare was given beside what it cannot compare."""
    if not arguments.compare:
        return
    if (config.method is None and config.model is None) or config.num_speculative_tokens == 0:
        raise ValueError("--compare needs drafts; give --drafter, or leave --compare out.")
    if config.verification not in SAME_TEXT:
        raise ValueError(
            f"--compare decodes the same text without drafts, which --verification "
            f"{config.verification} does not give; take one of {', '.join(SAME_TEXT)}."
        )
    if arguments.json:
        raise ValueError("--compare prints a line for readers; leave out --json.")
    count = getattr(arguments, "n", 1)  # there only if it was given
    if count > 1:
        raise ValueError(f"--compare takes one text per prompt; leave out --n {count}.")


def is_wanted(
    arguments: argparse.Namespace,
    is_streamed: bool,
    result: Generation,
) -> bool:
    """Returns whether a run is compared: on request, or one prompt of the embedded model.

    Prompts that failed, or that ask for a rule of another text in their line, are not.
    """
    stats = result.stats
    if any(completion.error is not None for completion in result):
        return False
    own = (completion.sampling for completion in result)
    rules = {each.verification or stats.verification for each in own if each is not None}
    if not rules.issubset(SAME_TEXT):
        return False
    if arguments.compare is None:
        return arguments.model == DEMO and is_streamed and stats.acceptance.num_drafted > 0
    return arguments.compare


def of(
    target: Model,
    entries: Sequence[PromptEntry],
    result: Generation,
    call: Mapping[str, Any],
    progress: Report,
) -> str:
    """Decodes the prompts again with and without drafts, in turn, with the seeds of a result;
    returns what to say.

    Args:
      call: the other arguments that the result was generated with.
    """
    from specjax.api.comparing import compare

    options = {name: value for name, value in call.items() if name != "drafter"}
    plain, drafted = compare(
        target,
        [entry.prompt for entry in entries],
        [call["drafter"]],
        sampling=[dataclasses.replace(each.sampling, seed=each.seed) for each in result],  # pyright: ignore
        repeats=TURNS if result.stats.run_s < LONG_S else 1,
        progress=progress,
        **options,
    ).rows
    said = line(plain.run_s, drafted.run_s, drafted.num_equal, drafted.num_tokens)
    return said if drafted.num_drafted else f"{said}\n{drafted.why}"


def line(plain_s: float, drafted_s: float, num_equal: int, num_tokens: int) -> str:
    """Returns one line.

    Args:
      plain_s, drafted_s: seconds of the texts without and with drafts.
      num_equal: tokens before the first that differs, of the `num_tokens` without drafts.
    """
    same = f"the same {num_tokens} tokens"
    if num_equal < num_tokens:
        same = f"the same tokens up to {num_equal} of {num_tokens}"
    return (
        f"again, in turn: {drafted_s:.2f} s with drafts, {plain_s:.2f} s without, {same} · "
        f"{plain_s / drafted_s:.2f} times as fast with drafts"
    )
