"""History drafting: what followed the longest stretch of text like this one, follows again.

Text is looked up in the row's own tokens, and in a corpus that all rows share: a ring of
token ids in which the host lays pieces of what the samples of the same prompt, other
requests and earlier epochs have written, the oldest overwritten first.

    corpus    a b c d | x b c e | . . .        '|' is no token: where one piece ends
    row       ... z b c                        b c stands twice; the later is read on: e

How many tokens agree up to each place is kept from step to step, and a new token moves it
by one place: match[j] = match[j - 1] + 1 where text[j] is the token, else 0. That is one
vector operation per token, whatever the length of the match, and no loop over it.

Source: suffix decoding (arXiv:2411.04975) for the longest suffix over own and shared text,
DAS (arXiv:2511.13841) for rollouts of earlier epochs. Here without counts: the longest match
wins, and among equals the row's own text, then that of its own prompt, then the latest.
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
from specjax.types import HostArray, Proposal

SEPARATOR = -1  # no token: no match runs over it
PIECE_TOKENS = 64  # most of one piece of text
LONGEST_MATCH = 63  # longer ones count as so long
WINDOW = 16  # tokens that are matched again for a row that entered, or fell behind
NO_GROUP = -1
MOST_PLACES = (
    2**24
)  # of the corpus and a row's own text: their numbers share 32 bits with the match


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryState:
    """The corpus, and how many of each row's last tokens stand before each place.

    Every place from `head` on, around the ring, is older than those before it.
    """

    corpus: Array  # i32[capacity], SEPARATOR after each piece
    corpus_groups: Array  # i32[capacity], whose prompt's answer it is; NO_GROUP
    head: Array  # i32[], where the next piece is laid
    row_groups: Array  # i32[rows]
    num_matched: Array  # i32[rows], tokens of the row that the next two know
    own_match: Array  # u8[rows, max_length], tokens that agree up to and with this one
    corpus_match: Array  # u8[rows, capacity], likewise

    @property
    def capacity(self) -> int:
        return self.corpus.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Text for the corpus, and what the host knows of the rows."""

    token_ids: HostArray  # i32[n, PIECE_TOKENS]
    counts: HostArray  # i32[n], 0 in an unused place
    groups: HostArray  # i32[n]
    has_entered: HostArray  # bool[rows], whether the row holds another request than before
    row_groups: HostArray  # i32[rows]


class Found(NamedTuple):
    """What each row reads on in, best first; [rows, num_matches]."""

    token_ids: Array  # i32[rows, num_matches, depth], that may follow
    counts: Array  # i32, how many of them there are
    lengths: Array  # i32, tokens that agree; 0 where nothing was found


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
      capacity: tokens of the corpus, of each shard; a piece takes one more than it has.
      min_match: fewest tokens that must agree.
      num_matches: continuations that are drafted; more than one make a tree.
      num_drafts: most draft tokens of a tree; None is room for all continuations.

    Cost per step: rows * (max_length + capacity) bytes read and written per new token,
    and rows * (max_length + capacity) read once per match.
    """
    depth = num_speculative_tokens
    budget = tree_budget(num_matches, depth, num_drafts)

    def draft(params, state: HistoryState, decode_state, num_tokens: Array) -> Draft:
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

    def begin(rows: int, max_length: int, num_pages: int, page_size: int):
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
    """Returns the state of an empty corpus.

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
    """Raises ValueError where no piece fits, or there are more places than can be numbered."""
    least = PIECE_TOKENS + 1
    if not least <= capacity or capacity + max_length > MOST_PLACES:
        raise ValueError(
            f"a corpus of {capacity} tokens beside rows of {max_length} must hold at least "
            f"{least}, and both together at most {MOST_PLACES}; change corpus_tokens."
        )


def remember(state: HistoryState, pieces: Pieces) -> HistoryState:
    """Lays pieces into the corpus, over the oldest; rows that entered are matched anew.

    A piece stands in one stretch: where too little is left before the end, what is left
    stays as it is, and the piece stands at the beginning. Of a match with what is new
    only tokens count that come from now on, but for rows that entered.
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
    """Takes in the tokens that were committed since; WINDOW of them where they are more."""
    history, length = decode_state.history, decode_state.cache.lengths + 1
    first = jnp.maximum(length - WINDOW, 0)
    is_far = takes_part & (state.num_matched < first)
    again = is_far[:, None]
    start = jnp.where(is_far, first, state.num_matched)
    matches = (
        jnp.where(again, 0, state.own_match).astype(jnp.uint8),
        jnp.where(again, 0, state.corpus_match).astype(jnp.uint8),
    )

    def lacks(carry) -> Array:
        num_matched, _ = carry
        return jnp.any(takes_part & (num_matched < length))

    def take(carry):
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
    """Returns what each row reads on in, the best first.

    A match in the row's own text reads on in itself past its end, as `ngram` does; one in
    the corpus ends where its piece does.
    """
    history, length = decode_state.history, decode_state.cache.lengths + 1
    max_length, capacity = history.shape[1], state.capacity
    own_place = jnp.arange(max_length, dtype=jnp.int32)[None, :]
    place = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    # Every place has a number; of two with as long a match that with the higher one is
    # the better: of own text, then of the own prompt's answers, then the later.
    age = (place - state.head) % capacity
    row_groups = state.row_groups[:, None]
    is_own_group = (state.corpus_groups[None, :] == row_groups) & (row_groups >= 0)
    is_text = own_place < length[:, None] - 1  # the newest token agrees with itself

    def keys(match: Array, number: Array) -> Array:
        key = match.astype(jnp.int32) * (2 * MOST_PLACES) + number
        return jnp.where(match >= min_match, key, 0)

    own = keys(jnp.where(is_text, state.own_match, 0), 2 * capacity + own_place)
    shared = keys(state.corpus_match, age + capacity * is_own_group)
    best: list[Array] = []
    for _ in range(num_matches):
        # One maximum after the other: XLA's top_k of integers sorts the whole on CPU.
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
    """Returns the tokens from each start i32[rows, n] on, i32[rows, n, depth], and how many are of
    its piece."""
    place = starts[:, :, None] + jnp.arange(depth)[None, None, :]
    inside = place < corpus.shape[0]
    tokens = jnp.where(inside, corpus[jnp.minimum(place, corpus.shape[0] - 1)], SEPARATOR)
    is_piece = jnp.cumprod(tokens >= 0, axis=-1)
    return jnp.maximum(tokens, 0), jnp.sum(is_piece, axis=-1, dtype=jnp.int32)


def enter_rows(state: HistoryState, row_ids: Array, drafter_lengths: Array) -> HistoryState:
    """Forgets what agreed with the text of rows that changed hands."""
    del drafter_lengths
    clear = lambda leaf: leaf.at[row_ids].set(0, mode="drop")
    return dataclasses.replace(
        state,
        num_matched=clear(state.num_matched),
        own_match=clear(state.own_match),
        corpus_match=clear(state.corpus_match),
    )


def state_axes(state: HistoryState) -> HistoryState:
    """Returns the axes of each leaf: every shard has the whole corpus, and its own rows."""
    return dataclasses.replace(by_row(state), corpus=SHARED, corpus_groups=SHARED, head=SHARED)
