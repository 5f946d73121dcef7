"""Calls of an environment beside the device: limits, batches, failures. No model."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from specjax.rl.environment import EnvironmentCalls, EnvironmentFailure, Reply, Turn
from specjax.rl.event_loops import HEARTBEAT_S, EventLoops

OVER = Reply(is_over=True)


def turn(number):
    return Turn(
        prompt_index=number,
        sample_index=0,
        turn_index=0,
        prompt_token_ids=[1],
        token_ids=[2],
        text=None,
        dialogue_token_ids=[1, 2],
        finish_reason="stop",
        stop_reason=2,
        is_last=False,
    )


def asked(environment, count=3, *, timeout_s=5.0, is_batched=False, most_calls=8):
    """Returns the replies to some turns by number, and the calls, which are closed."""
    calls = EnvironmentCalls(
        environment, timeout_s=timeout_s, is_batched=is_batched, most_calls=most_calls
    )
    for number in range(count):
        calls.ask(turn(number))
    replies = {}
    try:
        while calls.has_work:
            for answer in calls.answers(wait_s=1.0):
                assert answer.turn.prompt_index not in replies
                replies[answer.turn.prompt_index] = answer.reply
    finally:
        calls.close()
    return replies


def by_number(number):
    return Reply(token_ids=[number], reward=number)


def plain(turn):
    return by_number(turn.prompt_index)


async def coroutine(turn):
    await asyncio.sleep(0.001)
    return by_number(turn.prompt_index)


class Called:
    async def __call__(self, turn):
        return by_number(turn.prompt_index)


@pytest.mark.parametrize("environment", [plain, coroutine, Called(), lambda turn: coroutine(turn)])
def test_functions_of_one_turn(environment):
    assert asked(environment) == {number: by_number(number) for number in range(3)}


async def batched_coroutine(turns):
    return [by_number(turn.prompt_index) for turn in turns]


@pytest.mark.parametrize("environment", [lambda turns: list(map(plain, turns)), batched_coroutine])
def test_functions_of_a_batch(environment):
    replies = asked(environment, is_batched=True)
    assert replies == {number: by_number(number) for number in range(3)}


def test_a_batch_has_the_turns_that_ended_while_the_last_one_ran():
    sizes, may_end = [], threading.Event()

    def environment(turns):
        sizes.append(len(turns))
        may_end.wait(5)
        return [None] * len(turns)

    calls = EnvironmentCalls(environment, timeout_s=10, is_batched=True, most_calls=9)
    calls.ask(turn(0))
    assert calls.answers() == []
    for number in (1, 2, 3):
        calls.ask(turn(number))
        assert calls.answers() == []
    may_end.set()
    found = []
    while calls.has_work:
        found += calls.answers(wait_s=5)
    assert len(found) == 4
    assert sizes == [1, 3]


def test_no_more_calls_at_a_time_than_allowed():
    now, most, lock = 0, 0, threading.Lock()

    def environment(turn):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    asked(environment, 7, most_calls=2)
    assert most == 2


def test_errors_and_wrong_replies_are_failures_of_their_own_turn():
    wrong = [
        ValueError("no such tool"),
        {"text": "a"},
        Reply(),
        Reply(token_ids=[1], text="a"),
        SystemExit(3),
        OVER,
    ]

    def environment(turn):
        reply = wrong[turn.prompt_index]
        if isinstance(reply, BaseException):
            raise reply
        return reply

    replies = asked(environment, len(wrong))
    assert replies.pop(5) is OVER
    for number, words in enumerate(
        ["no such tool", "expected specjax.Reply", "neither or both", "neither or both", "Exit"]
    ):
        assert isinstance(replies[number], EnvironmentFailure)
        assert words in replies[number].message


def test_a_batch_may_fail_in_part_or_as_a_whole():
    replies = asked(lambda turns: [OVER, KeyError("gone"), None], is_batched=True)
    assert replies[0] is OVER
    assert "gone" in replies[1].message
    assert replies[2] is None
    for returned, words in ((lambda turns: [OVER], "3 turns"), (lambda turns: 1 / 0, "Zero")):
        replies = asked(returned, is_batched=True)
        assert all(words in replies[number].message for number in range(3))


class Unreadable(list):
    def _fail(self, *_):
        raise RuntimeError("no use")

    __iter__ = __repr__ = _fail


class UnreadableReply(Reply):
    is_over = property(lambda self: 1 / 0, lambda self, value: None)


class UnreadableError(Exception):
    __repr__ = Unreadable._fail


def test_what_cannot_be_read_is_a_failure():
    def raises(turns):
        raise UnreadableError

    for environment, words in (
        (lambda turns: Unreadable([OVER] * 3), "it returned an object of Unreadable whose repr"),
        (lambda turns: [UnreadableReply(text="a")] * 3, "its Reply raised ZeroDivisionError"),
        (lambda turns: [UnreadableError()] * 3, "it returned an object of UnreadableError"),
        (raises, "it raised an object of UnreadableError whose repr fails"),
    ):
        replies = asked(environment, is_batched=True)
        assert len(replies) == 3
        assert all(words in reply.message for reply in replies.values())


def hangs(turn):
    if turn.prompt_index == 1:
        time.sleep(30)
    return OVER


async def hangs_politely(turn):
    if turn.prompt_index == 1:
        await asyncio.sleep(30)
    return OVER


@pytest.mark.parametrize("environment", [hangs, hangs_politely])
def test_a_call_that_hangs_ends_after_its_time(environment):
    begun_at = time.perf_counter()
    replies = asked(environment, 5, timeout_s=0.2, most_calls=2)
    assert time.perf_counter() - begun_at < 5
    assert "longer than 0.2 s" in replies.pop(1).message
    assert set(map(id, replies.values())) == {id(OVER)}


def test_a_coroutine_that_blocks_its_loop_does_not_block_later_calls():
    async def environment(turn):
        if turn.prompt_index == 0:
            time.sleep(2)
        return OVER

    replies = asked(environment, 3, timeout_s=1.0, most_calls=1)
    assert isinstance(replies[0], EnvironmentFailure)
    assert replies[1] is replies[2] is OVER


def test_a_result_that_comes_too_late_is_dropped():
    calls = EnvironmentCalls(
        lambda turn: time.sleep(0.1), timeout_s=0.01, is_batched=False, most_calls=1
    )
    calls.ask(turn(0))
    time_out = []
    while not time_out:
        time_out = calls.answers(wait_s=1)
    time.sleep(0.2)
    assert calls.answers() == []
    assert not calls.has_work


def test_closing_cancels_what_runs():
    cancelled = threading.Event()

    async def environment(turn):
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    calls = EnvironmentCalls(environment, timeout_s=60, is_batched=False, most_calls=1)
    calls.ask(turn(0))
    calls.ask(turn(1))
    calls.answers(wait_s=0.05)
    calls.close()
    assert cancelled.wait(5)
    assert not calls.has_work
    assert calls.answers() == []


# Event loops


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_belongs_to_an_event_loop_lasts_between_calls(is_plain):
    """A semaphore belongs to the loop in which it was first waited for."""
    one_at_a_time = asyncio.Semaphore(1)

    async def environment(turn):
        async with one_at_a_time:
            return await coroutine(turn)

    given = (lambda turn: environment(turn)) if is_plain else environment
    for _ in range(3):
        assert asked(given) == {number: by_number(number) for number in range(3)}


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_call_that_hangs_leaves_the_next_one_alone(is_plain):
    one_at_a_time = asyncio.Semaphore(1)
    hangs_now = True

    async def environment(turn):
        async with one_at_a_time:
            await asyncio.sleep(60 if hangs_now else 0)
            return OVER

    given = (lambda turn: environment(turn)) if is_plain else environment
    replies = asked(given, timeout_s=0.1)
    assert all("longer than 0.1 s" in reply.message for reply in replies.values())
    hangs_now = False
    assert set(map(id, asked(given).values())) == {id(OVER)}


def test_a_loop_that_was_blocked_is_used_again():
    async def loop_of(blocked_s=0.0):
        begun.set()
        time.sleep(blocked_s)
        return asyncio.get_running_loop()

    loops, begun = EventLoops(), threading.Event()
    first = loops.submit(loop_of()).result(5)
    begun.clear()
    blocked = loops.submit(loop_of(4 * HEARTBEAT_S))
    begun.wait()
    others = [loops.submit(loop_of()).result(5) for _ in range(2)]
    assert not blocked.done()
    assert others[0] is others[1]
    assert others[0] is not first
    assert blocked.result(5) is first
    assert loops.submit(loop_of()).result(5) is first
    loops.close()


def test_loops_that_are_closed_cancel_what_runs():
    seen = []

    async def hangs_on():
        try:
            seen.append("begun")
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("cancelled")

    loops = EventLoops()
    future = loops.submit(hangs_on())
    while not seen:
        time.sleep(0.001)
    (thread,) = (loop._thread for loop in loops._loops)
    loops.close()
    assert seen == ["begun", "cancelled"]
    assert not thread.is_alive()
    assert future.done()
    loops.close()


def test_the_program_ends_while_a_coroutine_runs():
    program = """
import asyncio, threading
from specjax.rl.event_loops import EVENT_LOOPS

begun = threading.Event()

async def hangs_on():
    try:
        begun.set()
        await asyncio.sleep(60)
    finally:
        print("cancelled")

EVENT_LOOPS.submit(hangs_on())
begun.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "cancelled\n", "")
