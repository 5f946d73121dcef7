"""Threads take turns in the order in which they asked, and what could not be done is done later."""

import threading

import pytest

from specjax.api.turns import Turns

WAIT_S = 20  # of a test that would hang otherwise


def start(*works):
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def wait_until(condition):
    event = threading.Event()
    for _ in range(WAIT_S * 100):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it never came true")


@pytest.fixture
def rest():
    """Work that is left: done is what was."""
    return []


@pytest.fixture
def done():
    return []


@pytest.fixture
def turns(rest, done):
    def do_rest():
        done.extend(rest)
        rest.clear()

    return Turns(lambda: bool(rest), do_rest)


def test_turns_come_in_the_order_in_which_they_were_asked_for(turns):
    order = []

    def step(number):
        with turns.turn() as has_come:
            assert has_come
            order.append(number)

    threads = []
    with turns.turn():
        for number in range(5):
            threads += start(lambda number=number: step(number))
            wait_until(lambda number=number: len(turns._line) == number + 2)
        assert not order
    join(threads)
    assert order == [0, 1, 2, 3, 4]


def test_a_turn_is_given_up_for_news(turns):
    news, came = [], []

    def step():
        with turns.turn(unless=lambda: bool(news)) as has_come:
            came.append(has_come)

    with turns.turn():
        first = start(step)
        wait_until(lambda: len(turns._line) == 2)
        # Behind one that has no news.
        second = start(lambda: turns.turn().__enter__())
        wait_until(lambda: len(turns._line) == 3)
        news.append(1)
    join(first)
    assert came == [False]
    join(second)


def test_what_is_left_over_is_done_at_once_where_nobody_steps(turns, rest, done):
    rest.append(1)
    turns.tidy()
    assert done == [1]


def test_what_is_left_over_in_a_step_is_done_after_it(turns, rest, done):
    with turns.turn():
        rest.append(1)
        turns.tidy()
        with turns.tables():
            pass
        assert done == []
    assert done == [1]


def test_a_step_that_begins_just_then_is_not_disturbed(turns, rest, done):
    """It begins after somebody saw that nobody steps, and before that one has the tables."""

    class Lock:
        def acquire(self, blocking):
            turns._line.append(0)
            return turns._changed.acquire(blocking)

        def release(self):
            turns._changed.release()

    lock, turns._lock = turns._lock, Lock()
    rest.append(1)
    turns.tidy()
    turns._lock = lock
    assert done == []
    turns._line.clear()
    turns.tidy()
    assert done == [1]


def test_what_is_left_over_while_tables_are_held_is_done_after(turns, rest, done):
    with turns.tables():
        rest.append(1)
        turns.tidy()  # as by the garbage collector, in the same thread
        other = start(turns.tidy)
        join(other)
        assert done == []
    assert done == [1]


def test_what_would_wait_for_itself_says_so(turns):
    with turns.tables(), pytest.raises(RuntimeError, match="busy in the same thread"):
        turns.tables().__enter__()
    with (
        turns.turn(),
        pytest.raises(RuntimeError, match="from within a step"),
        turns.turn(),
    ):
        pass
    with turns.turn() as has_come:
        assert has_come


def test_an_exception_gives_the_turn_and_the_tables_back(turns):
    for exception in (ValueError, KeyboardInterrupt):
        with pytest.raises(exception), turns.turn():
            raise exception
        with pytest.raises(exception), turns.tables():
            raise exception
    join(start(lambda: turns.turn().__enter__()))
