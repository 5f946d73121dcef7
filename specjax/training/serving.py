"""Adapt: a drafter that learns while an engine serves, from hidden states that steps saw anyway.

    engine = specjax.Engine(target, drafter=head, adapt=specjax.Adapt(optax.adam(1e-4)))

Steps keep the hidden states of committed tokens in windows on the device (`decode.kept`). Between
two bursts a step of learning reads some windows: the target's head gives the distributions that
drafts are compared with, so no forward of the target is made. Drafts change no token, so texts are
those of an engine without it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specjax.config.checks import is_number
from specjax.decode.kept import KeptShape
from specjax.engine.adapting import Adapting, Learned
from specjax.engine.windows import KeptText
from specjax.heads.loading import LoadedDrafter
from specjax.models.base import ModelConfig, Params, resolve_taps
from specjax.training import figures, learning
from specjax.training.objective import Objective, Sums, check_is_objective
from specjax.training.texts import LEAST_TOKENS, Along, Target, TextBatch

# An update is dropped if the loss of its own texts rises by more than this share of it, and by more
# nats than this.
MOST_RISE = 1.0


@dataclasses.dataclass(frozen=True)
class Adapt:
    """How the drafter of an engine learns while it serves.

    Attributes:
      optimizer: any of optax that updates by gradients and weights alone.
      every_tokens: tokens of outputs that come to be kept between two steps of learning.
      rows: windows of a step, at most `replay`; the newest, and some of the others.
      length: tokens of a window, half of which may be prompt; at most what a row holds.
      replay: windows that the device keeps, at least 2. Half of them are being written.
      max_share: most of the wall time since the engine was made that steps may take while
        requests run, above 0 and at most 1.
      idle_steps: most steps between two times that there is work; `Engine.step` takes one where
        it has nothing else to do.
      depth: draft tokens per position that are learned, at most K of the engine or 8; None: K, at
        most 8, and at most what the drafter can.
      objective: losses; None: the default one. Its temperature should be that of requests.
      seed: of the windows that are drawn, and of what is drawn along them.

    Raises:
      TypeError, ValueError: a value is none that can be.
    """

    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    every_tokens: int = 1024
    rows: int = 4
    length: int = 256
    replay: int = 16
    max_share: float = 0.05
    idle_steps: int = 4
    depth: int | None = None
    objective: Objective | None = None
    seed: int = 0

    def __post_init__(self):
        learning.check_is_optimizer(self.optimizer)
        if self.objective is not None:
            check_is_objective(self.objective)
        least = {"every_tokens": 1, "rows": 1, "length": LEAST_TOKENS, "replay": 2}
        least |= {"idle_steps": 0, "depth": 1}
        learning.check_whole(vars(self), least, may_be_none=("depth",))
        learning.check_seed(self.seed)
        if not is_number(self.max_share) or not 0 < self.max_share <= 1:
            raise ValueError(f"max_share={self.max_share!r} must be above 0 and at most 1.")

    def shape(self, context: int, num_shards: int) -> KeptShape:
        """Returns how much is kept, where a row holds `context` tokens.

        Args:
          num_shards: of the mesh's data axis, each of which has as many windows.
        """
        per_shard = max(-(-self.replay // num_shards), 2)
        return KeptShape(per_shard * num_shards, min(self.length, context))

    def learner(
        self, drafter: LoadedDrafter, target: ModelConfig, num_speculative_tokens: int, length: int
    ) -> WindowLearner:
        """Returns what learns for a drafter; its weights come with `restart`.

        Args:
          drafter: its weights may be shapes alone.
          length: tokens of a window.

        Raises:
          NotImplementedError: the drafter is of a kind that cannot be trained.
          ValueError: the drafter drafts no `depth` tokens, `depth` is above K and 8, or the
            optimizer cannot be used.
        """
        return WindowLearner(self, drafter, target, num_speculative_tokens, length)

    def adapting(self, learner: WindowLearner, kept_bytes: int, first_s: float) -> Adapting:
        """Returns what decides when a learner learns.

        Args:
          kept_bytes: of the windows.
          first_s: seconds that a step takes.
        """
        return Adapting(
            learner,
            every_tokens=self.every_tokens,
            max_share=self.max_share,
            idle_steps=self.idle_steps,
            kept_bytes=kept_bytes,
            first_s=first_s,
            seed=self.seed,
        )


class LearnerBytes(NamedTuple):
    """Bytes of one device that learning takes."""

    kept: int  # weights in float32, the optimiser's state, and the weights that steps have
    workspace: int  # of a step of learning, beside them


class WindowLearner:
    """Learns from windows of hidden states; an `engine.adapting.Learner`."""

    def __init__(
        self,
        settings: Adapt,
        drafter: LoadedDrafter,
        target: ModelConfig,
        num_speculative_tokens: int,
        length: int,
    ):
        self.rows, self._length = min(settings.rows, settings.replay), length
        self._settings = settings
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, drafter.params)
        self._learner = learning.learner_of(
            drafter.spec,
            drafter.params,
            target,
            depth=settings.depth,
            num_speculative_tokens=num_speculative_tokens,
            objective=settings.objective,
        )
        learning.check_optimizer(settings.optimizer, _learned(drafter.params)[0])
        # As the decoder keeps them.
        absorbed = resolve_taps(drafter.spec.taps, target.num_layers)
        self.layers = tuple(dict.fromkeys((*absorbed, target.num_layers)))
        read = resolve_taps(self._learner.taps, target.num_layers)
        self._places = tuple(self.layers.index(layer) for layer in read)
        self._output = self.layers.index(target.num_layers)
        self._params: Any = None
        self._fixed: Any = None
        self._opt_state: Any = None
        self._num_bytes = self._num_steps = self._num_traces = 0
        self._compiled: dict[Any, Callable] = {}

    @property
    def num_traces(self) -> int:
        """How often a step was traced, and so compiled."""
        return self._num_traces

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in float32 and of the optimiser's state, over all devices."""
        return self._num_bytes

    def planned_bytes(self, target: Params, drafter: Params, shape: KeptShape) -> LearnerBytes:
        """Returns the bytes that learning takes, from shapes alone; compiles a step.

        Args:
          target, drafter: weights, or their shapes.
        """
        wide, learned, fixed = _learned(drafter)
        opt_state = jax.eval_shape(self._settings.optimizer.init, wide)
        size = shape.num_windows, shape.length, self._learner.target.hidden_size
        dtype = learning.compute_dtype(target)
        states = tuple(jax.ShapeDtypeStruct(size, dtype) for _ in self.layers)
        text, windows = _batch([], self.rows, self._length)
        inputs = wide, opt_state, fixed, _shapes(target), states, windows, text, np.int32(0)
        found: Any = self._jitted().lower(*inputs).compile().memory_analysis()
        beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        kept = jax.tree.leaves((wide, opt_state, learned))
        kept_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)
        return LearnerBytes(kept_bytes, max(beside, 0))

    def restart(self, params: Params) -> None:
        """Begins again from weights of the drafter, which are copied to float32."""
        self.let_go()
        learned, self._fixed = learning.split(params)
        self._params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), learned)
        self._opt_state = _beside(self._params, self._settings.optimizer.init(self._params))
        arrays = jax.tree.leaves((self._params, self._opt_state))
        self._num_bytes = sum(each.nbytes for each in arrays)

    def warm_up(self, params: Params, target: Params, states: tuple[Array, ...]) -> float:
        """Begins from weights of the drafter and compiles a step; returns the seconds of one."""
        self.restart(params)
        self.learn(target, states, ())
        start = time.perf_counter()
        self.learn(target, states, ())
        seconds = time.perf_counter() - start
        self.restart(params)  # an optimiser may move weights without a gradient
        self._num_steps = 0
        return seconds

    def learn(
        self, target: Params, states: tuple[Array, ...], texts: Sequence[KeptText]
    ) -> Learned:
        """Takes a step; see `engine.adapting.Learner`."""
        batch, windows = _batch(texts, self.rows, self._length)
        if self._params is None:
            raise RuntimeError("there are no weights to learn; call restart(params) first.")
        given = self._params, self._opt_state
        self._params = self._opt_state = None  # donated: an interrupt loses them
        arguments = *given, self._fixed, target, states, windows, batch, np.int32(self._num_steps)
        step = self._executable(target, arguments)
        own, opt_state, loss, is_kept, sums = jax.block_until_ready(step(*arguments))
        self._params, self._opt_state = own, opt_state
        self._num_steps += 1
        if not bool(is_kept):
            return Learned(None, float(loss))
        ways = [(text.rule, text.temperature) for text in texts]
        return Learned(self._served(), float(loss), figures.survival(sums, ways))

    def _executable(self, target: Params, arguments: tuple[Any, ...]) -> Callable:
        """Returns the compiled step for weights of the target's shapes, in the places they have."""
        places = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(target)]
        key = jax.tree.structure(target), tuple(places)
        if key not in self._compiled:
            with learning.traced_beside(target):
                self._compiled[key] = self._jitted(arguments[:2]).lower(*arguments).compile()
        return self._compiled[key]

    def _jitted(self, own: Any = None) -> Any:
        """Returns the step under jit; what it learns stays where it lies.

        Args:
          own: weights and optimiser's state; None: shapes alone are known.
        """
        places = (None, None) if own is None else jax.tree.map(lambda x: x.sharding, own)
        return jax.jit(
            self._traced, donate_argnums=(0, 1), out_shardings=(*places, None, None, None)
        )

    def let_go(self) -> None:
        """Frees the weights in float32 and the optimiser's state."""
        self._params = self._opt_state = None
        self._num_bytes = 0

    def _served(self) -> Params:
        """Returns the weights as steps have them: copies, because a step donates the others."""
        own = self._params | self._fixed
        return jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype), own, self._dtypes)

    def _traced(
        self,
        own: Params,
        opt_state: Any,
        fixed: Params,
        target_params: Params,
        states: tuple[Array, ...],
        windows: Array,
        text: TextBatch,
        step: Array,
    ) -> tuple[Params, Any, Array, Array, Sums]:
        """Returns weights and optimiser's state after an update, the loss before it, whether the
        update was kept, and the sums before it, which it did not fit to these texts."""
        self._num_traces += 1
        learner = self._learner
        target = Target(learner.target, jax.lax.stop_gradient(target_params))
        # What a window held before may be NaN, and stands behind the text.
        kept = [jnp.where(text.is_text[..., None], each[windows], 0) for each in states]
        taps = tuple(kept[place] for place in self._places)
        along = Along(target, text, taps, kept[self._output])
        key = jax.random.fold_in(jax.random.key(self._settings.seed), step)
        loss = lambda own: learner.loss_along(own | fixed, along, key)
        moved = learning.descended(self._settings.optimizer, loss, own, opt_state)
        before, (after, _) = moved.loss, loss(moved.params)
        most = before + MOST_RISE * jnp.maximum(jnp.abs(before), 1.0)
        is_kept = moved.is_applied & jnp.isfinite(before) & jnp.isfinite(after) & (after <= most)
        choose = lambda new, old: jnp.where(is_kept, new, old)
        new, new_state = jax.tree.map(choose, moved[:2], (own, opt_state))
        return new, new_state, before, is_kept, moved.sums


def _batch(texts: Sequence[KeptText], rows: int, length: int) -> tuple[TextBatch, np.ndarray]:
    """Returns texts as arrays of `rows` rows, and their windows i32[rows]; spare rows are empty."""
    token_ids = np.zeros((rows, length), np.int32)
    is_learned = np.zeros((rows, length), bool)
    lengths, windows = np.zeros((2, rows), np.int32)
    for row, text in enumerate(texts):
        count = len(text.token_ids)
        token_ids[row, :count] = text.token_ids
        is_learned[row, text.first_learned : count] = True
        lengths[row], windows[row] = count, text.window
    return TextBatch(token_ids, lengths, is_learned), windows


def _beside(params: Params, tree: Any) -> Any:
    """Returns a tree with its arrays on the devices of weights: whole on each, if not there yet."""
    whole = learning.place_beside(params)
    is_there = lambda x: x.sharding.device_set == whole.device_set
    return jax.tree.map(lambda x: x if is_there(x) else jax.device_put(x, whole), tree)


def _learned(drafter: Params) -> tuple[Params, Params, Params]:
    """Returns shapes of the weights that are learned, in float32 and as they are, and of others."""
    learned, fixed = learning.split(_shapes(drafter))
    return jax.eval_shape(lambda own: learning.cast(own, jnp.float32), learned), learned, fixed


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
