"""Which drafter, as a hashable value: part of the key of a compiled step.

Every spec builds its drafter and says how much room its drafts take:

    is_tree        whether drafts branch
    max_depth      of a tree of fixed depth; None where drafts may be of any depth
    num_nodes(K)   nodes verified per row, root included
    tree_slots(K)  slots that a row's nodes take past its root, those fed to grow a tree
                   too; 0 for chains
    has_probs      whether proposals come with the law that they were drawn from, if
                   `keeps_probs` asks, and say how sure they are, if `says_confidence` does
    configs        of the models it runs: their pages are counted, their windows checked
    takes_text     whether the host is to tell it what rows have written: see history

A spec of your own that has only build(K, dtype, keeps_probs) counts as one that drafts
chains, without probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from specjax.drafters import draft_model, history, hybrid, ngram, none
from specjax.drafters.base import Drafter
from specjax.models.base import ModelConfig
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    is_tree: ClassVar[bool] = False
    max_depth: ClassVar[None] = None

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return 1

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return 0

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
    max_depth: ClassVar[None] = None

    @property
    def is_tree(self) -> bool:
        return self.num_matches > 1

    def num_nodes(self, num_speculative_tokens: int) -> int:
        depth = num_speculative_tokens
        if not self.is_tree:
            return 1 + depth
        return 1 + ngram.tree_budget(self.num_matches, depth, self.num_drafts)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.num_nodes(num_speculative_tokens) - 1 if self.is_tree else 0

    def build(self, num_speculative_tokens: int, dtype, keeps_probs: bool) -> Drafter:
        # Deterministic: rejection runs as delta, the same law.
        del dtype, keeps_probs
        return ngram.drafter(
            num_speculative_tokens=num_speculative_tokens,
            min_match=self.min_match,
            max_match=self.max_match,
            num_matches=self.num_matches,
            num_drafts=self.num_drafts,
        )


CORPUS_TOKENS = 65_536  # where nobody says


@dataclasses.dataclass(frozen=True)
class HistoryDrafter:
    """Matching over the row's own text, its siblings', and that of earlier requests and epochs.

    Tokens of the corpus, tokens that must agree at least; trees as of NgramDrafter.
    """

    corpus_tokens: int = CORPUS_TOKENS
    min_match: int = 2
    num_matches: int = 1
    num_drafts: int | None = None
    max_depth: ClassVar[None] = None
    takes_text: ClassVar[bool] = True

    def __post_init__(self):
        history.check_capacity(self.corpus_tokens)

    @property
    def is_tree(self) -> bool:
        return self.num_matches > 1

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self._room.num_nodes(num_speculative_tokens)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self._room.tree_slots(num_speculative_tokens)

    def build(self, num_speculative_tokens: int, dtype, keeps_probs: bool) -> Drafter:
        # Deterministic, as n-grams are.
        del dtype, keeps_probs
        return history.drafter(
            num_speculative_tokens=num_speculative_tokens,
            capacity=self.corpus_tokens,
            min_match=self.min_match,
            num_matches=self.num_matches,
            num_drafts=self.num_drafts,
        )

    @property
    def _room(self) -> NgramDrafter:
        return NgramDrafter(num_matches=self.num_matches, num_drafts=self.num_drafts)


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """A draft model of the target's vocabulary, and its trees' shape or growth; None is a chain."""

    config: ModelConfig
    shape: TreeShape | Growth | None = None
    # Positions that it is fed; None is as many as it was made for.
    max_positions: int | None = None

    has_probs: ClassVar[bool] = True

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return (self.config,)

    @property
    def is_tree(self) -> bool:
        return self.shape is not None

    @property
    def max_depth(self) -> int | None:
        return None if self.shape is None else self.shape.max_depth

    def num_nodes(self, num_speculative_tokens: int) -> int:
        shape = self._cut(num_speculative_tokens)
        return 1 + num_speculative_tokens if shape is None else shape.num_nodes

    def tree_slots(self, num_speculative_tokens: int) -> int:
        shape = self._cut(num_speculative_tokens)
        num_fed = shape.num_fed if isinstance(shape, Growth) else 0
        return 0 if shape is None else max(shape.num_drafts, num_fed)

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
            shape=self._cut(num_speculative_tokens),
            max_positions=self.max_positions,
        )

    def _cut(self, num_speculative_tokens: int) -> TreeShape | Growth | None:
        return None if self.shape is None else self.shape.cut(num_speculative_tokens)


@dataclasses.dataclass(frozen=True)
class HybridDrafter:
    """History where it matches, chains of a draft model elsewhere."""

    model: ModelDrafter
    corpus_tokens: int = CORPUS_TOKENS
    min_match: int = 2

    is_tree: ClassVar[bool] = False
    max_depth: ClassVar[None] = None
    has_probs: ClassVar[bool] = False
    takes_text: ClassVar[bool] = True

    def __post_init__(self):
        history.check_capacity(self.corpus_tokens)
        if self.model.is_tree:
            raise ValueError(
                "corpus_tokens beside a draft model is for chains; leave out "
                "speculative_token_tree and tree_top_k, or corpus_tokens."
            )

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return self.model.configs

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return 1 + num_speculative_tokens

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return 0

    def build(self, num_speculative_tokens: int, dtype, keeps_probs: bool) -> Drafter:
        del keeps_probs
        return hybrid.drafter(
            self.model.build(num_speculative_tokens, dtype, False),
            num_speculative_tokens=num_speculative_tokens,
            capacity=self.corpus_tokens,
            min_match=self.min_match,
        )


DrafterSpec = NoDrafter | NgramDrafter | HistoryDrafter | ModelDrafter | HybridDrafter
