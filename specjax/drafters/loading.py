"""From a name, a folder or a model to a drafter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from specjax.config.names import NO_DRAFTER, check_drafter
from specjax.config.rules import Rule
from specjax.config.speculation import MAX_DRAFT_NODES, SpeculationConfig
from specjax.drafters.spec import (
    DrafterSpec,
    HistoryDrafter,
    HybridDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specjax.models.base import Model, ModelConfig, parameters
from specjax.models.loading import check_same_vocabulary, load_model
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import BY_LAW, DELTA, SYNTHETIC, TYPICAL


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and its weights. `params` may be replaced at any time, like a target's."""

    name: str
    spec: DrafterSpec
    params: Any = ()

    def __repr__(self) -> str:
        kind = type(self.spec).__name__
        return f"LoadedDrafter({self.name!r}, {kind}{parameters(self.params)})"

    @property
    def can_draft(self) -> bool:
        return not isinstance(self.spec, NoDrafter)

    @property
    def has_probs(self) -> bool:
        """Whether its proposals can come with the law that they were drawn from."""
        return getattr(self.spec, "has_probs", False)

    @property
    def is_tree(self) -> bool:
        """Whether drafts branch; a spec that does not say drafts chains."""
        return getattr(self.spec, "is_tree", False)

    @property
    def max_depth(self) -> int | None:
        """Of the tree it was loaded with; None where drafts may be of any depth."""
        return getattr(self.spec, "max_depth", None)

    def num_nodes(self, num_speculative_tokens: int) -> int:
        """Returns the nodes verified per row, root included."""
        answer = getattr(self.spec, "num_nodes", lambda depth: 1 + depth)
        return answer(num_speculative_tokens)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        """Returns the slots that a row's nodes take past its root; 0 for chains."""
        answer = getattr(self.spec, "tree_slots", lambda depth: 0)
        return answer(num_speculative_tokens)

    def check_windows(self, target: ModelConfig, num_speculative_tokens: int) -> None:
        """Raises ValueError where a sliding window might hide a node from its own tree."""
        num_nodes = self.tree_slots(num_speculative_tokens) + 1
        words = -(-num_nodes // 32) if self.is_tree else 0
        for config in (target, *self.configs):
            windows = [config.window(layer) for layer in range(config.num_layers)]
            narrow = [w for w in windows if w is not None and w <= 32 * words]
            if words and narrow:
                raise ValueError(
                    f"a sliding window of {min(narrow)} tokens is too narrow for trees of "
                    f"{num_nodes} nodes, which need more than "
                    f"{32 * words}; draft fewer nodes, or chains."
                )

    def check_rule(self, rule: str) -> None:
        """Raises ValueError where a verification rule cannot be applied to its drafts."""
        if rule == "block" and self.is_tree and self.has_probs:
            raise ValueError(
                "verification='block' is for chains; use 'traversal', which is the same on "
                "a chain and covers trees."
            )
        is_grown = isinstance(self.spec, ModelDrafter) and isinstance(self.spec.shape, Growth)
        if is_grown and Rule.of(rule) in BY_LAW:
            raise ValueError(
                f"verification={rule!r} would be biased on trees grown with tree_top_k, which "
                "keep nodes for the tokens that were drawn; use 'seeded', 'greedy' or "
                "'delta', or a fixed speculative_token_tree."
            )
        if rule == "lenient" and self.can_draft and not self.has_probs:
            raise ValueError(
                f"verification='lenient' needs the drafter's probabilities, and {self.name!r} "
                "has none; use 'delta', or a draft model."
            )

    def effective_rules(self, rules: Iterable[int]) -> tuple[int, ...]:
        """Returns those rules that a step must know beyond equality.

        Without probabilities a proposal is deterministic, and rules by law run as
        `delta`: the same law.
        """
        return tuple(
            sorted(
                rule
                for rule in set(rules)
                if rule > DELTA
                and self.can_draft
                and (self.has_probs or rule in (TYPICAL, SYNTHETIC))
            )
        )

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Of the models it runs."""
        return getattr(self.spec, "configs", ())


def load_drafter(
    source: LoadedDrafter | Model | str | os.PathLike[str] | None,
    target: Model,
    config: SpeculationConfig | None = None,
) -> LoadedDrafter:
    """Returns a drafter for a target.

    Args:
      source: None or "none" (plain decoding), "ngram", "history", "demo", a folder or hub
        name ("org/name") of a draft model, a Model, or a LoadedDrafter. A path is always a
        folder.
      config: prompt_lookup_* and num_draft_nodes of an n-gram drafter, the tree of a
        draft model. What it sets wins over what a LoadedDrafter was loaded with; a
        field at its default sets nothing.

    Raises:
      ValueError: no drafter has that name, the draft model's vocabulary is not the
        target's, or the config sets what such a drafter has no use for.
      TypeError: `source` is nothing of this.
    """
    config = config or SpeculationConfig()
    loaded = _load(source, target)
    if isinstance(loaded.spec, NgramDrafter):
        spec = _configured_ngram(loaded.spec, config)
    elif isinstance(loaded.spec, HistoryDrafter):
        spec = _configured_history(loaded.spec, config)
    elif isinstance(loaded.spec, HybridDrafter):
        spec = _configured_hybrid(loaded.spec, config)
    elif isinstance(loaded.spec, ModelDrafter):
        spec = _configured_model(loaded.spec, config)
        if config.corpus_tokens is not None:
            spec = HybridDrafter(spec, config.corpus_tokens, config.prompt_lookup_min)
    elif config.has_tree and loaded.can_draft:
        raise ValueError(_NO_MODEL.format(loaded.name))
    else:
        spec = loaded.spec
    return loaded if spec == loaded.spec else dataclasses.replace(loaded, spec=spec)


def _load(
    source: LoadedDrafter | Model | str | os.PathLike[str] | None, target: Model
) -> LoadedDrafter:
    """Returns a drafter of a source, without what a config asks for."""
    if isinstance(source, LoadedDrafter):
        for of_drafter in source.configs:
            check_same_vocabulary(target, Model(of_drafter, {}, name=source.name))
        return source
    if source is None or source == NO_DRAFTER:
        return LoadedDrafter(NO_DRAFTER, NoDrafter())
    if source == "ngram":
        return LoadedDrafter("ngram", NgramDrafter())
    if source == "history":
        return LoadedDrafter("history", HistoryDrafter())
    if isinstance(source, str | os.PathLike):
        check_drafter(source)
        source = load_model("demo-draft" if source == "demo" else source)
    if not isinstance(source, Model):
        raise TypeError(
            f"drafter is {source!r:.200}; expected None, 'ngram', 'history', 'demo', a folder "
            "or hub name, a Model, or what load_drafter returned."
        )
    check_same_vocabulary(target, source)
    return LoadedDrafter(source.name, ModelDrafter(source.config), source.params)


_NO_MODEL = (
    "speculative_token_tree and tree_top_k are for a draft model's tree, and the drafter is "
    "{!r}; leave them out. Several n-gram matches make a tree with prompt_lookup_matches."
)


def _configured_ngram(spec: NgramDrafter, config: SpeculationConfig) -> NgramDrafter:
    """Returns the spec with what a config sets; a field at its default keeps the spec's."""
    if config.has_tree:
        raise ValueError(_NO_MODEL.format("ngram"))
    if config.corpus_tokens is not None:
        raise ValueError(
            f"corpus_tokens={config.corpus_tokens} is for method 'history', or beside a draft "
            "model; 'ngram' looks into a row's own text alone. Leave it out, or draft from "
            "'history'."
        )
    # Every field is at least 1.
    low = _asked_for(config, "prompt_lookup_min") or spec.min_match
    high = _asked_for(config, "prompt_lookup_max") or spec.max_match
    if low > high:
        # One bound alone moves the other out of its way.
        is_high_asked = _asked_for(config, "prompt_lookup_max") is not None
        low, high = (high, high) if is_high_asked else (low, low)
    num_matches = _asked_for(config, "prompt_lookup_matches") or spec.num_matches
    num_drafts = config.num_draft_nodes or spec.num_drafts
    return NgramDrafter(low, high, num_matches, num_drafts)


def _configured_history(spec: HistoryDrafter, config: SpeculationConfig) -> HistoryDrafter:
    """Returns the spec with what a config sets; a field at its default keeps the spec's."""
    if config.has_tree:
        raise ValueError(_NO_MODEL.format("history"))
    return HistoryDrafter(
        corpus_tokens=config.corpus_tokens or spec.corpus_tokens,
        min_match=_asked_for(config, "prompt_lookup_min") or spec.min_match,
        num_matches=_asked_for(config, "prompt_lookup_matches") or spec.num_matches,
        num_drafts=config.num_draft_nodes or spec.num_drafts,
    )


def _configured_hybrid(spec: HybridDrafter, config: SpeculationConfig) -> HybridDrafter:
    """Likewise."""
    return HybridDrafter(
        model=_configured_model(spec.model, config),
        corpus_tokens=config.corpus_tokens or spec.corpus_tokens,
        min_match=_asked_for(config, "prompt_lookup_min") or spec.min_match,
    )


def _configured_model(spec: ModelDrafter, config: SpeculationConfig) -> ModelDrafter:
    """Returns the spec with the tree that a config asks for, or its own."""
    if config.prompt_lookup_matches > 1:
        raise ValueError(
            f"prompt_lookup_matches={config.prompt_lookup_matches!r} is for method 'ngram'; "
            "a draft model's tree is speculative_token_tree."
        )
    vocab_size = spec.config.vocab_size
    if config.tree_top_k is not None and config.tree_top_k > vocab_size:
        raise ValueError(
            f"tree_top_k={config.tree_top_k} is more than the {vocab_size} tokens there are; "
            "lower it."
        )
    most = spec.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > most:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {most} positions that the "
            "draft model was made for; lower it or leave it out."
        )
    shape = _shape(config) if config.has_tree else spec.shape
    if config.num_draft_nodes is not None:
        if not isinstance(shape, Growth):
            raise ValueError(
                f"num_draft_nodes={config.num_draft_nodes!r} is for trees of several n-gram "
                "matches and those grown with tree_top_k; leave it out."
            )
        shape = dataclasses.replace(shape, num_drafts=config.num_draft_nodes)
        shape = shape.cut(shape.max_depth)
    max_positions = config.max_model_len or spec.max_positions
    return dataclasses.replace(spec, shape=shape, max_positions=max_positions)


def _asked_for(config: SpeculationConfig, name: str) -> int | None:
    """Returns a field of a config; None where it has its default."""
    value = getattr(config, name)
    return None if value == getattr(SpeculationConfig, name) else value


def _shape(config: SpeculationConfig) -> TreeShape | Growth:
    """Returns the shape of the tree that is asked for, or how it grows."""
    if config.tree_top_k is not None:
        depth, width = config.depth, config.tree_top_k
        return Growth(depth, width, min(depth * width, MAX_DRAFT_NODES)).cut(depth)
    return static_shapes.from_rank_paths(config.speculative_token_tree)
