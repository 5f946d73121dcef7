"""rollout_turns(): dialogues of the policy with an environment, as arrays.

turn ends -> environment, beside the device's work -> reply -> next turn, on kept pages
"""

from __future__ import annotations

import collections
import math
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from specjax.config.checks import is_int, is_number, shown
from specjax.config.keywords import keyword_check
from specjax.config.sampling import SamplingParams, SamplingSource
from specjax.engine.loop import Loop, is_added
from specjax.engine.output_text import output_text
from specjax.engine.request import Request
from specjax.models.base import Params
from specjax.rl.batch import ENVIRONMENT, ERROR, LENGTH, STOP, UNFINISHED, Rollout
from specjax.rl.beginning import (
    as_rows,
    asked_again,
    begun,
    check_numbers,
    check_resumed,
    newest_turns,
    recorded,
    reopened,
    rule_of,
    sampling_of,
)
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.environment import (
    Answer,
    Environment,
    EnvironmentCalls,
    EnvironmentFailure,
    Reply,
    Turn,
)
from specjax.rl.reporting import ALARM_RATE, Run, alarm, refuse_nonsense
from specjax.rl.table import Table
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Report
from specjax.runtime.stack_level import of_the_caller
from specjax.types import DecoderParams

_FINISH_REASONS = {STOP: "stop", LENGTH: "length"}  # of turns that an environment replies to
WAIT_S = 1.0  # longest wait for an environment while no row runs; a signal ends it too


@entrance("specjax.rollout_turns", keyword_check)
def rollout_turns(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    prompts: Any,
    environment: Environment,
    *,
    max_turns: int,
    turn_timeout_s: float = 60.0,
    is_batched: bool = False,
    max_calls: int = 64,
    num_samples: int | None = None,
    sampling: SamplingSource | None = None,
    seeds: Sequence[int] | np.ndarray | None = None,
    prompt_mask: Any = None,
    prompt_width: int | None = None,
    completion_width: int | None = None,
    params_version: int | None = None,
    time_budget_s: float | None = None,
    progress: bool | Report | None = None,
) -> Rollout:
    """Samples dialogues: the policy writes a turn, the environment replies, and so on.

    While the environment works on some dialogues, the rows go on with others. The keys and
    values of a dialogue are kept meanwhile, as long as pages suffice, and are not computed again.

    Under `seeded` verification a turn has the tokens of one request whose prompt is all text
    before it, with the sample's seed: noise depends on the position alone. So a dialogue is a
    function of weights, prompt, sampling, seed and the replies.

    Args:
      prompts: as for `rollout`; or an unfinished Rollout of this function, which goes on.
        Dialogues that waited for a reply are given to the environment again.
      environment: takes a `Turn` and returns a `Reply`, or None where the dialogue is over. A
        plain function runs in threads, one for each call; a coroutine function in one event loop
        of the process, beside the rollout, and must not block it. An environment that raises,
        returns anything else, or takes too long ends its own dialogue with finish reason
        ENVIRONMENT; the others go on, and a warning is given at the end. `Rollout.errors` says
        what was wrong.
      max_turns: most turns of a dialogue. The environment sees the last one as well: it gives
        its reward.
      turn_timeout_s: seconds that one call may take. A coroutine is cancelled then; a thread
        cannot be, and is left to itself.
      is_batched: the environment takes a list of turns and returns a list of as many replies. One
        call runs at a time, with the turns that ended since the last one began. A call that
        raises or takes too long ends all of its dialogues; an exception in place of a reply ends
        that one.
      max_calls: most calls at a time, unless is_batched.
      sampling: as for `rollout`; max_tokens, min_tokens, stops and penalties are of each turn.
      completion_width: width of the result's completions, which hold all turns and replies;
        None: as many tokens as the decoder's rows have. A dialogue whose reply does not fit, with
        one token after it or min_tokens, ends with finish reason LENGTH, without that reply.
      time_budget_s: seconds after which the call ends; dialogues are UNFINISHED then.
      num_samples, seeds, prompt_mask, prompt_width, params_version, progress: as for `rollout`.

    Returns:
      As `rollout`. completion_ids hold the whole dialogue after its prompt, loss_mask the tokens
      that the policy wrote; log-probabilities are 0 elsewhere. `turns` has the turn of each
      token, and finish reason and reward of each turn.

    Raises:
      ValueError: as for `rollout`.
    """
    begun_at = time.perf_counter()
    check_decoder(decoder)
    sampling = sampling_of(prompts, sampling).over(decoder.config.vocab_size)
    if not callable(environment):
        raise TypeError(f"environment is {environment!r:.100}; expected a function of a Turn.")
    _check(max_turns, turn_timeout_s, max_calls, completion_width)
    check_numbers(num_samples, None, time_budget_s, sampling)
    rule = rule_of(decoder, sampling)
    if isinstance(prompts, Rollout):
        check_resumed(num_samples, seeds, prompt_mask)
        table, given = reopened(decoder, prompts, sampling, rule)[0], prompts.prompt_ids
        left = table.finish_reasons == UNFINISHED
        unanswered = np.flatnonzero(left & table.is_answerable).tolist()
        unended = np.flatnonzero(left & ~table.is_answerable).tolist()
        requests = newest_turns(decoder, table, unended, asked_again(sampling))
    else:
        unanswered, given = [], prompts
        table, requests = begun(
            decoder,
            *as_rows(decoder, prompts, prompt_mask),
            sampling=sampling,
            num_samples=num_samples or 1,
            seeds=seeds,
            width=prompt_width,
        )
        width = completion_width or decoder.max_length
        table.widen(width)
        for request in requests.values():
            most = len(request.prompt_token_ids) + width
            request.max_length = min(request.max_length, most)
    table.allow_turns(max_turns)
    calls = EnvironmentCalls(
        environment, timeout_s=turn_timeout_s, is_batched=is_batched, most_calls=max_calls
    )
    dialogues = _Dialogues(decoder, table, calls, asked_again(sampling), max_turns)
    deadline = None if time_budget_s is None else begun_at + time_budget_s
    handed_at = time.perf_counter()
    try:
        with (
            decoder.using(params, params_version) as loop,
            decoder.showing(progress) as report,
        ):
            run = Run(loop, handed_at)
            dialogues.run(loop, requests, unanswered, deadline, report)
    finally:
        calls.close()
    refuse_nonsense(table, dialogues.requests)
    metrics = run.metrics(decoder, table, dialogues.requests, begun_at) | dialogues.metrics()
    alarm(metrics, decoder, ALARM_RATE)
    _warn_of(dialogues.failures, len(table.lengths))
    return table.placed(
        decoder.placing(getattr(given, "sharding", None), len(table.lengths)),
        sampling=recorded(sampling, rule),
        metrics=metrics,
        errors=table.errors | dialogues.failures,
        is_exact=decoder.is_exact_under(rule),
    )


def _check(max_turns: Any, turn_timeout_s: Any, max_calls: Any, completion_width: Any) -> None:
    """Raises ValueError for invalid numbers."""
    for name, value in (
        ("max_turns", max_turns),
        ("max_calls", max_calls),
        ("completion_width", 1 if completion_width is None else completion_width),
    ):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
    if not (is_number(turn_timeout_s) and turn_timeout_s > 0):
        raise ValueError(f"{turn_timeout_s=!r} must be seconds above 0.")


def _warn_of(failures: dict[int, str], num_samples: int) -> None:
    if not failures:
        return
    index, first = min(failures.items())
    warnings.warn(
        f"the environment failed in {len(failures)} of {num_samples} dialogues, which have finish "
        f"reason ENVIRONMENT; in sample {index} {first}. The others are not affected.",
        stacklevel=of_the_caller(),  # past the decorator of `rollout_turns`
    )


class _Dialogues:
    """The dialogues of one call: which of them run, and which wait for the environment.

    Attributes:
      requests: of all turns that were begun, by number.
      failures: what was wrong with the environment, by sample.
    """

    def __init__(
        self,
        decoder: RolloutDecoder,
        table: Table,
        calls: EnvironmentCalls,
        asked: SamplingParams,
        max_turns: int,
    ):
        self._decoder, self._table, self._calls = decoder, table, calls
        self._asked, self._max_turns = asked, max_turns
        self._least = max(asked.min_tokens, 1)  # tokens of a turn
        self._running: dict[Request, int] = {}  # by request, the sample
        self._waiting: dict[Turn, int] = {}
        self._sample_index = _place_in_group(table.prompt_index)
        self._idle_s = 0.0
        self.requests: dict[int, Request] = {}
        self.failures: dict[int, str] = {}

    def metrics(self) -> dict[str, Any]:
        """Returns metrics beside those of every rollout."""
        table = self._table
        return {
            "num_turns": int(table.counts.sum()),
            "num_environment_failures": len(self.failures),
            "environment_wait_s": self._idle_s,
            "mean_reward": float(table.rewards.sum(axis=1).mean()),
        }

    def run(
        self,
        loop: Loop,
        requests: dict[int, Request],
        unanswered: Collection[int],
        deadline: float | None,
        report: Report,
    ) -> None:
        """Runs dialogues to their ends, or until a time.perf_counter().

        Args:
          requests: turns to begin with, by sample.
          unanswered: samples whose newest turn has ended.
        """
        self._loop = loop
        total = len(requests) + len(unanswered)
        try:
            for index, request in requests.items():
                self._begin(index, request)
            for index in unanswered:
                self._ask(index, None)
            # Another thread's step may have ended a turn that is still in `_running`.
            while loop.has_work or self._running or self._calls.has_work:
                self._take_ended()
                left = math.inf if deadline is None else deadline - time.perf_counter()
                if left <= 0:
                    break
                for answer in self._answers(min(left, WAIT_S)):
                    self._take_answer(self._waiting.pop(answer.turn), answer)
                if loop.has_work:
                    loop.step()
                report("dialogues", total - len(self._running) - len(self._waiting), total)
        finally:
            loop.pause()  # no row keeps a page, whatever happened
        for request, index in self._running.items():
            self._fill(index, request)
        unanswered = [index for index in self._running.values() if self._table.is_answerable[index]]
        for index in (*unanswered, *self._waiting.values()):
            self._table.finish_reasons[index] = UNFINISHED

    def _begin(self, index: int, request: Request) -> None:
        """Queues a sample's newest turn."""
        request.keeps_scores = True
        self.requests[request.number] = request
        self._running[request] = index
        if not is_added(self._loop, request):
            self._take_ended()

    def _take_ended(self) -> None:
        """Hands turns that ended to the environment."""
        for request in [request for request in self._running if request.is_finished]:
            index = self._running.pop(request)
            self._fill(index, request)
            if self._table.is_answerable[index]:
                self._ask(index, request.stop_reason)

    def _fill(self, index: int, request: Request) -> None:
        self._table.fill(index, request, request.max_length)

    def _ask(self, index: int, stop_reason: int | str | None) -> None:
        """Queues a sample's newest turn, which has ended, for the environment."""
        table, tokenizer = self._table, self._decoder.tokenizer
        start, end = int(table.starts[index]), int(table.lengths[index])
        prompt = table.prompt_ids[index][table.prompt_mask[index]].tolist()
        completion = table.completion_ids[index, :end].tolist()
        own = completion[start:]
        before = [*prompt, *completion[:start]]
        reason = _FINISH_REASONS[int(table.turn_reasons[index, table.counts[index] - 1])]
        text = None
        if tokenizer is not None:
            is_stopped = reason == "stop"
            text = output_text(tokenizer, before, self._asked, own, is_stopped=is_stopped)
        turn = Turn(
            prompt_index=int(table.prompt_index[index]),
            sample_index=self._sample_index[index],
            turn_index=int(table.counts[index]) - 1,
            prompt_token_ids=prompt,
            token_ids=own,
            text=text,
            dialogue_token_ids=[*before, *own],
            finish_reason=reason,
            stop_reason=stop_reason,
            is_last=table.counts[index] >= self._max_turns or self._room(index) < self._least,
        )
        self._waiting[turn] = index
        self._calls.ask(turn)

    def _room(self, index: int) -> int:
        """Returns how many tokens may follow a dialogue."""
        table = self._table
        length, num_prompt = int(table.lengths[index]), int(table.prompt_mask[index].sum())
        most = min(self._decoder.max_length, self._loop.scheduler.most_tokens)
        return min(most - num_prompt, table.completion_ids.shape[1]) - length

    def _answers(self, wait_s: float) -> list[Answer]:
        """Returns the environment's answers; waits for one if no row runs."""
        if self._loop.has_work:
            return self._calls.answers()
        begun_at = time.perf_counter()
        answers = self._calls.answers(wait_s=wait_s)
        self._idle_s += time.perf_counter() - begun_at
        return answers

    def _take_answer(self, index: int, answer: Answer) -> None:
        """Ends a dialogue, or begins its next turn."""
        table, reply = self._table, answer.reply
        try:
            token_ids = None if reply is None else self._tokens_of(index, answer.turn, reply)
        except Exception as error:  # whatever the objects of a reply do ends its own dialogue alone
            is_said = isinstance(error, ValueError)
            self.failures[index] = str(error) if is_said else f"its Reply raised {shown(error)}"
            table.finish_reasons[index] = ENVIRONMENT
            return
        if token_ids is None:
            return
        if len(token_ids) + self._least > self._room(index):
            table.finish_reasons[index] = LENGTH
            return
        table.reply(index, token_ids)
        try:
            request = newest_turns(self._decoder, table, [index], self._asked)[index]
        except ValueError as error:
            table.finish_reasons[index], table.errors[index] = ERROR, str(error)
        else:
            self._begin(index, request)

    def _tokens_of(self, index: int, turn: Turn, reply: Reply | EnvironmentFailure) -> Any:
        """Returns the token ids of a reply, None if the dialogue is over; notes the reward.

        Raises:
          ValueError: the environment failed.
        """
        if isinstance(reply, EnvironmentFailure):
            raise ValueError(reply.message)
        self._table.rewards[index, turn.turn_index] = _number(reply.reward)
        if reply.is_over or turn.is_last:
            return None
        if reply.text is not None:
            if self._decoder.tokenizer is None:
                raise ValueError("its Reply has text, and the model no tokenizer; set token_ids")
            if not isinstance(reply.text, str):
                raise ValueError(f"its text is {shown(reply.text)}; expected a str")
            return self._decoder.tokenizer.encode_more(reply.text)
        return self._decoder.checked_ids(reply.token_ids)


def _number(reward: Any) -> float:
    """Returns a reward; raises ValueError for what is no finite number of float32."""
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except Exception:  # a user's own number may raise anything
        value = math.nan
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"its reward is {shown(reward)}; expected a finite number of float32")
    return value


def _place_in_group(prompt_index: np.ndarray) -> list[int]:
    """Returns for each sample how many before it have the same prompt."""
    seen: collections.Counter[int] = collections.Counter()
    places = []
    for prompt in prompt_index.tolist():
        places.append(seen[prompt])
        seen[prompt] += 1
    return places
