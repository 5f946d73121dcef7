"""A draft model that drafts all tokens of a step in one forward, over mask tokens.

Each row is fed the committed tokens that it has not seen, the root last, and a mask token in place
of every draft token but the last. Attention is causal. What the model says after the root and after
each mask are the distributions of the draft tokens, none of which is fed.

Keys and values of masks lie past the root: the next step writes the committed tokens over them.

Source: An et al. 2025, PARD (arXiv:2504.18583), section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.drafters import draft_model, token_by_token
from specjax.drafters.base import Draft, Drafter
from specjax.drafters.draft_model import WHOLE, DraftModel, Partition
from specjax.drafters.one_pass import Asked, Drafting, OverMasks
from specjax.drafters.token_by_token import batch_of_rows
from specjax.drafters.token_set import TokenSet
from specjax.models.base import ModelConfig
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams, TokenBatch


def drafter(
    config: ModelConfig,
    *,
    num_speculative_tokens: int,
    dtype: Any,
    keeps_probs: bool,
    says_confidence: bool = False,
    max_positions: int | None = None,
    partition: Partition = WHOLE,
    said: TokenSet | None = None,
) -> Drafter:
    """Returns a drafter of chains that samples from a model with a `mask_token_id`.

    Arguments as of `draft_model.drafter`; how tokens are drawn under each rule is the same too.
    """
    by_token = draft_model.drafter(
        config,
        num_speculative_tokens=num_speculative_tokens,
        dtype=dtype,
        keeps_probs=keeps_probs,
        max_positions=max_positions,
        partition=partition,
    )
    model = _ParallelModel(
        vocab_size=config.vocab_size,
        keeps_probs=keeps_probs,
        says_confidence=says_confidence,
        keeps_fed=False,
        config=config,
        axis=partition.axis,
        said=said,
        depth=num_speculative_tokens,
    )

    def draft(params: DecoderParams, state: Any, decode_state: Any, num_tokens: Array) -> Draft:
        asked = Asked(state, num_tokens)
        drafted = token_by_token.draft(
            model, num_speculative_tokens, None, params, asked, decode_state, num_tokens
        )
        takes_part = decode_state.is_active & (num_tokens > 0)
        written = jnp.where(
            takes_part, decode_state.cache.lengths + 1, decode_state.drafter_lengths
        )
        return partition.agreed(drafted._replace(state=drafted.state.pages, written=written))

    return by_token._replace(draft=draft)


@dataclasses.dataclass(frozen=True)
class _ParallelModel(OverMasks, DraftModel):
    depth: int = 1  # K

    @property
    def num_drafts(self) -> int:
        return self.depth

    def vocabulary_of(self, params: DecoderParams, width: int) -> Vocabulary:
        del params
        return Vocabulary.of_width(width, self.vocab_size, self.axis)

    def begin(
        self, params: DecoderParams, state: Any, decode_state: Any, takes_part: Array
    ) -> tuple[Array, Any]:
        """Feeds what the model has not seen, the root included, and the masks.

        As no draft token is fed, up to K committed tokens are missing besides the root. After
        steps without drafts more are, fed before.

        Returns:
          `logits` of the first draft token [rows, vocab] where those of all draft tokens fit,
          else hidden [rows, hidden_size].
        """
        num_missing, pages = self.catch_up(
            params, state.state, decode_state, takes_part, most_left=self.depth
        )
        batch = self._batch(decode_state, num_missing, state.num_tokens, takes_part)
        hidden, pages = self.forward(params, pages, batch, 2 * self.depth)
        # Of the root, and of each mask.
        ahead = jnp.arange(self.depth)[None, :]
        flat = batch.row_starts[:-1, None] + num_missing[:, None] + ahead
        said = self.keep(params, hidden[jnp.minimum(flat, hidden.shape[0] - 1).T])
        return said[0], Drafting(pages, said)

    def _batch(
        self, decode_state: Any, num_missing: Array, num_tokens: Array, takes_part: Array
    ) -> TokenBatch:
        """Lays out the missing tokens of each row, its root, and a mask less than num_tokens."""
        root, width = decode_state.cache.lengths, decode_state.rows * 2 * self.depth
        first, counts = root - num_missing, jnp.where(takes_part, num_missing + num_tokens, 0)
        batch = batch_of_rows(decode_state, first, counts, width)
        row = jnp.minimum(batch.row_ids, decode_state.rows - 1)
        mask = jnp.int32(self.config.mask_token_id)
        is_mask = batch.positions > root[row]
        return dataclasses.replace(batch, token_ids=jnp.where(is_mask, mask, batch.token_ids))
