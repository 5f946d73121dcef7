"""A burst from its reservation until it is read back, and the record kept of it."""

from __future__ import annotations

import dataclasses
from concurrent import futures
from typing import Any

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.decode.sizes import PromptShape
from specjax.engine.metrics import BurstRecord
from specjax.engine.rows import Row
from specjax.policy.interface import Decision
from specjax.types import StepInfo


@dataclasses.dataclass
class Flight:
    """A burst that is about to be sent, or was sent and not read back."""

    own: np.ndarray  # i64[rows], their indices, ascending
    decision: Decision
    num_steps: int  # at most
    least: int  # least tokens that each row gains, unless it ends
    asked_depth: Any = None  # i64[rows], most tokens that each drafts
    num_behind: int = 0  # maximum over rows: committed tokens that the drafter has not seen
    context_tokens: int = 0
    is_cut: bool = False  # whether pages made it shorter
    is_learned_from: bool = True  # by the policy
    is_warm_up: bool = False  # its seconds are not those of later bursts
    prompts: PromptShape | None = None  # prompt tokens in the same step; None: a burst alone
    # The fields below are set when it is sent.
    bucket: Bucket | None = None
    params_version: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    places: Any = ()  # i64[rows], place of each row in the report
    report: StepInfo | None = None
    num_steps_run: Any = None  # i32[], on the device
    sent_at: float = 0.0  # time.perf_counter()
    done_at: futures.Future[float] | None = None  # time.perf_counter()
    # Time at which the device finished the prompts sent before it, if there were any.
    prompts_done_at: futures.Future[float] | None = None

    @property
    def depth(self) -> int:
        """K."""
        return self.decision.num_speculative_tokens

    @property
    def growth(self) -> int:
        """Most tokens that each row gains."""
        return self.num_steps * (1 + self.depth)


def record_of(flight: Flight, num_steps: int, seconds: float, num_tokens: int) -> BurstRecord:
    """Returns the record of a burst that was read back.

    Args:
      num_steps: steps that ran, at least 1.
      seconds: device seconds of all of them.
      num_tokens: tokens that all rows gained.
    """
    decision = flight.decision
    assert flight.bucket is not None
    return BurstRecord(
        num_speculative_tokens=int(flight.depth),
        reason=decision.reason,
        why=decision.why,
        num_rows=len(flight.rows),
        row_bucket=flight.bucket.rows,
        max_drafts=decision.max_drafts,
        num_steps=num_steps,
        context_tokens=flight.context_tokens,
        predicted_step_s=decision.predicted_step_s,
        measured_step_s=seconds / num_steps,
        predicted_tokens=decision.predicted_tokens,
        measured_tokens=num_tokens / num_steps,
        prompt_tokens=0 if flight.prompts is None else flight.prompts.num_tokens,
    )
