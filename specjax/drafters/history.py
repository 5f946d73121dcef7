"""History drafting: proposes the tokens that followed the longest match of the row's last tokens.

Matches are searched in the row's own tokens, and in a corpus that all rows share: a ring
buffer of token ids into which the host writes pieces of text of the same prompt's samples,
of other requests and of earlier epochs; the oldest are overwritten first.

    corpus    a b c d | x b c e | . . .        '|' is no token: it ends a piece
    row       ... z b c                        b c occurs twice; the later one proposes: e

The length of the match that ends at each place is kept from step to step, and a new token
moves it by one place: match[j] = match[j - 1] + 1 where text[j] is the token, else 0. That is
one vector operation per token, whatever the length of the match, and no loop over it.

Source: suffix decoding (arXiv:2411.04975) for the longest suffix over own and shared text,
DAS (arXiv:2511.13841) for rollouts of earlier epochs. Unlike them it keeps no counts: the longest
match wins, and among equals the row's own text, then text of its own prompt, then the latest.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.drafters.base import SHARED, Draft, Drafter, by_row
from specjax.drafters.ngram import continuations, tree_budget
from specjax.trees.merging import merge
from specjax.types import DecoderParams, HostArray, Proposal

SEPARATOR = -1  # no token id: a match never crosses it
PIECE_TOKENS = 64  # most tokens of one piece of text
LONGEST_MATCH = 63  # longer matches count as this long
WINDOW = 16  # last tokens matched again for a row that entered or fell behind
NO_GROUP = -1
# Most places of the corpus and a row's own text: place and match length share 32 bits.
MOST_PLACES = 2**24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryState:
    """The corpus, and the length of the match of each row's last tokens at each place.

    The oldest place is `head`; around the ring from there, places get newer.
    """

    corpus: Array  # i32[capacity], SEPARATOR after each piece
    corpus_groups: Array  # i32[capacity], the prompt that the text answers; NO_GROUP
    head: Array  # i32[], where the next piece is written
    row_groups: Array  # i32[rows]
    num_matched: Array  # i32[rows], tokens of the row that the two match arrays include
    own_match: Array  # u8[rows, max_length], length of the match that ends at this place
    corpus_match: Array  # u8[rows, capacity], the same in the corpus

    @property
    def capacity(self) -> int:
        return self.corpus.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Text for the corpus, and which rows have a new request."""

    token_ids: HostArray  # i32[n, PIECE_TOKENS]
    counts: HostArray  # i32[n], tokens of each piece; 0 for an unused one
    groups: HostArray  # i32[n], the prompt that each piece answers
    has_entered: HostArray  # bool[rows], whether the row holds another request than before
    row_groups: HostArray  # i32[rows]


class Found(NamedTuple):
    """Continuations of each row's text, best match first; leading [rows, num_matches]."""

    token_ids: Array  # i32[rows, num_matches, depth], tokens after the match
    counts: Array  # i32, how many of these tokens are valid
    lengths: Array  # i32, length of the match; 0 where there is none


def drafter(
    *,
    num_speculative_tokens: int,
    capacity: int,
    min_match: int,
    num_matches: int = 1,
    num_drafts: int | None = None,
) -> Drafter:
    """Returns a drafter without weights.

    Args:
      capacity: tokens of the corpus on each shard; a piece takes one more than its tokens.
      min_match: shortest match, in tokens.
      num_matches: continuations that are drafted; more than one make a tree.
      num_drafts: most draft tokens of a tree; None: room for all continuations.

    Cost per step: rows * (max_length + capacity) bytes read and written per new token,
    and rows * (max_length + capacity) read once per match.
    """
    depth = num_speculative_tokens
    budget = tree_budget(num_matches, depth, num_drafts)

    def draft(
        params: DecoderParams, state: HistoryState, decode_state: Any, num_tokens: Array
    ) -> Draft:
        del params
        state = catch_up(state, decode_state, num_tokens > 0)
        found = find(state, decode_state, min_match, num_matches, depth)
        counts = jnp.minimum(found.counts, num_tokens[:, None])
        written = decode_state.cache.lengths + 1
        if num_matches == 1:
            proposal = Proposal(token_ids=found.token_ids[:, 0], num_tokens=counts[:, 0])
            return Draft(proposal, state, written)
        grown = merge(found.token_ids, counts, num_drafts=budget)
        proposal = Proposal(token_ids=grown.token_ids, num_tokens=grown.num_tokens, tree=grown.tree)
        return Draft(proposal, state, written)

    def begin(rows: int, max_length: int, num_pages: int, page_size: int) -> HistoryState:
        del num_pages, page_size
        return init(rows, max_length, capacity)

    return Drafter(
        draft,
        init=begin,
        enter_rows=enter_rows,
        remember=remember,
        state_axes=state_axes,
    )


def init(rows: int, max_length: int, capacity: int) -> HistoryState:
    """Returns a state with an empty corpus.

    Raises:
      ValueError: no piece fits, or there are more places than can be numbered.
    """
    check_capacity(capacity, max_length)
    integers = lambda *shape: jnp.zeros(shape, jnp.int32)
    return HistoryState(
        corpus=jnp.full(capacity, SEPARATOR, jnp.int32),
        corpus_groups=jnp.full(capacity, NO_GROUP, jnp.int32),
        head=integers(),
        row_groups=jnp.full(rows, NO_GROUP, jnp.int32),
        num_matched=integers(rows),
        own_match=jnp.zeros((rows, max_length), jnp.uint8),
        corpus_match=jnp.zeros((rows, capacity), jnp.uint8),
    )


def check_capacity(capacity: int, max_length: int = 0) -> None:
    """Raises ValueError where no piece fits, or there are more places than can be numbered.

    Args:
      max_length: most tokens of a row; 0 where it is not known yet.
    """
    least, most = PIECE_TOKENS + 1, MOST_PLACES - max_length
    if most < least:
        raise ValueError(
            f"rows of {max_length} tokens leave no place for corpus_tokens={capacity}; lower "
            "max_context."
        )
    if not least <= capacity <= most:
        beside = f", beside rows of {max_length}" if max_length else ""
        raise ValueError(
            f"corpus_tokens={capacity} must be from {least} to {most}{beside}; change it."
        )


def remember(state: HistoryState, pieces: Pieces) -> HistoryState:
    """Writes pieces over the oldest text of the corpus, and resets the matches of entered rows.

    A piece is contiguous: if it does not fit before the end of the ring, it is written at
    the beginning, and the end keeps its old text. Matches with new text start at 0 and
    grow with the row's next tokens; rows that entered are matched again from the start.
    """
    width = pieces.token_ids.shape[1] + 1
    place = jnp.arange(width)

    def lay(index: Array, state: HistoryState) -> HistoryState:
        count = pieces.counts[index]
        head = jnp.where(state.head + width > state.capacity, 0, state.head)
        padded = jnp.pad(pieces.token_ids[index], (0, 1))
        text = jnp.where(place < count, padded, SEPARATOR)
        put = lambda whole, part, at: lax.dynamic_update_slice(whole, part, at)
        groups = jnp.full(width, pieces.groups[index])
        nothing = jnp.zeros((state.corpus_match.shape[0], width), jnp.uint8)
        laid = dataclasses.replace(
            state,
            corpus=put(state.corpus, text, (head,)),
            corpus_groups=put(state.corpus_groups, groups, (head,)),
            corpus_match=put(state.corpus_match, nothing, (jnp.int32(0), head)),
            head=head + count + 1,
        )
        return jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), laid, state)

    num_pieces = jnp.sum(pieces.counts > 0)
    state = lax.fori_loop(0, num_pieces, lay, state)
    entered = pieces.has_entered[:, None]
    return dataclasses.replace(
        state,
        row_groups=pieces.row_groups,
        num_matched=jnp.where(pieces.has_entered, 0, state.num_matched),
        own_match=jnp.where(entered, 0, state.own_match),
        corpus_match=jnp.where(entered, 0, state.corpus_match),
    )


def catch_up(state: HistoryState, decode_state: Any, takes_part: Array) -> HistoryState:
    """Extends the matches by the tokens committed since, or by the last WINDOW if more."""
    history, length = decode_state.history, decode_state.cache.lengths + 1
    first = jnp.maximum(length - WINDOW, 0)
    is_far = takes_part & (state.num_matched < first)
    again = is_far[:, None]
    start = jnp.where(is_far, first, state.num_matched)
    matches = (
        jnp.where(again, 0, state.own_match).astype(jnp.uint8),
        jnp.where(again, 0, state.corpus_match).astype(jnp.uint8),
    )

    def lacks(carry: tuple[Any, ...]) -> Array:
        num_matched, _ = carry
        return jnp.any(takes_part & (num_matched < length))

    def take(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        num_matched, (own, corpus) = carry
        is_new = takes_part & (num_matched < length)
        place = jnp.minimum(num_matched, history.shape[1] - 1)
        token = jnp.take_along_axis(history, place[:, None], axis=1)
        moved = (
            _extended(own, history, token),
            _extended(corpus, state.corpus[None, :], token),
        )
        keep = lambda new, old: jnp.where(is_new[:, None], new, old)
        matches = jax.tree.map(keep, moved, (own, corpus))
        return num_matched + is_new.astype(jnp.int32), matches

    num_matched, (own, corpus) = lax.while_loop(lacks, take, (start, matches))
    return dataclasses.replace(state, num_matched=num_matched, own_match=own, corpus_match=corpus)


def _extended(match: Array, text: Array, token: Array) -> Array:
    """Returns match u8[rows, length] after one more token i32[rows, 1] of every row.

    Args:
      text: i32[rows or 1, length].
    """
    before = jnp.pad(match, ((0, 0), (1, 0)))[:, :-1]
    longer = jnp.minimum(before, LONGEST_MATCH - 1) + jnp.uint8(1)
    return jnp.where(text == token, longer, jnp.uint8(0))


def find(
    state: HistoryState, decode_state: Any, min_match: int, num_matches: int, depth: int
) -> Found:
    """Returns the tokens after each row's longest matches, the best match first.

    Past the end of the row's own text the draft repeats itself, as in `ngram`; a draft from
    the corpus ends with its piece.
    """
    history, length = decode_state.history, decode_state.cache.lengths + 1
    max_length, capacity = history.shape[1], state.capacity
    own_place = jnp.arange(max_length, dtype=jnp.int32)[None, :]
    place = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    # Every place has a number, and the higher number breaks ties between equal lengths: own
    # text comes first, then answers to the row's prompt, then the later place.
    age = (place - state.head) % capacity
    row_groups = state.row_groups[:, None]
    is_own_group = (state.corpus_groups[None, :] == row_groups) & (row_groups >= 0)
    is_text = own_place < length[:, None] - 1  # without the newest token, which matches itself

    def keys(match: Array, number: Array) -> Array:
        key = match.astype(jnp.int32) * (2 * MOST_PLACES) + number
        return jnp.where(match >= min_match, key, 0)

    own = keys(jnp.where(is_text, state.own_match, 0), 2 * capacity + own_place)
    shared = keys(state.corpus_match, age + capacity * is_own_group)
    best: list[Array] = []
    for _ in range(num_matches):
        # One maximum after the other: on a CPU XLA's top_k of integers sorts the whole array.
        below = best[-1][:, None] if best else jnp.iinfo(jnp.int32).max
        largest = [jnp.max(jnp.where(k < below, k, 0), axis=1) for k in (own, shared)]
        best.append(jnp.maximum(*largest))
    key = jnp.stack(best, axis=1)
    lengths, number = key // (2 * MOST_PLACES), key % (2 * MOST_PLACES)
    is_own = number >= 2 * capacity
    start = jnp.where(is_own, number - 2 * capacity, (number + state.head) % capacity) + 1
    in_own = continuations(history, length, jnp.where(is_own, start, 0), depth)
    in_corpus, num_shared = _read(state.corpus, jnp.where(is_own, 0, start), depth)
    counts = jnp.where(is_own, depth, num_shared)
    return Found(
        token_ids=jnp.where(is_own[:, :, None], in_own, in_corpus),
        counts=jnp.where(lengths > 0, counts, 0),
        lengths=lengths,
    )


def _read(corpus: Array, starts: Array, depth: int) -> tuple[Array, Array]:
    """Returns the tokens from each start i32[rows, n] on, i32[rows, n, depth], and how many of
    them are in its piece."""
    place = starts[:, :, None] + jnp.arange(depth)[None, None, :]
    inside = place < corpus.shape[0]
    tokens = jnp.where(inside, corpus[jnp.minimum(place, corpus.shape[0] - 1)], SEPARATOR)
    is_piece = jnp.cumprod(tokens >= 0, axis=-1)
    return jnp.maximum(tokens, 0), jnp.sum(is_piece, axis=-1, dtype=jnp.int32)


def enter_rows(state: HistoryState, row_ids: Array, drafter_lengths: Array) -> HistoryState:
    """Returns the state with the matches of rows that hold a new request cleared."""
    del drafter_lengths
    clear = lambda leaf: leaf.at[row_ids].set(0, mode="drop")
    return dataclasses.replace(
        state,
        num_matched=clear(state.num_matched),
        own_match=clear(state.own_match),
        corpus_match=clear(state.corpus_match),
    )


def state_axes(state: HistoryState) -> HistoryState:
    """Returns the axes of each leaf: every shard has the whole corpus, and only its own rows."""
    return dataclasses.replace(by_row(state), corpus=SHARED, corpus_groups=SHARED, head=SHARED)
