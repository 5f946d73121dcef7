"""One step of a drafter's training: pure functions over a state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from specjax.config.checks import is_int
from specjax.drafters.base import DrafterSpec
from specjax.models import sharding
from specjax.models.base import ModelConfig, Params
from specjax.training.drafts import Kind
from specjax.training.kinds import kind_of_spec
from specjax.training.objective import Objective, Sums, check_is_objective, loss_of
from specjax.training.texts import Along, Target, TextBatch, states_along

MOST_DEPTH = 8  # draft tokens per position that a drafter in use learns, where none are said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What is static about training a drafter; hashable, a jit key.

    Attributes:
      kind, config: of the drafter.
      target: config of the target.
      depth: draft tokens of each root that it is trained on.
      dtype: that the drafter computes in; its weights are kept in float32.

    Raises:
      ValueError: the drafter drafts no `depth` tokens.
    """

    kind: Kind
    config: Any
    target: ModelConfig
    depth: int
    objective: Objective
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        most = self.kind.most_drafts(self.config)
        if most is not None and self.depth > most:
            raise ValueError(
                f"depth={self.depth} is more than the {most} tokens that this {self.kind.name} "
                "drafts; lower the depth, or let the head draft more."
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the drafter reads."""
        return self.kind.taps(self.config)

    def loss(
        self, params: Params, target_params: Params, text: TextBatch, key: Array | None
    ) -> tuple[Array, Sums]:
        """Returns the mean loss of the drafts along texts, f32[], and sums over the draft tokens.

        It is differentiable in `params`; no gradient reaches the target.

        Args:
          params: of the drafter.
          key: of what is drawn, as the roots of blocks; None: drafts after every token.
        """
        target = Target(self.target, jax.lax.stop_gradient(target_params))
        along = states_along(target, text, self.taps)
        return self.loss_along(params, along, key)

    def loss_along(self, params: Params, along: Along, key: Array | None) -> tuple[Array, Sums]:
        """Returns what `loss` does, along texts whose hidden states are known."""
        own = cast(params, self.dtype)
        drafts = self.kind.propose(own, self.config, along, self.depth, key)
        return loss_of(self.objective, along, drafts)


class LearningState(NamedTuple):
    """The state of a training run; a pytree.

    Attributes:
      params: float32 weights of the drafter, and its target_ids where it has some.
      step: i32[], updates made.
      key: of the run; a step draws from it and from its number.
    """

    params: Params
    opt_state: Any
    step: Array
    key: Array


def begin(
    learner: Learner,
    optimizer: optax.GradientTransformation,
    target_params: Params,
    seed: int,
    target_ids: Array | None = None,
    given: Params | None = None,
) -> LearningState:
    """Returns the state before the first step.

    Args:
      target_ids: i32[n], the tokens that a drafter of a part of the vocabulary can say.
      given: weights to begin with, in float32; None: new ones.
    """
    first, key = jax.random.split(jax.random.key(seed))
    target = Target(learner.target, target_params)
    params = given
    if params is None:
        params = learner.kind.begin(first, learner.config, target, target_ids)
    learned, _ = split(params)
    return LearningState(params, optimizer.init(learned), jnp.zeros((), jnp.int32), key)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(
    learner: Learner,
    optimizer: optax.GradientTransformation,
    state: LearningState,
    target_params: Params,
    text: TextBatch,
) -> tuple[LearningState, Array]:
    """Returns the state after a step, which is donated, and the loss before it.

    A step whose gradient is not finite changes nothing but the number of steps.
    """
    learned, fixed = split(state.params)
    key = jax.random.fold_in(state.key, state.step)
    loss = lambda own: learner.loss(own | fixed, target_params, text, key)
    moved = descended(optimizer, loss, learned, state.opt_state)
    params = moved.params | fixed
    return LearningState(params, moved.opt_state, state.step + 1, state.key), moved.loss


class Descended(NamedTuple):
    """The result of an update.

    Attributes:
      loss, sums: before it.
      is_applied: bool[], whether it changed params and opt_state.
    """

    params: Params
    opt_state: Any
    loss: Array
    sums: Sums
    is_applied: Array


def descended(
    optimizer: optax.GradientTransformation,
    loss: Callable[[Params], tuple[Array, Sums]],
    params: Params,
    opt_state: Any,
) -> Descended:
    """Updates by a loss's gradient; one that is not finite, or whose update is not, changes
    nothing."""
    (value, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    is_finite = jnp.isfinite(sum(map(jnp.vdot, *[jax.tree.leaves(gradients)] * 2)))
    updates, new_state = optimizer.update(gradients, opt_state, params)
    is_finite &= jnp.isfinite(sum(map(jnp.vdot, *[jax.tree.leaves(updates)] * 2)))
    keep = lambda new, old: jnp.where(is_finite, new, old)
    moved = jax.tree.map(keep, optax.apply_updates(params, updates), params)
    state = jax.tree.map(keep, new_state, opt_state)
    return Descended(moved, state, value, sums, is_finite)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(learner: Learner, params: Params, target_params: Params, text: TextBatch) -> Sums:
    """Returns the sums over the draft tokens after every token of texts."""
    return learner.loss(params, target_params, text, None)[1]


def check_whole(
    values: Mapping[str, Any], least: Mapping[str, int], may_be_none: Collection[str] = ()
) -> None:
    """Raises ValueError for a value that is no whole number of at least so much."""
    for name, lowest in least.items():
        value = values[name]
        if value is None and name in may_be_none:
            continue
        if not is_int(value) or value < lowest:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {lowest}.")


def check_seed(seed: Any) -> None:
    """Raises ValueError for a seed that is no whole number from 0 to 2**63 - 1."""
    if not is_int(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"{seed=!r} must be a whole number of at least 0 and below 2**63.")


def check_is_optimizer(optimizer: Any) -> None:
    """Raises TypeError for what is no optimiser of optax."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer is {optimizer!r:.100}; expected an optax.GradientTransformation."
        )


def check_optimizer(optimizer: optax.GradientTransformation, params: Params) -> None:
    """Raises ValueError for an optimiser whose updates have not the form of the weights, whose
    state changes its form, or which needs more than gradients and weights.

    Args:
      params: weights that are learned, or their shapes.
    """
    state = jax.eval_shape(optimizer.init, params)
    try:
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
    except TypeError as error:
        raise ValueError(
            f"the optimizer does not update by gradients and weights alone ({error}); give another "
            "optimizer."
        ) from error
    form = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    if form(state) != form(after):
        raise ValueError(
            "the optimizer's state has another form after an update; expected an "
            "optax.GradientTransformation whose state keeps its tree, shapes and dtypes."
        )
    expected, found = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, (params, updates))
    )
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    if wrong:
        name = wrong[0]
        shape = lambda shapes: shapes.get(name, "none")
        raise ValueError(
            f"the optimizer's update of {name} has the shape {shape(found)}, and the weights "
            f"{shape(expected)}; expected an optax.GradientTransformation whose updates are trees "
            "of the shapes of the weights."
        )


def learner_of(
    spec: DrafterSpec,
    params: Params,
    target: ModelConfig,
    *,
    depth: int | None,
    num_speculative_tokens: int,
    objective: Objective | None,
) -> Learner:
    """Returns what learns for a drafter that is in use.

    Args:
      spec, params: of the drafter; its weights may be shapes.
      depth: draft tokens per position; None: K, at most 8, and at most what the drafter can.
      num_speculative_tokens: K.

    Raises:
      NotImplementedError: the drafter is of a kind that cannot be trained.
      ValueError: the drafter drafts no `depth` tokens, or `depth` is above K and 8.
    """
    kind, config = kind_of_spec(spec)
    check_whole({"depth": depth}, {"depth": 1}, may_be_none=("depth",))
    if objective is not None:
        check_is_objective(objective)
    useful = max(num_speculative_tokens, MOST_DEPTH)
    if depth is not None and depth > useful:
        raise ValueError(
            f"{depth=} must be at most {useful}: a step drafts {num_speculative_tokens} tokens at "
            "most (num_speculative_tokens)."
        )
    most = kind.most_drafts(config) or MOST_DEPTH
    usual = min(max(num_speculative_tokens, 1), MOST_DEPTH, most)
    return Learner(
        kind=kind,
        config=config,
        target=target,
        depth=depth or usual,
        objective=objective or Objective(),
        dtype=compute_dtype(params),
    )


def place_beside(params: Params, axis: str | None = None) -> Any:
    """Returns where arrays beside a target go; None: the default device.

    Args:
      params: of the target.
      axis: of its mesh that the first axis is split over, where the mesh has it; None: every device
        holds the whole.
    """
    place = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(place, NamedSharding):
        return place
    axes = [axis] if axis in place.mesh.axis_names else []
    return NamedSharding(place.mesh, PartitionSpec(*axes))


def traced_beside(params: Params) -> contextlib.AbstractContextManager[None]:
    """Context for tracing what learns from a target: its ops are for the devices of the weights.

    Args:
      params: of the target; over no mesh, ops are for the default device.
    """
    return sharding.lowered(getattr(place_beside(params), "mesh", None))


def split(params: Params) -> tuple[Params, Params]:
    """Returns the weights that are learned, and the others: numbers of tokens."""
    is_fixed = lambda leaf: not jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jnp.floating)
    fixed = {name: leaf for name, leaf in params.items() if is_fixed(leaf)}
    return {name: leaf for name, leaf in params.items() if name not in fixed}, fixed


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Returns the weights in another floating dtype; numbers of tokens stay as they are."""
    to = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return jax.tree.map(to, params)


def compute_dtype(params: Params) -> Any:
    """Returns the dtype that a drafter beside these weights computes in: theirs, if it is of
    floating point and at least two bytes; else float32."""
    dtypes = [jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)]
    wide = [one for one in dtypes if jnp.issubdtype(one, jnp.floating) and one.itemsize > 1]
    return wide[0] if wide else jnp.dtype(jnp.float32)
