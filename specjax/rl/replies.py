"""Adds an environment's replies to a rollout by hand: see Rollout.continued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array

from specjax.rl.batch import LENGTH, STOP, Rollout
from specjax.rl.table import Table


def continued(
    batch: Rollout,
    replies: Sequence[Sequence[int] | None],
    rewards: Sequence[float] | np.ndarray | Array | None,
    width: int | None,
) -> Rollout:
    """See Rollout.continued."""
    lengths = np.asarray(batch.lengths)
    given = {place: list(reply) for place, reply in enumerate(replies) if reply is not None}
    _check(np.asarray(batch.finish_reasons), replies, given)
    ends = [int(lengths[place]) + len(reply) for place, reply in given.items()]
    own = batch.completion_ids.shape[1]
    if width is None:
        more = 1 if batch.sampling is None else batch.sampling.max_tokens
        width = max([own, *(end + more for end in ends)])
    needed = max([int(lengths.max(initial=0)), *(end + 1 for end in ends)])
    if width < needed:
        raise ValueError(
            f"{width=} must be at least {needed}, the tokens of the longest dialogue with its "
            "reply and one more; raise it, or pass None as that dialogue's reply."
        )
    table = Table.of(batch, width)
    table.allow_turns(1)
    if rewards is not None:
        table.rewards[np.arange(len(lengths)), table.counts - 1] = _checked(rewards, len(lengths))
    for place, reply in given.items():
        table.reply(place, reply)
    return table.placed(
        batch.lengths.sharding,
        is_exact=batch.is_exact,
        sampling=batch.sampling,
        metrics=batch.metrics,
    )


def _check(
    reasons: np.ndarray,
    replies: Sequence[Sequence[int] | None],
    given: dict[int, list[int]],
) -> None:
    if len(replies) != len(reasons):
        raise ValueError(
            f"{len(replies)} replies were given for {len(reasons)} samples; pass one each, None "
            "where a dialogue is over."
        )
    for place in given:
        if reasons[place] not in (STOP, LENGTH):
            raise ValueError(
                f"sample {place} has finish reason {int(reasons[place])}, and a reply; expected "
                f"STOP ({STOP}) or LENGTH ({LENGTH}): a turn that ended. Pass None for it."
            )


def _checked(rewards: Sequence[float] | np.ndarray | Array, count: int) -> np.ndarray:
    values = np.asarray(rewards, np.float32)
    if values.shape != (count,):
        raise ValueError(f"rewards have shape {values.shape}; expected ({count},), one per sample.")
    return values
