"""What a drafter that reads on in text is told: every token once, and what stands before it."""

import numpy as np
import pytest
from test_loop import make_request

from specjax.drafters.history import NO_GROUP, PIECE_TOKENS, WINDOW
from specjax.engine.rows import Row
from specjax.engine.text_feed import (
    MOST_PIECES,
    MOST_WAITING,
    NEW_TOKENS,
    TextFeed,
    group_of,
)

PROMPT = [7, 8, 9]


def told(feed, num_rows=1):
    """Returns all pieces that wait, as lists."""
    pieces = []
    while (found := feed.next_pieces([None] * num_rows)) is not None:
        for token_ids, count in zip(found.token_ids, found.counts.tolist()):
            if count:
                pieces.append(token_ids[:count].tolist())
    return pieces


def row_of(index, request):
    return Row(index, 0, request, request.token_ids, 0, 0)


def test_pieces_begin_with_what_stands_before_them():
    output = list(range(100, 100 + 2 * NEW_TOKENS + 5))
    text = [*PROMPT, *output]
    feed = TextFeed(1)
    assert feed.cut(PROMPT, output) == len(output)
    pieces = told(feed)
    assert [len(piece) for piece in pieces] == [
        len(PROMPT) + NEW_TOKENS,
        PIECE_TOKENS,
        WINDOW + 5,
    ]
    end = len(PROMPT)
    for piece in pieces:
        end = min(end + NEW_TOKENS, len(text))
        assert piece == text[end - len(piece) : end]
    assert feed.num_waiting == 0


def test_of_a_long_prompt_only_its_end_is_told():
    prompt = list(range(200, 200 + 2 * WINDOW))
    feed = TextFeed(1)
    feed.cut(prompt, [1, 2])
    assert told(feed) == [[*prompt[-WINDOW:], 1, 2]]


def test_a_request_is_told_in_whole_pieces_until_it_ends():
    feed, request = TextFeed(1), make_request(1, PROMPT, 2 * NEW_TOKENS)
    request.output_token_ids = list(range(NEW_TOKENS - 1))
    feed.note(request)
    assert feed.num_waiting == 0
    request.output_token_ids.append(50)
    feed.note(request)
    feed.note(request)
    assert told(feed) == [[*PROMPT, *range(NEW_TOKENS - 1), 50]]
    request.output_token_ids += [51, 52]
    feed.note(request, is_over=True)
    (rest,) = told(feed)
    assert rest[-3:] == [50, 51, 52]
    assert len(rest) == WINDOW + 2
    # It goes on later from where it was left; then it ends.
    request.output_token_ids.append(53)
    request.finish_reason = "stop"
    feed.note(request)
    assert told(feed)[0][-2:] == [52, 53]


def test_what_a_request_came_with_is_not_told_again():
    before = list(range(2 * WINDOW))
    request = make_request(1, PROMPT, 99, num_resumed=len(before))
    request.output_token_ids = [*before, 99]
    request.finish_reason = "length"
    feed = TextFeed(1)
    feed.note(request)
    assert told(feed) == [[*before[-WINDOW:], 99]]


def test_rows_that_hold_another_request_enter():
    feed = TextFeed(2)
    assert feed.next_pieces([None, None]) is None
    first, second = (make_request(n, [n, n], 4) for n in (1, 2))
    rows = [row_of(0, first), None]
    pieces = feed.next_pieces(rows)
    assert pieces is not None
    assert pieces.has_entered.tolist() == [True, False]
    assert pieces.row_groups.tolist() == [group_of([1, 1]), NO_GROUP]
    assert pieces.counts.sum() == 0
    assert feed.next_pieces(rows) is None
    # The same row of the batch, taken over by another request.
    pieces = feed.next_pieces([row_of(0, second), None])
    assert pieces is not None
    assert pieces.has_entered.tolist() == [True, False]
    assert pieces.row_groups[0] == group_of([2, 2]) != group_of([1, 1])


@pytest.mark.parametrize(("count", "places"), [(1, 4), (4, 4), (5, MOST_PIECES)])
def test_calls_come_in_two_sizes(count, places):
    feed = TextFeed(1)
    for number in range(count):
        feed.cut(PROMPT, [number])
    pieces = feed.next_pieces([None])
    assert pieces is not None
    assert pieces.token_ids.shape == (places, PIECE_TOKENS)
    assert np.count_nonzero(pieces.counts) == count
    assert set(pieces.groups[:count].tolist()) == {group_of(PROMPT)}


def test_the_oldest_pieces_are_dropped():
    feed = TextFeed(1)
    for number in range(MOST_WAITING + 3):
        feed.cut([], [number])
    assert feed.num_waiting == MOST_WAITING
    assert told(feed)[0] == [3]


def test_a_turn_of_a_dialogue_is_of_the_group_of_its_first_prompt():
    feed, request = TextFeed(1), make_request(1, [*PROMPT, 1, 2], 4)
    request.group = group_of(PROMPT)
    request.output_token_ids = [5]
    feed.note(request, is_over=True)
    pieces = feed.next_pieces([row_of(0, request)])
    assert pieces.groups[0] == pieces.row_groups[0] == group_of(PROMPT)
