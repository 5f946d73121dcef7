"""What drafts brought: the same prompts again, with and without them, in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli.prompts import PromptEntry
from specjax.config.names import DEMO, NO_DRAFTER
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig

if TYPE_CHECKING:
    from specjax.api.generation import Generation
    from specjax.models.base import Model

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
) -> str:
    """Decodes the prompts again with and without drafts, with the seeds of a result, in turn;
    returns what to say.

    The first run of each waits for more than its steps, so it is no measure of them. Who begins
    changes from turn to turn.

    Args:
      call: the other arguments that the result was generated with.
    """
    from specjax.api import generation

    given = [(each.sampling or SamplingParams(), each.seed) for each in result]
    own = [dataclasses.replace(params, seed=seed) for params, seed in given]
    prompts = [entry.prompt for entry in entries]
    plainly = {**call, "drafter": NO_DRAFTER, "speculative_config": None}
    undrafted = [dataclasses.replace(each, num_speculative_tokens=None) for each in own]
    decode = lambda how: generation.generate(
        target, prompts, sampling=own if how is call else undrafted, **how
    )
    plain = decode(plainly)
    turns = TURNS if result.stats.run_s < LONG_S else 1
    order = [plainly, call, call, plainly, plainly, call][: 2 * turns]
    runs = [(how is call, decode(how).stats.run_s) for how in order]
    num_equal = sum(_num_equal(*pair) for pair in zip(result, plain, strict=True))
    plain_s, drafted_s = (
        statistics.median(seconds for is_drafted, seconds in runs if is_drafted is wanted)
        for wanted in (False, True)
    )
    return line(plain_s, drafted_s, num_equal, plain.stats.num_output_tokens)


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


def _num_equal(one: Any, other: Any) -> int:
    """Returns how many tokens two texts begin with alike."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    differs = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differs, min(len(one.token_ids), len(other.token_ids)))
