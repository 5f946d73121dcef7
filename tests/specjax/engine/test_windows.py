"""Windows of hidden states: which row writes to which, and what they hold, by host figures."""

import itertools

import numpy as np
import pytest
from test_loop import make_request

from specjax.decode.sizes import PromptSizes, Sizes
from specjax.engine.scheduler import Scheduler
from specjax.engine.windows import LEAST_ROOM, Windows

SIZES = Sizes(rows=4, page_size=4, num_pages=64, pages_per_row=16, burst_steps=4)
LENGTH = 8


def _scheduler(num_shards=1):
    return Scheduler(SIZES, num_shards, prompt_sizes=PromptSizes((16,), 4), shares_prefixes=False)


def _admit(scheduler, *requests):
    for request in requests:
        scheduler.waiting.push(request)
    return scheduler.admit(4)


def _feed(scheduler):
    while scheduler.num_to_prefill:
        scheduler.next_chunk(scheduler.next_prompts())


def _gain(scheduler, row, tokens):
    row.request.output_token_ids += tokens
    scheduler.take_tokens(row, tokens, 0)


def test_a_row_writes_from_half_a_window_before_its_output_on():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    (row,) = _admit(scheduler, make_request(1, list(range(20, 30)), 30))
    of_rows, starts = windows.assign(scheduler)
    assert of_rows.tolist() == [0, 4, 4, 4]
    assert starts[row.index] == 10 - LENGTH // 2
    assert windows.assign(scheduler) is None  # nothing has changed
    _feed(scheduler)
    windows.collect(scheduler)
    assert not windows.texts
    _gain(scheduler, row, [1, 2, 3, 4])
    windows.collect(scheduler)
    assert not windows.texts  # the state of the newest token is not computed yet
    _gain(scheduler, row, [5])
    windows.collect(scheduler)
    (text,) = windows.texts
    assert text.token_ids == (26, 27, 28, 29, 1, 2, 3, 4)
    assert (text.window, text.first_learned, text.num_learned) == (0, 4, 4)
    assert windows.num_kept == 4


def test_the_next_window_begins_after_all_work_that_was_sent():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    (row,) = _admit(scheduler, make_request(1, [7, 8], 40))
    windows.assign(scheduler)
    _feed(scheduler)
    _gain(scheduler, row, list(range(10)))
    assert not scheduler.reserve(np.array([row.index]), 6)
    windows.collect(scheduler)
    of_rows, starts = windows.assign(scheduler)
    # 12 tokens, and 6 that are in flight: the work sent feeds positions up to 16.
    assert (of_rows[row.index], starts[row.index]) == (1, 17)
    scheduler.land(np.array([row.index]), 6, 0)
    _gain(scheduler, row, [50])
    scheduler.release(row)
    windows.collect(scheduler)  # of the second window nothing was written
    assert [text.window for text in windows.texts] == [0]
    assert windows.assign(scheduler)[0].tolist() == [4] * 4


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4])
def test_a_row_that_goes_leaves_what_it_has(num_tokens):
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    (row,) = _admit(scheduler, make_request(1, [7, 8, 9], 40))
    windows.assign(scheduler)
    _feed(scheduler)
    _gain(scheduler, row, list(range(num_tokens)))
    scheduler.preempt(row)
    windows.collect(scheduler)
    kept = [text.token_ids for text in windows.texts]
    # The last token's state is not there; of one learned token there is nothing to draft after.
    assert kept == ([(7, 8, 9, *range(num_tokens - 1))] if num_tokens >= 3 else [])


def test_a_prompt_that_was_fed_in_part_leaves_nothing():
    scheduler, windows = _scheduler(), Windows(4, 32)
    (row,) = _admit(scheduler, make_request(1, list(range(40)), 20))
    windows.assign(scheduler)
    scheduler.next_chunk(scheduler.next_prompts())
    scheduler.release(row)
    windows.collect(scheduler)
    assert not windows.texts


def test_an_output_that_is_fed_again_in_part_leaves_that_part():
    scheduler, windows = _scheduler(), Windows(4, 64)
    request = make_request(1, [7, 8], 60)
    request.output_token_ids += list(range(20, 58))  # as after a preemption
    (row,) = _admit(scheduler, request)
    windows.assign(scheduler)
    scheduler.next_chunk(scheduler.next_prompts())
    assert row.num_prefilled == 16
    scheduler.release(row)
    windows.collect(scheduler)
    (text,) = windows.texts
    assert text.token_ids == tuple(row.token_ids[8:16])


def test_a_request_that_failed_leaves_nothing():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    (row,) = _admit(scheduler, make_request(1, [7, 8], 40))
    windows.assign(scheduler)
    _feed(scheduler)
    _gain(scheduler, row, list(range(5)))
    row.request.end("error")
    scheduler.release(row)
    windows.collect(scheduler)
    assert not windows.texts
    assert windows.num_kept == 0


def test_half_of_the_windows_hold_texts_and_the_oldest_makes_room():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    seen = []
    for number in range(1, 7):
        (row,) = _admit(scheduler, make_request(number, [number, 8], 40))
        windows.assign(scheduler)
        _feed(scheduler)
        _gain(scheduler, row, list(range(9)))
        windows.collect(scheduler)
        scheduler.release(row)
        windows.collect(scheduler)
        seen.append([text.token_ids[0] for text in windows.texts])
    assert seen[-1] == [3, 4, 5, 6]
    rows = _admit(scheduler, *[make_request(number, [number, 9], 40) for number in range(7, 11)])
    assert len(rows) == 4
    windows.assign(scheduler)
    # Two of four rows write; the two newest texts are still there.
    assert [text.token_ids[0] for text in windows.texts] == [5, 6]


def test_rows_write_to_windows_of_their_own_shard():
    scheduler, windows = _scheduler(2), Windows(4, LENGTH, 2)
    rows = _admit(scheduler, *[make_request(number, [number, 9], 40) for number in range(1, 5)])
    assert {row.shard for row in rows} == {0, 1}
    of_rows, _ = windows.assign(scheduler)
    assert sorted(of_rows[:2].tolist()) == sorted(of_rows[2:].tolist()) == [0, 2]
    _feed(scheduler)
    for row in rows:
        _gain(scheduler, row, list(range(9)))
    windows.collect(scheduler)
    writer = {int(row.token_ids[0]): row.shard for row in rows}
    assert sorted(text.window for text in windows.texts) == [0, 2]
    assert all(writer[text.token_ids[0]] == text.window // 2 for text in windows.texts)


def test_a_request_that_is_almost_over_gets_no_window():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    _admit(scheduler, make_request(1, [7, 8], LEAST_ROOM - 3))
    assert windows.assign(scheduler)[0].tolist() == [4] * 4


def test_new_weights_of_the_target_forget_all():
    scheduler, windows = _scheduler(), Windows(4, LENGTH)
    one, other = _admit(scheduler, make_request(1, [7, 8], 40), make_request(2, [9, 8], 40))
    windows.assign(scheduler)
    _feed(scheduler)
    _gain(scheduler, one, list(range(9)))
    windows.collect(scheduler)
    assert windows.texts
    windows.forget()
    assert not windows.texts
    # What the other had written before is not counted: it begins anew.
    _, starts = windows.assign(scheduler)
    assert starts[other.index] == 1


def test_numbers_of_texts_go_on_in_the_windows_of_a_later_run():
    numbers = itertools.count()
    first, second = (Windows(4, 8, numbers=numbers) for _ in range(2))
    assert [next(each._numbers) for each in (first, second, first)] == [0, 1, 2]
