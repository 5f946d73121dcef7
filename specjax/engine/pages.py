"""Whose the pages are: free, held by rows, or kept because their prefix may come again.

The host decides it, before work is sent to the device. The device runs what it is sent in
order, so a page may be given away as soon as its row has ended: whoever writes to it
was sent before whoever reads it next.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

ROOT = 0  # the prefix of no tokens


@dataclasses.dataclass
class Prefix:
    """A full page of tokens after another prefix, and the page that holds its keys and values.

    `is_ready` is false until the work that fills the page was sent to the device.
    `has_drafter` says that the drafter's keys and values are there as well.
    """

    id: int
    page: int
    key: tuple[int, tuple[int, ...]]  # the prefix before it, and its own tokens
    is_ready: bool
    has_drafter: bool


class PagePool:
    """The pages of one shard, and the prefixes of which some hold keys and values.

    Invariant: every page is free, or kept with its prefix, or held, and counted once.
    A prefix is looked up by its tokens themselves, so none is taken for another.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        # Page 0 on top, so that small examples read in order.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        # Held by nobody, the least recently used first.
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._prefixes: dict[tuple[int, tuple[int, ...]], Prefix] = {}
        self._prefix_of: dict[int, Prefix] = {}  # by page
        self._next_id = ROOT + 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, those kept with a prefix included."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that rows hold; shared ones count once."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Returns `count` pages with one holder each; the least recently used prefixes go.

        Raises:
          ValueError: fewer are free.
        """
        if count > self.num_free:
            raise ValueError(
                f"{count=} pages were asked for and {self.num_free} are free."
            )
        pages = self._free[-count:][::-1] if count else []
        del self._free[len(self._free) - len(pages) :]
        while len(pages) < count:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            pages.append(page)
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Counts one more holder of pages that somebody holds, or that are kept."""
        for page in pages:
            self._kept.pop(page, None)
            self._num_holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Counts one holder less of a row's pages, in the order of the row.

        What nobody holds is free, or kept if it has a prefix: the row's first page the
        longest, because a prefix without what comes before it cannot be found.
        """
        for page in reversed(pages):
            self._num_holders[page] -= 1
            assert self._num_holders[page] >= 0, f"{page=} was given back twice"
            if self._num_holders[page]:
                continue
            prefix = self._prefix_of.get(page)
            if prefix is not None and not prefix.is_ready:
                self._forget(page)  # what would have filled it was never sent
                prefix = None
            if prefix is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def find(self, token_ids: Sequence[int]) -> list[Prefix]:
        """Returns the longest known prefix of some tokens, page by page."""
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
        """Makes a held page findable by the page_size tokens whose keys and values it holds.

        Returns:
          Its prefix; another page's where that is known already.
        """
        key = before, tuple(token_ids)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = Prefix(self._next_id, page, key, is_ready, has_drafter)
            self._next_id += 1
            self._prefixes[key] = self._prefix_of[page] = prefix
        elif prefix.page == page:
            prefix.is_ready |= is_ready
            prefix.has_drafter |= has_drafter
        elif is_ready and has_drafter and not prefix.has_drafter:
            # The better page takes its place.
            self._prefix_of[page] = prefix
            del self._prefix_of[prefix.page]
            if prefix.page in self._kept:
                del self._kept[prefix.page]
                self._free.append(prefix.page)
            prefix.page, prefix.is_ready, prefix.has_drafter = page, True, True
        return prefix

    def forget(self, pages: Iterable[int] | None = None) -> None:
        """Makes pages unfindable by what they hold; None is all, as new weights demand."""
        for page in list(self._prefix_of) if pages is None else pages:
            if page in self._prefix_of:
                self._forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def _forget(self, page: int) -> None:
        prefix = self._prefix_of.pop(page)
        del self._prefixes[prefix.key]

    def check(self) -> None:
        """Asserts the invariant."""
        held = {page for page, count in enumerate(self._num_holders) if count}
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a page is free twice"
        for one, other in itertools.combinations((free, kept, held), 2):
            assert not one & other, "a page is two things"
        assert len(free) + len(kept) + len(held) == self.num_pages, "a page is lost"
        assert kept <= set(self._prefix_of), "a page is kept without a prefix"
        assert not free & set(self._prefix_of), "a free page has a prefix"
