"""What a kind of drafter must say to be trained: its drafts along a text that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.models.base import ModelConfig, Params
from specjax.training import roots
from specjax.training.texts import Along, Target, TextBatch


class Drafts(NamedTuple):
    """Draft tokens after some tokens of each text, the roots, had the text been drafted so far.

    Draft token s = 0, 1, ... of a root at position p is a guess at the token of position p + s + 1,
    which the target predicts at p + s. The drafter knows the text up to the root, and the s tokens
    after it as its own earlier drafts.

    Attributes:
      roots: i32[rows, num_roots], positions.
      is_root: bool[rows, num_roots]; False for places that hold no root.
      hidden: for each s what `score` reads, [rows, num_roots, width]. An array that stands here
        twice is scored once.
      score: (hidden [n, width], s) -> f32[n, tokens that the drafter can say], logits.
      estimates: for each s f32[rows, num_roots], logits of how likely the draft token is
        accepted; () without a confidence head.
      target_ids: i32[tokens that the drafter can say], their numbers in the target's vocabulary;
        None: it can say all.
      has_all_roots: whether the roots of a row are all its places in order.
      is_aligned: whether hidden and estimates of draft token s stand in the place of the token that
        it follows, p + s, and not of its root. It takes all roots.
    """

    roots: Array
    is_root: Array
    hidden: tuple[Array, ...]
    score: Callable[[Array, int], Array]
    estimates: tuple[Array, ...] = ()
    target_ids: Array | None = None
    has_all_roots: bool = False
    is_aligned: bool = False

    @classmethod
    def after_each(
        cls,
        text: TextBatch,
        hidden: tuple[Array, ...],
        score: Callable[[Array, int], Array],
        target_ids: Array | None = None,
    ) -> Drafts:
        """Returns drafts after every token but the first, each in the place of the token that it
        follows."""
        return cls(*roots.after_first(text), hidden, score, (), target_ids, True, True)


class Propose(Protocol):
    """Returns the drafts of a drafter along texts, differentiable in `params`.

    Where a kind draws its roots, it does so by `key`; None: all are wanted.
    """

    def __call__(
        self, params: Params, config: Any, along: Along, depth: int, key: Array | None
    ) -> Drafts: ...


class Kind(NamedTuple):
    """A kind of drafter that can be trained.

    Attributes:
      name: as `SpeculationConfig.method` names it; of P-EAGLE, whose method is that of EAGLE-3,
        its own.
      configure: (target's config, options) -> config. Raises ValueError for an option that the
        kind does not have, or that is impossible.
      begin: (key, config, target, target_ids) -> params in float32, before any training.
        target_ids: i32[tokens that it can say] of a vocabulary that is a part; else None.
      propose: see Propose. `depth` is the number of draft tokens of each root.
      spec: config -> the drafter's spec.
      is_kind_of: spec -> whether a drafter is of this kind.
      taps: config -> layers of the target that it reads, as `DrafterSpec.taps` has them.
      most_drafts: config -> most draft tokens that it can be trained for; None: any number.
    """

    name: str
    configure: Callable[[ModelConfig, dict[str, Any]], Any]
    begin: Callable[[Array, Any, Target, Array | None], Params]
    propose: Propose
    spec: Callable[[Any], DrafterSpec]
    is_kind_of: Callable[[DrafterSpec], bool]
    taps: Callable[[Any], tuple[int, ...]] = lambda config: config.aux_layers
    most_drafts: Callable[[Any], int | None] = lambda config: getattr(config, "most_drafts", None)
