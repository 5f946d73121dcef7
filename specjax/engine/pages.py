"""The page pool: pages that are free, held by rows, or kept for the prefix cache.

The host allocates pages before work is sent to the device. The device runs work in the order
in which it was sent, so a page can be reused as soon as its row has ended: the old row's work
precedes the new row's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ROOT = 0  # the prefix of no tokens


@dataclasses.dataclass
class Prefix:
    """A full page of tokens after another prefix, and the page that holds its keys and values.

    `is_ready` is false until the work that fills the page is sent to the device.
    `has_drafter` is true if the page also holds the drafter's keys and values.
    """

    id: int
    page: int
    key: tuple[int, tuple[int, ...]]  # the prefix before it, and its own tokens
    is_ready: bool
    has_drafter: bool


@dataclasses.dataclass(frozen=True)
class Tail:
    """The last page of a text that has ended, not full; only one row may take it and go on.

    The pages before it are those of a prefix.
    """

    page: int
    key: tuple[int, tuple[int, ...]]  # the prefix before it, and its own tokens
    num_drafter: int  # how many of its tokens have the drafter's keys and values

    @property
    def num_tokens(self) -> int:
        return len(self.key[1])


class PagePool:
    """The pages of one shard, and the prefix cache over them.

    Invariant: every page is exactly one of free, kept with its prefix or tail, and held.
    Both are looked up by their tokens, not by a hash alone, so none is mistaken for another.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack as an array, of which the first `_num_stacked` entries count: bursts of many
        # rows take thousands of pages at once. Page 0 is on top, for readable examples.
        self._free = np.arange(num_pages)[::-1].copy()
        self._num_stacked = num_pages
        self._num_holders = np.zeros(num_pages, np.int64)
        self._is_cached = np.zeros(num_pages, bool)  # with a prefix, or a tail
        # Pages that no row holds but the prefix cache keeps, the least recently used first.
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._prefixes: dict[tuple[int, tuple[int, ...]], Prefix] = {}
        self._prefix_of: dict[int, Prefix] = {}  # by page
        self._tails: dict[tuple[int, tuple[int, ...]], list[Tail]] = {}
        self._tail_of: dict[int, Tail] = {}  # by page
        # After each prefix: how many tails there are of each number of tokens.
        self._tail_lengths: dict[int, collections.Counter[int]] = {}
        self._next_id = ROOT + 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, including those kept with a prefix or a tail."""
        return self._num_stacked + len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that rows hold; shared ones count once."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Returns `take_array` as a list."""
        return self.take_array(count).tolist()

    def take_array(self, count: int) -> np.ndarray:
        """Returns `count` pages with one holder each, i64; evicts the least recently used.

        Raises:
          ValueError: fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count=} pages were asked for and {self.num_free} are free.")
        left = max(self._num_stacked - count, 0)
        pages = self._free[left : self._num_stacked][::-1].copy()
        self._num_stacked = left
        if len(pages) < count:
            kept = [self._take_kept() for _ in range(count - len(pages))]
            pages = np.concatenate([pages, kept])
        self._num_holders[pages] = 1
        return pages

    def _take_kept(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._forget(page)
        return page

    def _free_again(self, pages: Any) -> None:
        end = self._num_stacked + len(pages)
        self._free[self._num_stacked : end] = pages
        self._num_stacked = end

    def hold(self, pages: Iterable[int]) -> None:
        """Adds one holder to pages that are held or kept."""
        for page in pages:
            self._kept.pop(page, None)
            self._num_holders[page] += 1

    def give_back(self, pages: Sequence[int] | np.ndarray) -> None:
        """Removes one holder from a row's pages, given in the order of the row.

        A page without holders becomes free, or is kept if it has a prefix or a tail. The row's
        first page is evicted last: what comes after a prefix cannot be found without it.
        """
        given = np.asarray(pages, np.int64)[::-1]
        self._num_holders[given] -= 1
        left = self._num_holders[given]
        assert np.all(left >= 0), f"a page of {list(pages)} was given back twice"
        gone = given[left == 0]
        is_cached = self._is_cached[gone]
        self._free_again(gone[~is_cached])
        for page in gone[is_cached].tolist():
            if page in self._tail_of or self._prefix_of[page].is_ready:
                self._kept[page] = None
            else:
                self._forget(page)  # the work that would have filled it was never sent
                self._free_again([page])

    def find(self, token_ids: Sequence[int]) -> list[Prefix]:
        """Returns the longest cached prefix of some tokens, page by page."""
        found, before = [], ROOT
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            key = before, tuple(token_ids[start : start + self.page_size])
            prefix = self._prefixes.get(key)
            if prefix is None:
                break
            found.append(prefix)
            before = prefix.id
        return found

    def remember(
        self,
        before: int,
        token_ids: Sequence[int],
        page: int,
        *,
        is_ready: bool = True,
        has_drafter: bool = True,
    ) -> Prefix:
        """Adds a held page to the prefix cache, under its page_size tokens.

        Returns:
          Its prefix; that of another page if the tokens are cached already.
        """
        key = before, tuple(token_ids)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = Prefix(self._next_id, page, key, is_ready, has_drafter)
            self._next_id += 1
            self._prefixes[key] = self._prefix_of[page] = prefix
            self._is_cached[page] = True
        elif prefix.page == page:
            prefix.is_ready |= is_ready
            prefix.has_drafter |= has_drafter
        elif is_ready and has_drafter and not prefix.has_drafter:
            # This page replaces the cached one, which lacks the drafter's keys and values.
            self._prefix_of[page] = prefix
            del self._prefix_of[prefix.page]
            self._is_cached[[page, prefix.page]] = True, False
            if prefix.page in self._kept:
                del self._kept[prefix.page]
                self._free_again([prefix.page])
            prefix.page, prefix.is_ready, prefix.has_drafter = page, True, True
        return prefix

    def keep_tail(
        self, before: int, token_ids: Sequence[int], page: int, *, num_drafter: int
    ) -> None:
        """Adds the last page of a text to the cache, just before its only holder gives it back.

        Args:
          before: id of the prefix before it.
          token_ids: its own, fewer than page_size and at least one.
          num_drafter: of these, those that the drafter has keys and values of.
        """
        if self._is_cached[page]:
            return  # it was to hold a longer prompt, which was not fed to its end
        assert self._num_holders[page] == 1, "others read a page that is to be written"
        tail = Tail(page, (before, tuple(token_ids)), num_drafter)
        self._tails.setdefault(tail.key, []).append(tail)
        self._tail_lengths.setdefault(before, collections.Counter())[tail.num_tokens] += 1
        self._tail_of[page] = tail
        self._is_cached[page] = True

    def find_tail(self, before: int, token_ids: Sequence[int]) -> Tail | None:
        """Returns the longest tail after a prefix that some tokens begin with; None if none."""
        for count in sorted(self._tail_lengths.get(before, ()), reverse=True):
            own = tuple(token_ids[:count])
            if len(own) == count and (tails := self._tails.get((before, own))):
                return tails[-1]
        return None

    def claim(self, tail: Tail) -> None:
        """Gives a tail's page one holder, which may write to it: nobody finds it any longer."""
        self._forget(tail.page)
        del self._kept[tail.page]
        self._num_holders[tail.page] = 1

    def forget(self, pages: Iterable[int] | None = None) -> None:
        """Removes pages from the prefix cache; by default all, as new weights require."""
        for page in [*self._prefix_of, *self._tail_of] if pages is None else pages:
            if self._is_cached[page]:
                self._forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free_again([page])

    def _forget(self, page: int) -> None:
        self._is_cached[page] = False
        if page in self._tail_of:
            self._forget_tail(self._tail_of.pop(page))
        else:
            del self._prefixes[self._prefix_of.pop(page).key]

    def _forget_tail(self, tail: Tail) -> None:
        tails, before = self._tails[tail.key], tail.key[0]
        tails.remove(tail)
        if not tails:
            del self._tails[tail.key]
        lengths = self._tail_lengths[before]
        lengths[tail.num_tokens] -= 1
        if not lengths[tail.num_tokens]:
            del lengths[tail.num_tokens]
        if not lengths:
            del self._tail_lengths[before]

    def check(self) -> None:
        """Asserts the invariant."""
        held = {page for page, count in enumerate(self._num_holders) if count}
        stacked = self._free[: self._num_stacked].tolist()
        free, kept = set(stacked), set(self._kept)
        assert len(free) == len(stacked), "a page is free twice"
        cached = {*self._prefix_of, *self._tail_of}
        assert len(cached) == len(self._prefix_of) + len(self._tail_of), "a prefix is a tail"
        assert set(np.flatnonzero(self._is_cached).tolist()) == cached
        assert set(self._tail_of) <= kept, "a page that a row may write is to be found"
        lengths = collections.Counter((t.key[0], t.num_tokens) for t in self._tail_of.values())
        counted = {(b, n): c for b, own in self._tail_lengths.items() for n, c in own.items()}
        assert counted == lengths
        assert sum(map(len, self._tails.values())) == len(self._tail_of)
        for one, other in itertools.combinations((free, kept, held), 2):
            assert not one & other, "a page is two things"
        assert len(free) + len(kept) + len(held) == self.num_pages, "a page is lost"
        assert kept <= cached, "a page is kept without a prefix"
        assert not free & cached, "a free page has a prefix"
