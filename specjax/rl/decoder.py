"""The decoder of rollouts: its sizes, compiled steps, pages, and learned step costs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from specjax.api.assemble import Setup
from specjax.api.handed_weights import completed
from specjax.api.requests import Refused, token_ids
from specjax.config.checks import shown
from specjax.config.engine import EngineConfig
from specjax.config.keywords import keyword_check
from specjax.config.rules import LOSSY_RULES, Rule, VerificationRule
from specjax.config.speculation import SpeculationConfig
from specjax.decode.made_weights import MadeWeights
from specjax.drafters.base import DrafterSpec
from specjax.engine.loop import Loop
from specjax.engine.metrics import BurstRecord
from specjax.engine.request import Request
from specjax.engine.text_feed import group_of
from specjax.heads.loading import DrafterSource
from specjax.models import sharding
from specjax.models.abstract import abstract_weights
from specjax.models.base import Model, ModelConfig, Params
from specjax.models.layouts.tables import Layout, LayoutName
from specjax.models.mesh_axes import MeshAxisMap, axes_by_name
from specjax.paged import kv_cache
from specjax.policy.interface import ExpectsAcceptance, SpeculationPolicy
from specjax.runtime import compilation_cache
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Progress, Report
from specjax.runtime.stack_level import of_the_caller
from specjax.text.tokenization import Tokenizer
from specjax.types import DecoderParams

MOST_PROMPTS = 100_000  # prompts whose completion lengths are kept
MOST_TOLD = 100_000  # completions of other runs kept until there is a loop; the oldest go first
NEWEST_WEIGHT = 0.5  # weight of the newest length in a prompt's expected length


class _Use:
    """Is alive while a call uses a decoder."""


def _no_use() -> None:
    return None


class RolloutDecoder:
    """Runs rollouts; made by `build_decoder`. Weights are an argument of every `rollout`.

    It keeps the executables, the pages, the corpus of a history drafter, and learned step
    costs, acceptance and lengths. They affect the speed of a rollout, never its tokens.
    EngineConfig sets rows and pages; the first rollout allocates them.
    """

    def __init__(
        self,
        setup: Setup,
        policy: SpeculationPolicy | None,
        mesh: Mesh | None = None,
        mesh_axes: MeshAxisMap | None = None,
        layout: LayoutName | Layout = "specjax",
    ):
        """Use `build_decoder`."""
        self._setup = setup
        self._handed = setup.handed_weights(layout)
        self._mesh, self._mesh_axes = mesh, mesh_axes
        self._policy = policy
        self._loop: Loop | None = None
        self._stream: weakref.ref[Any] | None = None  # that uses the loop now
        self._progress = Progress(False)  # of the call that runs
        self._use: Callable[[], _Use | None] = _no_use  # of the call that runs
        self._lock = threading.Lock()  # held while _use changes
        # The verification rule as a number of specjax.types.
        self.rule = Rule.of(setup.speculation.verification)
        self._lengths: collections.OrderedDict[int, float] = collections.OrderedDict()
        # Completions of other runs, kept until there is a loop.
        self._told: collections.deque[tuple[list[int], list[int]]]
        self._told = collections.deque(maxlen=MOST_TOLD)

    @property
    def config(self) -> ModelConfig:
        """Configuration of the target."""
        return self._setup.target.config

    @property
    def running_config(self) -> ModelConfig:
        """`config` with the dtype of hidden states that rollouts have."""
        kept = self._setup.engine.activation_dtype
        return dataclasses.replace(self.config, activation_dtype=kept)

    @property
    def layout(self) -> LayoutName | Layout:
        """Layout of the weights that rollouts take."""
        return self._handed.layout

    @property
    def pages_dtype(self) -> np.dtype:
        """dtype of cached keys and values."""
        dtype = jax.tree.leaves(self._setup.target.params)[0].dtype
        return kv_cache.pages_dtype(self._setup.engine.kv_cache_dtype, dtype)

    def cast(self, params: Params) -> Params:
        """Returns the target's weights in the dtypes that rollouts compute with; traceable."""
        shapes = self._setup.target.params
        return jax.tree.map(lambda leaf, own: jnp.asarray(leaf, own.dtype), params, shapes)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh passed to `build_decoder`, with its own axis types."""
        return self._mesh

    @property
    def num_speculative_tokens(self) -> int:
        """K: the most tokens drafted along one path."""
        return self._setup.speculation.depth

    @property
    def drafter(self) -> str:
        """Name of the drafter."""
        return self._setup.drafter.name

    @property
    def drafter_spec(self) -> DrafterSpec:
        """What the drafter is, as a hashable value."""
        return self._setup.drafter.spec

    @property
    def draft_params(self) -> Any:
        """Weights of the drafter that rollouts use where they are given none; () without any."""
        return self._setup.drafter.params

    @property
    def draft_shapes(self) -> Any:
        """Names, shapes and dtypes of the drafter's weights, a tree of jax.ShapeDtypeStruct."""
        return self._setup.abstract_drafter

    @property
    def has_draft_weights(self) -> bool:
        """Whether the drafter has weights, which go stale as the policy is trained."""
        return len(jax.tree.leaves(self._setup.abstract_drafter)) > 0

    @property
    def likely_faults(self) -> tuple[str, ...]:
        """What is likely wrong where hardly a draft is accepted."""
        return self._setup.drafter.spec.likely_faults

    @property
    def decisions(self) -> tuple[BurstRecord, ...]:
        """Records of the last bursts: K, the reason for it, predicted and measured figures."""
        return () if self._loop is None else tuple(self._loop.records)

    @property
    def is_exact(self) -> bool:
        """Whether samples are the target's own: the same tokens under `seeded`, `greedy` and
        `delta`, else the same distribution."""
        return self.is_exact_under(self._setup.speculation.verification)

    def is_exact_under(self, verification: str) -> bool:
        """Returns `is_exact` for a rollout with the given verification rule."""
        return not self._setup.drafter.can_draft or verification not in LOSSY_RULES

    @property
    def verification(self) -> str:
        """The rule that drafts are verified by."""
        return self._setup.speculation.verification

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and completion together."""
        most = self._setup.engine.max_context or self.config.max_position_embeddings
        return min(most, self.config.max_position_embeddings)

    @property
    def num_traces(self) -> int:
        """How many functions were traced, and so compiled, for this decoder's configuration."""
        steps = 0 if self._loop is None else self._loop.decoder.all_traces.total()
        return steps + self._handed.num_traces + (self._made.num_traces if self._made else 0)

    @property
    def weights_bytes_moved(self) -> int:
        """Bytes of weights that the last rollout copied: converted, cast, moved over devices, or
        made for the drafter."""
        return self._handed.bytes_moved + (self._made.num_bytes if self._made else 0)

    @property
    def weights_move_s(self) -> float:
        """Seconds that took, without compiling and without the wait until they are computed."""
        return self._handed.seconds + (self._made.seconds if self._made else 0.0)

    @property
    def _made(self) -> MadeWeights | None:
        """What makes the drafter's weights; None: it has its own, or no rollout began."""
        return None if self._loop is None else self._loop.decoder.made_weights

    @property
    def params_version(self) -> int:
        """How often the weights changed, or the version that the caller gave."""
        return self._handed.version

    @contextlib.contextmanager
    def using(self, params: Params | DecoderParams, version: int | None = None) -> Iterator[Loop]:
        """Context in which this call alone has the loop; arguments as of `hand_over`.

        Raises:
          RuntimeError: another call runs.
          ValueError: as `hand_over`.
        """
        with self._used_by_one():
            self._check_no_stream()
            try:
                yield self.hand_over(params, version)
            finally:
                self.let_go()

    @contextlib.contextmanager
    def _used_by_one(self) -> Iterator[None]:
        """Context of the only call that uses the decoder.

        Raises:
          RuntimeError: another call does.
        """
        use = _Use()
        with self._lock:
            if self._use() is not None:
                raise RuntimeError(
                    "the decoder runs another rollout, in another thread or around this call (an "
                    "environment that samples or scores with it). Let one end before the next "
                    "begins, or use build_decoder(..., shares_steps=True), with which threads "
                    "share steps."
                )
            # It dies with this call, wherever an interrupt ends that.
            self._use = weakref.ref(use)
        try:
            yield
        finally:
            self._use = _no_use

    @contextlib.contextmanager
    def showing(self, progress: bool | Report | None) -> Iterator[Report]:
        """Context that shows what is compiled and done, as of `generate`."""
        shown = self._progress = Progress(progress)
        try:
            yield shown.report
        finally:
            shown.close()
            self._progress = Progress(False)

    def hand_over(self, params: Params | DecoderParams, version: int | None = None) -> Loop:
        """Returns the loop with these weights; arrays already in place are not copied.

        `weights_bytes_moved` says how many bytes were.

        Cached pages are dropped unless the weights are the same array objects as in the last
        rollout, and `version` is None or the last version.

        Args:
          params: weights of the target in the decoder's layout, or of target and drafter. Numpy
            arrays may change in place, so they count as new each time, and are copied to the
            device.
          version: the caller's version of these weights; None: the last one, plus 1 if they
            are new.

        Raises:
          ValueError: shapes, dtypes or names are not those the decoder was built for.
        """
        self._check_no_stream()
        self._stream = None
        taken = self._handed.take(completed(params, self._setup.drafter.params), version)
        if self._loop is None:
            self._loop = self._make_loop(taken.params)
        if self._loop.has_work:
            self._loop.abandon()
        self._loop.take_params(taken.params, is_new=taken.is_new, version=taken.version)
        self._handed.settle(taken)
        if self._told:
            told, self._told = self._told, collections.deque(maxlen=MOST_TOLD)
            self._loop.remember(*zip(*told))
        return self._loop

    def _check_no_stream(self) -> None:
        if self._stream is not None and self._stream() is not None:
            raise ValueError(
                "a rollout_stream is open on this decoder, whose rows it uses; close it first, or "
                "build another decoder. Decoders built alike share what is compiled."
            )

    def lend(self, stream: Any) -> None:
        """Reserves the loop for a stream, as long as that is alive or until `take_back`."""
        self._stream = weakref.ref(stream)

    def take_back(self) -> None:
        """Ends `lend`."""
        self._stream = None

    def renew(
        self, params: Params | DecoderParams, version: int | None, *, recomputes: bool
    ) -> None:
        """Gives the loop other weights while requests run; arguments as of Loop.take_params.

        Raises:
          ValueError: as `hand_over`; or the version is not above the last one.
        """
        assert self._loop is not None
        # The draft model goes on with the weights that it has. The loop holds none if it is off.
        drafter = self._loop.params.drafter
        if not jax.tree.leaves(drafter) or not self.has_draft_weights:
            drafter = self._setup.drafter.params
        taken = self._handed.take(completed(params, drafter), version, increases=True)
        self._loop.take_params(
            taken.params,
            is_new=taken.is_new,
            version=taken.version,
            recomputes=recomputes,
        )
        self._handed.settle(taken)

    def expect_acceptance(self, survival: Sequence[float]) -> None:
        """Tells the policy of K how often drafts will be accepted, since the drafter has changed.

        Without it a drafter that was turned off because hardly a draft was accepted stays off until
        a probe finds that it has become better. Policies that learn nothing are not told.

        Args:
          survival: for each draft token of a path, the probability that it and all before it are
            accepted.
        """
        policy = None if self._loop is None else self._loop.policy
        if isinstance(policy, ExpectsAcceptance):
            policy.expect_acceptance(survival)

    def let_go(self) -> None:
        """Drops the weights until the next rollout, and saves the learned step costs."""
        if self._loop is not None:
            self._setup.keep(self._loop)
            self._loop.let_go()

    def placing(self, given: Any, num_samples: int) -> NamedSharding | None:
        """Returns the sharding of results; None: the default device.

        Results that do not divide evenly over the devices are replicated.

        Args:
          given: sharding of an array whose first axis results follow; if it is not over a
            mesh, results are split over the decoder's mesh as rows are.
        """
        mesh, spec = self.mesh, PartitionSpec()
        if isinstance(given, NamedSharding):
            mesh, spec = given.mesh, PartitionSpec(*given.spec[:1])
        elif mesh is not None:
            rows = axes_by_name(mesh, self._mesh_axes).get(sharding.DATA)
            spec = PartitionSpec(rows)
        if mesh is None:
            return None
        place = NamedSharding(mesh, spec)
        try:
            place.shard_shape((num_samples,))
        except ValueError:  # the number of samples does not divide evenly
            return NamedSharding(mesh, PartitionSpec())
        return place

    def requests(
        self, prompts: Sequence[Any], sampling: Sequence[Any]
    ) -> tuple[list[Request], list[Refused]]:
        """Returns the valid requests, n per prompt, and those refused; see Setup."""
        return self._setup.requests(prompts, sampling)

    def tokenized(self, prompt: Any) -> list[int] | None:
        """Returns the token ids of a prompt; None for one that will be refused."""
        try:
            return token_ids(self._setup.target, prompt)
        except (ValueError, TypeError):
            return None

    def checked_ids(self, ids: Any) -> list[int]:
        """Returns token ids that follow a text.

        Raises:
          ValueError: they are none, or not of the vocabulary.
        """
        refused = lambda: ValueError(
            f"its token_ids are {shown(ids)}; expected whole numbers from 0 to "
            f"{self.config.vocab_size - 1}"
        )
        try:
            given = list(ids)
        except Exception:  # a user's own sequence may raise anything
            raise refused() from None
        try:
            return token_ids(self._setup.target, given) if given else []
        except (TypeError, ValueError):
            raise refused() from None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None without one."""
        return self._setup.target.tokenizer

    def remember(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
    ) -> None:
        """Adds completions of other runs, as token ids, to the corpus of a history drafter.

        Later rollouts draft from them as from their own earlier ones; other drafters ignore
        them. When the corpus is full, the oldest are dropped.

        Raises:
          ValueError: there are not as many completions as prompts, or ids outside the
            vocabulary.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts and {len(completions)} completions were given; "
                "pass the prompt of each completion."
            )
        ids = functools.partial(token_ids, self._setup.target)
        pairs = zip(map(_as_ints, prompts), map(_as_ints, completions), strict=True)
        self._told.extend((ids(prompt), ids(answer)) for prompt, answer in pairs if answer)

    def forget(self) -> None:
        """Drops all text: the corpus, cached pages and learned lengths; and converted weights.
        Nothing is recompiled.

        Raises:
          ValueError: a stream is open, whose samples it would end.
        """
        self._check_no_stream()
        self._told.clear()
        self._lengths.clear()
        self._handed.forget()
        if self._made is not None:
            self._made.drop()
        if self._loop is not None:
            self._loop.forget()

    def expected_length(self, prompt_token_ids: Sequence[int]) -> float:
        """Returns the expected completion length of a prompt from earlier rollouts; 0 if none."""
        return self._lengths.get(group_of(prompt_token_ids), 0.0)

    def learn_length(self, prompt_token_ids: Sequence[int], length: float) -> None:
        """Records the longest completion of a prompt in one rollout, in tokens."""
        group = group_of(prompt_token_ids)
        known = self._lengths.pop(group, length)
        self._lengths[group] = known + NEWEST_WEIGHT * (length - known)
        if len(self._lengths) > MOST_PROMPTS:
            self._lengths.popitem(last=False)

    def _make_loop(self, params: DecoderParams) -> Loop:
        target = dataclasses.replace(self._setup.target, params=params.target)
        drafter = dataclasses.replace(self._setup.drafter, params=params.drafter)
        setup = dataclasses.replace(self._setup, target=target, drafter=drafter)
        # The weights are used only to measure memory: the kept setup must not hold them.
        engine = setup.with_reported_memory().engine
        setup = dataclasses.replace(self._setup, engine=engine)
        run = setup.for_run([self.rule], self._policy)
        return run.loop(
            run.standing_sizes(),
            [self.rule],
            on_progress=lambda *of: self._progress.report(*of),
            params=DecoderParams(None),
        )


def check_decoder(decoder: Any) -> None:
    """Raises TypeError for what is no RolloutDecoder."""
    if not isinstance(decoder, RolloutDecoder):
        raise TypeError(
            f"decoder is {decoder!r:.100}; expected what specjax.build_decoder returns."
        )


@entrance("specjax.build_decoder", keyword_check)
def build_decoder(
    target: ModelConfig | Model,
    *,
    drafter: DrafterSource = None,
    verification: VerificationRule | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    policy: SpeculationPolicy | None = None,
    mesh: Mesh | None = None,
    mesh_axes: MeshAxisMap | None = None,
    dtype: DTypeLike | None = None,
    layout: LayoutName | Layout = "specjax",
    shares_steps: bool = False,
) -> RolloutDecoder:
    """Returns a decoder for `rollout`; compiles nothing yet.

    Args:
      target: the policy's config, or a Model, whose tokenizer and dtype are used and whose
        weights are not held.
      drafter: as for `generate`. "history" drafts from samples of the same prompt and of
        earlier epochs, and never goes stale; a draft Model keeps the weights given here,
        unless a rollout passes newer ones.
      verification: "seeded" (default), "greedy" or "delta" give the tokens of plain
        decoding; others as for `generate`.
      engine: max_rows samples run at a time; max_context is the most tokens of prompt and
        completion together, None: the model's limit. numerics="invariant" makes rollouts
        equal to the last bit, whatever is drafted.
      policy: chooses K before each burst; None: goodput.
      mesh: devices to split over, with the axes "data" and "tensor", or a trainer's own. It may be
        the mesh that the weights lie on, or another.
      mesh_axes: what the axes of the mesh split, such as {"fsdp": "data", "tp": "tensor"}: "data"
        rows and pages, "tensor" heads, MLP and vocabulary. Axes of one device, and those of these
        two names, need no entry.
      dtype: that rollouts compute with; None: the Model's, or float32. Weights of more digits,
        such as float32 masters, are cast to 16 bits on the device once per update.
      layout: of the weights passed to rollouts: "specjax", "nnx", "linen", "tunix", "maxtext", or
        one's own; see `specjax.convert`. Weights in another layout than specjax's are converted
        on the device once per update, and the copy is kept until the trainer frees the arrays
        that it was made from.
      shares_steps: whether rollouts that several threads run at the same time, under the same
        weights, share rows and steps. Otherwise a decoder runs one rollout at a time.

    Raises:
      ValueError: the drafter does not fit the target, or a setting is invalid.
      NotImplementedError: the layout has no models like the target.
    """
    compilation_cache.enable()
    if isinstance(target, Model):
        leaves = jax.tree.leaves(target.params)
        given = target
        dtype = dtype or (leaves[0].dtype if leaves else None)
    elif isinstance(target, ModelConfig):
        given = Model(target, {}, name=target.family)
    else:
        raise TypeError(
            f"target is {target!r:.100}; expected a Model, as specjax.load_model returns, or its "
            "config."
        )
    shapes = abstract_weights(given.config, jnp.dtype(dtype or jnp.float32))
    setup = Setup.of(
        dataclasses.replace(given, params=shapes),
        drafter=drafter,
        verification=verification,
        num_speculative_tokens=num_speculative_tokens,
        speculative_config=speculative_config,
        engine=engine,
        mesh=mesh,
        mesh_axes=mesh_axes,
    )
    setup.drafter.check_rule(setup.speculation.verification, setup.engine.numerics)
    if getattr(setup.drafter.spec, "said", None) is not None:
        warnings.warn(
            f"{setup.drafter.name!r} has a vocabulary of its own. Newer weights of it, as "
            "DecoderParams(policy, draft), must be rewritten in the target's first: "
            "specjax.load_drafter(dataclasses.replace(draft, params=new), target).params.",
            stacklevel=of_the_caller(),
        )
    if shares_steps:
        from specjax.rl.joined import JoinedDecoder  # which is one

        return JoinedDecoder(setup, policy, mesh, mesh_axes, layout)
    return RolloutDecoder(setup, policy, mesh, mesh_axes, layout)


def _as_ints(token_ids: Sequence[int]) -> list[int]:
    return [operator.index(token) for token in token_ids]
