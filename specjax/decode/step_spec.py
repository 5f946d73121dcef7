"""What is static about a step."""

from __future__ import annotations

import dataclasses

from specjax.decode.rules import NO_OPTIONS, RuleOptions
from specjax.drafters.base import Drafter
from specjax.models.base import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One executable each."""

    config: ModelConfig
    drafter: Drafter
    num_speculative_tokens: int  # K; 0 is plain decoding
    max_logprobs: int
    rules: tuple[int, ...] = ()  # of types, those beyond equality that rows may use
    rule_options: RuleOptions = NO_OPTIONS
    # Most draft tokens verified per step over all rows, the likeliest to stand; None: all.
    max_drafts: int | None = None
    token_bucket: int | None = None  # of invariant numerics; None: all tokens at once
    logit_bytes: int = 10**9  # most that float32 logits of the target take at once
    tensor_axis: str | None = None  # mesh axis that heads and MLP are split over

    def __post_init__(self):
        if self.rules and self.token_bucket is not None:
            raise ValueError(
                f"rules={self.rules} compare whole rows, and token_bucket={self.token_bucket} "
                "decides token by token; under invariant numerics use none of them."
            )
