"""The loop: admit -> send -> read back, with one burst in flight while the last is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from specjax.config.gate import SpeculationGate
from specjax.decode.compiling import telling
from specjax.decode.decoder import Decoder
from specjax.decode.score import Scores
from specjax.engine.adapting import Adapting, AdaptStats
from specjax.engine.admission import admit
from specjax.engine.burst_choice import BurstChoice
from specjax.engine.faults import RECOVERABLE, Faults
from specjax.engine.metrics import BurstRecord
from specjax.engine.readback import Reader
from specjax.engine.recovery import Recovery
from specjax.engine.request import Request
from specjax.engine.run_state import RunState
from specjax.engine.scheduler import Scheduler
from specjax.engine.sending import Sender
from specjax.engine.text_feed import MOST_PIECES
from specjax.policy.interface import LEAST_TIMED_STEPS, SpeculationPolicy
from specjax.runtime.jax_settings import check_not_traced, in_own_settings
from specjax.runtime.progress import Report
from specjax.sampling import RowSampling
from specjax.types import DecoderParams


class Loop:
    """Runs requests on the rows of one decoder.

    While the device runs a burst the next one is planned and sent; then the first is
    read back. Rows that ended in the first do nothing in the second.

    Its parts share a RunState: `BurstChoice` chooses a burst, `Sender` sends it, `Reader`
    reads it back, `Recovery` restarts after an error.

    Args:
      gate: the largest batch that speculates.
      most_tokens: tokens of all rows together above which no other request is admitted; by
        default unlimited.
      fewer_pages: returns a decoder like another with fewer pages, for a device with less
        memory than planned; None if there is none.
      drafter_name: name of the drafter in warnings.
      drafter_fault: the reason why the drafter is turned off from the first; None: it is on.

    Attributes:
      compile_s, run_s: seconds in `step`: compiling, and all else.
      adapting: lets the drafter learn between bursts; None: it stays as it is.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        policy: SpeculationPolicy,
        *,
        gate: SpeculationGate = SpeculationGate(),  # noqa: B008, it is frozen
        most_tokens: int | None = None,
        fewer_pages: Callable[[Decoder], Decoder | None] = lambda decoder: None,
        drafter_name: str | None = None,
        drafter_fault: str | None = None,
        on_progress: Report = lambda what, done, total: None,
    ):
        self._run = RunState(
            decoder,
            params,
            gate=gate,
            most_tokens=most_tokens,
            drafter_name=drafter_name,
            drafter_fault=drafter_fault,
        )
        self._bursts = BurstChoice(self._run, policy)
        self._sender = Sender(self._run, self._bursts, on_progress)
        self._reader = Reader(self._run, policy)
        self._recovery = Recovery(self._run, fewer_pages)
        self._on_compile = lambda what: on_progress(f"compiling the {what}", 0, 0)
        self.compile_s = self.run_s = 0.0
        self.adapting: Adapting | None = None

    @property
    def decoder(self) -> Decoder:
        """The compiled functions; replaced by those of fewer pages once memory runs out."""
        return self._run.decoder

    @property
    def params(self) -> DecoderParams:
        """The weights; those of the target alone once the drafter is off."""
        return self._run.params

    @property
    def policy(self) -> SpeculationPolicy:
        """The policy that chooses K."""
        return self._bursts.policy

    @property
    def scheduler(self) -> Scheduler:
        """Queue, rows and pages."""
        return self._run.scheduler

    @property
    def faults(self) -> Faults:
        """Parts that failed and are no longer used."""
        return self._run.faults

    @property
    def gate(self) -> SpeculationGate:
        """The largest batch that speculates."""
        return self._run.gate

    @property
    def records(self) -> Sequence[BurstRecord]:
        """Records of the last bursts: K, the reason, predicted and measured figures."""
        return self._reader.records

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens that were fed, without those found in the prefix cache."""
        return self._run.num_prefilled

    @property
    def num_preemptions(self) -> int:
        """Number of times that a row was preempted."""
        return self._run.num_preemptions

    @property
    def kept_states(self) -> tuple[Any, ...]:
        """The hidden states that steps keep for a drafter that learns; () where they keep none."""
        return self._run.device_state.kept.states if self._run.has_windows else ()

    @property
    def adapt_stats(self) -> AdaptStats | None:
        """What the drafter has learned so far; None if it stays as it is."""
        return None if self.adapting is None else self.adapting.stats(self._run)

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or a burst is not read back."""
        run = self._run
        return bool(len(run.scheduler.waiting) or run.scheduler.occupied or run.flights)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that could never fit."""
        most = self.scheduler.most_tokens
        if request.max_length > most:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens and "
                f"max_tokens={request.params.max_tokens!r} need "
                f"{request.max_length} tokens of context, the pool holds {most} for one row; "
                f"lower max_tokens, "
                "shorten the prompt or raise num_pages."
            )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it could never fit.
        """
        self.check(request)
        if request.draft_cap:
            self.faults.miss_drafter()
        self.decoder.expect(request.sampling_values)
        self.scheduler.waiting.push(request)
        self._run.deadlines.push(request, len(self.scheduler.waiting))

    def abort(self, request: Request, reason: str = "abort") -> bool:
        """Ends a request with the tokens it has, and frees its pages.

        Returns:
          Whether it was still waiting or running.
        """
        if request.is_finished or not self._remove(request):
            return False
        request.end(reason)
        self._drop_deadlines()
        return True

    def withdraw(self, request: Request) -> bool:
        """Releases a request with the tokens that were read, without an end.

        Returns:
          Whether it was still waiting or running.
        """
        if request.is_finished or not self._remove(request):
            return False
        if self._run.feed is not None:
            self._run.feed.note(request, is_over=True)
        self._drop_deadlines()
        return True

    def _remove(self, request: Request) -> bool:
        """Takes a request out of its row or of the queue; returns whether it was there."""
        row = self._run.row_of(request)
        if row is None:
            return self.scheduler.waiting.remove(request)
        self.scheduler.release(row)
        return True

    def run(self) -> Iterator[list[Request]]:
        """Runs until no work is left; after each step yields the requests that advanced."""
        while self.has_work:
            check_not_traced("decoding")
            yield self.step()

    @in_own_settings
    def step(self, max_burst_steps: int | None = None) -> list[Request]:
        """Admits requests, sends the next work, and reads back the burst before it.

        Returns:
          The requests that advanced or ended.

        Raises:
          Exception: an error without recovery. Every request that waited or ran has ended
            with "error" then, and new ones may be added.
        """
        decoder, start = self.decoder, time.perf_counter()
        compiled_before = decoder.compile_s
        moved: list[Request] = []
        try:
            with telling(self._on_compile):
                self._advance(moved, max_burst_steps)
        except BaseException as error:
            self._recovery.recover(error)
            moved += self._end_unfit()
        self._drop_deadlines()
        compiled = decoder.compile_s - compiled_before
        self.compile_s += compiled
        self.run_s += time.perf_counter() - start - compiled
        return list(dict.fromkeys(moved))

    def _advance(self, moved: list[Request], max_burst_steps: int | None) -> None:
        """Does a step's work; adds the requests that advanced or ended to `moved`."""
        if self._run.recomputes:
            self._empty_rows(moved)
        self._run.ensure_state()
        self._learn(moved)
        moved += self._end_overdue()
        self._admit()
        self._run.point_windows()
        num_before = len(self._run.flights)
        self._send(max_burst_steps)
        num_sent = len(self._run.flights) - num_before
        while len(self._run.flights) > num_sent:
            self._read(moved)

    def _learn(self, moved: list[Request]) -> None:
        """Lets the drafter learn if it is due, once the bursts in flight are read back.

        Whether it is due is told by what windows held when rows were last pointed at them.
        """
        adapting, run = self.adapting, self._run
        if adapting is None:
            return
        last = self.records[-1].measured_step_s if self.records else None
        if not adapting.is_due(run, last):
            return
        begun_at = adapting.clock()
        while run.flights:
            self._read(moved)
        run.collect_windows()
        adapting.learn(run, self.policy, begun_at=begun_at)

    def learn_idle(self) -> bool:
        """Lets the drafter learn while there is no work; returns whether it did."""
        if self.adapting is None or self.has_work or self._run.device_state is None:
            return False
        self._run.collect_windows()
        return self.adapting.learn_idle(self._run, self.policy)

    def _empty_rows(self, moved: list[Request]) -> None:
        """Reads back all bursts in flight, and queues the requests that run."""
        run = self._run
        while run.flights:
            self._read(moved)
        for row in run.scheduler.occupied:
            run.scheduler.requeue(row)
        run.recomputes = False

    def _admit(self) -> None:
        # Bursts are made shorter where pages are short, so that no row waits for room for the
        # longest one. A plain burst is to fit, and of those that draft one whose time tells.
        steps = self.decoder.sizes.burst_steps
        drafting = min(steps, LEAST_TIMED_STEPS) * (1 + self.policy.max_speculative_tokens)
        admit(self._run, max(steps, drafting))

    def _send(self, max_burst_steps: int | None) -> None:
        self._sender.send(max_burst_steps)

    def _read(self, moved: list[Request]) -> None:
        self._reader.read(moved)

    def _end_overdue(self) -> list[Request]:
        """Ends the requests whose deadline has passed."""
        ended = []
        while (request := self._run.deadlines.pop_overdue()) is not None:
            if self.abort(request, "deadline"):
                ended.append(request)
        return ended

    def _end_unfit(self) -> list[Request]:
        """Ends the waiting requests that no longer fit since the pool was made smaller."""
        ended = []
        for request in list(self.scheduler.waiting.all()):
            try:
                self.check(request)
            except ValueError as error:
                self.scheduler.waiting.remove(request)
                request.fail(str(error))
                ended.append(request)
        return ended

    def _drop_deadlines(self) -> None:
        """Drops stale deadlines once no request waits or runs."""
        if not len(self.scheduler.waiting) and not self.scheduler.occupied:
            self._run.deadlines.clear()

    # Between steps

    def take_params(
        self,
        params: DecoderParams,
        *,
        is_new: bool = True,
        version: int | None = None,
        recomputes: bool = False,
        retries_drafter: bool = True,
    ) -> None:
        """Replaces the weights of the steps that are sent from now on.

        A burst in flight ends under the weights that it was sent with. The prefix cache is
        cleared, and prompts that are fed in part start again. All other rows keep their keys
        and values, unless pages are int8 or fp8: the scales of all pages follow from the newest
        weights.

        Args:
          is_new: False if the pages were filled with these same weights; no row changes then.
          version: the number of these weights in `Request.lineage`; above that of the last
            weights, unless these are the same. None: as it is.
          recomputes: whether all rows are fed again under the new weights.
          retries_drafter: whether a drafter that was turned off is tried again if weights are
            new; all rows are fed again then.

        Raises:
          ValueError: the weights lie on several devices, and there is no mesh. Nothing changed.
        """
        run, is_given = self._run, retries_drafter
        if self.adapting is not None and not is_given:
            params = DecoderParams(params.target, run.params.drafter)  # as it has learned to be
        retries_drafter |= run.makes_drafter
        retries_drafter &= is_new and run.faults.is_drafter_off
        if run.faults.is_drafter_off and not retries_drafter:
            params = DecoderParams(params.target)
        placed = run.placed(params)
        if retries_drafter or not run.faults.is_drafter_off:
            placed = run.with_made_weights(placed)
        before = run.params.drafter
        if is_new:  # first, so that an interrupt leaves no page to be read under other weights
            run.renew_weights(recomputes=recomputes)
        run.params = placed
        run.decoder.let_go()  # of the earlier weights
        if version is not None:
            run.params_version = version
        if retries_drafter:
            run.faults = Faults(run.faults.drafter, run.decoder.sizes.rows)
            self._recovery.restart()
        if self.adapting is not None and is_given and not _are_same(before, run.params.drafter):
            self.adapting.restart(run)

    # Between runs

    def abandon(self) -> None:
        """Ends the requests that an interrupted call left waiting or running."""
        self._recovery.abandon(RuntimeError("an earlier call was interrupted"))

    def forget(self) -> None:
        """Empties rows, pages and the drafter's state; keeps the learned speed."""
        if self.has_work:
            self.abandon()
        self.faults.is_drafter_off = False
        self._run.begin()

    def let_go(self) -> None:
        """Holds no weights until `take_params`."""
        self._run.params = DecoderParams(None)
        self.decoder.let_go()

    def pause(self) -> list[Request]:
        """Reads back all bursts in flight, and releases all requests with the tokens they have.

        Returns:
          The requests that have not ended; their full pages stay in the prefix cache until
          other requests need the room.
        """
        run = self._run
        try:
            while run.flights:
                self._read([])
        except BaseException as error:
            self._recovery.abandon(error)
            raise
        running = [row.request for row in run.scheduler.occupied]
        for row in run.scheduler.occupied:
            if run.feed is not None:
                run.feed.note(row.request, is_over=True)
            run.scheduler.release(row)
        waiting = run.scheduler.waiting.all()
        for request in waiting:
            run.scheduler.waiting.remove(request)
        run.prompts.num_tokens = 0
        return [*running, *waiting]

    def score(self, history: Any, num_tokens: Any, sampling: RowSampling) -> Scores:
        """Returns the log-probabilities of texts; arguments as of Decoder.score.

        Running rows are not changed."""
        run = self._run
        run.ensure_state()
        try:
            with telling(self._on_compile):
                run.device_state, scores = run.decoder.score(
                    run.params, run.device_state, history, num_tokens, sampling
                )
        except BaseException:
            run.begin()  # the state went with the call
            raise
        return scores

    def remember(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Gives answers from elsewhere to a drafter that matches text."""
        run = self._run
        if run.feed is None:
            return
        try:
            with telling(self._on_compile):
                for prompt, answer in zip(prompts, answers, strict=True):
                    run.feed.cut(prompt, answer)
                    if run.feed.num_waiting >= MOST_PIECES:
                        run.tell_drafter()
                run.tell_drafter()
        except RECOVERABLE as error:
            run.do_without(error)


def _are_same(one: Any, other: Any) -> bool:
    """Returns whether two trees hold the very same arrays."""
    left, right = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(left) == len(right) and all(a is b for a, b in zip(left, right))


def is_added(loop: Loop, request: Request) -> bool:
    """Queues a request, or ends it with the error where it could never fit; returns which."""
    try:
        loop.add(request)
    except ValueError as error:
        request.fail(str(error))
        return False
    return True
