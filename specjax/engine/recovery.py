"""Recovery from errors: with fewer pages, without the drafter, or by ending every request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax

from specjax.decode.decoder import Decoder
from specjax.decode.executables import OUT_OF_MEMORY
from specjax.engine.faults import LostWeights, lost_weights
from specjax.engine.run_state import RunState
from specjax.types import DecoderParams

INTERRUPTED = "the engine was interrupted: {error!r}."  # Request.error


class Recovery:
    """Restarts a run after an error of the device, or ends it.

    Args:
      fewer_pages: returns a decoder like another with fewer pages, None if there is none.
    """

    def __init__(self, run: RunState, fewer_pages: Callable[[Decoder], Decoder | None]):
        self._run = run
        self._fewer_pages = fewer_pages

    def recover(self, error: BaseException) -> None:
        """Makes the run ready for the next step after an error in one.

        Raises:
          BaseException: the error, or LostWeights in its place, if there is no recovery.
            Every request has ended with "error" then.
        """
        goes_on = False
        try:
            goes_on = self._begin_again(error)
        finally:
            if not goes_on:
                lost = lost_weights(self._run.params, "target")
                if lost and isinstance(error, Exception):
                    error = LostWeights(lost)
                self.abandon(error)
        if not goes_on:
            raise error

    def restart(self) -> None:
        """Empties all rows and pages; the requests that ran go back to the queue."""
        run = self._run
        waiting, deadlines = run.scheduler.waiting, run.deadlines
        running = [row.request for row in run.scheduler.occupied]
        try:
            run.begin()
        finally:
            run.scheduler.waiting, run.deadlines = waiting, deadlines
            for request in running:
                if not request.is_finished:
                    request.num_preemptions += 1
                    waiting.push(request)

    def abandon(self, error: BaseException) -> None:
        """Ends every request after an exception, and makes a new device state.

        If the device cannot allocate one either, the next step tries again.
        """
        for request in self._run.requests:
            request.fail(INTERRUPTED.format(error=error))
        # A second error must not hide the first.
        with contextlib.suppress(Exception):
            self._run.begin()

    def _begin_again(self, error: BaseException) -> bool:
        """Restarts after an error that lost the device's state; returns whether that worked.

        If memory ran out, pages are made fewer. Otherwise the drafter may be the cause (its
        weights may have been deleted), and it is turned off. Requests go on from the tokens
        that were read, as after a preemption.

        Returns:
          False if neither helps, or the error is not the device's.
        """
        run = self._run
        lost = lost_weights(run.params, "drafter")
        if lost and isinstance(error, Exception) and not run.faults.is_drafter_off:
            self._lose_drafter(lost)
            return True
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        if OUT_OF_MEMORY in str(error) and self._begin_with_fewer_pages():
            return True
        has_none = not run.decoder.drafter.can_draft
        if has_none or run.faults.is_drafter_off:
            return False
        run.turn_drafter_off(f"a step failed on the device with {str(error)[:200]!r}")
        self.restart()
        return True

    def _lose_drafter(self, lost: list[str]) -> None:
        """Restarts without the drafter after some of its weights were deleted."""
        run = self._run
        is_missed = any(request.draft_cap for request in run.requests)
        run.faults.lose_drafter(lost, is_missed=is_missed)
        run.params = DecoderParams(run.params.target)
        self.restart()

    def _begin_with_fewer_pages(self) -> bool:
        """Restarts with fewer pages; returns False if even the fewest do not fit."""
        run = self._run
        while (decoder := self._fewer_pages(run.decoder)) is not None:
            share = decoder.sizes.num_pages / run.decoder.sizes.num_pages
            run.use(decoder)
            run.gate = run.gate.of_share(share)
            if run.most_tokens is not None:
                run.most_tokens = int(run.most_tokens * share)
            try:
                self.restart()
            except jax.errors.JaxRuntimeError as error:
                if OUT_OF_MEMORY not in str(error):
                    raise
            else:
                return True
        return False
