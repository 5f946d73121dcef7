"""What was decided for every burst, and what came of it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstRecord:
    """One burst: which K, why, and the predicted beside the measured.

    `reason` is who decided: "goodput", "probe" or "nothing measured yet" of that policy,
    "fixed", "table", or what allowed no more: "memory gate", "pages", "rows"
    (speculation_max_rows), "user" (no row wants drafts), "drafter off" (it failed),
    "dropped" (the burst did not fit when it was compiled); "prompts" is a step with prompt
    tokens beside it, which does not draft.
    """

    num_speculative_tokens: int
    reason: str
    num_rows: int  # that decode
    row_bucket: int
    max_drafts: int | None
    num_steps: int  # that ran
    context_tokens: int  # of all rows
    predicted_step_s: float | None
    measured_step_s: float  # of the device, with the prompt tokens beside, if any
    predicted_tokens: float | None  # per step, of all rows
    measured_tokens: float
