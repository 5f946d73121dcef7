"""A drafter that is an EAGLE or EAGLE-3 head over the target; drafts chains and trees.

The pair of token j + 1 and the target's hidden states at token j lies in the slot of token j + 1,
so that what a page holds depends on no token after it. Slot 0 of a row has no pair. Of the last
layer, absorbing makes keys and values alone. Its queries, attention, output and MLP run when a row
drafts, for its newest pair. Keys and values of draft tokens come from the head's own features and
are overwritten when the tokens are absorbed.

A head of one layer absorbs every committed token, so that nothing is behind when a row drafts. With
more layers that would cost plain decoding too much. Such a head defers (`deferring`): it stores the
feature of each token, and runs its layers over the pairs when the row drafts. `store_features` of a
SpeculationConfig says otherwise for either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import layout
from pallas_kernels.ragged import tokens_of
from specjax.drafters import token_by_token
from specjax.drafters.base import Draft, Drafter, DrafterContext, by_page, by_row
from specjax.drafters.token_by_token import Fed, FedNodes, TokenByToken, keep_newest
from specjax.heads import deferring
from specjax.heads.deferring import Deferring
from specjax.heads.equations import eagle as eagle1
from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.paged import kv_cache
from specjax.paged.forward import Part, attention_over, make_decode_batch
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import DecoderParams, TokenBatch

FIRST_PAIR = 1  # position of the first token that has a token before it

AnyEagle = EagleConfig | Eagle3Config


class EagleState(NamedTuple):
    """Keys and values by page, and what the last layer adds to of each row's newest pair.

    Attributes:
      pages: of every layer of the head.
      newest: [rows, hidden_size]. The pair is at the position of the row's root.
      stored: as of `deferring.Deferring`.
    """

    pages: tuple[kv_cache.Pages, ...]
    newest: Array
    stored: tuple[Array, ...]


def drafter(
    config: AnyEagle,
    context: DrafterContext,
    shape: TreeShape | Growth | None = None,
    *,
    stores: str | None,
) -> Drafter:
    """Returns the functions of an EAGLE or EAGLE-3 head.

    Args:
      shape: shape of a tree, whose depth is K, or how it grows; None: chains.
      stores: as of `deferring.Deferring`.
    """
    head = EagleHead(**token_by_token.of_head(config, context), stores=stores)
    propose = functools.partial(token_by_token.draft, head, context.num_speculative_tokens, shape)
    return functions_of(head, propose)


def functions_of(head: EagleHead, propose: Callable[..., Draft]) -> Drafter:
    """Returns the functions of a head.

    Args:
      propose: drafts as `Drafter.draft` does, with a head that has caught up.
    """
    own, dtype = head.config.layers, head.context.dtype

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> EagleState:
        del max_length
        pages = kv_cache.init_pages(own, num_pages, page_size, dtype)
        newest = jnp.zeros((rows, own.hidden_size), dtype)
        return EagleState(pages, newest, head.init_stored(num_pages, page_size))

    def draft(
        params: DecoderParams, state: EagleState, decode_state: Any, num_tokens: Array
    ) -> Draft:
        if not head.stores:
            return propose(params, state, decode_state, num_tokens)
        takes_part = decode_state.is_active & (num_tokens > 0)
        state, written = head.catch_up(params, state, decode_state, takes_part)
        return propose(params, state, decode_state, num_tokens)._replace(written=written)

    return Drafter(
        draft,
        init=init,
        absorb=head.absorb,
        defer=head.defer if head.stores else None,
        state_axes=_axes,
        draws_afresh=True,
    )


def equations_of(config: AnyEagle) -> Any:
    """Returns the module with the equations of a head; both have functions of the same names."""
    return eagle3 if isinstance(config, Eagle3Config) else eagle1


def _axes(state: EagleState) -> Any:
    return EagleState(by_page(state.pages), by_row(state.newest), by_page(state.stored))


@dataclasses.dataclass(frozen=True)
class EagleHead(Deferring, TokenByToken):
    """A head that is fed pairs, token by token."""

    config: AnyEagle

    @property
    def model(self) -> Any:
        """The module with the equations of this kind."""
        return equations_of(self.config)

    def absorb(
        self,
        params: DecoderParams,
        state: EagleState,
        fed: TokenBatch,
        next_token_ids: Array,
        taps: tuple[Array, ...],
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> EagleState:
        """Runs the pairs of the tokens after those that were fed; see `Drafter.absorb`."""
        state, features = self.store(params, state, fed, taps)
        slots = kv_cache.slots(
            fed.block_table, fed.row_ids, fed.positions + 1, **_page_sizes(state)
        )
        pairs = dataclasses.replace(
            fed,
            token_ids=next_token_ids,
            positions=fed.positions + 1,
            lengths=fed.lengths + 1,
            slot_mapping=slots,
        )
        x, pages = self.run_pairs(params, state.pages, pairs, features, max_tokens_per_row)
        newest = keep_newest(state.newest, x, fed, row_ids)
        return state._replace(pages=pages, newest=newest)

    def features(self, params: DecoderParams, taps: Sequence[Array]) -> Array:
        return self.model.feature(params.drafter, self.config, taps)

    def catch_up(
        self, params: DecoderParams, state: EagleState, decode_state: Any, takes_part: Array
    ) -> tuple[EagleState, Array]:
        """Runs the pairs that rows lack up to their root, from what is stored.

        Args:
          takes_part: bool[rows]; other rows stay behind.

        Returns:
          The state, and `Draft.written`, i32[rows].
        """
        root, done = decode_state.cache.lengths, decode_state.drafter_lengths
        row_ids = jnp.arange(decode_state.rows, dtype=jnp.int32)

        def run(state: EagleState, pairs: TokenBatch) -> EagleState:
            before = pairs.row_ids, pairs.positions - 1
            features = self.features_at(params, state, decode_state, *before)
            x, pages = self.run_pairs(params, state.pages, pairs, features, len(features))
            newest = keep_newest(state.newest, x, pairs, row_ids)
            return state._replace(pages=pages, newest=newest)

        first = jnp.maximum(done, FIRST_PAIR)
        counts = jnp.where(takes_part & (done < root), root + 1 - first, 0)
        state = deferring.catch_up(run, state, decode_state, first, counts)
        return state, jnp.where(takes_part, root, done)

    def run_pairs(
        self,
        params: DecoderParams,
        pages: tuple[kv_cache.Pages, ...],
        pairs: TokenBatch,
        features: Array,
        max_tokens_per_row: int,
    ) -> tuple[Array, tuple[kv_cache.Pages, ...]]:
        """Absorbs pairs; returns what the last layer adds to, and the pages.

        Args:
          features: [num_tokens, hidden_size], of the token before each.
        """
        x = self.enter(params, pairs, features)
        x, below = self.run(params, pages[:-1], pairs, x, max_tokens_per_row)
        # What the last layer says is not used: the compiler leaves out all but keys and values.
        _, last = self.run(params, pages[-1:], pairs, x, max_tokens_per_row, self.last_layer)
        return x, (*below, *last)

    def begin(
        self, params: DecoderParams, state: EagleState, decode_state: Any, takes_part: Array
    ) -> tuple[Array, EagleState]:
        """Runs the last layer on the newest pair of each row, whose keys are in the pages."""
        history, roots = decode_state.history, decode_state.cache.lengths
        flat = _Flat(Fed(decode_state, history, roots, takes_part, state.newest, 0))
        out, _ = self.run(
            params, state.pages[-1:], flat.batch, flat.hidden, 1, self.last_layer, is_written=True
        )
        return flat.by_row(out), state

    def feed(self, params: DecoderParams, state: EagleState, fed: Fed) -> tuple[Array, EagleState]:
        flat = _Flat(fed)
        features = self.model.next_feature(params.drafter, self.config, flat.hidden)
        x = self.enter(params, flat.batch, features)
        out, pages = self.run(params, state.pages, flat.batch, x, 1)
        return flat.by_row(out), state._replace(pages=pages)

    def feed_nodes(
        self, params: DecoderParams, state: EagleState, fed: FedNodes
    ) -> tuple[Array, EagleState]:
        rows, count, batch = fed.decode_state.rows, len(fed.nodes), fed.batch()
        row = jnp.minimum(batch.row_ids, rows - 1)
        offset = jnp.arange(rows * count) - batch.row_starts[row]
        above = fed.hidden[row, jnp.clip(offset, 0, count - 1)]
        features = self.model.next_feature(params.drafter, self.config, above)
        x = self.enter(params, batch, features)
        out, pages = self.run(params, state.pages, batch, x, count)
        return out[tokens_of(batch.row_starts, rows * count, count)], state._replace(pages=pages)

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        del depth
        own = params.drafter
        if self.config.has_head:
            scores = self.model.own_logits(own, self.config, hidden)
            return scores, token_by_token.own_vocabulary(params, self.config)
        return self.context.own_target_logits(
            params, self.model.normed_output(own, self.config, hidden)
        )

    @property
    def last_layer(self) -> int:
        return self.config.layers.num_layers - 1

    def enter(self, params: DecoderParams, batch: TokenBatch, features: Array) -> Array:
        """Returns what the first layer adds to of a batch of pairs, [num_tokens, hidden_size]."""
        embedded = self._embedded(params, batch, features.dtype)
        return self.model.joined(params.drafter, self.config, embedded, features)

    def run(
        self,
        params: DecoderParams,
        pages: tuple[kv_cache.Pages, ...],
        batch: TokenBatch,
        x: Array,
        max_tokens_per_row: int,
        first_layer: int = 0,
        *,
        is_written: bool = False,
    ) -> tuple[Array, tuple[kv_cache.Pages, ...]]:
        """Runs layers over a batch of pairs; returns x after them, and the pages.

        Args:
          pages: of these layers, from `first_layer` on.
          x: [num_tokens, hidden_size], of `enter` or of the layers before.
          is_written: whether their pages hold the keys and values of this batch.
        """
        part, own = Part(batch, max_tokens_per_row), self.config.layers
        attend = attention_over(own, [part], first_key=FIRST_PAIR, is_written=is_written)
        embedded = self._embedded(params, batch, x.dtype)
        return self.model.forward(
            params.drafter, self.config, embedded, x, batch.positions, attend, pages, first_layer
        )

    def _embedded(self, params: DecoderParams, batch: TokenBatch, dtype: Any) -> Array:
        if self.config.has_embedding:
            return params.drafter["embed_tokens"][batch.token_ids].astype(dtype)
        return self.context.target_embedding(params, batch.token_ids).astype(dtype)


class _Flat:
    """The tokens that are fed, laid out flat; rows that are not fed take no place.

    Attributes:
      batch: these tokens.
      hidden: [num_tokens, width], after the token before each.
    """

    def __init__(self, fed: Fed):
        cache, self._most = fed.decode_state.cache, fed.decode_state.rows - 1
        self.batch = make_decode_batch(
            fed.history,
            cache.block_table,
            fed.positions,
            fed.is_fed,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        )
        self.hidden = fed.hidden[jnp.minimum(self.batch.row_ids, self._most)]

    def by_row(self, tokens: Array) -> Array:
        """Returns what each row has of [num_tokens, width], [rows, width]."""
        return tokens[jnp.clip(self.batch.row_starts[1:] - 1, 0, self._most)]


def _page_sizes(state: EagleState) -> dict[str, int]:
    keys, _ = state.pages[0]
    return {"page_size": layout.page_size(keys), "num_slots": layout.num_slots(keys)}
