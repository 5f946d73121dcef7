"""The record of a burst: its decision, and predicted beside measured figures."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstRecord:
    """One burst: its K, the reason, and predicted beside measured figures.

    `reason` names the policy: "goodput" (also "unproven", "probe" or "nothing measured yet"),
    "fixed" or "table"; or the limit that lowered K: "memory gate", "pages" (where prompts are fed
    too), "rows" (speculation_max_rows), "user" (no row wants drafts), "drafter off" (it failed),
    "dropped" (the burst did not fit when it was compiled). "prompts" is a step that the goodput
    policy lets run plainly because of the prompt tokens beside it.
    """

    num_speculative_tokens: int
    reason: str
    why: str = ""  # figures behind the reason, in words
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


# What the reason of a decision means, after "K = 0 in 3 of 4 bursts: ".
_WORDS = {
    "fixed": "the policy is 'fixed'",
    "table": "num_speculative_tokens_per_batch_size says so",
    "probe": "measured, to compare",
    "nothing measured yet": "the step that drafts was not yet compiled and measured",
    "unproven": "drafts may be faster here, by too little or too unsure to change over",
    "prompts": "prompts were fed beside",
    "memory gate": "the batch is above speculation_weight_fraction of the memory",
    "pages": "pages were short",
    "rows": "more rows decode than speculation_max_rows",
    "user": "no request wants drafts",
    "drafter off": "the drafter failed",
    "dropped": "the step that drafts did not fit into memory",
}


def which_k(records: Sequence[BurstRecord]) -> str:
    """Returns in a line of words which K bursts had and why, the most frequent first; "" of none.

    Of each K the most frequent reason is told, with the figures of its last burst.
    """
    reasons: dict[int, collections.Counter[str]] = {}
    last = {}
    for record in records:
        depth = record.num_speculative_tokens
        reasons.setdefault(depth, collections.Counter())[record.reason] += 1
        last[depth, record.reason] = record.why
    parts = []
    for depth, counts in sorted(reasons.items(), key=lambda item: -item[1].total()):
        reason = counts.most_common(1)[0][0]
        faster = "drafting is faster here" if depth else "plain decoding is faster here"
        words = _WORDS.get(reason, faster if reason == "goodput" else reason)
        figures = last[depth, reason]
        parts.append(
            f"K = {depth} in {counts.total()} of {len(records)} bursts: {words}"
            + (f" ({figures})" if figures else "")
        )
    return "; ".join(parts)
