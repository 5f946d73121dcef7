"""Which drafter, as a hashable value: part of the key of a compiled step."""

from __future__ import annotations

import dataclasses

from specjax.drafters import draft_model, ngram, none
from specjax.drafters.base import Drafter
from specjax.models.base import ModelConfig
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    def build(self, num_speculative_tokens: int, dtype, keeps_probs: bool) -> Drafter:
        del num_speculative_tokens, dtype, keeps_probs
        return none.drafter()


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """N-gram matching over prompt and output; tokens that must agree, fewest and most.

    More than one match makes a tree, of at most num_drafts tokens.
    """

    min_match: int = 2
    max_match: int = 4
    num_matches: int = 1
    num_drafts: int | None = None

    def build(self, num_speculative_tokens: int, dtype, keeps_probs: bool) -> Drafter:
        del (
            dtype,
            keeps_probs,
        )  # deterministic: rejection runs as delta, the same law
        return ngram.drafter(
            num_speculative_tokens=num_speculative_tokens,
            min_match=self.min_match,
            max_match=self.max_match,
            num_matches=self.num_matches,
            num_drafts=self.num_drafts,
        )


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """A draft model of the target's vocabulary, and its trees' shape or growth; None is a chain."""

    config: ModelConfig
    shape: TreeShape | Growth | None = None

    def build(
        self,
        num_speculative_tokens: int,
        dtype,
        keeps_probs: bool,
        says_confidence: bool = False,
    ) -> Drafter:
        return draft_model.drafter(
            self.config,
            num_speculative_tokens=num_speculative_tokens,
            dtype=dtype,
            keeps_probs=keeps_probs,
            says_confidence=says_confidence,
            shape=None
            if self.shape is None
            else self.shape.cut(num_speculative_tokens),
        )


DrafterSpec = NoDrafter | NgramDrafter | ModelDrafter
