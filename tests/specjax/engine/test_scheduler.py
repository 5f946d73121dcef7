"""What the loop over a decoder without a drafter does not show: whose keys the drafter has."""

import dataclasses

import numpy as np
import pytest
from test_loop import make_request

from specjax.decode.sizes import PromptSizes, Sizes
from specjax.engine.scheduler import Scheduler

SIZES = Sizes(rows=2, page_size=4, num_pages=16, pages_per_row=8, burst_steps=4)


def admit(scheduler, request):
    scheduler.waiting.push(request)
    (row,) = scheduler.admit(4)
    while row.num_to_prefill:
        scheduler.next_chunk(scheduler.next_prompts())
    return row


def flags(scheduler, token_ids):
    return [prefix.has_drafter for prefix in scheduler.pools[0].find(token_ids)]


def test_pages_are_shared_when_the_drafter_has_caught_up():
    scheduler = Scheduler(SIZES, needs_drafter=True)
    row = admit(scheduler, make_request(1, [1, 2, 3, 4, 5], 20))
    assert flags(scheduler, row.token_ids) == [True]
    assert not scheduler.reserve(np.array([row.index]), 15)
    # Eight tokens more, of which the drafter lacks one at a page's end, and then all.
    scheduler.take_tokens(row, [6, 7, 8, 9], 7)
    assert flags(scheduler, row.token_ids) == [True, False]
    scheduler.take_tokens(row, [10, 11, 12, 13], 7)
    assert flags(scheduler, row.token_ids) == [True, False, False]
    scheduler.take_tokens(row, [14], 12)
    assert flags(scheduler, row.token_ids) == [True, True, True]
    text = row.token_ids[:]
    scheduler.land(np.array([row.index]), 15, 0)
    scheduler.shrink(row)
    scheduler.release(row)
    again = admit(scheduler, make_request(2, text, 2))
    assert len(again.prefixes) == 3


def test_a_row_makes_the_drafters_keys_anew_where_it_cannot_catch_up():
    scheduler = Scheduler(SIZES, needs_drafter=True)
    scheduler.feeds_shared_again, scheduler.catches_up = True, False
    row = admit(scheduler, make_request(1, [1, 2, 3], 20))
    assert not scheduler.reserve(np.array([row.index]), 15)
    scheduler.take_tokens(row, [4, 5, 6, 7, 8, 9], 2)
    text = row.token_ids[:]
    assert flags(scheduler, text) == [False, False]
    again = admit(scheduler, make_request(2, text, 2))
    assert scheduler.pages(again)[0] != scheduler.pages(row)[0]
    # Its pages are the ones to be found from now on.
    assert flags(scheduler, text) == [True, True]
    found = [prefix.page for prefix in scheduler.pools[0].find(text)]
    assert found == scheduler.pages(again)[:2]


def test_a_row_goes_on_from_pages_that_lack_the_drafters_keys():
    scheduler = Scheduler(SIZES, needs_drafter=True)
    row = admit(scheduler, make_request(1, [1, 2, 3], 20))
    own = np.array([row.index])
    assert not scheduler.reserve(own, 15)
    scheduler.take_tokens(row, [4, 5, 6, 7, 8, 9, 10, 11], 5)
    text = [*row.token_ids, *range(50, 60)]
    assert flags(scheduler, text) == [True, False]
    scheduler.land(own, 15, 0)
    scheduler.shrink(row)
    scheduler.release(row)
    scheduler.waiting.push(make_request(2, text, 4))
    (again,) = scheduler.admit(4)
    # Two pages and two tokens of a third, of which the drafter has one page.
    assert (again.num_prefilled, again.num_drafter_final) == (10, 4)
    scheduler.next_chunk(scheduler.next_prompts())
    assert (again.num_prefilled, again.num_drafter_final) == (20, 4)
    assert flags(scheduler, text) == [True, False, False, False, False]
    assert not scheduler.reserve(np.array([again.index]), 4)
    scheduler.take_tokens(again, [60], 21)  # it drafted, and caught up first
    assert flags(scheduler, text) == [True] * 5
    scheduler.check()


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("length", [3, 6])
def test_pages_of_earlier_weights_are_not_gone_on_with(is_new, length):
    scheduler = Scheduler(SIZES)
    row = admit(scheduler, make_request(1, list(range(1, length + 1)), 9))
    scheduler.table.is_decoding[row.index] = True
    if is_new:
        scheduler.renew_weights()
    scheduler.release(row)
    scheduler.waiting.push(make_request(2, [*row.token_ids, 7], 4))
    (again,) = scheduler.admit(4)
    assert again.num_prefilled == (0 if is_new else length - 1)
    scheduler.check()


@pytest.mark.parametrize("catches_up", [False, True])
def test_a_drafter_that_absorbs_goes_on_from_what_it_has_absorbed(catches_up):
    for num_drafted in (6, 5, 4, 3):
        scheduler = Scheduler(SIZES, needs_drafter=True)
        scheduler.feeds_shared_again, scheduler.catches_up = True, catches_up
        row = admit(scheduler, make_request(1, [1, 2, 3], 9))
        own = np.array([row.index])
        assert not scheduler.reserve(own, 8)
        scheduler.take_tokens(row, [4, 5, 6, 7], num_drafted)
        scheduler.land(own, 8, 0)
        scheduler.shrink(row)
        scheduler.release(row)
        scheduler.waiting.push(make_request(2, [*row.token_ids, 8], 4))
        (again,) = scheduler.admit(4)
        # Six tokens are known, which a page and a tail hold. The last one is fed again for what is
        # absorbed, unless the drafter lacks tokens before it, which it catches up with.
        known, drafted = 6, num_drafted if num_drafted >= 4 else 0
        if not catches_up:
            known = drafted
        fed = known - int(0 < known == drafted)
        assert (again.num_prefilled, again.num_drafter_final) == (fed, drafted)
        scheduler.next_chunk(scheduler.next_prompts())
        is_level = drafted == known
        assert again.num_drafter_final == (again.num_prefilled if is_level else drafted)
        scheduler.check()


@pytest.mark.parametrize("needs_drafter", [False, True])
def test_a_page_is_looked_at_once_however_long_the_text(monkeypatch, needs_drafter):
    sizes = dataclasses.replace(SIZES, num_pages=600, pages_per_row=300)
    scheduler = Scheduler(sizes, needs_drafter=needs_drafter)
    row = admit(scheduler, make_request(1, [1, 2, 3], 1000))
    assert not scheduler.reserve(np.array([row.index]), 1000)
    pool, places = scheduler.pools[0], []
    remember = scheduler._remember

    def counted(row, place, *arguments, **flags):
        places.append(place)
        return remember(row, place, *arguments, **flags)

    monkeypatch.setattr(scheduler, "_remember", counted)
    for token in range(801):
        scheduler.take_tokens(row, [token], 2)  # nothing is drafted
    assert places == list(range(803 // 4))
    assert len(pool.find(row.token_ids)) == 803 // 4


@pytest.mark.parametrize(
    ("prompts", "calls"),
    [
        # Eight short prompts fill two buckets of 64 and part of a third, not eight of 64.
        ([21] * 8, [(64, [20, 20, 20, 4]), (64, [16, 20, 20, 8]), (64, [12, 20])]),
        # The first prompts are fed first; who comes later takes what they leave.
        ([401, 101], [(256, [256]), (256, [144, 100])]),
        ([251, 3, 2, 2], [(256, [250, 2, 1, 1])]),
        ([18], [(64, [17])]),
    ],
)
def test_prompts_take_what_they_need_of_a_bucket(prompts, calls):
    sizes = dataclasses.replace(SIZES, rows=8, num_pages=256, pages_per_row=128)
    scheduler = Scheduler(sizes, prompt_sizes=PromptSizes((64, 256), 16))
    for index, count in enumerate(prompts):
        scheduler.waiting.push(make_request(index, [index] * count, 4))
    scheduler.admit(4)
    sent = []
    while scheduler.num_to_prefill:
        chunk = scheduler.next_chunk(scheduler.next_prompts())
        used = chunk.row_ids < sizes.rows
        assert np.array_equal(used, chunk.counts > 0)
        sent.append((chunk.num_tokens, chunk.counts[used].tolist()))
    assert sent == calls
    scheduler.check()


def test_what_a_row_wrote_is_forgotten_where_nobody_may_read_it():
    for forgets in (False, True):
        scheduler = Scheduler(SIZES)
        text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        row = admit(scheduler, make_request(1, text, 2))
        scheduler.release(row, forgets=forgets)
        assert len(scheduler.pools[0].find(text)) == (0 if forgets else 2)
        scheduler.check()


@pytest.mark.parametrize(("num_pages", "num_rows"), [(5, 1), (6, 2)])
def test_room_for_good_is_counted_in_whole_pages(num_pages, num_rows):
    """Two requests that may have nine tokens each, which take three pages of four."""
    sizes = dataclasses.replace(SIZES, num_pages=num_pages)
    scheduler = Scheduler(sizes, counts_worst_case=True)
    for index in range(2):
        scheduler.waiting.push(make_request(index, [index], 8))
    assert len(scheduler.admit(4)) == num_rows


def test_the_longest_request_leaves_room_for_a_tree():
    sizes = dataclasses.replace(SIZES, tree_slots=3)
    assert Scheduler(sizes).most_tokens == 8 * 4 - 3
    few = dataclasses.replace(sizes, num_pages=5)
    assert Scheduler(few).most_tokens == 5 * 4 - 3
    row = admit(Scheduler(few), make_request(1, [1, 2, 3], 14))
    assert row.request.max_length == 17


@pytest.mark.parametrize("tree_slots", [0, 3])
@pytest.mark.parametrize("num_left", [1, 4])
def test_a_request_that_fills_the_pool_is_admitted_alone(num_left, tree_slots):
    """It needs all pages but what its last tokens take, less than a burst may add."""
    sizes = dataclasses.replace(SIZES, num_pages=5, tree_slots=tree_slots)
    scheduler = Scheduler(sizes)
    most = scheduler.most_tokens
    row = admit(scheduler, make_request(1, list(range(most - num_left)), num_left))
    assert len(row.token_ids) + 4 >= most
    scheduler.waiting.push(make_request(2, [99], 1))
    assert not scheduler.admit(4)
    scheduler.release(row)
    assert scheduler.admit(4)
    scheduler.check()


@pytest.mark.parametrize(("expected", "end"), [(0, 0), (5, 8), (100, 23)])
def test_no_row_is_expected_to_outlast_its_length(expected, end):
    scheduler = Scheduler(SIZES)
    row = admit(scheduler, make_request(1, [1, 2, 3], 20, expected_length=expected))
    assert scheduler.table.expected_end[row.index] == end
