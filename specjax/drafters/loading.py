"""From a name, a folder or a model to a drafter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from specjax.config import MAX_DRAFT_NODES, VERIFICATION_RULES, SpeculationConfig
from specjax.drafters.spec import DrafterSpec, ModelDrafter, NgramDrafter, NoDrafter
from specjax.models.base import Model, ModelConfig
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

    @property
    def can_draft(self) -> bool:
        return not isinstance(self.spec, NoDrafter)

    @property
    def is_model(self) -> bool:
        return isinstance(self.spec, ModelDrafter)

    @property
    def is_tree(self) -> bool:
        if isinstance(self.spec, NgramDrafter):
            return self.spec.num_matches > 1
        return isinstance(self.spec, ModelDrafter) and self.spec.shape is not None

    @property
    def max_depth(self) -> int | None:
        """Of the tree it was loaded with; None where drafts may be of any depth."""
        shape = self.spec.shape if isinstance(self.spec, ModelDrafter) else None
        return None if shape is None else shape.max_depth

    def num_nodes(self, num_speculative_tokens: int) -> int:
        """Returns the nodes of a row's tree, root included; 0 for chains."""
        if not self.is_tree:
            return 0
        spec = self.spec
        if isinstance(spec, ModelDrafter):
            assert spec.shape is not None
            return spec.shape.cut(num_speculative_tokens).num_nodes
        assert isinstance(spec, NgramDrafter)
        most = spec.num_matches * num_speculative_tokens
        return 1 + min(most, spec.num_drafts or MAX_DRAFT_NODES)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        """Returns the slots that a row's nodes take past its root, those fed to grow a tree too."""
        if not self.is_tree:
            return 0
        shape = self.spec.shape if isinstance(self.spec, ModelDrafter) else None
        num_fed = 0
        if isinstance(shape, Growth):
            num_fed = shape.cut(num_speculative_tokens).num_fed
        return max(self.num_nodes(num_speculative_tokens) - 1, num_fed)

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
        if rule == "block" and self.is_tree and self.is_model:
            raise ValueError(
                "verification='block' is for chains; use 'traversal', which is the same on "
                "a chain and covers trees."
            )
        is_grown = isinstance(self.spec, ModelDrafter) and isinstance(
            self.spec.shape, Growth
        )
        if is_grown and VERIFICATION_RULES.index(rule) in BY_LAW:
            raise ValueError(
                f"verification={rule!r} would be biased on trees grown with tree_top_k, which "
                "keep nodes for the tokens that were drawn; use 'seeded', 'greedy' or "
                "'delta', or a fixed speculative_token_tree."
            )
        if rule == "lenient" and self.can_draft and not self.is_model:
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
                if rule > DELTA and (self.is_model or rule in (TYPICAL, SYNTHETIC))
            )
        )

    @property
    def configs(self) -> list[ModelConfig]:
        """Of the models it runs."""
        return [self.spec.config] if isinstance(self.spec, ModelDrafter) else []


def load_drafter(
    source: LoadedDrafter | Model | str | os.PathLike[str] | None,
    target: Model,
    config: SpeculationConfig | None = None,
) -> LoadedDrafter:
    """Returns a drafter for a target.

    Args:
      source: None (plain decoding), "ngram", "demo", a folder or hub name of a
        draft model, a Model, or a LoadedDrafter, which is returned as it is. A
        path is always a folder.
      config: prompt_lookup_* and num_draft_nodes of an n-gram drafter, the tree of a
        draft model.

    Raises:
      ValueError: the draft model's vocabulary is not the target's.
      TypeError: `source` is nothing of this.
    """
    config = config or SpeculationConfig()
    if isinstance(source, LoadedDrafter):
        for of_drafter in source.configs:
            check_same_vocabulary(target, Model(of_drafter, {}, name=source.name))
        return _with_tree(source, config)
    if source is None:
        return LoadedDrafter("none", NoDrafter())
    if source == "ngram":
        if _asks_for_tree(config):
            raise ValueError(_NO_MODEL.format("ngram"))
        return LoadedDrafter(
            "ngram",
            NgramDrafter(
                config.prompt_lookup_min,
                config.prompt_lookup_max,
                config.prompt_lookup_matches,
                config.num_draft_nodes,
            ),
        )
    if isinstance(source, str | os.PathLike):
        source = load_model("demo-draft" if source == "demo" else source)
    if not isinstance(source, Model):
        raise TypeError(
            f"drafter is {source!r}; expected None, 'ngram', 'demo', a folder or hub "
            "name, a Model, or what load_drafter returned."
        )
    check_same_vocabulary(target, source)
    if config.prompt_lookup_matches > 1:
        raise ValueError(
            f"prompt_lookup_matches={config.prompt_lookup_matches!r} is for method 'ngram'; "
            "a draft model's tree is speculative_token_tree."
        )
    return LoadedDrafter(
        source.name, ModelDrafter(source.config, _shape(config)), source.params
    )


_NO_MODEL = (
    "speculative_token_tree and tree_top_k are for a draft model's tree, and the drafter is "
    "{!r}; leave them out. Several n-gram matches make a tree with prompt_lookup_matches."
)


def _with_tree(drafter: LoadedDrafter, config: SpeculationConfig) -> LoadedDrafter:
    """Returns a loaded drafter with the tree that a call asks for, if it asks for one."""
    if not _asks_for_tree(config) or not drafter.can_draft:
        return drafter
    if not isinstance(drafter.spec, ModelDrafter):
        raise ValueError(_NO_MODEL.format(drafter.name))
    spec = dataclasses.replace(drafter.spec, shape=_shape(config))
    return dataclasses.replace(drafter, spec=spec)


def _asks_for_tree(config: SpeculationConfig) -> bool:
    return config.speculative_token_tree is not None or config.tree_top_k is not None


def _shape(config: SpeculationConfig) -> TreeShape | Growth | None:
    """Returns the shape of the tree that is asked for, or how it grows; None for chains."""
    if config.tree_top_k is not None:
        depth, width = config.num_speculative_tokens, config.tree_top_k
        num_drafts = config.num_draft_nodes or min(depth * width, MAX_DRAFT_NODES)
        return Growth(depth, width, num_drafts).cut(depth)
    tree = config.speculative_token_tree
    return None if tree is None else static_shapes.from_rank_paths(tree)
