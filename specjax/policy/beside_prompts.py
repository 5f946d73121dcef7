"""Chooses K of a step that also feeds prompts. No jax.

Prompts are fed whatever K is, so the question is what drafting adds to the step:

    worth(bucket) = expected tokens - rate * seconds of the step with the prompts

where `rate`, in tokens per second, is that of the best burst without prompts: the seconds that
drafting adds could be spent there instead. Where reading the weights limits the step, drafts
cost as little beside prompts as without them; where the prompts fill the processor, each draft
token adds its products, and the measured seconds say so.

Seconds are learned by bucket and token bucket of the prompts, apart from those of bursts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specjax.decode.bucket import Bucket
from specjax.policy.interface import Load

MEMORY = 9  # latest measurements kept of a step, whose median counts
PROBE_EVERY = 32  # steps beside one token bucket, of which one measures what was not chosen


class Option(NamedTuple):
    """A step that may run beside prompts."""

    bucket: Bucket
    tokens: float  # expected, of all rows
    burst_s: float  # seconds of its step in a burst without prompts


class MixedCosts:
    """Seconds of steps with prompts in them, by bucket and token bucket of the prompts."""

    def __init__(self):
        self._latest: dict[tuple[Bucket, int], list[float]] = {}
        # Seconds of the same steps in a burst, when the option was last compared.
        self._burst_s: dict[Bucket, float] = {}

    def observe(self, bucket: Bucket, prompt_tokens: int, seconds: float) -> None:
        """Adds one measurement, seconds of a step."""
        before = self._latest.get((bucket, prompt_tokens), [])
        self._latest[bucket, prompt_tokens] = [*before[1 - MEMORY :], seconds]

    def count(self, bucket: Bucket, prompt_tokens: int) -> int:
        """Returns the number of remembered measurements of a step."""
        return len(self._latest.get((bucket, prompt_tokens), ()))

    def seconds(self, option: Option, prompt_tokens: int) -> float:
        """Returns the seconds of a step: measured, or those of a burst's step and the prompts.

        Where no step with these prompts was measured they count as free, which is the same for
        all options.
        """
        self._burst_s[option.bucket] = option.burst_s
        if own := self._latest.get((option.bucket, prompt_tokens)):
            return statistics.median_low(own)
        added = [
            statistics.median_low(latest) - self._burst_s[bucket]
            for (bucket, tokens), latest in self._latest.items()
            if tokens == prompt_tokens and bucket in self._burst_s
        ]
        return option.burst_s + max(statistics.median_low(added) if added else 0.0, 0.0)


class BesidePrompts:
    """Chooses among the steps that may run beside prompts, and what to compile.

    Attributes:
      costs: learned from the steps that ran.
    """

    def __init__(self):
        self.costs = MixedCosts()
        self._num_chosen: dict[int, int] = {}  # by token bucket of the prompts
        # Seconds that each step which is not compiled would have saved.
        self._missed_s: dict[tuple[Bucket, int], float] = {}

    def choose(
        self, load: Load, plain: Option, drafting: Sequence[Option], rate: float
    ) -> tuple[Option, Bucket | None]:
        """Returns the step to run, and the one to compile in the background, if any.

        Args:
          plain: the step at K = 0, which runs while nothing better is compiled.
          drafting: steps with drafts.
          rate: tokens per second of the best burst without prompts.
        """
        beside = load.prompt_tokens
        worth = self._worth(beside, rate)
        usable = [plain, *(o for o in drafting if load.is_compiled(o.bucket))]
        best = max([plain, *drafting], key=worth)
        if not load.is_compiled(plain.bucket) and load.is_there(best.bucket):
            return best, None
        chosen = max(usable, key=worth)
        if best is chosen:
            return self._or_probe(chosen, usable, beside), None
        key = best.bucket, beside
        saved_s = (worth(best) - worth(chosen)) / rate
        self._missed_s[key] = self._missed_s.get(key, 0.0) + saved_s
        repays = self._missed_s[key] >= load.ready_s(best.bucket)
        is_coming = any(load.is_coming(option.bucket) for option in drafting)
        if not repays or is_coming:
            return chosen, None
        del self._missed_s[key]
        return chosen, best.bucket

    def _worth(self, prompt_tokens: int, rate: float) -> Callable[[Option], float]:
        return lambda option: option.tokens - rate * self.costs.seconds(option, prompt_tokens)

    def _or_probe(self, chosen: Option, usable: Sequence[Option], prompt_tokens: int) -> Option:
        """Returns the chosen step, or now and then the one that was measured least."""
        turn = self._num_chosen[prompt_tokens] = self._num_chosen.get(prompt_tokens, 0) + 1
        if turn % PROBE_EVERY:
            return chosen
        count = lambda option: self.costs.count(option.bucket, prompt_tokens)
        others = [option for option in usable if option is not chosen]
        return min(others, key=count, default=chosen)
