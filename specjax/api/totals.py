"""Figures over finished requests: what `stats` says of a call or an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from specjax.api.assemble import Setup
from specjax.api.results import GenerationStats, lossy_rule
from specjax.engine.loop import Loop
from specjax.engine.metrics import BurstRecord
from specjax.engine.request import AcceptanceCounts, Request


class Totals:
    """Sums over finished requests since a value of time.perf_counter()."""

    def __init__(self, begun_at: float):
        self._begun_at = begun_at
        self.acceptance = AcceptanceCounts()
        self.num_prompts = self._num_prompt_tokens = self._num_output_tokens = 0
        self._first_token_at: float | None = None
        self._lossy: set[str] = set()
        self._of_loop = dict(run_s=0.0, compile_s=0.0, num_preemptions=0)

    def add(self, samples: Sequence[Request]) -> None:
        """Adds the samples of one prompt, which have ended."""
        self.num_prompts += 1
        for request in samples:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._num_output_tokens += len(request.output_token_ids)
            self.acceptance.merge(request.counts)
            first = request.first_token_at
            if first is not None:
                self._first_token_at = min(first, self._first_token_at or first)
            self._lossy.update(filter(None, [lossy_rule(request)]))

    def look_at(self, loop: Loop) -> None:
        """Notes the seconds and preemptions of a loop so far."""
        self._of_loop = {name: getattr(loop, name) for name in self._of_loop}

    def stats(
        self, setup: Setup, decisions: Iterable[BurstRecord], **others: Any
    ) -> GenerationStats:
        """Returns the figures.

        Args:
          others: fields of GenerationStats that are not counted here.
        """
        first = self._first_token_at
        return GenerationStats(
            num_prompts=self.num_prompts,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            acceptance=copy.deepcopy(self.acceptance),
            time_to_first_token_s=0.0 if first is None else first - self._begun_at,
            num_speculative_tokens=setup.speculation.depth,
            drafter=setup.drafter.name,
            verification=setup.speculation.verification,
            lossy=tuple(sorted(self._lossy)),
            decisions=tuple(decisions),
            **self._of_loop,
            **others,
        )
