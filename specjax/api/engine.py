"""Engine: requests that come and go, for a loop of your own or asyncio."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from pallas_kernels.implementations import Taken
from specjax.api.acceptance_alarm import AcceptanceAlarm
from specjax.api.adapting import Adaptation, attach, with_learner
from specjax.api.assemble import Setup
from specjax.api.handed_weights import completed, wait_for
from specjax.api.outbox import Outbox
from specjax.api.requests import Prompt, token_ids
from specjax.api.results import Chunk, GenerationStats
from specjax.api.totals import Totals
from specjax.api.turns import Turns
from specjax.config.checks import is_int, is_number
from specjax.config.engine import EngineConfig
from specjax.config.keywords import checks_keywords, hints_at, keyword_check
from specjax.config.rules import Rule, VerificationRule
from specjax.config.sampling import SamplingSource
from specjax.config.speculation import SpeculationConfig
from specjax.engine.adapting import AdaptStats
from specjax.engine.loop import Loop, is_added
from specjax.engine.recovery import INTERRUPTED
from specjax.engine.request import Request
from specjax.heads.loading import DrafterSource, LoadedDrafter
from specjax.models.base import Model, Params
from specjax.models.layouts.tables import Layout, LayoutName
from specjax.models.mesh_axes import MeshAxisMap
from specjax.planning.memory_model import MemoryPlan
from specjax.policy.interface import SpeculationPolicy
from specjax.runtime import compilation_cache
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Progress, Report
from specjax.sampling import EVERYTHING
from specjax.types import DecoderParams

T = TypeVar("T")
_ELSEWHERE = {
    "generate": "Engine.add takes a prompt and Engine.step runs all; specjax.generate takes "
    "prompts at once",
    "run": "`while engine.has_work: engine.step()` runs what Engine.add took",
}


@hints_at(_ELSEWHERE)
class Engine:
    """Continuous batching: requests are added at any time, and each step advances those that run.

        with specjax.Engine("demo", drafter="demo") as engine:
            engine.add("def fibonacci(n):", SamplingParams(max_tokens=64))
            while engine.has_work:
                for chunk in engine.step():
                    print(chunk.text, end="")

    Its rows and pages are fixed by EngineConfig: `max_rows` requests run at a time, others
    wait, by priority and then by arrival. Prompts are fed beside rows that decode; prompts
    with a common prefix share pages; when pages run out the latest request is preempted, and
    goes on later from the tokens it has.

    Methods may be called from several threads.
    """

    @entrance("specjax.Engine", keyword_check)
    def __init__(
        self,
        target: Model | str | os.PathLike[str],
        *,
        drafter: DrafterSource = None,
        verification: VerificationRule | None = None,
        other_verifications: Sequence[VerificationRule] = (),
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | Mapping[str, Any] | None = None,
        policy: SpeculationPolicy | None = None,
        mesh: Mesh | None = None,
        mesh_axes: MeshAxisMap | None = None,
        layout: LayoutName | Layout = "specjax",
        adapt: Adaptation | None = None,
        progress: bool | Report | None = None,
    ):
        """Loads the models and allocates their pages; arguments as `generate`.

        Args:
          other_verifications: rules beside `verification` to compile, so that requests can
            choose them by SamplingParams.verification. "greedy", "seeded" and "delta" are
            always available.
          layout: of the weights passed to `update_params`, as for `build_decoder`.
          adapt: a `specjax.Adapt`, with which the drafter learns between bursts; None: it stays as
            it is.
        """
        compilation_cache.enable()
        self._progress = Progress(progress)
        with contextlib.closing(self._progress):
            self._progress.report("loading", 0, 0)
            setup = Setup.of(
                target,
                drafter=drafter,
                verification=verification,
                num_speculative_tokens=num_speculative_tokens,
                speculative_config=speculative_config,
                engine=engine,
                mesh=mesh,
                mesh_axes=mesh_axes,
            ).with_reported_memory()
            learner: Any = None
            if adapt is not None:
                setup, learner = with_learner(setup, adapt)
            params, setup = setup.params, setup.without_weights()
            self._handed = setup.handed_weights(layout)
            names = [setup.speculation.verification, *other_verifications]
            for name in names:
                setup.drafter.check_rule(name, setup.engine.numerics)
            self._rules = [Rule.of(name) for name in names]
            self._setup = setup = setup.for_run(self._rules, policy)
            self._loop: Loop | None = setup.loop(
                setup.standing_sizes(),
                self._rules,
                on_progress=self._progress.report,
                params=params,
            )
            # The next request may ask for anything, and others would wait meanwhile.
            self._loop.decoder.compile_for(EVERYTHING)
            self._handed.note(DecoderParams(params.target, self._own_drafter(self._loop)))
            if adapt is not None:
                self._progress.report("compiling what the drafter learns with", 0, 0)
                attach(adapt, learner, self._loop)
        self._adapted: tuple[Any, AdaptStats | None] = (), None  # once it is closed
        self._updates = Turns(lambda: False, lambda: None)  # of threads that bring new weights
        self._memory_watch = setup.memory_watch(self._loop)
        self._records = self._loop.records
        self._stepper = futures.ThreadPoolExecutor(1)  # of asyncio's streams
        self._turns = Turns(lambda: bool(self._to_end), self._take_in)
        # The tables: requests and chunks, requests added since the last step, and requests to
        # end after it. Only the last may be written to without holding the tables.
        self._outbox = Outbox()
        self._new: collections.deque[Request] = collections.deque()
        self._to_end: collections.deque[_Ending] = collections.deque()
        self._num_added = 0
        self._totals = Totals(time.perf_counter())
        self._alarm = AcceptanceAlarm(setup.drafter, setup.speculation.verification)

    @checks_keywords
    def add(
        self,
        prompt: Prompt,
        sampling: SamplingSource | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """Queues a prompt.

        Args:
          sampling: as for `generate`, of one prompt.
          priority: the lowest goes first; equal priorities are served by arrival.
          deadline_s: seconds from now after which it ends with the tokens it has.

        Returns:
          Its id: the `prompt_index` of its chunks.

        Raises:
          ValueError: the request cannot be served; other requests are not affected.
        """
        return self._add(prompt, sampling, priority, deadline_s=deadline_s)

    def step(self, *, max_burst_steps: int | None = None) -> list[Chunk]:
        """Advances running requests by one burst; returns the chunks of text they gained.

        The last chunk of a sample has a finish_reason and its `completion`. Chunks of
        streamed requests go to their streams instead.

        Args:
          max_burst_steps: most speculative steps that the device runs without the host, from 1;
            fewer make text appear more steadily. By default EngineConfig.burst_steps.

        Raises:
          ValueError: max_burst_steps is no such number; requests are not affected.
          RuntimeError: the engine is closed, or this is called from within a step.
          Exception: an error of the device. All requests end with "error" then, and the
            engine accepts new ones.
        """
        if max_burst_steps is not None and not (is_int(max_burst_steps) and max_burst_steps >= 1):
            raise ValueError(
                f"max_burst_steps={max_burst_steps!r:.200} must be a whole number from 1, or None "
                "for EngineConfig.burst_steps."
            )
        with self._turns.turn():
            self._advance(max_burst_steps)
        with self._turns.tables():
            return self._outbox.take_unclaimed()

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or chunks are left for `step` to return."""
        with self._turns.tables():
            return self._outbox.has_work

    def abort(self, request_id: int) -> bool:
        """Ends a request with the tokens it has; frees its pages at once, or after a running step.

        Returns:
          Whether it had not ended yet. Its last chunks come with the next step.

        Raises:
          ValueError: the id is not a whole number.
        """
        if not is_int(request_id):
            raise ValueError(f"request_id={request_id!r:.200} must be an id that `add` returned.")
        samples = self._outbox.samples(request_id)
        if all(request.is_finished for request in samples):
            return False
        self._to_end.append(_Ending(request_id))
        self._turns.tidy()
        return True

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingSource | None = None,
        *,
        token_by_token: bool = True,
        **arguments: Any,
    ) -> Iterator[Chunk]:
        """Yields the chunks of a prompt, stepping as needed; arguments as `add`.

        The prompt is added when the first chunk is asked for. Closing or dropping the iterator
        aborts the request. Other requests advance in the same steps; their chunks come from
        `step`, or from their own streams.

        Args:
          token_by_token: whether bursts are short while this request runs, so that a few tokens
            come at once. False, for those who need the whole text: bursts are as long as with
            `add`.

        Raises:
          Exception: as of `step`, if this stream called it. Other streams end with a chunk
            whose completion has the error.
        """
        request_id = self._add(
            prompt, sampling, is_read=True, token_by_token=token_by_token, **arguments
        )
        try:
            while True:
                chunks, is_over = self._take_mail(request_id)
                yield from chunks
                if is_over:
                    return
                self._advance_for(request_id)
        finally:
            self._leave(request_id)

    async def astream(
        self,
        prompt: Prompt,
        sampling: SamplingSource | None = None,
        *,
        token_by_token: bool = True,
        **arguments: Any,
    ) -> AsyncIterator[Chunk]:
        """Like `stream`, for asyncio: one thread of the engine runs the steps of all streams."""
        # In another thread: neither the event loop nor the steps wait for tokenising.
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(None, self._token_ids, prompt)
        request_id = self._add(
            prompt, sampling, is_read=True, token_by_token=token_by_token, **arguments
        )
        try:
            while True:
                chunks, is_over = self._take_mail(request_id)
                for chunk in chunks:
                    yield chunk
                if is_over:
                    return
                step = self._advance_beside(request_id)
                if step is not None:
                    await asyncio.wrap_future(step)
        finally:
            self._leave(request_id)

    @entrance("specjax.Engine.update_params")
    @checks_keywords
    def update_params(
        self,
        params: Params | DecoderParams,
        *,
        version: int | None = None,
        running: Literal["keep", "recompute"] = "keep",
    ) -> int:
        """Replaces the weights, from the next step on; compiles no step.

        A burst that the device runs ends under the earlier weights. Requests that wait, and
        those whose prompt is fed only in part, are fed under the new weights. All others go
        on: `Completion.params_versions` says which weights drew each token, and `cache_fills`
        from which their keys and values are. Waits for a step of another thread to end.

        Args:
          params: weights of the target in the engine's layout, or DecoderParams(target, drafter);
            a drafter keeps its weights if none are given for it. The arrays are neither
            donated nor copied on one device: keep them until the next update. The same arrays
            again change nothing, unless `version` is new.
          version: number of these weights, above that of the last; None: the last one, plus 1.
          running: "keep" leaves requests that run their keys and values, "recompute" feeds their
            tokens again under the new weights. Over int8 or fp8 pages they are always fed again.

        Returns:
          The version of the weights.

        Raises:
          ValueError: an argument is invalid, or shapes, dtypes or names of the weights are not
            those that the engine was made for. Nothing has changed then.
          RuntimeError: the engine is closed, or this is called from within a step.
        """
        if running not in ("keep", "recompute"):
            raise ValueError(f'{running=!r:.200} must be "keep" or "recompute".')
        is_given = isinstance(params, DecoderParams) and bool(jax.tree.leaves(params.drafter))
        self._turns.check_outside()
        # Steps go on while a trainer computes the weights, and while they are converted.
        wait_for(params)
        with self._updates.turn():
            with self._turns.tables():
                loop, handed = self._running_loop, self._handed
            taken = handed.take(
                completed(params, self._own_drafter(loop)),
                version,
                has_drafter=is_given,
                increases=True,
            )
            with self._turns.turn():
                with self._turns.tables():
                    loop = self._running_loop
                loop.take_params(
                    taken.params,
                    is_new=taken.is_new,
                    version=taken.version,
                    recomputes=running == "recompute",
                    retries_drafter=is_given,
                )
                handed.settle(taken)
                if loop.adapting is not None:
                    handed.note_drafter(self._own_drafter(loop))
            return taken.version

    @property
    def params_version(self) -> int:
        """Version of the weights that the next step runs under; 0 for those it was made with."""
        return self._handed.version

    @property
    def stats(self) -> GenerationStats:
        """Figures over all finished requests."""
        with self._turns.tables():
            return self._totals.stats(
                self._setup, self._records, params_version=self._handed.version
            )

    @property
    def memory(self) -> MemoryPlan | None:
        """The planned pages, weight limit and gate, and the measured memory of steps.

        None if memory_bytes is not set and the device does not report its memory.
        """
        plan, watch = self._setup.memory, self._memory_watch
        if plan is None or watch is None:
            return None
        return dataclasses.replace(plan, measured_workspace=watch.measured_workspace)

    @property
    def adaptation(self) -> AdaptStats | None:
        """What the drafter has learned so far; None without `adapt`."""
        with self._turns.tables():
            return self._adapted[1] if self._loop is None else self._loop.adapt_stats

    @property
    def drafter(self) -> LoadedDrafter:
        """The drafter with its weights in use: with `adapt` those that it has learned so far, which
        `save_pretrained` takes, of an engine that is closed too.

        Its arrays stay valid while the engine goes on. Weights that are made from the target's,
        those of a drafter that was turned off, and those of a closed engine without `adapt` are
        left out.
        """
        with self._turns.tables():
            loop = self._loop
            params = self._adapted[0] if loop is None else self._own_drafter(loop)
        return dataclasses.replace(self._setup.drafter, params=params)

    @property
    def kernels(self) -> tuple[Taken, ...]:
        """The implementation that each op takes in this engine's steps, and why no better one.

        The first call traces the steps, for a second or so, unless memory was planned.
        """
        return self._setup.kernels

    def close(self) -> None:
        """Ends all requests and frees the memory of the pages. May be called twice.

        Open streams end with the tokens their requests have. A running step is waited for.

        Raises:
          RuntimeError: this is called from within a step.
        """
        with self._turns.turn():
            with self._turns.tables():
                loop = self._loop
                if loop is not None and loop.adapting is not None:
                    self._adapted = self._own_drafter(loop), loop.adapt_stats
                    loop.adapting.close()
                try:
                    self._to_end.extend(map(_Ending, self._outbox.ids()))
                    self._take_in()
                finally:
                    self._loop = None
                    self._end_lost("the engine was closed.")
                    self._outbox.take_unclaimed()
            self._stepper.shutdown(wait=False)
            self._progress.close()
            if loop is not None:
                self._setup.keep(loop)
        self._look_at_acceptance()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _own_drafter(self, loop: Loop) -> Any:
        """Returns the drafter's weights in use; () where they are made from the target's."""
        is_made = self._setup.drafter.spec.made_by is not None
        return () if is_made else loop.params.drafter

    @property
    def _running_loop(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("the engine is closed; make a new one.")
        return self._loop

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt; tokenising may take a while."""
        try:
            return token_ids(self._setup.target, prompt)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def _made(self, prompt: Prompt, sampling: SamplingSource | None) -> list[Request]:
        """Returns the samples of one prompt; raises ValueError if one cannot be served."""
        requests, refused = self._setup.requests([prompt], sampling, num_before=self._num_added)
        if refused:
            raise ValueError(refused[0].error.removeprefix("prompt 0: "))
        allowed = set(self._setup.drafter.effective_rules(self._rules))
        for request in requests:
            wanted = self._setup.drafter.effective_rules([request.rule])
            if not allowed.issuperset(wanted):
                name = Rule(request.rule).label
                raise ValueError(
                    f"verification={name!r} is not compiled into this engine; make it with "
                    f"other_verifications=[{name!r}]."
                )
            request.prompt_index = self._num_added
            self._running_loop.check(request)
        return requests

    @checks_keywords
    def _add(
        self,
        prompt: Prompt,
        sampling: SamplingSource | None,
        priority: int = 0,
        *,
        deadline_s: float | None = None,
        is_read: bool = False,  # by a stream of its own; else `step` returns its chunks
        token_by_token: bool = False,
    ) -> int:
        if not isinstance(token_by_token, bool):
            raise ValueError(f"{token_by_token=!r:.200} must be True or False.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"{priority=!r} must be a whole number, the lowest first.")
        if deadline_s is not None and not (is_number(deadline_s) and deadline_s >= 0):
            raise ValueError(f"{deadline_s=!r} must be seconds from now, or None.")
        prompt = self._token_ids(prompt)  # outside the lock
        self._look_at_acceptance()
        with self._turns.tables():
            requests = self._made(prompt, sampling)
            for request in requests:
                request.priority, request.is_streamed = priority, token_by_token
                if deadline_s is not None:
                    request.deadline = time.perf_counter() + deadline_s
            request_id = requests[0].prompt_index
            self._num_added += 1
            self._outbox.open(request_id, requests, is_streamed=is_read)
            self._new += requests
            return request_id

    @entrance("a step of specjax.Engine")
    def _advance(self, max_burst_steps: int | None) -> None:
        """Steps once, if there is work; the caller holds the turn."""
        with self._turns.tables():
            loop = self._running_loop
            self._take_in()
            is_idle = not loop.has_work
            if is_idle:
                self._end_lost("the engine lost it in an interruption.")
        if is_idle:
            self._learn(loop.learn_idle)
            return
        try:
            moved = self._learn(lambda: loop.step(max_burst_steps))
        except BaseException as error:
            with self._turns.tables():
                self._end_lost(INTERRUPTED.format(error=error))
            if loop.has_work:
                loop.abandon()  # an interrupt came before the loop could do so
            raise
        finally:
            self._progress.close()  # the caller writes text now
        with self._turns.tables():
            self._totals.look_at(loop)
            self._hand_out(moved)
        if self._memory_watch is not None:
            self._memory_watch.look()

    def _learn(self, step: Callable[[], T]) -> T:
        """Runs a step in which the drafter may learn; its weights then count as those in use."""
        loop = self._running_loop
        adapting = loop.adapting
        before = 0 if adapting is None else adapting.num_updates
        try:
            return step()
        finally:
            if adapting is not None and adapting.num_updates != before:
                self._handed.note_drafter(self._own_drafter(loop))

    def _advance_for(self, request_id: int) -> None:
        """Steps once, unless another thread's step has already made chunks for the request."""
        has_news = lambda: self._outbox.has_news(request_id)
        with self._turns.turn(unless=has_news) as has_come:
            if has_come:
                self._advance(None)

    def _advance_beside(self, request_id: int) -> futures.Future[None] | None:
        """Like `_advance_for`, in the engine's own thread; None once the engine is closed."""
        with self._turns.tables():
            if self._loop is None:
                return None
            return self._stepper.submit(self._advance_for, request_id)

    def _take_in(self) -> None:
        """Queues added requests and ends those to end.

        The caller holds the tables, and no thread is stepping."""
        loop = self._loop
        while self._new:
            request = self._new.popleft()
            if not is_added(self._running_loop, request):
                self._hand_out([request])
        while self._to_end:
            request_id, is_left = self._to_end.popleft()
            samples = self._outbox.samples(request_id)
            if loop is not None:
                self._hand_out([each for each in samples if loop.abort(each)])
            if is_left:
                self._outbox.leave(request_id)

    def _look_at_acceptance(self) -> None:
        """Warns once where hardly a draft is accepted; in a thread of the caller, not in a step."""
        if self._alarm.is_over:
            return
        with self._turns.tables():
            counts = copy.deepcopy(self._totals.acceptance)
        self._alarm.look(counts)

    def _hand_out(self, moved: Iterable[Request]) -> None:
        """Makes chunks of the requests' new text, for their streams or for `step`."""
        for samples in self._outbox.hand_out(moved):
            self._totals.add(samples)

    def _end_lost(self, error: str) -> None:
        """Ends the requests that the loop lost in an exception, and hands out their last chunks.

        Otherwise their streams would wait for ever.
        """
        waiting = set(self._new)
        lost = [each for each in self._outbox.unended() if each not in waiting]
        for request in lost:
            request.fail(error)
        self._hand_out(lost)

    def _take_mail(self, request_id: int) -> tuple[list[Chunk], bool]:
        """Returns the chunks of a streamed request, and whether they are its last."""
        with self._turns.tables():
            return self._outbox.take_mail(request_id)

    def _leave(self, request_id: int) -> None:
        """Ends a stream that is no longer read; may be called at any point of the program."""
        self._to_end.append(_Ending(request_id, is_left=True))
        self._turns.tidy()


class _Ending(NamedTuple):
    """A request that is to be ended."""

    request_id: int
    is_left: bool = False  # whether its remaining chunks are dropped
