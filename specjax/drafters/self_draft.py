"""A drafter that is the target itself with weights of few bits, and perhaps fewer layers.

It keeps no keys and values. It reads the target's, which are exact, and writes those of the root
and of draft tokens into the slots that the target writes them to when it verifies: all of them are
past `lengths`, in pages of the row's own, and the target writes before it reads. So the drafter has
no prompt to be fed, no token to catch up with, and nothing to move or to share.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.drafters import token_by_token
from specjax.drafters.base import Draft, Drafter, DrafterContext
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.quantised_target import QuantisedTarget, head_of, layers_of
from specjax.paged import kv_cache
from specjax.paged.forward import forward, own_logits
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import DecoderParams, TokenBatch

_Pages = tuple[kv_cache.Pages, ...]  # of the drafter's layers


def drafter(
    weights: QuantisedTarget, context: DrafterContext, shape: TreeShape | Growth | None
) -> Drafter:
    """Returns the drafter; it draws as a draft model does (`draft_model.drafter`).

    Args:
      weights: makes `DecoderParams.drafter`.
      shape: shape of a tree, whose depth is K, or how it grows; None: chains.
    """
    target, kept = context.target, weights.kept_layers(context.target)

    def draft(params: DecoderParams, state: Any, decode_state: Any, num_tokens: Array) -> Draft:
        cache = decode_state.cache
        model = SelfModel(
            vocab_size=target.vocab_size,
            keeps_probs=context.keeps_probs,
            says_confidence=context.says_confidence,
            keeps_fed=False,
            config=weights.config(target),
            axis=context.tensor_axis,
            kv_scales=None if cache.scales is None else cache.scales[:, jnp.array(kept)],
        )
        own = tuple(cache.pages[layer] for layer in kept)
        depth = context.num_speculative_tokens
        drafted = token_by_token.draft(model, depth, shape, params, own, decode_state, num_tokens)
        written = dict(zip(kept, drafted.state, strict=True))
        pages = tuple(written.get(layer, page) for layer, page in enumerate(cache.pages))
        return drafted._replace(state=state, pages=pages)

    return Drafter(draft, draws_afresh=True)


@dataclasses.dataclass(frozen=True)
class SelfModel(DraftModel):
    """The target's layers in few bits, over pages of the target; made anew for every draft.

    Attributes:
      config: of the layers that it has.
      kv_scales: f32[2, layers, kv_heads], of its layers; see `forward`.
    """

    kv_scales: Array | None = None

    def forward(
        self, params: DecoderParams, pages: _Pages, batch: TokenBatch, max_tokens_per_row: int
    ) -> tuple[Array, _Pages]:
        return forward(
            layers_of(params.target, params.drafter),
            self.config,
            pages,
            batch,
            max_tokens_per_row=max_tokens_per_row,
            tensor_axis=self.axis,
            kv_scales=self.kv_scales,
        )

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        del depth
        weights = head_of(params.target, params.drafter, self.config)
        return own_logits(weights, self.config, hidden, self.axis)

    def begin(
        self, params: DecoderParams, state: _Pages, decode_state: Any, takes_part: Array
    ) -> tuple[Array, _Pages]:
        """Feeds the root alone: the pages hold all tokens before it."""
        counts = takes_part.astype(jnp.int32)
        root, history = decode_state.cache.lengths, decode_state.history
        return self.feed_some(params, state, decode_state, history, root, counts, 1)
