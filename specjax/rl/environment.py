"""Calls a user's environment beside the device's work, with time limits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.config.checks import shown
from specjax.rl.event_loops import EVENT_LOOPS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """A turn of a dialogue that the policy has just ended, for an environment to reply to."""

    prompt_index: int
    sample_index: int  # of the prompt's samples
    turn_index: int  # from 0
    prompt_token_ids: list[int]  # the dialogue's first prompt
    token_ids: list[int]  # that the policy wrote in this turn, a stop token included
    # What these add to the text before them, as a Completion's text: without special tokens, and
    # without the stop string that ended it, unless the sampling parameters keep them. None
    # without a tokenizer.
    text: str | None
    # All of the dialogue: the prompt, earlier turns with their replies, and this turn.
    dialogue_token_ids: list[int]
    finish_reason: str  # "stop", or "length" at max_tokens or where no more fits
    # The stop string, or the id of the stop token. None with "length", and for a turn that ended
    # in an earlier call, whose Rollout goes on.
    stop_reason: int | str | None
    is_last: bool  # whether the dialogue ends here whatever the reply: it gives the reward alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers to a turn.

    Exactly one of token_ids and text is set if the dialogue goes on. Text is tokenized without
    special tokens; a chat template's markers are the environment's to write.
    """

    token_ids: Sequence[int] | None = None
    text: str | None = None
    reward: float = 0.0  # of the turn
    is_over: bool = False  # whether the dialogue ends with that turn


class EnvironmentFailure(NamedTuple):
    """Why there is no reply to a turn."""

    message: str


class Answer(NamedTuple):
    """An environment's reply to one turn; None: the dialogue is over, without a reward."""

    turn: Turn
    reply: Any  # Reply, None, or EnvironmentFailure


# Of one turn, or of a list of turns; a coroutine function of either.
Environment = Callable[[Any], Any]


@dataclasses.dataclass
class _Call:
    turns: list[Turn]
    deadline: float  # time.perf_counter()
    cancel: Callable[[], Any]


class EnvironmentCalls:
    """Calls of an environment that run at the same time as the device.

    A plain function runs in a thread for each call, a coroutine as a task of the process's event
    loop, which other calls share. A call past its time limit is cancelled if it is a task, and
    abandoned if it is a thread, which Python cannot end: its result is dropped.

    Args:
      timeout_s: seconds that one call may take from its beginning.
      is_batched: whether the environment takes a list of turns, and returns a list of replies.
        One call runs at a time then, with the turns that ended since the last one began.
      most_calls: most calls of single turns at a time; the others wait for their turn.
    """

    def __init__(
        self, environment: Environment, *, timeout_s: float, is_batched: bool, most_calls: int
    ):
        self._environment = environment
        self._is_async = _is_coroutine_function(environment)
        self._timeout_s = timeout_s
        self._is_batched = is_batched
        self._most_calls = 1 if is_batched else most_calls
        self._waiting: collections.deque[Turn] = collections.deque()
        self._running: dict[int, _Call] = {}
        self._results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._num_calls = 0

    @property
    def has_work(self) -> bool:
        """Whether a turn was asked about and has no answer yet."""
        return bool(self._waiting or self._running)

    def ask(self, turn: Turn) -> None:
        """Queues a turn; `answers` begins the calls."""
        self._waiting.append(turn)

    def answers(self, *, wait_s: float = 0.0) -> list[Answer]:
        """Begins calls as far as their number allows, and returns the answers there are.

        Args:
          wait_s: seconds to wait for one if there is none.
        """
        self._begin()
        found = self._collect(0.0)
        if not found and wait_s > 0 and self._running:
            first = min(call.deadline for call in self._running.values())
            found = self._collect(max(min(wait_s, first - time.perf_counter()), 0.001))
        found += self._overdue()
        self._begin()
        return found

    def close(self) -> None:
        """Cancels or abandons the calls that run, and drops the turns that wait."""
        for call in self._running.values():
            call.cancel()
        self._running.clear()
        self._waiting.clear()

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._most_calls:
            count = len(self._waiting) if self._is_batched else 1
            turns = [self._waiting.popleft() for _ in range(count)]
            number = self._num_calls
            self._num_calls += 1
            deadline = time.perf_counter() + self._timeout_s
            # Entered before it begins, so that its result is never of an unknown call.
            call = self._running[number] = _Call(turns, deadline, cancel=lambda: None)
            argument = list(turns) if self._is_batched else turns[0]
            if self._is_async:
                call.cancel = self._begin_task(number, argument)
            else:
                self._begin_thread(number, argument, call)

    def _begin_thread(self, number: int, argument: Any, call: _Call) -> None:
        def run() -> None:
            try:
                result = self._environment(argument)
                if inspect.iscoroutine(result):
                    future = EVENT_LOOPS.submit(result)
                    call.cancel = future.cancel
                    if number not in self._running:  # its time was over before that
                        future.cancel()
                    result = future.result()
            except BaseException as error:
                result = error
            self._results.put((number, result))

        # A daemon: one that hangs must not keep the program from ending.
        threading.Thread(target=run, name="specjax-environment", daemon=True).start()

    def _begin_task(self, number: int, argument: Any) -> Callable[[], Any]:
        async def run() -> None:
            try:
                result = await self._environment(argument)
            except BaseException as error:
                result = error
            self._results.put((number, result))

        return EVENT_LOOPS.submit(run()).cancel

    def _collect(self, wait_s: float) -> list[Answer]:
        found: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            while True:
                waits = wait_s > 0 and not found
                number, result = self._results.get(block=waits, timeout=wait_s if waits else None)
                call = self._running.pop(number, None)
                if call is not None:  # else it came too late
                    found += self._split(call, result)
        return found

    def _split(self, call: _Call, result: Any) -> list[Answer]:
        """Returns the answers to the turns of a call that ended."""
        if isinstance(result, BaseException):
            failure = EnvironmentFailure(f"it raised {shown(result, 300)}")
            return [Answer(turn, failure) for turn in call.turns]
        replies = _list_of(result) if self._is_batched else [result]
        if replies is None or len(replies) != len(call.turns):
            failure = EnvironmentFailure(
                f"it returned {shown(result)} for {len(call.turns)} turns; expected a list of "
                "as many replies"
            )
            return [Answer(turn, failure) for turn in call.turns]
        return [Answer(turn, _checked(reply)) for turn, reply in zip(call.turns, replies)]

    def _overdue(self) -> list[Answer]:
        now, found = time.perf_counter(), []
        failure = EnvironmentFailure(f"it took longer than {self._timeout_s:g} s")
        for number, call in list(self._running.items()):
            if call.deadline <= now:
                del self._running[number]
                call.cancel()
                found += [Answer(turn, failure) for turn in call.turns]
        return found


def _is_coroutine_function(function: Any) -> bool:
    # An object may have an async __call__.
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _list_of(result: Any) -> list[Any] | None:
    """Returns the items of a sequence; None for what is none."""
    try:
        is_list = isinstance(result, Sequence) and not isinstance(result, str)
        return list(result) if is_list else None
    except Exception:  # a user's own sequence may raise anything
        return None


def _checked(reply: Any) -> Any:
    """Returns a reply, or the failure that it is, whatever its objects do."""
    try:
        return _answer_of(reply)
    except Exception as error:  # a user's own class of Reply may raise anything
        return EnvironmentFailure(f"its Reply raised {shown(error)}")


def _answer_of(reply: Any) -> Any:
    if reply is None:
        return None
    if isinstance(reply, BaseException):
        return EnvironmentFailure(f"it returned {shown(reply, 300)}")
    if not isinstance(reply, Reply):
        return EnvironmentFailure(f"it returned {shown(reply)}; expected specjax.Reply or None")
    if not isinstance(reply.is_over, bool | np.bool_):
        return EnvironmentFailure(f"its is_over is {shown(reply.is_over)}; expected True or False")
    has = (reply.token_ids is not None) + (reply.text is not None)
    if has == 2 or (not has and not reply.is_over):
        return EnvironmentFailure(
            "its Reply has neither or both of token_ids and text; set one, or is_over=True"
        )
    return reply
