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

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer

from specjax.config.checks import is_number
from specjax.models.base import Params
from specjax.models.layouts.converting import convert
from specjax.models.layouts.tables import leaves_of
from specjax.rl.batch import Rollout
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.scoring import Texts
from specjax.training import figures, learning, replay
from specjax.training.figures import Figures
from specjax.training.learning import Learner
from specjax.training.objective import Objective, Sums
from specjax.training.replay import Replay
from specjax.training.texts import LEAST_TOKENS, TextBatch, compacted
from specjax.types import DecoderParams

MOST_TOKENS = 2048  # of a text, where none is said
TOLD_ROWS = 4  # texts along which the policy of K is told what the drafter is accepted for


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
      has_learned: whether the weights changed. They do not where a gradient is not finite.
      acceptance_rate: accepted / drafted tokens of the batch; None where nothing was drafted.
      loss: mean over the updates, nats; None without any.
      figures: of the texts that were learned, before the updates; None without any.
      num_dropped: samples of the batch that hold nothing to learn, as those that failed.
      seconds: of the step, until its results were on the device.
    """

    has_learned: bool
    acceptance_rate: float | None
    loss: float | None
    figures: Figures | None
    num_dropped: int
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
          optimizer: any of optax that updates by gradients and weights alone.
          every: calls of `step` of which one learns; each adds its texts.
          below: acceptance rate of a batch under which the drafter learns from it; None: always.
            A batch without drafts counts as below. 0.2 is where `rollout` gives its alarm.
          updates: of the weights, in a step that learns.
          rows: texts of an update, drawn from those that are kept; at most `replay`.
          replay: newest texts that are kept, on the host.
          max_tokens: of a text, at least 8 and at most the decoder's max_length; of longer ones the
            end is kept. None: 2,048, or less as max_length has it.
          depth: draft tokens per position that it learns, at most K of the decoder or 8; None: K,
            at most 8, and at most what the drafter can.
          objective: losses; None: the default one.
          seed: of the texts that are drawn, and of what is drawn along them.

        Raises:
          NotImplementedError: the drafter is of a kind that cannot be trained.
          ValueError: a number is out of range.
        """
        check_decoder(decoder)
        numbers = {"every": every, "updates": updates, "rows": rows, "replay": replay}
        learning.check_whole(numbers, dict.fromkeys(numbers, 1))
        if max_tokens is not None:
            learning.check_whole({"max_tokens": max_tokens}, {"max_tokens": LEAST_TOKENS})
        learning.check_seed(seed)
        if below is not None and not (is_number(below) and 0 <= below <= 1):
            raise ValueError(f"{below=!r} must be a share of accepted drafts, from 0 to 1.")
        learning.check_is_optimizer(optimizer)
        self._decoder, self._optimizer = decoder, optimizer
        self._learner = _learner_of(decoder, depth, objective)
        self._every, self._below = every, below
        self._updates, self._rows, self._capacity = updates, min(rows, replay), replay
        self._width = min(max_tokens or MOST_TOKENS, decoder.max_length)
        self._seed = seed
        self._num_traces = 0
        self._learn = jax.jit(self._traced, static_argnums=0)

    @property
    def num_traces(self) -> int:
        """How often an update was traced, and so compiled."""
        return self._num_traces

    def init(self, params: Params | None = None) -> AdapterState:
        """Returns the first state.

        Args:
          params: weights of the drafter to begin with, any tree of its names: dicts, nnx.State,
            FrozenDict; None: those that the decoder was built with. They are copied.

        Raises:
          ValueError: there are no weights, or they have other names; or the optimizer gives updates
            of another form.
        """
        given: Any = self._decoder.draft_params if params is None else params
        leaves = jax.tree.leaves(given)
        if not leaves or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise ValueError(
                "the decoder was built without weights of its drafter; pass init(params)."
            )
        copies = jax.tree.map(lambda leaf: jnp.array(leaf), _own_tree(self._decoder, given))
        own = learning.cast(copies, jnp.float32)
        learned, _ = learning.split(own)
        learning.check_optimizer(self._optimizer, learned)
        ring = replay.empty(self._capacity, self._width)
        return AdapterState(own, self._optimizer.init(learned), ring, 0, 0)

    def weights(self, params: Params, state: AdapterState) -> DecoderParams:
        """Returns the weights for `rollout`: of the policy, and of the drafter as it is now."""
        return DecoderParams(params, self.draft_weights(state))

    def draft_weights(self, state: AdapterState) -> Params:
        """Returns the drafter's weights in the dtype that the decoder has them in."""
        return learning.cast(state.params, self._learner.dtype)

    def step(
        self, state: AdapterState, params: Params | DecoderParams, batch: Rollout
    ) -> tuple[AdapterState, AdapterStats]:
        """Takes in what the policy sampled, and lets the drafter learn from it.

        It runs outside jit. Steps with batches of any shape, sampled at one temperature, share one
        executable.

        Args:
          params: weights of the policy that the drafter is to follow: those of the next rollout,
            in the decoder's layout. No gradient reaches them.
          batch: of `rollout`, `rollout_turns` or `rollout_stream`; what an environment wrote is
            read and not learned.
        """
        start = time.perf_counter()
        if not isinstance(state, AdapterState) or not isinstance(batch, Rollout):
            raise TypeError(
                f"state is {state!r:.100} and batch {batch!r:.100}; expected an AdapterState, as "
                "of init(), and a Rollout."
            )
        if isinstance(batch.completion_ids, Tracer):
            raise TypeError(
                "a step runs outside jit: it keeps texts on the host and compiles its own update; "
                "inside jit use draft_loss."
            )
        # As wide as the ring, which an adapter of other sizes may have begun.
        texts = self._texts(batch, state.replay.texts.token_ids.shape[1])
        num_dropped = len(batch.token_ids) - len(texts.lengths)
        num_drafted, num_accepted = int(batch.num_drafted.sum()), int(batch.num_accepted.sum())
        rate = num_accepted / num_drafted if num_drafted else None
        ring, calls = state.replay.added(texts), int(state.num_calls) + 1
        state = state._replace(replay=ring, num_calls=calls)
        is_due = calls % self._every == 0 and ring.num_texts > 0
        is_low = self._below is None or rate is None or rate < self._below
        has_learned, loss, told = False, None, None
        if is_due and is_low:
            heat: Any = 1.0 if batch.sampling is None else batch.sampling.temperature
            state, has_learned, loss, told = self._learned(state, _policy(params), heat)
        seconds = time.perf_counter() - start
        return state, AdapterStats(has_learned, rate, loss, told, num_dropped, seconds)

    def _texts(self, batch: Rollout, width: int) -> TextBatch:
        """Returns the texts of a batch that hold something to learn, on the host."""
        host: Any = jax.device_get((batch.token_ids, batch.token_mask, _is_learned(batch)))
        token_ids, mask, is_learned = host
        texts = replay.texts_of(token_ids, mask, is_learned, width)
        most = self._learner.target.vocab_size
        if texts.token_ids.size and texts.token_ids.max() >= most:
            raise ValueError(
                f"the batch holds token {texts.token_ids.max()}, and the policy has {most} tokens; "
                "give a rollout of this decoder's policy."
            )
        return texts

    def _learned(
        self, state: AdapterState, policy: Params, heat: float
    ) -> tuple[AdapterState, bool, float, Figures]:
        """Returns the state after the updates, whether they changed the weights, their mean loss,
        and the figures before them; tells the policy of K what the changed drafter is accepted
        for, at the temperature `heat`."""
        drawn = state.replay.drawn(self._updates, self._rows, self._seed)
        key = jax.random.fold_in(jax.random.key(self._seed), int(state.num_updates))
        with learning.traced_beside(policy):
            learned: Any = self._learn(
                heat or 1.0, state.params, state.opt_state, policy, drawn, key
            )
        own, opt_state, loss, has_learned, before, after = jax.block_until_ready(learned)
        updates = int(state.num_updates) + self._updates
        state = state._replace(params=own, opt_state=opt_state, num_updates=updates)
        survival = figures.survival(after, [(self._decoder.rule, heat)])
        if has_learned and survival:
            self._decoder.expect_acceptance(survival)
        return state, bool(has_learned), float(loss), figures.figures_of(before)

    def _traced(
        self,
        temperature: float,
        params: Params,
        opt_state: Any,
        given: Params,
        drawn: TextBatch,
        key: Array,
    ) -> tuple[Params, Any, Array, Array, Sums, Sums]:
        """Returns the weights and the optimiser's state after the updates, the mean loss, whether
        the weights changed, and sums: before the updates, and after them at a temperature."""
        self._num_traces += 1
        decoder, learner = self._decoder, self._learner
        policy = decoder.cast(convert(given, decoder.layout, decoder.config))
        learned, fixed = learning.split(params)

        def update(carry: Any, part: Any) -> tuple[Any, tuple[Array, Array, Sums]]:
            own, opt_state = carry
            text, key = part
            loss = lambda own: learner.loss(own | fixed, policy, text, key)
            moved = learning.descended(self._optimizer, loss, own, opt_state)
            return moved[:2], (moved.loss, moved.is_applied, moved.sums)

        keys = jax.random.split(key, self._updates)
        (own, opt_state), (values, applied, sums) = jax.lax.scan(
            update, (learned, opt_state), (drawn, keys)
        )
        own, before = own | fixed, jax.tree.map(lambda each: each[0], sums)
        objective = dataclasses.replace(learner.objective, temperature=temperature)
        as_sampled = dataclasses.replace(learner, objective=objective)
        told = jax.tree.map(lambda each: each[0, :TOLD_ROWS], drawn)
        after = as_sampled.loss(own, policy, told, None)[1]
        return own, opt_state, jnp.mean(values), jnp.any(applied), before, after


def draft_loss(
    decoder: RolloutDecoder,
    draft_params: Params,
    params: Params | DecoderParams,
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
      draft_params: of the drafter, in any floating dtype. The numbers of its tokens, `target_ids`,
        may be left out: then they are the decoder's, and jax.grad has floating point alone.
      params: of the policy, in the decoder's layout; or DecoderParams, whose drafter is not read.
      batch: a Rollout, or any texts, of which the completions are learned.
      depth, objective: as for `DrafterAdapter`.
      key: of what is drawn, as the places of blocks; None: the same each time.

    Returns:
      f32[], nats, and `specjax.training.Sums` by draft token; `figures_of` makes rates of them.
    """
    check_decoder(decoder)
    learner = _learner_of(decoder, depth, objective)
    policy = decoder.cast(convert(_policy(params), decoder.layout, decoder.config))
    own = _own_tree(decoder, draft_params)
    parts = [
        (batch.prompt_ids, batch.completion_ids),
        (batch.prompt_mask, batch.completion_mask),
    ]
    token_ids, mask = (jnp.concatenate(list(map(jnp.asarray, part)), axis=1) for part in parts)
    text = compacted(token_ids, mask.astype(bool), _is_learned(batch))
    key = jax.random.key(0) if key is None else key
    return learner.loss(own, policy, text, key)


def _learner_of(decoder: RolloutDecoder, depth: int | None, objective: Objective | None) -> Learner:
    return learning.learner_of(
        decoder.drafter_spec,
        decoder.draft_params,
        decoder.running_config,
        depth=depth,
        num_speculative_tokens=decoder.num_speculative_tokens,
        objective=objective,
    )


def _own_tree(decoder: RolloutDecoder, given: Any) -> Params:
    """Returns a drafter's weights as the tree that the decoder has them in.

    Args:
      given: any tree of the same names; numbers of tokens may be left out.

    Raises:
      ValueError: other names.
    """
    shapes = decoder.draft_shapes
    found, expected = leaves_of(given), leaves_of(shapes)
    is_number = lambda name: jnp.issubdtype(expected[name].dtype, jnp.integer)
    absent = [name for name in expected if name not in found]
    if absent and all(map(is_number, absent)) and jax.tree.leaves(decoder.draft_params):
        found |= {name: leaves_of(decoder.draft_params)[name] for name in absent}
        absent = []
    if absent or (unknown := [name for name in found if name not in expected]):
        what = f"lack {', '.join(absent[:10])}" if absent else f"have {', '.join(unknown[:10])}"
        raise ValueError(
            f"the drafter's weights {what}, which is not as {decoder.drafter!r} has them; give the "
            "tree that load_drafter or an adapter returned."
        )
    for name, shape in expected.items():
        if jnp.shape(found[name]) != shape.shape:
            raise ValueError(
                f"{name} of the drafter's weights is {list(jnp.shape(found[name]))}, expected "
                f"{list(shape.shape)}; give weights of {decoder.drafter!r}."
            )
    return jax.tree.structure(shapes).unflatten([found[name] for name in expected])


def _policy(params: Params | DecoderParams) -> Params:
    return params.target if isinstance(params, DecoderParams) else params


def _is_learned(batch: Rollout | Texts) -> Array:
    """Returns which tokens of prompts and completions are learned, bool[num_samples, width]."""
    own = batch.loss_mask if isinstance(batch, Rollout) else batch.completion_mask
    prompts = jnp.zeros(jnp.shape(batch.prompt_mask), bool)
    return jnp.concatenate([prompts, jnp.asarray(own, bool)], axis=1)
