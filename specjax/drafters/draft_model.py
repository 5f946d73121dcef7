"""A drafter that is a smaller model with the target's vocabulary; drafts chains and trees.

Its keys and values use the target's page ids, in arrays of its own. After full acceptance
one committed token is missing there, because the last draft token is proposed but never
fed: it is fed together with the root.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels.move_kv import move_kv
from pallas_kernels.ragged import tokens_of
from specjax.drafters import token_by_token
from specjax.drafters.base import CATCH_UP_WIDTH, Draft, Drafter, by_page
from specjax.drafters.token_by_token import Fed, FedNodes, TokenByToken
from specjax.drafters.token_set import TokenSet
from specjax.models.base import MeshAxes, ModelConfig
from specjax.paged import kv_cache
from specjax.paged.forward import forward, make_batch, make_decode_batch, own_logits
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import DecoderParams, TokenBatch

_Pages = tuple[kv_cache.Pages, ...]  # of every layer


class Partition(NamedTuple):
    """How the model is split over a mesh; by default each device holds all of it.

    Attributes:
      num_shards: devices that share its heads.
      axis: mesh axes that its heads are split over; None for one shard.
      copies_axis: mesh axis along which devices hold the same shard, where axis is part of the
        target's tensor axis.
    """

    num_shards: int = 1
    axis: MeshAxes | None = None
    copies_axis: str | None = None

    def agreed(self, draft: Draft) -> Draft:
        """Returns the first copy's draft on every copy.

        The target verifies one draft on all of its devices. Sums over the shards of different
        copies may round differently, and could choose different tokens.
        """
        axis = self.copies_axis
        if axis is None:
            return draft

        def of_first(value: Array) -> Array:
            is_first = jax.lax.axis_index(axis) == 0
            return jax.lax.psum(jnp.where(is_first, value, jnp.zeros_like(value)), axis)

        common = jax.tree.map(of_first, draft._replace(state=()))
        return common._replace(state=draft.state)


WHOLE = Partition()


def drafter(
    config: ModelConfig,
    *,
    num_speculative_tokens: int,
    dtype: Any,
    keeps_probs: bool,
    shape: TreeShape | Growth | None = None,
    says_confidence: bool = False,
    max_positions: int | None = None,
    partition: Partition = WHOLE,
    said: TokenSet | None = None,
) -> Drafter:
    """Returns a drafter that samples from a model.

    Under `greedy` and `seeded` it draws with the target's own noise, so that equal
    distributions propose equal tokens; under `delta` it proposes its likeliest tokens,
    which this rule accepts most often; under the other rules it draws with its own noise.

    Args:
      keeps_probs: whether the distributions are kept, f32[rows, num_drafts, vocab].
      shape: shape of a tree, whose depth is num_speculative_tokens, or how it grows;
        None: chains.
      says_confidence: whether proposals estimate the acceptance of their tokens, which
        costs some passes over the vocabulary.
      max_positions: most positions that the model is fed; None:
        config.max_position_embeddings.
      partition: how the model is split over a mesh.
      said: the tokens that it may draft; None: all.
    """
    model = DraftModel(
        config.vocab_size, keeps_probs, says_confidence, True, config, partition.axis, said
    )

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> _Pages:
        del rows, max_length
        shards = partition.num_shards
        return kv_cache.init_pages(config, num_pages, page_size, dtype, kv_shards=shards)

    def prefill(
        params: DecoderParams,
        state: _Pages,
        batch: TokenBatch,
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> _Pages:
        del row_ids  # pages are found by the batch's block table
        _, state = model.forward(params, state, batch, max_tokens_per_row)
        return state

    propose = functools.partial(token_by_token.draft, model, num_speculative_tokens, shape)

    def draft(params: DecoderParams, state: _Pages, decode_state: Any, num_tokens: Array) -> Draft:
        return partition.agreed(propose(params, state, decode_state, num_tokens))

    return Drafter(
        draft,
        init=init,
        prefill=prefill,
        move=move_kv,
        state_axes=by_page if partition.num_shards == 1 else _by_page_and_head,
        max_positions=max_positions or config.max_position_embeddings,
        draws_afresh=True,
    )


def _by_page_and_head(state: _Pages) -> Any:
    return jax.tree.map(lambda leaf: PartitionSpec("pages", "kv_heads"), state)


@dataclasses.dataclass(frozen=True)
class DraftModel(TokenByToken):
    """A draft model, which is fed the tokens of each row by position."""

    config: ModelConfig
    axis: MeshAxes | None = None  # mesh axes that its heads are split over
    said: TokenSet | None = None  # the tokens that it may draft; None: all

    def forward(
        self, params: DecoderParams, pages: _Pages, batch: TokenBatch, max_tokens_per_row: int
    ) -> tuple[Array, _Pages]:
        """Runs the model over flat tokens; returns hidden [num_tokens, hidden_size] and pages."""
        return forward(
            params.drafter,
            self.config,
            pages,
            batch,
            max_tokens_per_row=max_tokens_per_row,
            tensor_axis=self.axis,
        )

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        del depth
        scores, vocabulary = own_logits(params.drafter, self.config, hidden, self.axis)
        return scores if self.said is None else self.said.keep(scores, vocabulary), vocabulary

    def begin(
        self, params: DecoderParams, state: _Pages, decode_state: Any, takes_part: Array
    ) -> tuple[Array, _Pages]:
        """Feeds the committed tokens that the drafter has not seen, the root included.

        After full acceptance one token is missing: it goes with the root into one forward. After
        steps without drafts more are missing, fed before.

        Returns:
          hidden [rows, hidden_size] after the root, and the pages.
        """
        root, history = decode_state.cache.lengths, decode_state.history
        missing, pages = self.catch_up(params, state, decode_state, takes_part, most_left=1)
        counts = jnp.where(takes_part, missing + 1, 0)
        return self.feed_some(params, pages, decode_state, history, root - missing, counts, 2)

    def catch_up(
        self,
        params: DecoderParams,
        pages: _Pages,
        decode_state: Any,
        takes_part: Array,
        *,
        most_left: int,
    ) -> tuple[Array, _Pages]:
        """Feeds committed tokens before the root, CATCH_UP_WIDTH at a time, while rows lack many.

        Args:
          most_left: static, at least 1; tokens that a row may lack afterwards.

        Returns:
          i32[rows], tokens before the root that each row lacks, 0 to most_left, and the pages.
        """
        root, first = decode_state.cache.lengths, decode_state.drafter_lengths
        num_behind = jnp.where(takes_part, root - first, 0)
        history = decode_state.history

        def is_behind(carry: tuple[_Pages, Array]) -> Array:
            return jnp.max(num_behind - carry[1], initial=0) > most_left

        def feed_next(carry: tuple[_Pages, Array]) -> tuple[_Pages, Array]:
            pages, num_fed = carry
            counts = jnp.clip(num_behind - num_fed, 0, CATCH_UP_WIDTH)
            _, pages = self.feed_some(
                params, pages, decode_state, history, first + num_fed, counts, CATCH_UP_WIDTH
            )
            return pages, num_fed + counts

        nothing = jnp.zeros_like(num_behind)
        pages, num_fed = jax.lax.while_loop(is_behind, feed_next, (pages, nothing))
        return num_behind - num_fed, pages

    def feed(self, params: DecoderParams, state: _Pages, fed: Fed) -> tuple[Array, _Pages]:
        counts = fed.is_fed.astype(jnp.int32)
        return self.feed_some(
            params, state, fed.decode_state, fed.history, fed.positions, counts, 1
        )

    def feed_nodes(
        self, params: DecoderParams, state: _Pages, fed: FedNodes
    ) -> tuple[Array, _Pages]:
        """Feeds nodes, which read the keys and values of their parents."""
        rows, width = fed.decode_state.rows, len(fed.nodes)
        batch = fed.batch()
        hidden, state = self.forward(params, state, batch, width)
        return hidden[tokens_of(batch.row_starts, rows * width, width)], state

    def feed_some(
        self,
        params: DecoderParams,
        pages: _Pages,
        decode_state: Any,
        history: Array,
        positions: Array,
        counts: Array,
        width: int,
    ) -> tuple[Array, _Pages]:
        """Feeds `counts` tokens of each row, from `positions` on.

        Args:
          history: i32[rows, max_length], the tokens.
          positions: i32[rows].
          counts: i32[rows], 0 to width.

        Returns:
          hidden [rows, hidden_size] after each row's last token, and the pages.
        """
        cache, num_tokens = decode_state.cache, decode_state.rows * width
        sizes = {"page_size": cache.page_size, "num_slots": cache.num_slots}
        place = history, cache.block_table, positions
        if width == 1:
            batch = make_decode_batch(*place, counts > 0, **sizes)
        else:
            batch = make_batch(*place, counts, num_tokens=num_tokens, **sizes)
        hidden, pages = self.forward(params, pages, batch, width)
        # Rows that are not fed take no place among the flat tokens.
        return hidden[jnp.clip(batch.row_starts[1:] - 1, 0, num_tokens - 1)], pages
