"""Engine: requests that come and go, for a loop of your own or asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

from jax.sharding import Mesh

from specjax import compilation_cache
from specjax.config import (
    VERIFICATION_RULES,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
)
from specjax.drafters.loading import LoadedDrafter
from specjax.engine.loop import Loop
from specjax.engine.memory_model import MemoryPlan
from specjax.engine.request import AcceptanceCounts, Request
from specjax.engine.speculation_policy import SpeculationPolicy
from specjax.models.base import Model
from specjax.progress import Progress, Report
from specjax.requests import Prompt, as_list
from specjax.results import Chunk, ChunkWriter, GenerationStats, lossy_rule
from specjax.setup import Setup, keep_costs
from specjax.surroundings import entrance


class Engine:
    """Continuous batching: requests are added at any time, and each step advances those that run.

        with specjax.Engine("demo", drafter="demo") as engine:
            engine.add("def fibonacci(n):", SamplingParams(max_tokens=64))
            while engine.has_work:
                for chunk in engine.step():
                    print(chunk.text, end="")

    Its rows and pages are settled once, by EngineConfig: `max_rows` requests run at a
    time, others wait, by priority and then by arrival. Prompts are fed beside rows that
    decode; prompts that begin alike share pages; when pages run out the latest request
    is preempted, and goes on later from the tokens it has.

    Methods may be called from several threads.
    """

    @entrance("specjax.Engine")
    def __init__(
        self,
        target: Model | str | os.PathLike[str],
        *,
        drafter: LoadedDrafter | Model | str | os.PathLike[str] | None = None,
        verification: str | None = None,
        other_verifications: Sequence[str] = (),
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | None = None,
        policy: SpeculationPolicy | None = None,
        mesh: Mesh | None = None,
        progress: bool | Report = False,
    ):
        """Loads the models and makes room for their pages; arguments as `generate`.

        Args:
          other_verifications: rules beside `verification` that requests may ask for by
            SamplingParams.verification: they are compiled in. "greedy", "seeded" and
            "delta" always are.
        """
        compilation_cache.enable()
        self._progress = Progress(progress)
        self._progress.report("loading", 0, 0)
        self._setup = setup = Setup.of(
            target,
            drafter=drafter,
            verification=verification,
            num_speculative_tokens=num_speculative_tokens,
            speculative_config=speculative_config,
            engine=engine,
            mesh=mesh,
        ).with_reported_memory()
        names = [setup.speculation.verification, *other_verifications]
        for name in names:
            setup.drafter.check_rule(name)
        self._rules = [VERIFICATION_RULES.index(name) for name in names]
        self._setup = setup = setup.for_run(self._rules, policy)
        self._loop: Loop | None = setup.loop(
            setup.standing_sizes(),
            self._rules,
            policy,
            on_progress=self._progress.report,
        )
        self._memory_watch = setup.memory_watch(self._loop)
        self._records = self._loop.records
        self._started_at = time.perf_counter()
        # A step may take long, compiling included: what is below `_lock` does not wait for it.
        self._stepping = threading.RLock()
        self._stepper = futures.ThreadPoolExecutor(1)  # of asyncio's streams
        self._lock = threading.RLock()
        self._new: list[Request] = []  # added since the last step
        self._to_abort: list[Request] = []
        self._writer = ChunkWriter()
        self._requests: dict[int, list[Request]] = {}  # by id, those not over
        self._mail: dict[int, list[Chunk]] = {}  # of requests that are streamed
        self._left: set[int] = set()  # streams that nobody reads any more, not yet over
        self._unclaimed: list[Chunk] = []
        self._num_added = 0
        self._totals = _Totals()

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """Queues a prompt.

        Args:
          sampling: None is what the model's generation_config.json says.
          priority: the lowest goes first; among equals, who came first.
          deadline_s: seconds from now after which it ends with what it has.

        Returns:
          Its id: the `prompt_index` of its chunks.

        Raises:
          ValueError: it cannot be served; others are not touched.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"{priority=!r} must be a whole number, the lowest first.")
        if deadline_s is not None and not deadline_s >= 0:
            raise ValueError(f"{deadline_s=!r} must be seconds from now, or None.")
        with self._lock:
            requests = self._made(prompt, sampling)
            for request in requests:
                request.priority = priority
                if deadline_s is not None:
                    request.deadline = time.perf_counter() + deadline_s
            self._num_added += 1
            self._new += requests
            self._requests[requests[0].prompt_index] = requests
            return requests[0].prompt_index

    def step(self, *, max_burst_steps: int | None = None) -> list[Chunk]:
        """Advances what runs by one burst; returns what requests gained.

        The last chunk of a sample has a finish_reason, and its `completion`. Requests
        that are streamed have their chunks there.

        Args:
          max_burst_steps: of the speculative steps that the device runs on its own;
            fewer for text that appears more steadily.

        Raises:
          RuntimeError: the engine is closed.
          Exception: what went wrong on the device. All requests end with "error" then,
            and the engine takes new ones.
        """
        self._advance(max_burst_steps)
        with self._lock:
            chunks, self._unclaimed = self._unclaimed, []
            return chunks

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or chunks are left for `step` to return."""
        with self._lock:
            return bool(self._requests or self._unclaimed)

    def abort(self, request_id: int) -> bool:
        """Ends a request with what it has; its pages are free at once, or after the step under way.

        Returns:
          Whether it was still under way. Its last chunks come with the next step.
        """
        with self._lock:
            left = [
                request
                for request in self._requests.get(request_id, [])
                if not request.is_finished
            ]
            self._to_abort += left
        # Whoever steps does it when the step is over.
        if left and self._stepping.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._stepping.release()
        return bool(left)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **arguments: Any
    ) -> Iterator[Chunk]:
        """Yields the chunks of a prompt, stepping as needed; arguments as `add`.

        The prompt is added when the first chunk is asked for. Closing the iterator aborts
        it. Other requests are advanced beside it; their chunks come from `step`, or
        from streams of their own.
        """
        request_id = self._open(prompt, sampling, arguments)
        try:
            while True:
                chunks, is_over = self._take_mail(request_id)
                yield from chunks
                if is_over:
                    return
                self._advance_for(request_id)
        finally:
            self._close_stream(request_id)

    async def astream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **arguments: Any
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for asyncio: a thread of the engine's own steps for all streams."""
        request_id = self._open(prompt, sampling, arguments)
        loop = asyncio.get_running_loop()
        try:
            while True:
                chunks, is_over = self._take_mail(request_id)
                for chunk in chunks:
                    yield chunk
                if is_over:
                    return
                await loop.run_in_executor(self._stepper, self._advance_for, request_id)
        finally:
            self._close_stream(request_id)

    @property
    def stats(self) -> GenerationStats:
        """Figures over all requests that are over."""
        with self._lock:
            setup, totals = self._setup, self._totals
            return GenerationStats(
                num_prompts=totals.num_prompts,
                num_prompt_tokens=totals.num_prompt_tokens,
                num_output_tokens=totals.num_output_tokens,
                acceptance=totals.acceptance,
                run_s=totals.run_s,
                compile_s=totals.compile_s,
                time_to_first_token_s=totals.first_token_s or 0.0,
                num_speculative_tokens=setup.speculation.depth,
                drafter=setup.drafter.name,
                verification=setup.speculation.verification,
                lossy=tuple(sorted(totals.lossy)),
                decisions=tuple(self._records),
                num_preemptions=totals.num_preemptions,
            )

    @property
    def memory(self) -> MemoryPlan | None:
        """Pages, weight limit and gate that were planned, and what steps were seen to take.

        None without memory_bytes, on a device that does not say how many it has.
        """
        plan, watch = self._setup.memory, self._memory_watch
        if plan is None or watch is None:
            return None
        return dataclasses.replace(plan, measured_workspace=watch.measured_workspace)

    def close(self) -> None:
        """Ends all requests and gives the memory of the pages back. May be called twice.

        Streams under way end with what their requests have.
        """
        with self._stepping:
            for request_id in list(self._requests):
                self.abort(request_id)
            if self._loop is not None:
                keep_costs(self._loop)
            with self._lock:
                self._loop = None
                self._unclaimed.clear()
            self._stepper.shutdown(wait=False)
            self._progress.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _running_loop(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("the engine is closed; make a new one.")
        return self._loop

    def _made(self, prompt: Prompt, sampling: SamplingParams | None) -> list[Request]:
        """Returns the samples of one prompt, every one of which can be served."""
        requests, refused = self._setup.requests(
            as_list([prompt]), sampling, num_before=self._num_added
        )
        if refused:
            raise ValueError(refused[0].error.removeprefix("prompt 0: "))
        allowed = set(self._setup.drafter.effective_rules(self._rules))
        for request in requests:
            wanted = self._setup.drafter.effective_rules([request.rule])
            if not allowed.issuperset(wanted):
                name = VERIFICATION_RULES[request.rule]
                raise ValueError(
                    f"verification={name!r} is not compiled into this engine; make it with "
                    f"other_verifications=[{name!r}]."
                )
            request.prompt_index = self._num_added
            self._running_loop.check(request)
        return requests

    @entrance("a step of specjax.Engine")
    def _advance(self, max_burst_steps: int | None) -> None:
        with self._stepping:
            loop = self._running_loop
            self._take_in()
            if not loop.has_work:
                return
            try:
                moved = loop.step(max_burst_steps)
            except BaseException:
                self._hand_out(loop.abandoned)
                raise
            with self._lock:
                self._totals.run_s = loop.run_s
                self._totals.compile_s = loop.compile_s
                self._totals.num_preemptions = loop.num_preemptions
            self._hand_out(moved)
            self._take_in()
            if self._memory_watch is not None:
                self._memory_watch.look()

    def _advance_for(self, request_id: int) -> None:
        """Steps until a streamed request has something, or is over; others may have stepped for it."""
        with self._stepping:
            while not self._mail[request_id] and request_id in self._requests:
                self._advance(None)

    def _take_in(self) -> None:
        """Takes in what was added and aborted since the last step; not during one."""
        with self._lock:
            new, self._new = self._new, []
            ended, self._to_abort = self._to_abort, []
            loop = self._running_loop
            unfit = [each for each in new if not _is_added(loop, each)]
            gone = [each for each in ended if loop.abort(each)]
            self._hand_out(list(dict.fromkeys([*unfit, *gone])))

    def _hand_out(self, moved: Sequence[Request]) -> None:
        """Makes chunks of what requests gained, for their streams or for `step`."""
        with self._lock:
            for request in moved:
                chunk = self._writer.chunk(request)
                own = self._requests[request.prompt_index]
                self._mail.get(request.prompt_index, self._unclaimed).append(chunk)
                if all(each.is_finished for each in own):
                    del self._requests[request.prompt_index]
                    self._totals.add(own, self._started_at)
                    if request.prompt_index in self._left:
                        self._forget_stream(request.prompt_index)

    def _open(
        self, prompt: Prompt, sampling: SamplingParams | None, arguments: dict[str, Any]
    ) -> int:
        with self._lock:
            request_id = self.add(prompt, sampling, **arguments)
            self._mail[request_id] = []
            return request_id

    def _take_mail(self, request_id: int) -> tuple[list[Chunk], bool]:
        """Returns the chunks of a streamed request, and whether they are its last."""
        with self._lock:
            chunks, self._mail[request_id] = self._mail[request_id], []
            return chunks, request_id not in self._requests

    def _close_stream(self, request_id: int) -> None:
        with self._lock:
            self._left.add(request_id)
            if request_id not in self._requests:
                self._forget_stream(request_id)
        self.abort(request_id)

    def _forget_stream(self, request_id: int) -> None:
        self._left.discard(request_id)
        self._mail.pop(request_id, None)


class _Totals:
    """Figures of requests that are over."""

    def __init__(self):
        self.num_prompts = self.num_prompt_tokens = self.num_output_tokens = 0
        self.acceptance = AcceptanceCounts()
        self.compile_s = self.run_s = 0.0
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self.lossy: set[str] = set()

    def add(self, samples: Sequence[Request], started_at: float) -> None:
        self.num_prompts += 1
        for request in samples:
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_output_tokens += len(request.output_token_ids)
            self.acceptance.merge(request.counts)
            if self.first_token_s is None and request.first_token_at is not None:
                self.first_token_s = request.first_token_at - started_at
            self.lossy.update(filter(None, [lossy_rule(request)]))


def _is_added(loop: Loop, request: Request) -> bool:
    """Queues a request, or ends it where pages have become too few for it meanwhile."""
    try:
        loop.add(request)
    except ValueError as error:
        request.error = str(error)
        request.end("error")
        return False
    return True
