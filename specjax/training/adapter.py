"""DrafterAdapter: a drafter that follows a policy while it is trained, by the policy's own samples.

    adapter = specjax.DrafterAdapter(decoder, optax.adam(1e-4))
    state = adapter.init()
    for ...:
        batch = specjax.rollout(decoder, adapter.weights(params, state), prompts, ...)
        params = ...                                  the update of the policy, as without
        state, stats = adapter.step(state, params, batch)

A policy that changes is drafted for ever worse by a drafter that does not. Its rollouts are text
that the policy wrote, and under the rule `seeded` the chance that each draft token is accepted can
be counted along it, so the drafter learns from them what it will be used for. Tokens, rewards and
the policy's weights are those of a run without it: drafts change no token.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax.config.checks import is_int, is_number
from specjax.layouts.converting import convert
from specjax.models.base import Params
from specjax.rl.batch import Rollout
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.scoring import Texts
from specjax.training import figures, learning, replay
from specjax.training.figures import Figures
from specjax.training.kinds import kind_of_spec
from specjax.training.learning import Learner
from specjax.training.objective import Objective, Sums
from specjax.training.replay import Replay
from specjax.training.texts import TextBatch, compacted
from specjax.types import DecoderParams

MOST_TOKENS = 2048  # of a text, where none is said


class AdapterState(NamedTuple):
    """What a `DrafterAdapter` keeps between steps; a pytree, which Orbax can save.

    Attributes:
      params: weights of the drafter in float32.
      opt_state: of the optimiser.
      replay: the newest texts of the policy, numpy arrays.
      num_calls, num_updates: of `step`, and of the optimiser.
    """

    params: Params
    opt_state: Any
    replay: Replay
    num_calls: int
    num_updates: int


class AdapterStats(NamedTuple):
    """What a step of a `DrafterAdapter` did.

    Attributes:
      has_learned: whether the weights changed.
      acceptance_rate: accepted / drafted tokens of the batch; None where nothing was drafted.
      loss: mean over the updates, nats; None without any.
      figures: of the texts that were learned, before the updates; None without any.
      seconds: of the step, until its results were on the device.
    """

    has_learned: bool
    acceptance_rate: float | None
    loss: float | None
    figures: Figures | None
    seconds: float


class DrafterAdapter:
    """Trains the drafter of a rollout decoder along what the policy samples."""

    def __init__(
        self,
        decoder: RolloutDecoder,
        optimizer: optax.GradientTransformation,
        *,
        every: int = 1,
        below: float | None = None,
        updates: int = 1,
        rows: int = 16,
        replay: int = 64,
        max_tokens: int | None = None,
        depth: int | None = None,
        objective: Objective | None = None,
        seed: int = 0,
    ):
        """
        Args:
          decoder: whose drafter has weights: a draft model, or a head over the policy.
          optimizer: any of optax.
          every: calls of `step` of which one learns; each adds its texts.
          below: acceptance rate of a batch under which the drafter learns from it; None: always.
            A batch without drafts counts as below.
          updates: of the weights, in a step that learns.
          rows: texts of an update, drawn from those that are kept.
          replay: newest texts that are kept, on the host.
          max_tokens: of a text; longer ones are cut. None: the decoder's max_length, at most 2,048.
          depth: draft tokens per position that it learns; None: K of the decoder, at most 8, and
            at most what the drafter can.
          objective: losses; None: the default one.
          seed: of the texts that are drawn, and of what is drawn along them.

        Raises:
          NotImplementedError: the drafter is of a kind that cannot be trained.
          ValueError: a number is out of range.
        """
        check_decoder(decoder)
        numbers = {"every": every, "updates": updates, "rows": rows, "replay": replay}
        numbers |= {"max_tokens": max_tokens, "depth": depth}
        for name, value in numbers.items():
            is_chosen = value is None and name in ("max_tokens", "depth")
            if not is_chosen and (not is_int(value) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        if below is not None and not (is_number(below) and 0 <= below <= 1):
            raise ValueError(f"{below=!r} must be a share of accepted drafts, from 0 to 1.")
        self._decoder, self._optimizer = decoder, optimizer
        self._learner = _learner_of(decoder, depth, objective)
        self._every, self._below = every, below
        self._updates, self._rows, self._capacity = updates, rows, replay
        self._width = max_tokens or min(decoder.max_length, MOST_TOKENS)
        self._seed = seed
        self._num_traces = 0
        self._learn = jax.jit(self._traced)

    @property
    def num_traces(self) -> int:
        """How often an update was traced, and so compiled."""
        return self._num_traces

    def init(self, params: Params | None = None) -> AdapterState:
        """Returns the first state.

        Args:
          params: weights of the drafter to begin with; None: those that the decoder was built
            with.

        Raises:
          ValueError: there are no weights.
        """
        given = self._decoder.draft_params if params is None else params
        leaves = jax.tree.leaves(given)
        if not leaves or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise ValueError(
                "the decoder was built without weights of its drafter; pass init(params)."
            )
        own = learning.cast(jax.tree.map(jnp.asarray, given), jnp.float32)
        learned, _ = learning.split(own)
        ring = replay.empty(self._capacity, self._width)
        return AdapterState(own, self._optimizer.init(learned), ring, 0, 0)

    def weights(self, params: Params, state: AdapterState) -> DecoderParams:
        """Returns the weights for `rollout`: of the policy, and of the drafter as it is now."""
        return DecoderParams(params, self.draft_weights(state))

    def draft_weights(self, state: AdapterState) -> Params:
        """Returns the drafter's weights in the dtype that the decoder has them in."""
        return learning.cast(state.params, self._learner.dtype)

    def step(
        self, state: AdapterState, params: Params, batch: Rollout
    ) -> tuple[AdapterState, AdapterStats]:
        """Takes in what the policy sampled, and lets the drafter learn from it.

        It runs outside jit. Steps with batches of any shape share one executable.

        Args:
          params: weights of the policy that the drafter is to follow: those of the next rollout,
            in the decoder's layout. No gradient reaches them.
          batch: of `rollout`, `rollout_turns` or `rollout_stream`; what an environment wrote is
            read and not learned.
        """
        start = time.perf_counter()
        if not isinstance(batch, Rollout):
            raise TypeError(f"batch is {batch!r:.100}; expected a Rollout.")
        host: Any = jax.device_get(
            (batch.token_ids, batch.token_mask, _is_learned(batch), _accepted(batch))
        )
        token_ids, mask, is_learned, (num_drafted, num_accepted) = host
        texts = replay.texts_of(token_ids, mask, is_learned, self._width)
        ring, calls = state.replay.added(texts), state.num_calls + 1
        rate = int(num_accepted) / int(num_drafted) if num_drafted else None
        state = state._replace(replay=ring, num_calls=calls)
        is_due = calls % self._every == 0 and ring.num_texts > 0
        is_low = self._below is None or rate is None or rate < self._below
        if not (is_due and is_low):
            return state, AdapterStats(False, rate, None, None, time.perf_counter() - start)
        drawn = ring.drawn(self._updates, self._rows, self._seed)
        key = jax.random.fold_in(jax.random.key(self._seed), state.num_updates)
        own, opt_state, loss, sums = self._learn(
            state.params, state.opt_state, self._policy(params), drawn, key
        )
        jax.block_until_ready(own)
        state = state._replace(
            params=own, opt_state=opt_state, num_updates=state.num_updates + self._updates
        )
        told = figures.figures_of(sums)
        is_greedy = batch.sampling is not None and batch.sampling.temperature == 0
        self._decoder.expect_acceptance(
            told.greedy_survival if is_greedy else told.sampled_survival
        )
        return state, AdapterStats(True, rate, float(loss), told, time.perf_counter() - start)

    def _policy(self, params: Params) -> Params:
        return params.target if isinstance(params, DecoderParams) else params

    def _traced(
        self, params: Params, opt_state: Any, given: Params, drawn: TextBatch, key: Array
    ) -> tuple[Params, Any, Array, Sums]:
        """Returns the weights and the optimiser's state after the updates, the mean loss, and the
        sums before the first."""
        self._num_traces += 1
        decoder, learner = self._decoder, self._learner
        policy = decoder.cast(convert(given, decoder.layout, decoder.config))
        learned, fixed = learning.split(params)

        def update(carry: Any, part: Any) -> tuple[Any, tuple[Array, Sums]]:
            own, opt_state = carry
            text, key = part
            loss = lambda own: learner.loss(own | fixed, policy, text, key)
            (value, sums), gradients = jax.value_and_grad(loss, has_aux=True)(own)
            own, opt_state = learning.applied(self._optimizer, gradients, opt_state, own)
            return (own, opt_state), (value, sums)

        keys = jax.random.split(key, self._updates)
        (own, opt_state), (values, sums) = jax.lax.scan(update, (learned, opt_state), (drawn, keys))
        first = jax.tree.map(lambda each: each[0], sums)
        return own | fixed, opt_state, jnp.mean(values), first


def draft_loss(
    decoder: RolloutDecoder,
    draft_params: Params,
    params: Params,
    batch: Rollout | Texts,
    *,
    depth: int | None = None,
    objective: Objective | None = None,
    key: Array | None = None,
) -> tuple[Array, Sums]:
    """Returns the loss of a drafter along what a policy sampled, for a loss of one's own.

    Pure and traceable; differentiable in draft_params. No gradient reaches the policy.

    Args:
      decoder: whose drafter it is.
      draft_params: of the drafter, in any floating dtype.
      params: of the policy, in the decoder's layout.
      batch: a Rollout, or any texts, of which the completions are learned.
      depth, objective: as for `DrafterAdapter`.
      key: of what is drawn, as the places of blocks; None: the same each time.

    Returns:
      f32[], nats, and `specjax.training.Sums` by draft token; `figures_of` makes rates of them.
    """
    check_decoder(decoder)
    learner = _learner_of(decoder, depth, objective)
    policy = decoder.cast(convert(params, decoder.layout, decoder.config))
    parts = [
        (batch.prompt_ids, batch.completion_ids),
        (batch.prompt_mask, batch.completion_mask),
    ]
    token_ids, mask = (jnp.concatenate(list(map(jnp.asarray, part)), axis=1) for part in parts)
    text = compacted(token_ids, mask.astype(bool), _is_learned(batch))
    key = jax.random.key(0) if key is None else key
    return learner.loss(draft_params, policy, text, key)


def _learner_of(decoder: RolloutDecoder, depth: int | None, objective: Objective | None) -> Learner:
    kind, own = kind_of_spec(decoder.drafter_spec)
    most = kind.most_drafts(own) or 8
    asked = depth or min(max(decoder.num_speculative_tokens, 1), 8, most)
    if depth is not None and kind.most_drafts(own) is not None and depth > most:
        raise ValueError(f"{depth=} is more than the {most} tokens that the drafter drafts.")
    leaves = jax.tree.leaves(decoder.draft_params)
    floats = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return Learner(
        kind=kind,
        config=own,
        target=decoder.running_config,
        depth=asked,
        objective=objective or Objective(),
        dtype=floats[0],
    )


def _is_learned(batch: Rollout | Texts) -> Array:
    """Returns which tokens of prompts and completions are learned, bool[num_samples, width]."""
    own = batch.loss_mask if isinstance(batch, Rollout) else batch.completion_mask
    prompts = jnp.zeros(jnp.shape(batch.prompt_mask), bool)
    return jnp.concatenate([prompts, jnp.asarray(own, bool)], axis=1)


def _accepted(batch: Rollout) -> tuple[Array, Array]:
    return jnp.sum(batch.num_drafted), jnp.sum(batch.num_accepted)
