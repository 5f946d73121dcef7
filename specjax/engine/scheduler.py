"""The scheduler: assigns requests to rows, pages to rows, prompts to chunks. No jax, no waiting.

For work in flight it assumes the most that the work can do: a row's `most` tokens. Pages for
these are taken before the work is sent, so that a burst cannot run out of them; pages that
were not needed are given back when the burst is read.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.decode.sizes import PromptShape, PromptSizes, Sizes
from specjax.engine.pages import ROOT, PagePool, Prefix, Tail
from specjax.engine.request import Request
from specjax.engine.rows import Row, RowTable
from specjax.engine.waiting import WaitingQueue
from specjax.paged.kv_cache import NO_PAGE

MOST_POSTPONED = 8  # requests that may be passed over in one admission
# Shared prompt tokens that outweigh one more row in a shard: every shard waits for the fullest.
TOKENS_OF_A_ROW = 64
# Prompt buckets of a scheduler that was given none.
USUAL_PROMPTS = PromptSizes((64, 256), 16)


def _order(row: Row) -> tuple[int, int]:
    """Returns the sort key of a row's request: priority, then arrival, the lowest first."""
    assert row.request.arrival is not None
    return row.request.priority, row.request.arrival


class PromptChunk(NamedTuple):
    """Prompt tokens for one call; arrays are [places], those of one shard side by side."""

    row_ids: np.ndarray  # i32, row within the shard; rows_per_shard in an unused place
    counts: np.ndarray  # i32, tokens of each place
    num_tokens: int  # the token bucket: most tokens of all places of a shard


class _Candidate(NamedTuple):
    """An empty row for a request, and what is cached there of its tokens."""

    index: int
    shared: list[Prefix]  # full pages, which other rows may read as well
    tail: Tail | None  # the page after them, which it would go on writing
    num_known: int  # tokens that it need not feed
    num_drafter: int  # of these, the first ones, which the drafter need not be fed either


class Scheduler:
    """The queue, the rows, and the pages of every shard.

    Args:
      num_shards: of the mesh's data axis: rows and pages are split over it evenly.
      counts_worst_case: whether a request waits until the pages suffice for the full length
        of it and of all running rows; then no row is ever preempted.
      most_batch_tokens: limit on the tokens of all rows together, counted after the work sent
        or, with counts_worst_case, at full length. Above it a request waits unless it is
        alone; by default there is no limit.
      shares_prefixes: whether rows may read pages that other rows filled.
      prompt_sizes: token buckets of prompts, per call and shard.
      needs_drafter: whether it matters which pages hold the drafter's keys and values.

    Attributes:
      feeds_shared_again: whether a row feeds the last token of its shared pages again to get
        its hidden states: a drafter that absorbs them pairs each with the next token. Where the
        drafter is behind, it does not: it catches up with that token too.
      catches_up: whether the drafter can catch up later. If not, shared pages must hold its keys
        and values too.
    """

    def __init__(
        self,
        sizes: Sizes,
        num_shards: int = 1,
        *,
        prompt_sizes: PromptSizes = USUAL_PROMPTS,
        shares_prefixes: bool = True,
        counts_worst_case: bool = False,
        most_batch_tokens: int | None = None,
        needs_drafter: bool = False,
    ):
        self.sizes = sizes
        self.waiting = WaitingQueue()
        self.rows: list[Row | None] = [None] * sizes.rows
        self.table = RowTable(sizes.rows)
        self.pools = [
            PagePool(sizes.num_pages // num_shards, sizes.page_size) for _ in range(num_shards)
        ]
        self.block_table = np.full((sizes.rows, sizes.pages_per_row), NO_PAGE, np.int32)
        self.prompt_sizes = prompt_sizes
        self._counts_worst_case = counts_worst_case
        self._most_batch_tokens = most_batch_tokens
        self._shares_prefixes = shares_prefixes
        self.needs_drafter = needs_drafter
        self.feeds_shared_again, self.catches_up = False, True
        self._prefilling: list[Row] = []  # in the order of their requests

    @property
    def rows_per_shard(self) -> int:
        return len(self.rows) // len(self.pools)

    @property
    def occupied(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def at(self, indices: np.ndarray) -> list[Row]:
        """Returns the rows at some indices, leaving out empty ones."""
        rows = self.rows
        return [row for index in indices.tolist() if (row := rows[index]) is not None]

    @property
    def decoding(self) -> np.ndarray:
        """Rows whose prompts are fed by the work sent so far, and that may not have ended.

        Returns:
          Their indices, i64[rows that decode], ascending.
        """
        table = self.table
        return np.flatnonzero(table.is_prefilled & (table.max_length > table.least))

    @property
    def num_to_prefill(self) -> int:
        return sum(row.num_to_prefill for row in self._prefilling)

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and output that one request may have."""
        pool = self.pools[0]
        slots = min(self.sizes.max_length, pool.num_pages * pool.page_size)
        return slots - self.sizes.tree_slots

    # Rows

    def admit(self, growth: int) -> list[Row]:
        """Admits waiting requests to rows, in their order, until one has to wait.

        A request waits for a row, and for pages that hold its tokens and `growth` more, beside
        those that the running rows need for the same growth. A request that could share pages
        which are about to be filled is passed over by a few others.
        """
        if not len(self.waiting) or self.table.is_occupied.all():
            return []
        admitted, postponed = [], []
        _, wanted = self._wanted(np.flatnonzero(self.table.is_occupied), growth)
        while (request := self.waiting.first()) is not None:
            if self._is_too_heavy(request, growth):
                break
            candidates = self._candidates(request)
            if candidates is None:
                if len(postponed) == MOST_POSTPONED:
                    break
                self.waiting.remove(request)
                postponed.append(request)
                continue
            row = self._place(request, candidates, growth, wanted)
            if row is None:
                break
            self.waiting.remove(request)
            self._announce_prefixes(row)
            if row.num_to_prefill:
                bisect.insort(self._prefilling, row, key=_order)
            admitted.append(row)
        for request in postponed:
            self.waiting.push(request)
        return admitted

    def release(self, row: Row, *, forgets: bool = False) -> None:
        """Empties a row; its pages can be taken at once.

        Args:
          forgets: removes its pages from the prefix cache.
        """
        assert self.rows[row.index] is row
        self.rows[row.index] = None
        pages = self.pages(row)
        if forgets:
            self.pools[row.shard].forget(pages)
        else:
            self._keep_tail(row)
        self.pools[row.shard].give_back(pages)
        self.block_table[row.index] = NO_PAGE
        self.table.clear(row.index)
        if row in self._prefilling:
            self._prefilling.remove(row)

    def preempt(self, row: Row) -> None:
        """Empties a row and queues its request, which later goes on from the tokens it has."""
        row.request.num_preemptions += 1
        self.requeue(row)

    def requeue(self, row: Row) -> None:
        """Empties a row and queues its request."""
        self.release(row)
        self.waiting.push(row.request)

    def renew_weights(self) -> None:
        """Empties the prefix cache, and the rows whose tokens are not all fed yet.

        Other rows keep their pages, which hold keys and values of earlier weights from now on:
        no other row may read them.
        """
        for row in self.occupied:
            if row.num_to_prefill:
                self.requeue(row)
            else:
                row.is_of_old_weights = True
        for pool in self.pools:
            pool.forget()

    def last_in(self, rows: Iterable[Row]) -> Row:
        """Returns the row to preempt: the last by priority, and among equals by arrival."""
        return max(rows, key=_order)

    def row_buckets(self, rows: np.ndarray, buckets: Sequence[int]) -> list[int]:
        """Returns the row buckets that hold some rows, ascending, and all rows last.

        Args:
          rows: i64[any], indices.
          buckets: row buckets to choose from, of all shards together, ascending.
        """
        num_shards = len(self.pools)
        most = int(np.bincount(rows // self.rows_per_shard).max())
        fitting = [
            bucket // num_shards * num_shards
            for bucket in buckets
            if most <= bucket // num_shards < self.rows_per_shard
        ]
        return [*dict.fromkeys(fitting), len(self.rows)]

    def places(self, rows: np.ndarray, bucket: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns the place of each row in one of `row_buckets`.

        Args:
          rows: i64[any], indices, ascending.

        Returns:
          i32[bucket], as BurstPlan.row_ids, None if the bucket holds all rows; and the places.
        """
        if bucket == len(self.rows):
            return None, rows
        num_shards = len(self.pools)
        size = bucket // num_shards
        shards = rows // self.rows_per_shard
        first_of_shard = shards.searchsorted(shards)
        places = shards * size + np.arange(len(rows)) - first_of_shard
        row_ids = np.full(num_shards * size, self.rows_per_shard, np.int32)
        row_ids[places] = rows % self.rows_per_shard
        return row_ids, places

    # Pages

    def table_now(self) -> np.ndarray:
        """Returns a copy of the block table, which the work sent may read later."""
        # Not by `copy`: memcpy is 12 times as slow on AMD's Zen if the two arrays lie a few
        # bytes beyond a multiple of 4096 apart, as neighbours in memory do.
        return np.positive(self.block_table)

    def pages(self, row: Row) -> list[int]:
        """Returns the pages that a row holds, in order."""
        num_pages = self.table.num_pages[row.index]
        return self.block_table[row.index, :num_pages].tolist()

    def reserve(self, rows: np.ndarray, growth: int, least: int = 0) -> np.ndarray:
        """Takes the pages that rows need to gain up to `growth` tokens in the next burst.

        Args:
          rows: i64[any], indices, ascending.
          least: least tokens that a row gains unless it ends.

        Returns:
          The number of pages that each shard lacks, i64[shards]; if any, no page was taken.
        """
        counts, wanted = self._wanted(rows, growth)
        lacking = wanted - [pool.num_free for pool in self.pools]
        if np.any(lacking > 0):
            return lacking.clip(0)
        taken = [pool.take_array(count) for pool, count in zip(self.pools, wanted.tolist())]
        pages = np.concatenate(taken)
        counts = counts.clip(0)
        before = self.table.num_pages[rows]
        # For each page: the row that gets it, and its place among the row's new pages.
        owners = np.repeat(np.arange(len(rows)), counts)
        nth = np.arange(len(pages)) - (counts.cumsum() - counts)[owners]
        self.block_table[rows[owners], before[owners] + nth] = pages
        self.table.num_pages[rows] = before + counts
        self.table.flying_most[rows] += growth
        self.table.flying_least[rows] += least
        return np.zeros_like(wanted)

    def land(self, rows: np.ndarray, growth: int, least: int) -> None:
        """Undoes the counts of `reserve` once the work was read back, or if it was never sent."""
        self.table.flying_most[rows] -= growth
        self.table.flying_least[rows] -= least

    def shrink(self, row: Row) -> None:
        """Gives back the pages that a row no longer needs."""
        num_pages = self._num_pages(int(self.table.most[row.index]))
        surplus = self.block_table[row.index, num_pages : self.table.num_pages[row.index]]
        if len(surplus):
            self.pools[row.shard].give_back(surplus)
            surplus[:] = NO_PAGE
            self.table.num_pages[row.index] = num_pages

    # Prompts

    def next_prompts(self) -> PromptShape:
        """Returns the shape of the call that feeds the next prompt tokens; some must wait."""
        sizes, rows = self.prompt_sizes, self.rows_per_shard
        most = sizes.places(sizes.most_tokens, rows)
        waiting = max(
            sum(row.num_to_prefill for row in own[:most]) for own in self._prefilling_by_shard()
        )
        bucket = sizes.best(waiting)
        return PromptShape(sizes.places(bucket, rows), bucket)

    def next_chunk(self, shape: PromptShape) -> PromptChunk:
        """Returns the next prompt tokens to send, and counts them as sent; some must wait.

        Each prompt takes what it needs of the token bucket, in the order of requests: the first
        ones begin to decode soonest.
        """
        row_ids = np.full((len(self.pools), shape.places), self.rows_per_shard, np.int32)
        counts = np.zeros_like(row_ids)
        for shard, rows in enumerate(self._prefilling_by_shard()):
            left = shape.num_tokens
            for place, row in enumerate(rows[: shape.places]):
                count = min(left, row.num_to_prefill)
                if not count:
                    break
                left -= count
                row_ids[shard, place] = row.index % self.rows_per_shard
                counts[shard, place] = count
                # A drafter that is behind catches up from there when the row drafts.
                is_level = row.num_drafter_final >= row.num_prefilled
                row.num_prefilled += count
                if is_level:
                    row.num_drafter_final = row.num_prefilled
                self.table.update(row)
                self._note_prefixes(row)
        self._prefilling = [row for row in self._prefilling if row.num_to_prefill]
        return PromptChunk(row_ids.reshape(-1), counts.reshape(-1), shape.num_tokens)

    def _prefilling_by_shard(self) -> list[list[Row]]:
        """Returns the rows of each shard that have prompt tokens to feed, in order."""
        by_shard: list[list[Row]] = [[] for _ in self.pools]
        for row in self._prefilling:
            by_shard[row.shard].append(row)
        return by_shard

    # Reading back

    def take_tokens(self, row: Row, token_ids: Sequence[int], drafter_length: int) -> None:
        """Adds tokens to a decoding row, and sets how many of all its tokens its drafter has."""
        row.token_ids += token_ids
        row.num_prefilled = len(row.token_ids) - 1
        row.num_drafter_final = drafter_length
        self.table.update(row)
        self._note_prefixes(row)

    def check(self) -> None:
        """Asserts that every page is accounted for and every figure is right; for tests."""
        held = [set() for _ in self.pools]
        expected = RowTable(len(self.rows))
        for row in self.occupied:
            pages = self.pages(row)
            assert len(set(pages)) == len(pages)
            assert NO_PAGE not in pages
            assert np.all(self.block_table[row.index, len(pages) :] == NO_PAGE)
            held[row.shard].update(pages)
            expected.enter(row)
        names = "request_number", "num_tokens", "num_drafter_final", "is_prefilled"
        for name in ("is_occupied", *names):
            figures = getattr(self.table, name)
            assert np.array_equal(figures, getattr(expected, name)), name
        for pool, pages in zip(self.pools, held):
            pool.check()
            assert pool.num_held == len(pages), "a page is held by nobody"

    def _num_pages(self, tokens: Any) -> Any:
        """Returns the pages that a row's tokens need, including its tree slots."""
        return -(-(tokens + self.sizes.tree_slots) // self.sizes.page_size)

    def _wanted(self, rows: np.ndarray, growth: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pages that rows lack to grow, below 0 for a surplus.

        Returns:
          i64[rows], and the sum of those above 0 by shard, i64[shards].
        """
        table = self.table
        tokens = table.num_tokens[rows] + table.flying_most[rows] + growth
        tokens = np.minimum(tokens, table.max_length[rows])
        counts = self._num_pages(tokens) - table.num_pages[rows]
        shards = rows // self.rows_per_shard
        wanted = np.bincount(shards, counts.clip(0), minlength=len(self.pools))
        return counts, wanted.astype(np.int64)

    def _candidates(self, request: Request) -> list[_Candidate] | None:
        """Returns the empty rows for a request, best first, one per shard.

        None if it could share pages that are about to be filled.
        """
        candidates = []
        for shard, pool in enumerate(self.pools):
            index = self._empty_row(shard)
            if index is None:
                continue
            shared = self._shareable(pool, request.token_ids)
            if shared is None:
                return None
            first = shard * self.rows_per_shard
            own = self.rows[first : first + self.rows_per_shard]
            num_rows = sum(row is not None for row in own)
            candidate = self._candidate(index, pool, shared, request.token_ids)
            gain = candidate.num_known - num_rows * TOKENS_OF_A_ROW
            candidates.append((-gain, -pool.num_free, index, candidate))
        candidates.sort(key=lambda each: each[:3])
        return [candidate for *_, candidate in candidates]

    def _candidate(
        self, index: int, pool: PagePool, shared: list[Prefix], token_ids: Sequence[int]
    ) -> _Candidate:
        """Returns an empty row with the pages that are cached for a text."""
        size, before = self.sizes.page_size, shared[-1].id if shared else ROOT
        num_drafted = next((n for n, p in enumerate(shared) if not p.has_drafter), len(shared))
        known, num_drafter = len(shared) * size, num_drafted * size
        tail = None
        if self._shares_prefixes:
            tail = pool.find_tail(before, token_ids[known:-1])
        if tail is not None and num_drafter == known:
            num_drafter += tail.num_drafter
        if tail is not None:
            known += tail.num_tokens
        if not self.needs_drafter:
            num_drafter = known
        elif not self.catches_up:
            known = num_drafter
            tail = tail if known > len(shared) * size else None
        return _Candidate(index, shared, tail, known, num_drafter)

    def _keep_tail(self, row: Row) -> None:
        """Keeps the last page of a row that ends, for a request that continues its text."""
        size = self.sizes.page_size
        place, count = divmod(row.num_prefilled, size)
        if not self._shares_prefixes or row.is_of_old_weights:
            return
        if not count or len(row.prefixes) < place:
            return
        before = row.prefixes[place - 1] if place else ROOT
        num_drafter = min(max(row.num_drafter_final - place * size, 0), count)
        self.pools[row.shard].keep_tail(
            before,
            row.token_ids[place * size : place * size + count],
            int(self.block_table[row.index, place]),
            num_drafter=num_drafter,
        )

    def _place(
        self,
        request: Request,
        candidates: Sequence[_Candidate],
        growth: int,
        wanted: np.ndarray,
    ) -> Row | None:
        """Puts a request into a row with pages for its tokens; returns None if it must wait.

        Args:
          wanted: i64[shards], pages that running rows need to grow; those of the new row are added.
        """
        token_ids = request.token_ids
        for index, shared, tail, num_known, num_drafter in candidates:
            shard = index // self.rows_per_shard
            pool = self.pools[shard]
            if self._counts_worst_case and not self._fits_for_good(request, shard):
                continue
            pages = [prefix.page for prefix in shared]
            pool.hold(pages)
            # Alone it always fits: a pool holds `most_tokens`, which no max_length exceeds.
            most = min(len(token_ids) + growth, request.max_length)
            count = self._num_pages(most) - len(pages)
            if count + wanted[shard] > pool.num_free:  # of which one may be the tail's
                pool.give_back(pages)
                continue
            if tail is not None:
                pool.claim(tail)
                pages.append(tail.page)
            feeds_again = self.feeds_shared_again and 0 < num_known == num_drafter
            self.rows[index] = row = Row(
                index,
                shard,
                request,
                token_ids,
                num_prefilled=num_known - int(feeds_again),
                num_drafter_final=num_drafter,
                prefixes=[prefix.id for prefix in shared],
                num_drafter_remembered=min(num_drafter // self.sizes.page_size, len(shared)),
            )
            self.table.enter(row)
            self.block_table[index, : len(pages)] = pages
            self.table.num_pages[index] = len(pages)
            own = np.array([index])
            lacking = self.reserve(own, 0)
            assert not np.any(lacking)
            wanted += self._wanted(own, growth)[1]
            return row
        return None

    def _is_too_heavy(self, request: Request, growth: int) -> bool:
        """Returns whether a request would exceed the limit on the tokens of all rows."""
        most, table = self._most_batch_tokens, self.table
        if most is None or not table.is_occupied.any():
            return False
        if self._counts_worst_case:
            return int(table.max_length.sum()) + request.max_length > most
        own = min(len(request.token_ids) + growth, request.max_length)
        return int(table.most.sum()) + own > most

    def _fits_for_good(self, request: Request, shard: int) -> bool:
        """Returns whether a shard has pages for the full length of its rows and a request."""
        size = self.sizes.page_size
        most = [row.request.max_length for row in self.occupied if row.shard == shard]
        slots = [tokens + self.sizes.tree_slots for tokens in (*most, request.max_length)]
        return sum(-(-n // size) for n in slots) <= self.pools[shard].num_pages

    def _empty_row(self, shard: int) -> int | None:
        first = shard * self.rows_per_shard
        own = range(first, first + self.rows_per_shard)
        return next((index for index in own if self.rows[index] is None), None)

    def _shareable(self, pool: PagePool, token_ids: Sequence[int]) -> list[Prefix] | None:
        """Returns the cached prefixes that a new row can read; None if some are being filled."""
        if not self._shares_prefixes:
            return []
        found = pool.find(token_ids[:-1])
        if not all(prefix.is_ready for prefix in found):
            return None
        if not self.catches_up:
            lacking = [i for i, prefix in enumerate(found) if not prefix.has_drafter]
            found = found[: lacking[0]] if lacking else found
        return found

    def _announce_prefixes(self, row: Row) -> None:
        """Adds a prompt's full pages to the prefix cache before they are filled.

        Requests that could share them wait."""
        if not self._shares_prefixes:
            return
        size = self.sizes.page_size
        before = row.prefixes[-1] if row.prefixes else ROOT
        is_level = row.num_drafter_final >= row.num_prefilled
        for place in range(len(row.prefixes), (len(row.token_ids) - 1) // size):
            prefix = self._remember(row, place, before, is_ready=False, has_drafter=is_level)
            before = prefix.id

    def _note_prefixes(self, row: Row) -> None:
        """Adds the pages that are filled by now to the prefix cache."""
        if not self._shares_prefixes or row.is_of_old_weights:
            return
        size, num_known = self.sizes.page_size, len(row.prefixes)
        num_filled = num_drafted = row.num_prefilled // size
        if self.needs_drafter:
            num_drafted = min(row.num_drafter_final // size, num_filled)
        # Only cached pages that the drafter has caught up with, and new ones: otherwise a row
        # of plain decoding would visit all of its pages with every burst.
        caught_up = range(row.num_drafter_remembered, min(num_drafted, num_known))
        for place in (*caught_up, *range(num_known, num_filled)):
            before = row.prefixes[place - 1] if place else ROOT
            prefix = self._remember(row, place, before, has_drafter=place < num_drafted)
            row.prefixes[place : place + 1] = [prefix.id]
        row.num_drafter_remembered = max(num_drafted, row.num_drafter_remembered)

    def _remember(self, row: Row, place: int, before: int, **flags: bool) -> Prefix:
        size = self.sizes.page_size
        own = row.token_ids[place * size : (place + 1) * size]
        pool = self.pools[row.shard]
        page = int(self.block_table[row.index, place])
        return pool.remember(before, own, page, **flags)
