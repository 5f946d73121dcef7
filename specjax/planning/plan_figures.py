"""What a plan says, of compiled steps or of formulas: rows, K, seconds, tokens per second."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from specjax.config import batch_size_table
from specjax.decode.bucket import Bucket
from specjax.paged.work import ModelWork
from specjax.planning.drafter_split import TABLE_CONTEXT
from specjax.planning.memory_model import MemoryPlan
from specjax.planning.plan_request import PlanRequest
from specjax.planning.roofline import (
    choose_num_speculative_tokens,
    compute_bound_tokens,
    expected_tokens,
    roofline_step_s,
    verify_work,
)
from specjax.planning.step_prior import step_prior


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """The figures of a plan; bytes are of one chip unless noted otherwise."""

    request: PlanRequest
    weights_bytes: int  # of target and drafter, each parameter once
    resident_bytes: int  # weights and state of one chip, pages left out
    target_bytes_per_token: float
    drafter_bytes_per_token: float
    memory: MemoryPlan | None  # None if the device's memory is unknown
    target_work: ModelWork
    drafter_works: tuple[ModelWork, ...]  # of each model that the drafter runs
    notes: tuple[str, ...] = ()

    def step_s(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the least seconds of a step by the device's peak figures.

        Of a CPU they are those of the measured speed of its products and launches.

        Raises:
          ValueError: neither is known.
        """
        device = self.request.device
        if device.figures is None:
            if self._processor_s is None:
                raise ValueError(f"no figures are known for {device.name}.")
            return self._processor_s(Bucket(rows, num_speculative_tokens), rows * context)
        return roofline_step_s(
            self.target_work,
            self.drafter_works,
            device.figures,
            rows=rows,
            num_speculative_tokens=num_speculative_tokens,
            context=context,
        )

    @functools.cached_property
    def _processor_s(self) -> Callable[[Bucket, float], float] | None:
        speed = self.request.device.speed
        if speed is None:
            return None
        works = [(work, work.num_layers) for work in (self.target_work, *self.drafter_works)]
        return step_prior(speed, works[0], works[1:])

    def tokens_per_s(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the expected tokens per second of all rows by `step_s`, an upper bound.

        Raises:
          ValueError: the device's figures are not known.
        """
        k = num_speculative_tokens
        expected = expected_tokens(self.request.acceptance_rate, k)
        return rows * expected / self.step_s(rows, k, context)

    def choose(self, rows: int, context: int) -> int | None:
        """Returns the K with the most expected tokens per second, 0 above the gate.

        None if neither figures nor a measured speed of the device are known.
        """
        request = self.request
        if not request.device.has_seconds:
            return None
        if self.memory is not None and not self.memory.may_speculate(rows * context):
            return 0
        depths = range(request.most_drafted + 1)
        seconds = [self.step_s(rows, k, context) for k in depths]
        return choose_num_speculative_tokens(seconds, request.acceptance_rate)

    def batch_size_table(self, context: int) -> list[list[int]] | None:
        """Returns K by batch size in vLLM's format, for rows of `context` tokens each."""
        entries: list[list[int]] = []
        for rows in range(1, self.request.engine.max_rows + 1):
            k = self.choose(rows, context)
            if k is None:
                return None
            if entries and entries[-1][2] == k:
                entries[-1][1] = rows
            else:
                entries.append([rows, rows, k])
        batch_size_table.parse(entries)
        return entries

    @property
    def contexts(self) -> list[int]:
        """Tokens per row for which to tabulate: 512 times powers of 4, and the most."""
        most = self.request.max_context
        return [c for c in (4**i * 512 for i in range(12)) if c < most] + [most]

    @property
    def table_context(self) -> int:
        return min(TABLE_CONTEXT, self.request.max_context)

    @property
    def compute_bound_tokens(self) -> float | None:
        """Tokens of a step from which on arithmetic takes longer than reading the weights."""
        figures = self.request.device.figures
        return None if figures is None else compute_bound_tokens(self.target_work, figures)

    def intensity(self, rows: int, num_speculative_tokens: int, context: int) -> float:
        """Returns the operations per byte of verification."""
        work = verify_work(self.target_work, rows, num_speculative_tokens, context)
        return work.intensity
