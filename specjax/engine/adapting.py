"""Lets a drafter learn between bursts: when, for how long, and from which kept texts. No jax.

What learns is handed in (`Learner`); see `specjax.training.serving`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.engine.request import Request
from specjax.engine.run_state import RunState
from specjax.engine.windows import KeptText
from specjax.policy.interface import ExpectsAcceptance, SpeculationPolicy
from specjax.runtime.stack_level import of_the_caller
from specjax.types import DecoderParams


class Learned(NamedTuple):
    """The result of a step of learning.

    Attributes:
      params: the drafter's weights for steps; None where the update was dropped.
      loss: of the texts before the update, nats.
      survival: for each draft token of a path, how likely it and all before it were accepted
        before the update, which these texts did not change; () where that is not known.
    """

    params: Any
    loss: float
    survival: Sequence[float] = ()


class Learner(Protocol):
    """Learns from kept texts.

    Attributes:
      rows: most texts of a step.
      num_bytes: of its weights and of the optimiser's state.
    """

    rows: int

    @property
    def num_bytes(self) -> int: ...

    def restart(self, params: Any) -> None:
        """Begins again from weights of the drafter, which are copied."""
        ...

    def learn(self, target: Any, states: tuple[Any, ...], texts: Sequence[KeptText]) -> Learned:
        """Takes a step, and returns when its results are there.

        Args:
          target: weights of the target.
          states: as `Kept.states`.
          texts: at most `rows`, of different windows.
        """
        ...

    def let_go(self) -> None:
        """Frees its memory."""
        ...


class AdaptStats(NamedTuple):
    """What a drafter that learns while it serves has done so far.

    Attributes:
      num_updates: steps that changed the drafter's weights.
      num_dropped: steps whose update was dropped: the loss or the update was not finite, or the
        loss of its own texts rose by far.
      loss: of the last step before its update, nats; None before any.
      learn_s: seconds of all steps, bursts that had to end before them included.
      share: of the time since the engine was made that steps took beside requests, 0 to 1; steps
        of an engine without work are left out.
      num_tokens: tokens of outputs whose hidden states were kept so far.
      num_texts: windows that hold a text now.
      kept_bytes: of the windows, over all devices.
      learner_bytes: of the weights in float32 and the optimiser's state.
      is_off: whether it stopped, after an error that a warning named or with the drafter.
    """

    num_updates: int
    num_dropped: int
    loss: float | None
    learn_s: float
    share: float
    num_tokens: int
    num_texts: int
    kept_bytes: int
    learner_bytes: int
    is_off: bool


class Budget:
    """Seconds that steps may take: a share of the time, of which at most two steps' is saved up."""

    def __init__(self, max_share: float, clock: Callable[[], float] = time.perf_counter):
        self._max_share, self.clock = max_share, clock
        self._begun_at = self._counted_to = clock()
        self._left_s = self._spent_s = 0.0

    def allows(self, seconds: float) -> bool:
        """Returns whether a step of so many seconds stays within the share.

        However long nothing was spent, as while an engine has no work, no more than two steps
        follow each other for it.
        """
        now = self.clock()
        earned = self._max_share * (now - self._counted_to)
        self._left_s = min(self._left_s + earned, 2.0 * seconds)
        self._counted_to = now
        return seconds <= self._left_s

    def spend(self, seconds: float) -> None:
        """Counts seconds that requests waited."""
        self._left_s -= seconds
        self._spent_s += seconds

    @property
    def share(self) -> float:
        """The share that was spent so far."""
        elapsed = self.clock() - self._begun_at
        return self._spent_s / elapsed if elapsed > 0 else 0.0


class Adapting:
    """Decides between bursts whether the drafter learns, and lets it.

    Args:
      every_tokens: tokens of outputs that come to be kept between two steps.
      max_share: most of the time since now that steps may take while requests run, 0 to 1.
      idle_steps: most steps between two times that there is work.
      first_s: seconds that a step is taken to last, before one was measured in service.
      seed: of the texts that are drawn beside the newest ones.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        every_tokens: int,
        max_share: float,
        idle_steps: int,
        kept_bytes: int,
        first_s: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._learner = learner
        self._every_tokens, self._idle_steps = every_tokens, idle_steps
        self._kept_bytes = kept_bytes
        self._budget = Budget(max_share, clock)
        self._random = np.random.default_rng(seed)
        self._step_s = first_s
        self._idle_left = 0
        self._num_learned_of = 0  # tokens kept when it last learned
        self._newest = -1  # number of the newest text that was learned from
        self._num_updates = self._num_dropped = 0
        self._loss: float | None = None
        self._learn_s = 0.0
        self._is_off = self._has_warned = self._is_interrupted = False

    @property
    def num_updates(self) -> int:
        """Steps that changed the drafter's weights."""
        return self._num_updates

    def stats(self, run: RunState | None) -> AdaptStats:
        """Returns the figures so far; None for a run that is over."""
        return AdaptStats(
            num_updates=self._num_updates,
            num_dropped=self._num_dropped,
            loss=self._loss,
            learn_s=self._learn_s,
            share=self._budget.share,
            num_tokens=0 if run is None else run.num_kept,
            num_texts=0 if run is None else len(run.kept_texts),
            kept_bytes=self._kept_bytes if run is not None and run.has_windows else 0,
            learner_bytes=0 if self._is_off else self._learner.num_bytes,
            is_off=self._is_off or run is None or run.faults.is_drafter_off,
        )

    def _can_learn(self, run: RunState) -> bool:
        return not self._is_off and not run.faults.is_drafter_off and run.has_windows

    def is_due(self, run: RunState, step_s: float | None) -> bool:
        """Returns whether the drafter should learn before the next burst.

        Args:
          step_s: seconds of a step of the last burst; None before any.
        """
        self._idle_left = self._idle_steps
        if run.faults.is_drafter_off:
            self._learner.let_go()  # until `restart` brings other weights
        if not self._can_learn(run) or not run.kept_texts:
            return False
        if run.num_kept - self._num_learned_of < self._every_tokens:
            return False
        return self._budget.allows(self._step_s) and not self._endangers(run, step_s or 0.0)

    def _endangers(self, run: RunState, step_s: float) -> bool:
        """Returns whether a request with a deadline, at a token per step, would end after it."""
        now = self._budget.clock()

        def end(request: Request) -> float:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            return now + self._step_s + step_s * (request.max_length - num_tokens)

        if not len(run.deadlines):
            return False
        return any(
            request.deadline is not None and end(request) > request.deadline
            for request in run.requests
        )

    def learn(self, run: RunState, policy: SpeculationPolicy, *, begun_at: float) -> None:
        """Takes a step; no burst is in flight.

        Args:
          begun_at: by the clock, when requests began to wait for it. What was read back since may
            have turned the drafter off, or shown that nothing is kept: then no step is taken.
        """
        if not self._can_learn(run) or not run.kept_texts:
            self._budget.spend(self._budget.clock() - begun_at)
            return
        self._take_step(run, policy)
        seconds = self._budget.clock() - begun_at
        self._step_s = seconds
        self._budget.spend(seconds)
        self._learn_s += seconds

    def learn_idle(self, run: RunState, policy: SpeculationPolicy) -> bool:
        """Takes a step if the engine has none else to do and may take another; returns whether."""
        if not self._idle_left or not self._can_learn(run) or not run.kept_texts:
            return False
        self._idle_left -= 1
        begun_at = self._budget.clock()
        self._take_step(run, policy)
        self._learn_s += self._budget.clock() - begun_at
        return True

    def clock(self) -> float:
        """Returns the time that `begun_at` is of."""
        return self._budget.clock()

    def restart(self, run: RunState) -> None:
        """Goes on from other weights of the drafter, which a trainer brought."""
        if not self._is_off and not run.faults.is_drafter_off:
            self._guarded(lambda: self._learner.restart(run.params.drafter))

    def close(self) -> None:
        """Frees the memory of what learns."""
        self._is_off = True
        self._learner.let_go()

    def _take_step(self, run: RunState, policy: SpeculationPolicy) -> None:
        self._num_learned_of = run.num_kept
        texts = self._drawn(run.kept_texts)
        target, states = run.params.target, run.device_state.kept.states
        if self._is_interrupted:  # the weights in float32 were lost
            self.restart(run)
            if self._is_off:
                return
        self._is_interrupted = True
        learned = self._guarded(lambda: self._learner.learn(target, states, texts))
        self._is_interrupted = False
        if learned is None:
            return
        self._loss = learned.loss
        if learned.params is None:
            self._drop(learned.loss)
            return
        self._guarded(lambda: self._hand_out(run, policy, learned))

    def _hand_out(self, run: RunState, policy: SpeculationPolicy, learned: Learned) -> None:
        """Gives new weights to steps, and tells the policy of K."""
        run.take_drafter(DecoderParams(run.params.target, learned.params))
        self._num_updates += 1
        if len(learned.survival) and isinstance(policy, ExpectsAcceptance):
            policy.expect_acceptance(learned.survival)

    def _drawn(self, texts: Sequence[KeptText]) -> list[KeptText]:
        """Returns the texts that were not learned yet, the newest first, and some of the others."""
        new = [text for text in reversed(texts) if text.number > self._newest]
        old = [text for text in texts if text.number <= self._newest]
        new = new[: self._learner.rows]
        count = min(self._learner.rows - len(new), len(old))
        others = self._random.choice(len(old), count, replace=False) if count else ()
        self._newest = max(self._newest, texts[-1].number)
        return [*new, *(old[index] for index in others)]

    def _drop(self, loss: float) -> None:
        self._num_dropped += 1
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an update of the drafter was dropped (loss {loss:.4g}): it was not finite, or "
                "the loss of its own texts rose by far. The drafter stays as it was and goes on "
                "learning; lower the optimiser's learning rate if AdaptStats.num_dropped grows.",
                stacklevel=of_the_caller(),
            )

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Runs a part that must not end requests: if it raises, learning is over."""
        try:
            return run()
        except Exception as error:  # an optimiser may raise anything, a device lack memory
            self.close()
            warnings.warn(
                f"the drafter learns no more: {error!r:.300}. Requests go on with the drafter as "
                "it is.",
                stacklevel=of_the_caller(),
            )
            return None
