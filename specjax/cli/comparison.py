"""What drafts brought: the same prompts once more without them, in the same run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli.prompts import PromptEntry
from specjax.config.names import NO_DRAFTER
from specjax.config.sampling import SamplingParams

if TYPE_CHECKING:
    from specjax.api.generation import Generation
    from specjax.models.base import Model

EMBEDDED = "demo"


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError where --compare was given beside what it cannot compare."""
    if not arguments.compare:
        return
    if arguments.json:
        raise ValueError("--compare prints a line for readers; leave out --json.")
    count = getattr(arguments, "n", 1)  # there only if it was given
    if count > 1:
        raise ValueError(f"--compare takes one text per prompt; leave out --n {count}.")


def is_wanted(arguments: argparse.Namespace, is_streamed: bool, result: Generation) -> bool:
    """Returns whether a run is compared: on request, or one prompt of the embedded model."""
    stats = result.stats
    has_drafter = stats.drafter != NO_DRAFTER and stats.num_speculative_tokens > 0
    if not has_drafter or any(completion.error is not None for completion in result):
        return False
    if arguments.compare is None:
        has_drafted = stats.acceptance.num_drafted > 0
        return arguments.model == EMBEDDED and is_streamed and has_drafted and not stats.lossy
    return arguments.compare


def of(
    target: Model,
    entries: Sequence[PromptEntry],
    sampling: Sequence[SamplingParams],
    result: Generation,
    call: Mapping[str, Any],
) -> str:
    """Decodes the prompts without drafts, with the seeds of a result; returns what to say.

    Args:
      call: the other arguments that the result was generated with.
    """
    from specjax.api import generation

    seeds = {completion.prompt_index: completion.seed for completion in result}
    own = [dataclasses.replace(each, seed=seeds[i]) for i, each in enumerate(sampling)]
    plain = generation.generate(
        target,
        [entry.prompt for entry in entries],
        sampling=own,
        **{**call, "drafter": NO_DRAFTER, "speculative_config": None},
    )
    pairs = zip(result, plain, strict=True)
    return line(result.stats, plain.stats, sum(_num_equal(*pair) for pair in pairs))


def line(drafted: Any, plain: Any, num_equal: int) -> str:
    """Returns one line.

    Args:
      drafted, plain: stats of the two runs.
      num_equal: tokens before the first that differs, over all texts.
    """
    total = plain.num_output_tokens
    same = f"the same {total} tokens"
    if num_equal < total:
        same = f"the same tokens up to {num_equal} of {total}"
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    return (
        f"without drafts: {same} in {plain.run_s:.2f} s ({plain.tokens_per_second:.0f} tokens/s) · "
        f"with them {ratio:.2f} times as fast"
    )


def _num_equal(one: Any, other: Any) -> int:
    """Returns how many tokens two texts begin with alike."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    differs = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differs, min(len(one.token_ids), len(other.token_ids)))
