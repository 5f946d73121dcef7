"""The arrays of a Rollout while it runs, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from specjax.config.sampling import SamplingParams
from specjax.engine.request import SCORE_COLUMNS, Request
from specjax.rl.batch import (
    ERROR,
    LENGTH,
    STOP,
    UNFINISHED,
    Rollout,
    RolloutLogProbs,
    RolloutTurns,
)

_REASONS = {"stop": STOP, "length": LENGTH, "error": ERROR}


class Table:
    """The arrays of a Rollout while it runs; fields have the names of Rollout and RolloutTurns."""

    def __init__(self, prompts: Sequence[Sequence[int]], width: int, length: int):
        """Makes the arrays for the prompt of every sample, and the widths of both parts."""
        count = len(prompts)
        self.prompt_ids, self.completion_ids, self.params_versions = (
            np.zeros((count, each), np.int32) for each in (width, length, length)
        )
        self.prompt_mask = np.zeros((count, width), bool)
        for index, prompt in enumerate(prompts):
            if len(prompt):
                self.prompt_ids[index, -len(prompt) :] = prompt
                self.prompt_mask[index, -len(prompt) :] = True
        self.loss_mask = np.zeros((count, length), bool)
        self.scores = np.zeros((count, length, len(SCORE_COLUMNS)), np.float32)
        self.top_ids: np.ndarray | None = None
        self.top: np.ndarray | None = None
        self.has_entropy = False
        self.lengths, self.finish_reasons, self.prompt_index = np.zeros((3, count), np.int32)
        self.num_drafted, self.num_accepted, self.num_steps = np.zeros((3, count), np.int32)
        self.seeds = np.zeros((count, 2), np.uint32)
        self.errors: dict[int, str] = {}  # by sample
        # Of turns: tokens of each completion before its newest turn, and the arrays.
        self.starts = np.zeros(count, np.int64)
        self.has_turns = False
        self.index = np.full((count, length), -1, np.int32)
        self.counts = np.ones(count, np.int32)
        self.turn_reasons, self.rewards = np.zeros((count, 1), np.int32), np.zeros((count, 1))

    @classmethod
    def of(cls, batch: Rollout, width: int | None = None) -> Table:
        """Returns the table of a rollout's arrays.

        Args:
          width: of the completions; None: as it is. None may be longer.
        """
        own = batch.completion_ids.shape[1]
        width = own if width is None else width
        table = cls([()] * batch.num_samples, batch.prompt_ids.shape[1], width)
        for name in _AS_THEY_ARE:
            setattr(table, name, np.array(getattr(batch, name)))
        table.index = np.where(batch.completion_mask, 0, -1).astype(np.int32)
        columns = batch.logprobs.behaviour, batch.logprobs.tempered, batch.logprobs.raw
        entropy = np.zeros((batch.num_samples, own)) if batch.entropy is None else batch.entropy
        scores = map(np.asarray, (*columns, entropy))
        table.scores = np.stack(list(scores), axis=-1).astype(np.float32)
        table.has_entropy = batch.entropy is not None
        if batch.top_ids is not None:
            table.top_ids = np.array(batch.top_ids)
            table.top = np.array(batch.top_logprobs)
        table.turn_reasons[:, 0] = table.finish_reasons
        if batch.turns is not None:
            table._take_turns(batch.turns)
        table.widen(width)
        return table

    def widen(self, width: int) -> None:
        """Sets the width of completions, at least that of the longest."""
        for name in _OVER_TOKENS:
            if (values := getattr(self, name)) is not None:
                setattr(self, name, _widened(values, width, -1 if name == "index" else 0))

    def _take_turns(self, turns: RolloutTurns) -> None:
        self.has_turns = True
        self.index, self.counts = np.array(turns.index), np.array(turns.counts)
        self.turn_reasons, self.rewards = np.array(turns.finish_reasons), np.array(turns.rewards)
        is_before = (self.index >= 0) & (self.index < self.counts[:, None] - 1)
        self.starts = is_before.sum(axis=1)

    def describe(self, sampling: SamplingParams) -> None:
        """Allocates arrays for the per-token values that `sampling` asks for."""
        count, length = self.completion_ids.shape
        self.has_entropy |= sampling.entropy
        if sampling.logprobs and self.top_ids is None:
            shape = count, length, sampling.logprobs
            self.top_ids = np.zeros(shape, np.int32)
            self.top = np.zeros(shape, np.float32)

    @property
    def is_answerable(self) -> np.ndarray:
        """Whether each sample's newest turn ended, so that an environment may reply; bool."""
        reasons = self.turn_reasons[np.arange(len(self.counts)), self.counts - 1]
        return (reasons == STOP) | (reasons == LENGTH)

    def prompt_of(self, index: int) -> list[int]:
        """Returns the tokens before a sample's newest turn: its prompt, and earlier turns."""
        prompt = self.prompt_ids[index][self.prompt_mask[index]].tolist()
        return [*prompt, *self.completion_ids[index, : self.starts[index]].tolist()]

    def fill(self, index: int, request: Request, most: int) -> None:
        """Adds what a request gained, and its error; it is the sample's newest turn.

        Args:
          most: tokens of prompt and completion at which it ends without a token budget.
        """
        start = self.starts[index]
        end = start + len(request.output_token_ids)
        gained = index, slice(start + request.num_resumed, end)
        self.completion_ids[index, start:end] = request.output_token_ids
        tokens = request.num_resumed, len(request.output_token_ids)
        self.params_versions[gained] = request.lineage.versions(*tokens)
        self.loss_mask[gained] = True
        self.index[gained] = self.counts[index] - 1
        self.lengths[index] = end
        if request.logprobs:
            columns, top_ids, top = zip(*request.logprobs, strict=True)
            self.scores[gained] = columns
            if self.top_ids is not None and self.top is not None:
                k = self.top_ids.shape[2]
                self.top_ids[gained] = np.stack(top_ids)[:, :k]
                self.top[gained] = np.stack(top)[:, :k]
        reason = _REASONS.get(request.finish_reason or "", UNFINISHED)
        if reason == LENGTH and len(request.token_ids) < most:
            reason = UNFINISHED
        self.finish_reasons[index] = self.turn_reasons[index, self.counts[index] - 1] = reason
        if reason == ERROR:
            self.errors[index] = str(request.error)
        self.num_drafted[index] += request.counts.num_drafted
        self.num_accepted[index] += request.counts.num_accepted
        self.num_steps[index] += request.counts.num_steps

    def allow_turns(self, most: int) -> None:
        """Makes room for the figures of that many turns."""
        self.has_turns = True
        most = max(most, self.rewards.shape[1])
        self.rewards, self.turn_reasons = (
            _widened(values, most, 0) for values in (self.rewards, self.turn_reasons)
        )

    def reply(self, index: int, token_ids: Sequence[int]) -> None:
        """Adds an environment's tokens to a sample, and begins its next turn."""
        start, end = self.lengths[index], self.lengths[index] + len(token_ids)
        self.completion_ids[index, start:end] = token_ids
        self.index[index, start:end] = self.counts[index] - 1
        self.lengths[index] = self.starts[index] = end
        self.finish_reasons[index] = UNFINISHED
        self.counts[index] += 1
        self.allow_turns(int(self.counts[index]))

    def placed(self, place: Sharding | None, **beside: Any) -> Rollout:
        """Returns the rollout with its arrays on the device.

        Args:
          beside: fields that are no arrays.
        """
        put = jnp.asarray if place is None else lambda x: jax.device_put(x, place)
        behaviour, tempered, raw, entropy = np.moveaxis(self.scores, -1, 0)
        length = self.completion_ids.shape[1]
        return Rollout(
            **{name: put(getattr(self, name)) for name in _AS_THEY_ARE},
            completion_mask=put(np.arange(length) < self.lengths[:, None]),
            logprobs=RolloutLogProbs(
                behaviour=put(behaviour), tempered=put(tempered), raw=put(raw)
            ),
            entropy=put(entropy) if self.has_entropy else None,
            top_ids=None if self.top_ids is None else put(self.top_ids),
            top_logprobs=None if self.top is None else put(self.top),
            turns=self._turns(put) if self.has_turns else None,
            **beside,
        )

    def _turns(self, put: Callable[[Any], Array]) -> RolloutTurns:
        return RolloutTurns(
            index=put(self.index),
            counts=put(self.counts),
            finish_reasons=put(self.turn_reasons),
            rewards=put(self.rewards.astype(np.float32)),
        )


def _widened(values: np.ndarray, width: int, fill: int) -> np.ndarray:
    """Returns an array with another size of its second axis, filled up at the end."""
    if values.shape[1] >= width:
        return values[:, :width]
    new = np.full((len(values), width, *values.shape[2:]), fill, values.dtype)
    new[:, : values.shape[1]] = values
    return new


# Fields of Rollout that Table has under the same name.
_AS_THEY_ARE = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "loss_mask",
    "lengths",
    "finish_reasons",
    "params_versions",
    "num_drafted",
    "num_accepted",
    "num_steps",
    "prompt_index",
    "seeds",
)
# Fields of Table whose second axis is that of the completions' tokens.
_OVER_TOKENS = (
    "completion_ids",
    "loss_mask",
    "params_versions",
    "scores",
    "top_ids",
    "top",
    "index",
)
