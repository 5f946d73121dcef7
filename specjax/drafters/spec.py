"""The drafters that come with specjax, as hashable values; `DrafterSpec` is their base class."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from specjax.config.checks import is_int
from specjax.config.speculation import MAX_DRAFT_NODES, SpeculationConfig
from specjax.drafters import draft_model, history, hybrid, ngram, none, parallel_model
from specjax.drafters.base import (
    Block,
    Drafter,
    DrafterContext,
    ModelWork,
    check_no_features,
    check_no_masks,
    check_num_shards,
    no_tree_message,
)
from specjax.drafters.base import DrafterSpec as DrafterSpec
from specjax.drafters.token_set import TokenSet
from specjax.models.base import ModelConfig
from specjax.models.partition import undivided
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape


@dataclasses.dataclass(frozen=True)
class NoDrafter(DrafterSpec):
    """Plain decoding."""

    can_draft: ClassVar[bool] = False

    def num_nodes(self, num_speculative_tokens: int) -> int:
        del num_speculative_tokens
        return 1

    def build(self, context: DrafterContext) -> Drafter:
        del context
        return none.drafter()


@dataclasses.dataclass(frozen=True)
class NgramDrafter(DrafterSpec):
    """N-gram matching over prompt and output, by matches of min_match to max_match tokens.

    More than one match makes a tree, of at most num_drafts tokens.
    """

    min_match: int = 2
    max_match: int = 4
    num_matches: int = 1
    num_drafts: int | None = None

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

    def configured(self, config: SpeculationConfig) -> NgramDrafter:
        if config.has_tree:
            raise ValueError(no_tree_message("ngram"))
        check_no_masks(config, "'ngram'")
        check_no_features(config, "'ngram'")
        if config.corpus_tokens is not None:
            raise ValueError(
                f"corpus_tokens={config.corpus_tokens} is for method 'history', or beside a draft "
                "model; 'ngram' looks into a row's own text alone. Leave it out, or draft from "
                "'history'."
            )
        # Every field is at least 1.
        low = asked_for(config, "prompt_lookup_min") or self.min_match
        high = asked_for(config, "prompt_lookup_max") or self.max_match
        if low > high:
            # A bound set on its own moves the default of the other.
            is_high_asked = asked_for(config, "prompt_lookup_max") is not None
            low, high = (high, high) if is_high_asked else (low, low)
        num_matches = asked_for(config, "prompt_lookup_matches") or self.num_matches
        num_drafts = config.num_draft_nodes or self.num_drafts
        # Not NgramDrafter(...): a class derived from it stays what it is.
        return dataclasses.replace(
            self, min_match=low, max_match=high, num_matches=num_matches, num_drafts=num_drafts
        )

    def build(self, context: DrafterContext) -> Drafter:
        # Deterministic: rejection runs as delta, the same law.
        return ngram.drafter(
            num_speculative_tokens=context.num_speculative_tokens,
            min_match=self.min_match,
            max_match=self.max_match,
            num_matches=self.num_matches,
            num_drafts=self.num_drafts,
        )


CORPUS_TOKENS = 65_536  # default size of the corpus


@dataclasses.dataclass(frozen=True)
class HistoryDrafter(DrafterSpec):
    """Matching over the row's own text, its siblings', and that of earlier requests and epochs.

    The corpus holds corpus_tokens tokens, and a match has at least min_match. Trees are as in
    NgramDrafter.
    """

    corpus_tokens: int = CORPUS_TOKENS
    min_match: int = 2
    num_matches: int = 1
    num_drafts: int | None = None
    takes_text: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __post_init__(self):
        history.check_capacity(self.corpus_tokens)

    @property
    def is_tree(self) -> bool:
        return self.num_matches > 1

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self._room.num_nodes(num_speculative_tokens)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self._room.tree_slots(num_speculative_tokens)

    def configured(self, config: SpeculationConfig) -> HistoryDrafter:
        if config.has_tree:
            raise ValueError(no_tree_message("history"))
        check_no_masks(config, "'history'")
        check_no_features(config, "'history'")
        return dataclasses.replace(
            self,
            corpus_tokens=config.corpus_tokens or self.corpus_tokens,
            min_match=asked_for(config, "prompt_lookup_min") or self.min_match,
            num_matches=asked_for(config, "prompt_lookup_matches") or self.num_matches,
            num_drafts=config.num_draft_nodes or self.num_drafts,
        )

    def build(self, context: DrafterContext) -> Drafter:
        # Deterministic, as NgramDrafter is.
        return history.drafter(
            num_speculative_tokens=context.num_speculative_tokens,
            capacity=self.corpus_tokens,
            min_match=self.min_match,
            num_matches=self.num_matches,
            num_drafts=self.num_drafts,
        )

    @property
    def _room(self) -> NgramDrafter:
        return NgramDrafter(num_matches=self.num_matches, num_drafts=self.num_drafts)


class Shaped(DrafterSpec):
    """Drafts chains, or trees of a shape that a config may set.

    Attributes:
      shape: of its trees, None: chains. A field of the derived class.
    """

    shape: TreeShape | Growth | None

    has_probs: ClassVar[bool] = True
    abstains: ClassVar[bool] = False

    @property
    def is_tree(self) -> bool:
        return self.shape is not None

    @property
    def is_grown(self) -> bool:
        return isinstance(self.shape, Growth)

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

    def shape_of(self, config: SpeculationConfig, vocab_size: int) -> TreeShape | Growth | None:
        """Returns the tree of a config, or its own if the config sets none.

        Raises:
          ValueError: the config sets a field that does not apply to drafts of a model.
        """
        if config.prompt_lookup_matches > 1:
            raise ValueError(
                f"prompt_lookup_matches={config.prompt_lookup_matches!r} is for method 'ngram'; "
                "a draft model's tree is speculative_token_tree."
            )
        if config.tree_top_k is not None and config.tree_top_k > vocab_size:
            raise ValueError(
                f"tree_top_k={config.tree_top_k} is more than the {vocab_size} tokens there are; "
                "lower it."
            )
        shape = _shape(config) if config.has_tree else self.shape
        if config.num_draft_nodes is None:
            return shape
        if not isinstance(shape, Growth):
            raise ValueError(
                f"num_draft_nodes={config.num_draft_nodes!r} is for trees of several n-gram "
                "matches and those grown with tree_top_k; leave it out."
            )
        shape = dataclasses.replace(shape, num_drafts=config.num_draft_nodes)
        return shape.cut(shape.max_depth)

    def _cut(self, num_speculative_tokens: int) -> TreeShape | Growth | None:
        return None if self.shape is None else self.shape.cut(num_speculative_tokens)


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Shaped):
    """A draft model with the target's vocabulary; `shape` describes its trees, None: chains.

    One of another vocabulary is rewritten first (`other_vocabulary`), and drafts what is in both.
    One with a mask token drafts a chain in one forward (`parallel_model`), unless is_parallel is
    False.
    """

    config: ModelConfig
    shape: TreeShape | Growth | None = None
    # Most positions that it is fed; None: config.max_position_embeddings.
    max_positions: int | None = None
    num_shards: int = 1  # set by `split`
    said: TokenSet | None = None  # the tokens that it may draft; None: all
    is_parallel: bool | None = None  # None: as the config says, by its mask_token_id

    def __post_init__(self):
        check_num_shards(self.num_shards)
        most = self.max_positions
        if most is not None and not (is_int(most) and most >= 1):
            raise ValueError(f"max_positions={most!r:.100} must be a whole number from 1, or None.")

    @property
    def takes_masks(self) -> bool:
        """Whether it drafts all tokens of a step in one forward, over mask tokens."""
        return self.config.mask_token_id is not None and self.is_parallel is not False

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return (self.config,)

    @property
    def likely_faults(self) -> tuple[str, ...]:
        faults = (
            "its weights are not those of its config.json",
            "it was trained for text of another kind, or prompts lack the chat template",
        )
        if self.said is None:
            return faults
        return (*faults, f"the {len(self.said):,} tokens that both vocabularies have are too few")

    def can_split(self, num_shards: int) -> bool:
        return undivided(self.config, num_shards) is None

    def split(self, num_shards: int) -> ModelDrafter:
        """Returns the spec with its weights split over num_shards devices.

        Raises:
          ValueError: heads or MLP cannot be split so.
        """
        check_num_shards(num_shards)
        if (field := undivided(self.config, num_shards)) is not None:
            raise ValueError(
                f"{field}={getattr(self.config, field)} of the draft model is not divisible by "
                f"{num_shards=}; use fewer."
            )
        return dataclasses.replace(self, num_shards=num_shards)

    def configured(self, config: SpeculationConfig) -> ModelDrafter | HybridDrafter:
        return beside_history(self, config)

    def with_tree(self, config: SpeculationConfig) -> ModelDrafter:
        """Returns the spec with the tree of a config, or its own if the config sets none.

        Raises:
          ValueError: the config sets a field that does not apply to a draft model.
        """
        most = self.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > most:
            raise ValueError(
                f"max_model_len={config.max_model_len} is more than the {most} positions that the "
                "draft model was made for; lower it or leave it out."
            )
        if self.config.mask_token_id is None:
            check_no_masks(config, "this draft model")
        check_no_features(config, "a draft model")
        spec = dataclasses.replace(
            self,
            shape=self.shape_of(config, self._num_said),
            max_positions=config.max_model_len or self.max_positions,
            is_parallel=(
                self.is_parallel if config.parallel_drafting is None else config.parallel_drafting
            ),
        )
        if spec.is_tree and spec.takes_masks:
            raise ValueError(
                "a draft model with a mask token drafts chains; leave out speculative_token_tree "
                "and tree_top_k, or draft token by token with parallel_drafting=False."
            )
        return spec

    @property
    def _num_said(self) -> int:
        return self.config.vocab_size if self.said is None else len(self.said)

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        """Returns the work of one draft token, or of the forward over masks that drafts them all.

        A row has at most 2 K tokens in that forward, of which K - 1 are masks.
        """
        works = super().work(target, dtype, num_weights)
        if not self.takes_masks:
            return works
        block = Block(0, per_draft=2)
        return tuple(dataclasses.replace(work, block=block) for work in works)

    def build(self, context: DrafterContext) -> Drafter:
        options: dict[str, Any] = dict(
            num_speculative_tokens=context.num_speculative_tokens,
            dtype=context.dtype,
            keeps_probs=context.keeps_probs,
            says_confidence=context.says_confidence,
            max_positions=self.max_positions,
            partition=draft_model.Partition(
                self.num_shards, context.draft_axis, context.copies_axis
            ),
            said=self.said,
        )
        if self.takes_masks:
            return parallel_model.drafter(self.config, **options)
        shape = self._cut(context.num_speculative_tokens)
        return draft_model.drafter(self.config, shape=shape, **options)


def beside_history(spec: Any, config: SpeculationConfig) -> Any:
    """Returns the drafter of a config: a spec alone, or beside history if it has corpus_tokens."""
    if config.corpus_tokens is None:
        return spec.with_tree(config)
    _check_no_longest(config)
    of_model = spec.with_tree(_without_history(config))
    return HybridDrafter(of_model, config.corpus_tokens, config.prompt_lookup_min)


def _check_no_longest(config: SpeculationConfig) -> None:
    """Raises ValueError where a config bounds matches of history from above."""
    if asked_for(config, "prompt_lookup_max") is not None:
        raise ValueError(
            f"prompt_lookup_max={config.prompt_lookup_max} is for method 'ngram': beside "
            "corpus_tokens the longest match is taken, whatever its length; leave it out."
        )


def _without_history(config: SpeculationConfig) -> SpeculationConfig:
    """Returns a config without the fields of history beside a model."""
    return dataclasses.replace(
        config,
        corpus_tokens=None,
        prompt_lookup_min=SpeculationConfig.prompt_lookup_min,
        prompt_lookup_max=SpeculationConfig.prompt_lookup_max,
    )


@dataclasses.dataclass(frozen=True)
class HybridDrafter(DrafterSpec):
    """History drafts where they are expected to be accepted more, else chains of a model.

    `model` is a draft model or a head over the target.
    """

    model: Any  # ModelDrafter, or a head
    corpus_tokens: int = CORPUS_TOKENS
    min_match: int = 2

    abstains: ClassVar[bool] = False
    takes_text: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __post_init__(self):
        history.check_capacity(self.corpus_tokens)
        if self.model.is_tree:
            raise ValueError(
                "corpus_tokens beside a draft model or a head is for chains; leave out "
                "speculative_token_tree and tree_top_k, or corpus_tokens."
            )
        if isinstance(self.model, ModelDrafter) and self.model.takes_masks:
            raise ValueError(
                "corpus_tokens beside a draft model with a mask token is not supported; leave it "
                "out, or draft token by token with parallel_drafting=False."
            )

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return self.model.configs

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    def bytes_per_token(self, target: ModelConfig, dtype: Any) -> int:
        return self.model.bytes_per_token(target, dtype)

    def abstract_params(self, target: ModelConfig, dtype: Any) -> Any:
        return self.model.abstract_params(target, dtype)

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        return self.model.work(target, dtype, num_weights)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.model.tree_slots(num_speculative_tokens)

    @property
    def likely_faults(self) -> tuple[str, ...]:
        return self.model.likely_faults

    @property
    def made_by(self) -> Any:
        return self.model.made_by

    @property
    def uses_target_pages(self) -> bool:
        return self.model.uses_target_pages

    @property
    def num_shards(self) -> int:
        return self.model.num_shards

    def can_split(self, num_shards: int) -> bool:
        return self.model.can_split(num_shards)

    def split(self, num_shards: int) -> HybridDrafter:
        return dataclasses.replace(self, model=self.model.split(num_shards))

    def configured(self, config: SpeculationConfig) -> HybridDrafter:
        _check_no_longest(config)
        return dataclasses.replace(
            self,
            model=self.model.with_tree(_without_history(config)),
            corpus_tokens=config.corpus_tokens or self.corpus_tokens,
            min_match=asked_for(config, "prompt_lookup_min") or self.min_match,
        )

    def build(self, context: DrafterContext) -> Drafter:
        without_figures = dataclasses.replace(context, keeps_probs=False, says_confidence=False)
        return hybrid.drafter(
            self.model.build(without_figures),
            num_speculative_tokens=context.num_speculative_tokens,
            capacity=self.corpus_tokens,
            min_match=self.min_match,
        )


def asked_for(config: SpeculationConfig, name: str) -> Any:
    """Returns a field of a config, or None if it has its default."""
    value = getattr(config, name)
    return None if value == getattr(SpeculationConfig, name) else value


def _shape(config: SpeculationConfig) -> TreeShape | Growth:
    """Returns the shape, or the growth, of the tree that a config asks for."""
    if config.tree_top_k is not None:
        depth, width = config.depth, config.tree_top_k
        return Growth(depth, width, min(depth * width, MAX_DRAFT_NODES)).cut(depth)
    return static_shapes.from_rank_paths(config.speculative_token_tree)
