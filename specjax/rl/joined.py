"""Rollouts that several threads run at the same time on one decoder, in the same steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

import jax

from specjax.api.turns import Turns
from specjax.engine.loop import Loop, is_added
from specjax.engine.request import Request
from specjax.models.base import Params
from specjax.rl.decoder import RolloutDecoder
from specjax.runtime.progress import Report
from specjax.types import DecoderParams


class JoinedDecoder(RolloutDecoder):
    """A decoder for rollouts of several threads; `build_decoder(shares_steps=True)` makes it.

    A rollout that begins while another runs under the same weights joins it: its prompts take
    free rows, and whichever thread has its turn steps for all. Each returns when its own samples
    are done. A rollout under other weights waits until those before it have ended; rollouts begin
    in the order in which they were called.

    Samples are those of a rollout alone. Seconds, traces and preemptions in `metrics` count what
    other rollouts did at the time, too.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._turns = Turns(lambda: False, lambda: None)
        self._shares: dict[int, Share] = {}  # by thread
        self._weights: tuple[Any, ...] = ()  # as they were given, while rollouts run
        self._line: list[object] = []  # rollouts that have not begun, in their order
        self._changed = threading.Condition()  # _shares or _line
        self._own = threading.local()  # its `version` is that of the thread's last rollout

    @contextlib.contextmanager
    def showing(self, progress: bool | Report | None) -> Iterator[Report]:
        """As of one rollout, but that threads side by side show nothing by default."""
        with super().showing(progress or False) as report:
            yield report

    @property
    def params_version(self) -> int:
        """The version of the weights of this thread's last rollout."""
        return getattr(self._own, "version", super().params_version)

    @contextlib.contextmanager
    def _used_by_one(self) -> Iterator[None]:
        """Threads share the loop."""
        yield

    def hand_over(self, params: Params | DecoderParams, version: int | None = None) -> Loop:
        """Returns this thread's share of the loop, once the loop has these weights.

        Raises:
          ValueError: as `RolloutDecoder.hand_over`.
        """
        me = object()
        weights = version, *jax.tree.leaves(params)
        may_begin = lambda: self._line[0] is me and self._may_join(weights)
        with self._changed:
            self._line.append(me)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(may_begin)
                with self._turns.turn():
                    if may_begin():
                        return self._join(params, version, weights)
        finally:
            with self._changed:
                self._line.remove(me)
                self._changed.notify_all()

    def let_go(self) -> None:
        """Ends this thread's share; the last one drops the weights."""
        me = threading.get_ident()
        try:
            with self._turns.turn():
                share = self._shares.pop(me, None)
                if share is not None:
                    share.withdraw()
                if not self._shares:
                    self._weights = ()
                    self._finish()
                    super().let_go()
        finally:
            with self._changed:
                self._shares.pop(me, None)  # if an interrupt came before its turn
                self._changed.notify_all()

    def step(self) -> None:
        """Steps for all rollouts; the caller has the turn."""
        assert self._loop is not None
        for share in list(self._shares.values()):
            share.take_in(self._loop)
        try:
            self._loop.step()
        except BaseException as error:
            for share in list(self._shares.values()):
                share.error = error
            raise

    def turn(self, unless: Any = lambda: False) -> Any:
        """Waits until no other thread steps: `Turns.turn`."""
        return self._turns.turn(unless)

    def _may_join(self, weights: tuple[Any, ...]) -> bool:
        """Returns whether a rollout need not wait: none runs, or one under the same arrays."""
        if not self._shares:
            return True
        version, *leaves = weights
        used_version, *used = self._weights or (None,)
        is_same = version == used_version and len(leaves) == len(used)
        # Arrays of numpy may have changed in place.
        return is_same and all(
            isinstance(own, jax.Array) and own is other for own, other in zip(leaves, used)
        )

    def _join(
        self, params: Params | DecoderParams, version: int | None, weights: tuple[Any, ...]
    ) -> Loop:
        if not self._shares:
            super().hand_over(params, version)
            self._weights = weights
        assert self._loop is not None
        self._own.version = super().params_version
        share = Share(self, self._loop)
        self._shares[threading.get_ident()] = share
        return cast(Loop, share)  # what a rollout calls of one

    def _finish(self) -> None:
        """Reads back what is in flight for rows that ended."""
        while self._loop is not None and self._loop.has_work:
            self._loop.step()


class Share:
    """One rollout's part of a loop: it has work while its own requests do."""

    def __init__(self, owner: JoinedDecoder, loop: Loop):
        self._owner, self._loop = owner, loop
        self._open: list[Request] = []
        self._new: list[Request] = []
        self.error: BaseException | None = None  # of a step, which ended all requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    @property
    def has_work(self) -> bool:
        """Whether requests of this rollout wait or run.

        Raises:
          RuntimeError: a step failed that another thread ran.
        """
        if any(request.finish_reason == "error" for request in self._open):
            with self._owner.turn():
                pass  # the step that ended it may be about to fail
        if self.error is not None:
            raise RuntimeError(
                f"a step failed that this rollout shared with others: {self.error!r}"
            ) from self.error
        return not self._is_over()

    def add(self, request: Request) -> None:
        """Queues a request for the next step.

        Raises:
          ValueError: it could never fit.
        """
        self._loop.check(request)
        self._open.append(request)
        self._new.append(request)

    def take_in(self, loop: Loop) -> None:
        """Gives the loop the requests that were added since the last step."""
        for request in self._taken():
            is_added(loop, request)  # else the pool was made smaller by now

    def step(self) -> None:
        """Steps once for all rollouts, unless this one is done before its turn comes."""
        with self._owner.turn(unless=self._is_over) as has_come:
            if has_come and not self._is_over():
                self._owner.step()

    def pause(self) -> list[Request]:
        """Takes this rollout's requests out of the loop, with the tokens that were read.

        Returns:
          Those that have not ended.
        """
        with self._owner.turn():
            return self.withdraw()

    def withdraw(self) -> list[Request]:
        """Does so; the caller has the turn."""
        left = [request for request in self._open if not request.is_finished]
        self._open.clear()
        self._new.clear()
        for request in left:
            self._loop.withdraw(request)
        return left

    def score(self, *arguments: Any) -> Any:
        """Returns `Loop.score`, between steps."""
        with self._owner.turn():
            return self._loop.score(*arguments)

    def _is_over(self) -> bool:
        return all(request.is_finished for request in self._open)

    def _taken(self) -> Iterator[Request]:
        while self._new:
            yield self._new.pop(0)
