"""rollout_stream(): groups of samples from an endless feed of prompts, as they end.

feed -> rows as they come free -> groups that ended -> Rollouts; new weights in between
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from specjax.config.checks import is_int
from specjax.config.keywords import keyword_check
from specjax.config.sampling import SamplingParams, SamplingSource
from specjax.engine.loop import Loop, is_added
from specjax.engine.request import Request
from specjax.models.base import Params
from specjax.rl.batch import ERROR, Rollout
from specjax.rl.beginning import (
    PromptSeeds,
    check_numbers,
    recorded,
    rule_of,
    sampling_of,
    without_text,
)
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.feed import Feed
from specjax.rl.joined import JoinedDecoder
from specjax.rl.reporting import ALARM_RATE, Run, alarm
from specjax.rl.table import Table
from specjax.runtime.jax_settings import check_not_traced, entrance, in_own_settings
from specjax.runtime.progress import Report
from specjax.runtime.stack_level import of_the_caller
from specjax.types import DecoderParams

ASK_AGAIN_S = 0.01  # seconds until a feed without a prompt is asked again while no row runs


@entrance("specjax.rollout_stream", keyword_check)
def rollout_stream(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    prompts: Iterable[Any],
    *,
    num_samples: int = 1,
    keep_first: int | None = None,
    batch_groups: int = 1,
    sampling: SamplingSource | None = None,
    prompt_width: int | None = None,
    params_version: int | None = None,
    max_staleness: int | None = None,
    in_order: bool = False,
    progress: bool | Report | None = None,
) -> RolloutStream:
    """Samples completions of a feed of prompts; rows that end go on with the next prompt.

    Where lengths differ much, no row waits for the longest completion of a batch. Between two
    Rollouts the weights may be replaced (`RolloutStream.update_params`): completions that run
    then go on under the new ones, and params_versions say which weights drew each token.

    The decoder serves nothing else until the stream is closed, exhausted or dropped.

    Args:
      params: as for `rollout`. They are held until they are replaced or the stream is closed.
      prompts: an iterable, which may be endless, of texts or lists of token ids. A prompt is
        taken from it when a row is about to come free. It may give None where it has no prompt
        now: rows that run go on, and it is asked again after each step. An exception ends it.
      num_samples: completions of each prompt, a group.
      keep_first: how many of a group are returned: the first that end. The others are aborted.
        That prefers short completions: rewards that depend on length are biased.
      batch_groups: groups in each Rollout. The last one may have fewer, and so may one that is
        returned because no row runs and the feed has no prompt now.
      sampling: as for `rollout`, for all prompts.
      prompt_width: width of the result's prompts; None: the longest of each Rollout. A prompt
        that is longer has finish reason ERROR.
      max_staleness: how far the weights that drew the oldest token of a completion may be behind
        the stream's, in versions, when it is returned. A completion that falls further behind is
        drawn anew from its prompt, with its seed; no prompt is lost. None: no bound.
      in_order: returns groups in the order of the feed, not of their ends.
      params_version: as for `rollout`.
      progress: as for `generate`, while `next` works.

    Returns:
      An iterator of Rollouts of batch_groups * keep_first samples. prompt_index counts the
      prompts of the feed from 0. The order of groups, and which samples keep_first keeps, depend
      on speed; under `seeded` verification and constant weights the tokens of a sample do not.

    Raises:
      ValueError: weights have another shape, a number is invalid, or the decoder shares its steps.
    """
    check_decoder(decoder)
    if isinstance(decoder, JoinedDecoder):
        raise ValueError(
            "a decoder with shares_steps=True runs rollouts of several threads under the same "
            "weights, and a stream needs one to itself; build it without shares_steps."
        )
    sampling = sampling_of(None, sampling)
    sampling.validate()
    sampling = sampling.over(decoder.config.vocab_size)
    check_numbers(num_samples, None, None, sampling)
    keep_first = num_samples if keep_first is None else keep_first
    _check(num_samples, keep_first, batch_groups, prompt_width, max_staleness)
    options = _Options(
        num_samples, keep_first, batch_groups, prompt_width, max_staleness, in_order, progress
    )
    rule = rule_of(decoder, sampling)
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r:.100}; expected an iterable of prompts.")
    feed = iter(prompts)
    with decoder._used_by_one():
        loop = decoder.hand_over(params, params_version)
        state = _State(decoder, loop, feed, sampling, rule, options)
        return RolloutStream(state)


class RolloutStream(Iterator[Rollout]):
    """Rollouts of groups that ended; made by `rollout_stream`.

    It works while `next` is called, and pauses in between. As a context manager it closes itself.
    """

    def __init__(self, state: _State):
        """Use `rollout_stream`."""
        self._state = state
        # Ends with this object: it does not refer to it.
        self._rollouts = _rollouts(state)
        next(self._rollouts)  # to its `try`, or closing it would skip what is there to do

    def __next__(self) -> Rollout:
        check_not_traced("specjax.rollout_stream")
        self._check_idle("next")
        return next(self._rollouts)

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def params_version(self) -> int:
        """Version of the weights that draw the next tokens."""
        return self._state.version

    @property
    def metrics(self) -> dict[str, int]:
        """Counts since the beginning, for a logger; see docs/rollout-stream.md."""
        return dict(self._state.counts)

    @in_own_settings
    def update_params(
        self,
        params: Params | DecoderParams,
        version: int | None = None,
        *,
        recomputes: bool = False,
    ) -> None:
        """Replaces the weights for all tokens that are drawn from now on.

        Args:
          params: of the same shapes; as for `rollout`.
          version: above the last one; None: the last one and 1.
          recomputes: whether running completions are fed again, so that no keys and values
            of earlier weights are read. Otherwise only prompts that begin are.

        Raises:
          ValueError: the stream is closed, weights have another shape, or the version is not above
            the last. The earlier weights stay in use.
        """
        self._check_idle("update_params")
        self._state.update_params(params, version, recomputes)

    def close(self) -> None:
        """Ends all completions and frees the rows; can be called again."""
        self._check_idle("close")
        self._rollouts.close()

    def _check_idle(self, name: str) -> None:
        """Raises RuntimeError while `next` works, in another thread or below it."""
        if inspect.getgeneratorstate(self._rollouts) == inspect.GEN_RUNNING:
            raise RuntimeError(
                f"{name} was called while the stream works, by its own feed or by another thread; "
                "call it between two Rollouts, from one thread at a time."
            )


def _rollouts(
    state: _State, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> Generator[Any, None, None]:
    try:
        yield None
        while (batch := state.next_batch()) is not None:
            yield batch
    finally:
        # A stream that is open when the program ends is dropped after the modules that closing it
        # needs, and no global of this one may be left either.
        if not is_finalizing():
            state.close()


@dataclasses.dataclass(frozen=True)
class _Options:
    num_samples: int
    keep_first: int
    batch_groups: int
    prompt_width: int | None
    max_staleness: int | None
    in_order: bool
    progress: bool | Report | None


def _check(
    num_samples: int,
    keep_first: Any,
    batch_groups: Any,
    prompt_width: Any,
    max_staleness: Any,
) -> None:
    """Raises ValueError for invalid numbers."""
    for name, value, least in (
        ("keep_first", keep_first, 1),
        ("batch_groups", batch_groups, 1),
        ("prompt_width", 1 if prompt_width is None else prompt_width, 1),
        ("max_staleness", 0 if max_staleness is None else max_staleness, 0),
    ):
        if not is_int(value) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
    if keep_first > num_samples:
        raise ValueError(f"{keep_first=} must be at most {num_samples=}.")


@dataclasses.dataclass(eq=False)
class _Group:
    """The samples of one prompt."""

    number: int  # in the feed
    prompt: Any
    params: SamplingParams  # with the prompt's seed
    requests: list[Request]  # by sample; none if the prompt was refused
    error: str | None = None
    # Samples that ended, in that order.
    ended: list[int] = dataclasses.field(default_factory=list)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.requests[0].prompt_token_ids if self.requests else ()


class _State:
    """The groups that run and that ended, and the rest of the feed."""

    def __init__(
        self,
        decoder: RolloutDecoder,
        loop: Loop,
        feed: Iterator[Any],
        sampling: SamplingParams,
        rule: str,
        options: _Options,
    ):
        self._decoder, self._loop, self._options = decoder, loop, options
        self._rule = rule
        self._sampling = dataclasses.replace(
            sampling, n=options.num_samples, logprobs=sampling.logprobs or 0
        )
        self._seeds = PromptSeeds(sampling.seed)
        self._feed = Feed(feed)
        self._numbers = itertools.count()
        self._running: dict[Request, tuple[_Group, int]] = {}
        self._groups: dict[int, _Group] = {}  # not ended, by number
        self._ended: dict[int, _Group] = {}  # by number, in the order of their ends
        self._num_returned = 0
        self._is_closed = False
        self.counts: collections.Counter[str] = collections.Counter(
            num_prompts=0, num_returned=0, num_restarted=0, num_aborted=0, num_tokens_dropped=0
        )
        decoder.lend(self)

    @property
    def version(self) -> int:
        return self._decoder.params_version

    @in_own_settings
    def next_batch(self) -> Rollout | None:
        """Runs until enough groups have ended; None once the feed is over and all were returned.

        Raises:
          Exception: what the feed raised, once all groups were returned that had begun.
        """
        begun_at, most = time.perf_counter(), self._options.batch_groups
        run, num_drawn = Run(self._loop, begun_at), 0
        with self._decoder.showing(self._options.progress) as report:
            while True:
                self._pull()
                groups = self._ready()
                if groups:
                    return self._rollout(groups, run, begun_at, num_drawn)
                if self._loop.has_work:
                    num_drawn += self._step()
                    report("groups", min(len(self._ended), most), most)
                elif self._feed.is_over:
                    self._feed.raise_error()
                    return None
                else:
                    assert self._feed.has_none_now, "no row runs, and prompts are left"
                    time.sleep(ASK_AGAIN_S)

    def update_params(self, params: Any, version: int | None, recomputes: bool) -> None:
        """See RolloutStream.update_params."""
        if self._is_closed:
            raise ValueError("the stream is closed or exhausted; begin another.")
        self._decoder.renew(params, version, recomputes=recomputes)
        for group in [*self._groups.values(), *self._ended.values()]:
            for sample, request in enumerate(group.requests):
                self._restart_if_stale(group, sample, request)

    def close(self) -> None:
        """Ends all that runs, and gives the decoder back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._feed.close()
        try:
            self._loop.pause()
        finally:
            self._decoder.take_back()
            self._decoder.let_go()

    # The feed

    def _pull(self) -> None:
        """Takes prompts from the feed until more requests wait than rows are free.

        It stops where enough groups have ended: prompts that are refused never wait.
        """
        scheduler = self._loop.scheduler
        num_free = len(scheduler.rows) - len(scheduler.occupied)
        self._feed.has_none_now = False
        while len(scheduler.waiting) <= num_free and self._has_room() and not self._ready():
            prompt = self._feed.next()
            if prompt is None:
                return
            self._begin(prompt)

    def _has_room(self) -> bool:
        """Returns whether more groups may begin: in order, ended ones wait for earlier ones."""
        at_a_time = -(-len(self._loop.scheduler.rows) // self._options.num_samples) + 1
        return len(self._ended) <= at_a_time + self._options.batch_groups

    def _begin(self, prompt: Any) -> None:
        ids = self._decoder.tokenized(prompt)
        seed = self._seeds.next(() if ids is None else ids)
        params = dataclasses.replace(self._sampling, seed=seed)
        group = _Group(next(self._numbers), prompt if ids is None else ids, params, [])
        self.counts["num_prompts"] += 1
        self._groups[group.number] = group
        made, refused = self._decoder.requests([group.prompt], [params])
        width = self._options.prompt_width
        if refused:
            error = refused[0].error.removeprefix("prompt 0: ")
            group.error = f"prompt {group.number} of the feed: {error}"
        elif width is not None and len(made[0].prompt_token_ids) > width:
            group.error = (
                f"prompt {group.number} of the feed has {len(made[0].prompt_token_ids)} tokens, "
                f"and prompt_width={width}; raise it, or shorten the prompt."
            )
        else:
            group.requests = made
        if group.error is not None:
            self._end(group)
        for sample, request in enumerate(group.requests):
            self._add(group, sample, request)

    def _add(self, group: _Group, sample: int, request: Request) -> None:
        request.keeps_scores = True
        without_text(request)
        self._running[request] = group, sample
        if not is_added(self._loop, request):
            self._take([request])

    # Samples

    def _step(self) -> int:
        """Steps, and notes the samples that ended; returns how many tokens were drawn."""
        before = {request: len(request.output_token_ids) for request in self._running}
        moved = self._loop.step()
        num_drawn = sum(len(each.output_token_ids) - num for each, num in before.items())
        self._take(moved)
        return num_drawn

    def _take(self, moved: Sequence[Request]) -> None:
        """Notes the samples that ended, in the order of groups."""
        known = [(*self._running[each], each) for each in moved if each in self._running]
        for group, sample, request in sorted(known, key=lambda each: (each[0].number, each[1])):
            if self._restart_if_stale(group, sample, request) or not request.is_finished:
                continue
            if self._running.pop(request, None) is not None:
                group.ended.append(sample)
                self._end_if_enough(group)

    def _end_if_enough(self, group: _Group) -> None:
        served = [s for s in group.ended if group.requests[s].finish_reason != "error"]
        is_running = any(request in self._running for request in group.requests)
        if len(served) < self._options.keep_first and is_running:
            return
        for request in group.requests:
            if self._running.pop(request, None) is not None:
                self._loop.abort(request)
                self.counts["num_aborted"] += 1
                self.counts["num_tokens_dropped"] += len(request.output_token_ids)
        self._end(group)

    def _end(self, group: _Group) -> None:
        del self._groups[group.number]
        self._ended[group.number] = group

    def _restart_if_stale(self, group: _Group, sample: int, request: Request) -> bool:
        """Draws a sample anew if its oldest token is too old; returns whether it was."""
        most, oldest = self._options.max_staleness, request.lineage.oldest
        is_out = request not in self._running and sample not in group.ended
        if most is None or oldest is None or self.version - oldest <= most or is_out:
            return False
        if self._running.pop(request, None) is not None:
            self._loop.abort(request)
        else:
            group.ended.remove(sample)
        if group.number in self._ended:
            self._groups[group.number] = self._ended.pop(group.number)
        self.counts["num_restarted"] += 1
        self.counts["num_tokens_dropped"] += len(request.output_token_ids)
        made, _ = self._decoder.requests([group.prompt], [group.params])
        group.requests[sample] = made[sample]
        self._add(group, sample, made[sample])
        return True

    # Results

    def _ready(self) -> list[_Group]:
        """Returns the groups to return now, none if too few have ended."""
        groups = list(self._ended.values())
        if self._options.in_order:
            in_order = itertools.count(self._num_returned)
            numbers = itertools.takewhile(self._ended.__contains__, in_order)
            groups = [self._ended[number] for number in numbers]
        groups = groups[: self._options.batch_groups]
        is_rest = (self._feed.is_over or self._feed.has_none_now) and not self._groups
        return groups if len(groups) == self._options.batch_groups or is_rest else []

    def _kept(self, group: _Group) -> list[Request | None]:
        """Returns the samples of a group to return, None for one that was never drawn."""
        if not group.requests:
            return [None] * self._options.keep_first
        failed = [group.requests[s].finish_reason == "error" for s in group.ended]
        # Errors only where too few are without; a stable sort keeps the order of their ends.
        first = [s for _, s in sorted(zip(failed, group.ended), key=lambda each: each[0])]
        return [group.requests[s] for s in sorted(first[: self._options.keep_first])]

    def _rollout(self, groups: list[_Group], run: Run, begun_at: float, num_drawn: int) -> Rollout:
        """Returns the arrays of some groups, which leave the stream.

        Args:
          begun_at: time.perf_counter() at which `next` was called.
          num_drawn: tokens that were drawn since, of whatever groups.
        """
        options, decoder = self._options, self._decoder
        for group in groups:
            del self._ended[group.number]
        self._num_returned += len(groups)
        self.counts["num_returned"] += len(groups)
        kept = [(group, request) for group in groups for request in self._kept(group)]
        longest = max(len(group.prompt_token_ids) for group in groups)
        width = options.prompt_width or max(longest, 1)
        length = min(self._sampling.max_tokens, decoder.max_length)
        table = Table([group.prompt_token_ids for group, _ in kept], width, length)
        table.describe(self._sampling)
        table.prompt_index[:] = [group.number for group, _ in kept]
        requests = {}
        for index, (group, request) in enumerate(kept):
            if request is None:
                table.finish_reasons[index], table.errors[index] = ERROR, str(group.error)
                continue
            requests[index] = request
            table.seeds[index] = request.sampling_values["seeds"]
            table.fill(index, request, request.max_length)
        metrics = run.metrics(decoder, table, requests, begun_at, num_drawn=num_drawn)
        metrics |= self._staleness(requests)
        alarm(metrics, decoder, ALARM_RATE)
        _warn_of(table.errors, len(kept))
        return table.placed(
            decoder.placing(None, len(kept)),
            sampling=recorded(dataclasses.replace(self._sampling, n=1), self._rule),
            metrics=metrics,
            errors=table.errors,
            is_exact=decoder.is_exact_under(self._rule),
        )

    def _staleness(self, requests: dict[int, Request]) -> dict[str, float]:
        oldest = [request.lineage.oldest for request in requests.values()]
        behind = [self.version - version for version in oldest if version is not None]
        return {
            "mean_staleness": float(np.mean(behind)) if behind else 0.0,
            "largest_staleness": max(behind, default=0),
        }


def _warn_of(errors: dict[int, str], num_samples: int) -> None:
    if errors:
        warnings.warn(
            f"{len(errors)} of {num_samples} samples have finish reason ERROR: "
            f"{next(iter(errors.values()))}",
            stacklevel=of_the_caller(),  # past the stream's own functions
        )
