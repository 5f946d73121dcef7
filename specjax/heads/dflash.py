"""A drafter that is a DFlash head over the target: one pass over a block of masks drafts a chain.

The slot of token j holds the keys and values of its context, which depend on no token after it.
A head absorbs every committed token, so that nothing is behind when a row drafts. One that defers
(`deferring`) stores the contexts of K = 0 themselves, or the hidden states that they are computed
from, and makes their keys and values when a row drafts. A block writes its own from the newest
token on, past the last absorbed one; absorbing overwrites them. Tokens are drawn one after the
other, each with its own noise and after the sampling parameters of the request have seen the ones
before it; the head ran once for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.ragged import tokens_of
from specjax.drafters import one_pass, token_by_token
from specjax.drafters.base import Draft, Drafter, DrafterContext, by_page
from specjax.drafters.one_pass import Drafting, OverMasks
from specjax.drafters.token_by_token import Fed, TokenByToken, token_at
from specjax.heads import deferring
from specjax.heads.deferring import Deferring
from specjax.heads.equations import dflash, dflash2, dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.models.base import Attend
from specjax.paged import kv_cache
from specjax.paged.forward import Part, attention_over
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams, TokenBatch, lay_out

BITS = 32  # of a word of ancestor bits


class DFlashState(NamedTuple):
    """Keys and values of every layer, by page; `stored` is as of `deferring.Deferring`."""

    pages: tuple[kv_cache.Pages, ...]
    stored: tuple[Array, ...]


def drafter(config: DFlashConfig, context: DrafterContext, *, stores: str | None) -> Drafter:
    """Returns the functions of a DFlash head.

    Args:
      stores: as of `deferring.Deferring`.
    """
    depth = context.num_speculative_tokens
    head = _Head(**token_by_token.of_head(config, context), stores=stores)

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> DFlashState:
        del rows, max_length
        pages = kv_cache.init_pages(config.layers, num_pages, page_size, context.dtype)
        return DFlashState(pages, head.init_stored(num_pages, page_size))

    def draft(
        params: DecoderParams, state: DFlashState, decode_state: Any, num_tokens: Array
    ) -> Draft:
        """Drafts as `Drafter.draft` does; a block holds `most_drafts` tokens."""
        asked = jnp.minimum(num_tokens, config.most_drafts)
        written = None
        if head.stores:
            takes_part = decode_state.is_active & (asked > 0)
            state, written = head.catch_up(params, state, decode_state, takes_part)
        drafted = token_by_token.draft(head, depth, None, params, state, decode_state, asked)
        return drafted._replace(state=state._replace(pages=drafted.state.pages), written=written)

    return Drafter(
        draft,
        init=init,
        absorb=head.absorb,
        defer=head.defer if head.stores else None,
        state_axes=by_page,
        draws_afresh=True,
    )


@dataclasses.dataclass(frozen=True)
class _OfRows(TokenByToken):
    """What the matrix of a head, or of the target, says of the rows of a block."""

    config: DFlashConfig
    context: DrafterContext

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        del depth
        if self.config.has_head:
            scores = dflash.own_logits(params.drafter, self.config, hidden)
            return scores, token_by_token.own_vocabulary(params, self.config)
        normed = dflash.normed_output(params.drafter, self.config, hidden)
        return self.context.own_target_logits(params, normed)


@dataclasses.dataclass(frozen=True)
class _Head(OverMasks, Deferring, _OfRows):
    """A head that is fed contexts of the text, and blocks of masks."""

    def absorb(
        self,
        params: DecoderParams,
        state: DFlashState,
        fed: TokenBatch,
        next_token_ids: Array,
        taps: tuple[Array, ...],
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> DFlashState:
        """Writes keys and values of the tokens that were fed; see `Drafter.absorb`."""
        del next_token_ids, row_ids, max_tokens_per_row
        state, contexts = self.store(params, state, fed, taps)
        return self._with_keys(params, state, fed, contexts)

    def features(self, params: DecoderParams, taps: Sequence[Array]) -> Array:
        """Returns the contexts of tokens."""
        return dflash.context(params.drafter, self.config, taps)

    def catch_up(
        self, params: DecoderParams, state: DFlashState, decode_state: Any, takes_part: Array
    ) -> tuple[DFlashState, Array]:
        """Makes the keys and values that rows lack below their root, from what is stored.

        Args:
          takes_part: bool[rows]; other rows stay behind.

        Returns:
          The state, and `Draft.written`, i32[rows].
        """
        root, done = decode_state.cache.lengths, decode_state.drafter_lengths

        def run(state: DFlashState, batch: TokenBatch) -> DFlashState:
            own = batch.row_ids, batch.positions
            contexts = self.features_at(params, state, decode_state, *own)
            return self._with_keys(params, state, batch, contexts)

        counts = jnp.where(takes_part, jnp.maximum(root - done, 0), 0)
        state = deferring.catch_up(run, state, decode_state, done, counts)
        return state, jnp.where(takes_part, root, done)

    def _with_keys(
        self, params: DecoderParams, state: DFlashState, batch: TokenBatch, contexts: Array
    ) -> DFlashState:
        """Returns the state with the keys and values of contexts, of all layers."""
        new = dflash.context_keys(params.drafter, self.config, contexts, batch.positions)
        written = (
            kv_cache.write(pages, k, v, batch.slot_mapping)
            for pages, (k, v) in zip(state.pages, new, strict=True)
        )
        return state._replace(pages=tuple(written))

    @property
    def num_drafts(self) -> int:
        return self.context.num_speculative_tokens

    def vocabulary_of(self, params: DecoderParams, width: int) -> Vocabulary:
        return token_by_token.head_vocabulary(params, self.config, self.context, width)

    def begin(
        self, params: DecoderParams, state: Any, decode_state: Any, takes_part: Array
    ) -> tuple[Array, Any]:
        """Runs the blocks of all rows that take part, each after its root.

        Returns:
          This device's slice of the logits of the first draft token [rows, n], where those of all
          fit: then the matrix of the head is read once. Otherwise hidden [rows, hidden_size],
          before the norm.
        """
        config, first = self.config, self.config.first_row
        history, roots = decode_state.history, decode_state.cache.lengths
        block, pages = self.block(params, state, decode_state, takes_part)
        hidden = block[:, first : first + self.num_drafts].swapaxes(0, 1)
        said = self.keep(params, hidden)
        reads_normed = config.markov_reads_normed or self._num_estimates
        nothing = None
        if config.markov_kind == dspark.RNN:
            nothing = jnp.zeros((decode_state.rows, config.markov_rank), said.dtype)
        drafting = Drafting(pages, said, hidden if reads_normed else None, nothing)
        return self._after(params, drafting, history, roots, 0)

    @property
    def _num_estimates(self) -> int:
        """Numbers that a confidence head says of a draft token, where they are asked for."""
        return int(self.says_confidence and self.config.has_confidence)

    def _after(
        self,
        params: DecoderParams,
        drafting: Drafting,
        history: Array,
        positions: Array,
        depth: int | Array,
    ) -> tuple[Array, Drafting]:
        """Returns what a block said of the token after a position, and what its other heads say.

        Args:
          positions: i32[rows].
          depth: i32[], of the tokens at them; that of the root is 0.

        Returns:
          [rows, width]: of the block, of the Markov head, and of the confidence head; and
          `drafting` with the state of the Markov head after this token.
        """
        config, own = self.config, params.drafter
        said = one_pass.said_after(drafting.said, depth)
        normed = embedded = latent = after = estimate = None
        if drafting.hidden is not None:
            hidden = one_pass.said_after(drafting.hidden, depth)
            normed = dflash.normed_output(own, config, hidden)
        if config.markov_rank:
            embedded = dspark.markov_embedding(own, token_at(history, positions))
            before = drafting.carried
            before = None if before is None else before.astype(embedded.dtype)
            latent, after = dspark.markov_step(own, config, embedded, normed, before)
        if self._num_estimates:
            assert normed is not None
            estimate = dspark.confidence(own, config, normed, embedded)[:, None]
        if after is not None:
            drafting = drafting._replace(carried=after.astype(said.dtype))
        parts = [part.astype(said.dtype) for part in (latent, estimate) if part is not None]
        return jnp.concatenate([said, *parts], axis=1), drafting

    def confidence(self, hidden: Array) -> Array | None:
        if not self._num_estimates:
            return None
        return hidden[:, -1].astype(jnp.float32)

    def block(
        self, params: DecoderParams, state: Any, decode_state: Any, takes_part: Array
    ) -> tuple[Array, tuple[kv_cache.Pages, ...]]:
        """Returns hidden [rows, tokens of a block, hidden_size] before the norm, and the pages."""
        config, rows = self.config, decode_state.rows
        width = config.num_rows(self.context.num_speculative_tokens)
        batch = _blocks(config, decode_state, takes_part, width)
        if config.has_embedding:
            embedded = params.drafter["embed_tokens"][batch.token_ids]
        else:
            embedded = self.context.target_embedding(params, batch.token_ids)
        out, pages = dflash.forward(
            params.drafter,
            config,
            embedded.astype(self.context.dtype),
            batch.positions,
            _attention(config, batch, width),
            state.pages,
            width,
        )
        return out[tokens_of(batch.row_starts, rows * width, width)], pages

    def feed(self, params: DecoderParams, state: Any, fed: Fed) -> tuple[Array, Any]:
        """Returns what was said of the next token: only a Markov head reads this one."""
        return self._after(params, state, fed.history, fed.positions, fed.depth)

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        rank = self.config.markov_rank
        width = hidden.shape[1] - rank - self._num_estimates
        said, latent, _ = jnp.split(hidden, [width, width + rank], axis=1)
        scores, vocabulary = super().own_logits(params, said, depth)
        if self.config.markov_kind == dspark.SELECTOR:
            table = params.drafter["markov_w2"]
            return _of_candidates(self.config, table, scores, latent, vocabulary), vocabulary
        if rank:
            table = vocabulary.slice_of(params.drafter["markov_w2"], scores.shape[1], axis=0)
            scores += dspark.markov_logits(table, latent)
        return scores, vocabulary


def _of_candidates(
    config: DFlashConfig, table: Array, scores: Array, latent: Array, vocabulary: Vocabulary
) -> Array:
    """Returns logits f32[num_tokens, n] after the selector, -inf for all but the likeliest tokens.

    Args:
      table, latent: as of `dflash2.candidate_logits`, of the whole vocabulary.
      scores: f32[num_tokens, n], this device's slice of the block's logits.
    """
    token_ids, best = vocabulary.top(scores, config.selector_top_k)
    best += dflash2.candidate_logits(table, latent, token_ids)
    index = vocabulary.index(token_ids, scores.shape[1])
    rows = jnp.arange(len(scores))[:, None]
    return jnp.full_like(scores, -jnp.inf).at[rows, index].set(best, mode="drop")


def _blocks(config: DFlashConfig, decode_state: Any, takes_part: Array, width: int) -> TokenBatch:
    """Lays out the newest token of each row that takes part, and masks after it.

    Args:
      width: tokens of a block, static.
    """
    cache, rows = decode_state.cache, decode_state.rows
    history = decode_state.history
    counts = jnp.where(takes_part, width, 0)
    row_starts, row_ids, offsets = lay_out(counts, rows * width)
    row = jnp.minimum(row_ids, rows - 1)
    newest = token_at(history, cache.lengths)
    positions = jnp.where(row_ids < rows, cache.lengths[row] + offsets, 0)
    return TokenBatch(
        token_ids=jnp.where(offsets == 0, newest[row], config.mask_token_id),
        positions=positions,
        row_ids=row_ids,
        slot_mapping=kv_cache.slots(
            cache.block_table,
            row_ids,
            positions,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        ),
        row_starts=row_starts,
        lengths=cache.lengths,
        block_table=cache.block_table,
    )


def _attention(config: DFlashConfig, batch: TokenBatch, width: int) -> Attend:
    """Returns the attention of blocks: in both directions, but in layers that are causal."""
    words = -(-width // BITS)
    each = [min(BITS, width - BITS * word) for word in range(words)]
    bits = jnp.array([(1 << count) - 1 for count in each], jnp.uint32)
    together = dataclasses.replace(
        batch, ancestor_bits=jnp.broadcast_to(bits, (batch.token_ids.shape[0], words))
    )
    # With bits, the window of each token is that of the last one: widened, that of the first.
    windows = tuple(window and window + width - 1 for window in config.layers.layer_windows)
    wider = dataclasses.replace(config.layers, layer_windows=windows)
    of_kind = {
        True: attention_over(config.layers, [Part(batch, width)]),
        False: attention_over(wider, [Part(together, width)]),
    }

    def attend(layer: int, *arguments: Any, **arrays: Any) -> Any:
        return of_kind[config.causal_layers[layer]](layer, *arguments, **arrays)

    return attend
