"""The record of a burst: its decision, and predicted beside measured figures."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstRecord:
    """One burst: its K, the reason, and predicted beside measured figures.

    `reason` names the policy: "goodput" (also "probe" or "nothing measured yet"), "fixed" or
    "table"; or the limit that lowered K: "memory gate", "pages" (where prompts are fed too),
    "rows" (speculation_max_rows), "user" (no row wants drafts), "drafter off" (it failed),
    "dropped" (the burst did not fit when it was compiled). "prompts" is a step that the goodput
    policy lets run plainly because of the prompt tokens beside it.
    """

    num_speculative_tokens: int
    reason: str
    num_rows: int  # rows that decode
    row_bucket: int
    max_drafts: int | None
    num_steps: int  # steps that ran
    context_tokens: int  # of all rows
    predicted_step_s: float | None
    measured_step_s: float  # device seconds, including prompt tokens in the same step
    predicted_tokens: float | None  # per step, of all rows
    measured_tokens: float
    prompt_tokens: int = 0  # token bucket of the prompts in the same step; 0: none
