"""A drafter that is a P-EAGLE head over the target: one pass over masks drafts a chain.

Pairs of the text are absorbed as by EAGLE-3 (`eagle`), the root's too, and what the head says after
it is the first draft token. The others come from masks at the positions after the root, in one
forward. Keys and values of masks lie past the root: the next step writes the pairs of committed
tokens over them.

Source: Hui et al. 2026, P-EAGLE (arXiv:2602.01469), section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.ragged import tokens_of
from specjax.drafters import token_by_token
from specjax.drafters.base import Draft, Drafter, DrafterContext
from specjax.drafters.one_pass import Asked, Drafting, OverMasks
from specjax.drafters.token_by_token import batch_of_rows
from specjax.heads import eagle
from specjax.heads.eagle import EagleHead, EagleState
from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.paged import kv_cache
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams


def drafter(config: Eagle3Config, context: DrafterContext, *, stores: str | None) -> Drafter:
    """Returns the functions of a P-EAGLE head, a config with a `mask_token_id`.

    Args:
      stores: as of `deferring.Deferring`.
    """
    head = ParallelHead(**token_by_token.of_head(config, context), stores=stores)
    depth = context.num_speculative_tokens

    def propose(
        params: DecoderParams, state: EagleState, decode_state: Any, num_tokens: Array
    ) -> Draft:
        asked = Asked(state, num_tokens)
        drafted = token_by_token.draft(head, depth, None, params, asked, decode_state, num_tokens)
        return drafted._replace(state=state._replace(pages=drafted.state.pages))

    return eagle.functions_of(head, propose)


@dataclasses.dataclass(frozen=True)
class ParallelHead(OverMasks, EagleHead):
    """A head that is fed pairs of the text, and masks."""

    config: Eagle3Config

    @property
    def num_drafts(self) -> int:
        return self.context.num_speculative_tokens

    def vocabulary_of(self, params: DecoderParams, width: int) -> Vocabulary:
        return token_by_token.head_vocabulary(params, self.config, self.context, width)

    def begin(
        self, params: DecoderParams, state: Asked, decode_state: Any, takes_part: Array
    ) -> tuple[Array, Drafting]:
        """Runs a mask less than each row is asked for: the root's pair says the first draft token.

        Returns:
          This device's slice of the logits of the first draft token [rows, n] where those of all
          fit, else r [rows, hidden_size].
        """
        first, _ = super().begin(params, state.state, decode_state, takes_part)
        said, pages = first[None], state.state.pages
        if self.num_drafts > 1:
            counts = jnp.where(takes_part, state.num_tokens - 1, 0)
            of_masks, pages = self.run_masks(params, pages, decode_state, counts)
            said = jnp.concatenate([said, of_masks.swapaxes(0, 1)])
        said = self.keep(params, said)
        return said[0], Drafting(pages, said)

    def run_masks(
        self,
        params: DecoderParams,
        pages: tuple[kv_cache.Pages, ...],
        decode_state: Any,
        counts: Array,
    ) -> tuple[Array, tuple[kv_cache.Pages, ...]]:
        """Returns r [rows, K - 1, hidden_size] of `counts` masks after each root, and the pages.

        Args:
          counts: i32[rows], at most K - 1.
        """
        most, first = self.num_drafts - 1, decode_state.cache.lengths + 1
        batch = batch_of_rows(decode_state, first, counts, decode_state.rows * most)
        masks = jnp.full_like(batch.token_ids, jnp.int32(self.config.mask_token_id))
        batch = dataclasses.replace(batch, token_ids=masks)
        feature = eagle3.mask_feature(params.drafter, self.config)
        features = jnp.broadcast_to(feature, (len(masks), *feature.shape))
        x = self.enter(params, batch, features)
        out, pages = self.run(params, pages, batch, x, most)
        return out[tokens_of(batch.row_starts, len(masks), most)], pages
