"""The page pool: who holds what, which prefixes are found, and who goes first."""

import hypothesis
import hypothesis.strategies as st
import pytest

from specjax.engine.pages import ROOT, PagePool

SIZE = 2


def remember(pool, tokens, pages, **flags):
    """Makes the pages of one text findable."""
    before = ROOT
    for place, page in enumerate(pages):
        own = tokens[place * SIZE : (place + 1) * SIZE]
        before = pool.remember(before, own, page, **flags).id


def found(pool, tokens):
    return [prefix.page for prefix in pool.find(tokens)]


def test_take_and_give_back():
    pool = PagePool(3, SIZE)
    assert pool.take(2) == [0, 1]
    assert (pool.num_free, pool.num_held) == (1, 2)
    pool.give_back([0])
    assert pool.take(2) == [0, 2]
    with pytest.raises(ValueError, match="count=1 pages were asked for and 0 are free"):
        pool.take(1)
    pool.check()


def test_a_page_is_free_when_its_last_holder_goes():
    pool = PagePool(2, SIZE)
    pages = pool.take(1)
    pool.hold(pages)
    pool.give_back(pages)
    assert pool.num_free == 1
    pool.give_back(pages)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(pages)


def test_prefixes_are_found_as_far_as_they_agree():
    pool = PagePool(8, SIZE)
    pages = pool.take(3)
    remember(pool, [1, 2, 3, 4, 5, 6], pages)
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert found(pool, [1, 2, 3, 4, 5]) == pages[:2]  # no full page more
    assert found(pool, [1, 2, 9, 4, 5, 6]) == pages[:1]
    assert found(pool, [3, 4]) == []  # the same tokens, after others
    assert found(pool, [1]) == []


def test_prefixes_outlive_their_row_until_pages_run_out():
    pool = PagePool(4, SIZE)
    first, second = pool.take(2), pool.take(1)
    remember(pool, [1, 2, 3, 4], first)
    remember(pool, [5, 6], second)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.num_free == 4
    pool.take(1)  # never held before
    pool.take(1)  # now the least recently used goes, a text's last page first
    assert found(pool, [1, 2, 3, 4]) == first[:1]
    assert found(pool, [5, 6]) == second
    pool.hold(found(pool, [1, 2]))
    assert pool.num_free == 1
    pool.take(1)
    assert found(pool, [5, 6]) == []
    assert found(pool, [1, 2]) == first[:1]
    pool.check()


def test_what_was_never_filled_is_forgotten():
    pool = PagePool(2, SIZE)
    pages = pool.take(1)
    remember(pool, [1, 2], pages, is_ready=False)
    assert not pool.find([1, 2])[0].is_ready
    pool.give_back(pages)
    assert found(pool, [1, 2]) == []
    pool.check()


def test_a_page_with_the_drafters_keys_takes_the_place_of_one_without():
    pool = PagePool(3, SIZE)
    one, other, third = ([page] for page in pool.take(3))
    remember(pool, [1, 2], one, has_drafter=False)
    remember(pool, [1, 2], other, has_drafter=False)
    assert found(pool, [1, 2]) == one
    pool.give_back(one)
    remember(pool, [1, 2], third)
    assert found(pool, [1, 2]) == third
    assert pool.find([1, 2])[0].has_drafter
    pool.check()
    assert pool.take(1) == one


def test_forgetting():
    pool = PagePool(4, SIZE)
    kept, held = pool.take(1), pool.take(2)
    remember(pool, [1, 2], kept)
    remember(pool, [3, 4, 5, 6], held)
    pool.give_back(kept)
    pool.forget(held[1:])
    assert found(pool, [3, 4, 5, 6]) == held[:1]
    pool.forget()
    assert found(pool, [1, 2]) == found(pool, [3, 4]) == []
    pool.check()
    assert (pool.num_free, pool.num_held) == (2, 2)


def end(pool, tokens, pages, num_drafter=9):
    """Gives the pages of a text back whose last one is not full."""
    full = len(tokens) // SIZE
    before = ([prefix.id for prefix in pool.find(tokens)] or [ROOT])[-1]
    pool.keep_tail(before, tokens[full * SIZE :], pages[full], num_drafter=num_drafter)
    pool.give_back(pages)


def tail_of(pool, tokens):
    prefixes = pool.find(tokens)
    before = prefixes[-1].id if prefixes else ROOT
    return pool.find_tail(before, tokens[len(prefixes) * SIZE :])


def test_a_page_that_is_not_full_is_found_once_and_may_be_written():
    pool = PagePool(4, SIZE)
    pages = pool.take(2)
    remember(pool, [1, 2], pages[:1])
    end(pool, [1, 2, 3], pages)
    pool.check()
    assert pool.num_held == 0
    assert tail_of(pool, [1, 2, 4]) is tail_of(pool, [3]) is tail_of(pool, [1, 2]) is None
    tail = tail_of(pool, [1, 2, 3, 5])
    assert (tail.page, tail.num_tokens) == (pages[1], 1)
    pool.hold(pages[:1])
    pool.claim(tail)
    assert tail_of(pool, [1, 2, 3, 5]) is None
    assert pool.num_held == 2
    pool.check()
    pool.give_back(pages)
    pool.check()
    assert pool.num_held == 0


def test_the_longest_tail_is_taken_and_equal_texts_have_one_each():
    pool = PagePool(6, 4)
    for tokens in ([1], [1, 2, 3], [1, 2], [1, 2, 3]):
        (page,) = pool.take(1)
        pool.keep_tail(ROOT, tokens, page, num_drafter=0)
        pool.give_back([page])
    pool.check()
    lengths = []
    while (tail := pool.find_tail(ROOT, [1, 2, 3, 4])) is not None:
        lengths.append(tail.num_tokens)
        pool.claim(tail)
        pool.check()
    assert lengths == [3, 3, 2, 1]


def test_tails_go_when_pages_run_out_or_weights_are_new():
    pool = PagePool(2, SIZE)
    pages = pool.take(2)
    remember(pool, [1, 2], pages[:1])
    end(pool, [1, 2, 3], pages)
    pool.take(1)  # the tail's: it was given back before the page that it comes after
    assert tail_of(pool, [1, 2, 3]) is None
    assert found(pool, [1, 2]) == pages[:1]
    pool.check()
    pool = PagePool(2, SIZE)
    end(pool, [3], pool.take(1))
    pool.forget()
    assert tail_of(pool, [3]) is None
    assert pool.num_free == 2
    pool.check()


@hypothesis.settings(deadline=None)
@hypothesis.given(data=st.data())
def test_random_scripts(data):
    """No page is lost, held twice by accident, or found for other tokens than its own."""
    pool = PagePool(6, SIZE)
    rows, content = [], {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["begin", "begin", "end", "forget"]))
        if action == "begin":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=7))
            shared, tail = pool.find(tokens), tail_of(pool, tokens)
            pages = [prefix.page for prefix in shared]
            for place, page in enumerate(pages):
                assert content[page] == tokens[: (place + 1) * SIZE]
            pool.hold(pages)
            missing = -(-len(tokens) // SIZE) - len(pages)
            if missing > pool.num_free:
                pool.give_back(pages)
                continue
            if tail is not None:
                known = len(pages) * SIZE + tail.num_tokens
                assert content[tail.page] == tokens[:known]
                pool.claim(tail)
                pages.append(tail.page)
                missing -= 1
            pages += pool.take(missing)
            for place, page in enumerate(pages):
                content[page] = tokens[: (place + 1) * SIZE]
            remember(pool, tokens, pages[: len(tokens) // SIZE])
            rows.append((tokens, pages))
        elif action == "end" and rows:
            tokens, pages = rows.pop(data.draw(st.integers(0, len(rows) - 1)))
            if len(tokens) % SIZE and len(pool.find(tokens)) == len(tokens) // SIZE:
                end(pool, tokens, pages)
            else:
                pool.give_back(pages)
        elif action == "forget":
            pool.forget()
        pool.check()
        assert pool.num_held == len({page for _, pages in rows for page in pages})
