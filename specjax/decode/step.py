"""One speculative step: draft -> verify -> accept -> commit."""

from __future__ import annotations

import dataclasses

from specjax.decode.commit import commit
from specjax.decode.draft import draft
from specjax.decode.state import DecodeState
from specjax.decode.verify import verify
from specjax.drafters.base import Drafter
from specjax.models.base import ModelConfig
from specjax.types import DecoderParams, StepInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is static about a step; one executable each."""

    config: ModelConfig
    drafter: Drafter
    num_speculative_tokens: int  # K; 0 is plain decoding
    max_logprobs: int
    tensor_axis: str | None = None  # mesh axis that heads and MLP are split over


def step(
    spec: StepSpec, params: DecoderParams, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """Advances every active row by 1 to K + 1 tokens."""
    state, drafted = draft(
        spec.drafter, params.drafter, state, spec.num_speculative_tokens
    )
    cache, verification = verify(
        params.target,
        spec.config,
        state,
        drafted.proposal,
        max_logprobs=spec.max_logprobs,
        tensor_axis=spec.tensor_axis,
    )
    state = dataclasses.replace(state, cache=cache)
    return commit(state, spec.drafter, drafted, verification)
