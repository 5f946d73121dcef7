"""What `Engine(adapt=...)` takes, as the layers above define it, and how it is put together."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

from specjax.api.assemble import Setup
from specjax.engine.adapting import Adapting
from specjax.engine.loop import Loop
from specjax.models import sharding

S = TypeVar("S", bound=Setup)


@runtime_checkable
class Adaptation(Protocol):
    """How a drafter learns while an engine serves; `specjax.Adapt` is one."""

    def shape(self, context: int, num_shards: int) -> Any:
        """Returns the decode.kept.KeptShape of hidden states."""
        ...

    def learner(self, drafter: Any, target: Any, num_speculative_tokens: int, length: int) -> Any:
        """Returns what learns; see `specjax.training.serving.WindowLearner`."""
        ...

    def adapting(self, learner: Any, kept_bytes: int, first_s: float) -> Adapting:
        """Returns what decides when it learns."""
        ...


def with_learner(setup: S, adapt: Any) -> tuple[S, Any]:
    """Returns a setup that keeps hidden states and plans for a learner, and the learner.

    Args:
      setup: with weights, or with their shapes.

    Raises:
      TypeError: `adapt` is no such setting.
      NotImplementedError, ValueError: the drafter cannot learn.
    """
    if not isinstance(adapt, Adaptation):
        raise TypeError(f"adapt is {adapt!r:.100}; expected a specjax.Adapt, or None.")
    target, engine = setup.target.config, setup.engine
    most = target.max_position_embeddings
    num_shards = sharding.axis_size(setup.mesh, sharding.DATA)
    shape = adapt.shape(min(most, engine.max_context or most), num_shards)
    running = dataclasses.replace(target, activation_dtype=engine.activation_dtype)
    if not setup.drafter.can_draft:
        raise ValueError(
            "adapt= lets a drafter learn, and this engine has none that drafts; give a head over "
            "the target or a draft model, and num_speculative_tokens of at least 1."
        )
    depth = setup.speculation.depth
    learner = adapt.learner(setup.drafter, running, depth, shape.length)
    setup.check_kept(shape, len(learner.layers))
    num_bytes = 0
    if engine.memory_bytes is not None and num_shards == 1:
        with sharding.lowered(setup.mesh):
            num_bytes = sum(learner.planned_bytes(setup.target.params, setup.drafter.params, shape))
    return dataclasses.replace(setup, kept=shape, learner_bytes=num_bytes), learner


def attach(adapt: Adaptation, learner: Any, loop: Loop) -> None:
    """Lets a loop's drafter learn from now on, unless it is turned off."""
    states = loop.kept_states
    if not states:
        return
    first_s = learner.warm_up(loop.params.drafter, loop.params.target, states)
    kept_bytes = sum(leaf.nbytes for leaf in states)
    loop.adapting = adapt.adapting(learner, kept_bytes, first_s)
