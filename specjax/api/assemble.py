"""Sets up a call or an engine: target, drafter, rules, sizes, compiled functions."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.implementations import Taken, target_platform
from pallas_kernels.names import PLATFORMS
from specjax.api.handed_weights import HandedWeights
from specjax.api.loading import dtype_of, load_split_drafter, load_target
from specjax.api.policies import check_policy, kind_of_policy, policy_of
from specjax.api.requests import Refused, make_requests, one_each
from specjax.api.self_tests import trusted_kernels
from specjax.api.sizing import (
    Pooled,
    check_pages,
    check_state,
    choose_sizes,
    page_bytes,
    standing_sizes,
)
from specjax.config.engine import EngineConfig
from specjax.config.gate import SpeculationGate, gate_tokens
from specjax.config.keywords import made
from specjax.config.names import BY_NAME
from specjax.config.rules import Rule
from specjax.config.speculation import SpeculationConfig
from specjax.configs.devices import of_kind
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder, shared_decoder
from specjax.decode.executables import OUT_OF_MEMORY
from specjax.decode.kept import KeptShape
from specjax.decode.rules import RuleOptions
from specjax.decode.sizes import Sizes
from specjax.drafters.guard import DrafterError
from specjax.engine.loop import Loop
from specjax.engine.request import Request
from specjax.heads.loading import DrafterSource, LoadedDrafter, load_drafter
from specjax.models import families, sharding
from specjax.models.base import Model
from specjax.models.layouts.tables import Layout, LayoutName
from specjax.models.mesh_axes import MeshAxisMap, mapped
from specjax.paged import kv_cache
from specjax.paged.page_sizes import with_page_size
from specjax.paged.work import ModelWork
from specjax.planning import devices, plan_request, plans
from specjax.planning.device_memory import (
    MemoryWatch,
    available_bytes,
    bytes_on,
    total_bytes,
)
from specjax.planning.memory_model import MemoryPlan
from specjax.planning.processor_speed import processor_speed
from specjax.planning.step_prior import Accelerator, step_prior
from specjax.policy.goodput import Goodput
from specjax.policy.interface import SpeculationPolicy
from specjax.policy.shelf import shelf_of
from specjax.policy.step_cost import Prior
from specjax.runtime.amounts import amount
from specjax.runtime.progress import Report
from specjax.runtime.stack_level import of_the_caller
from specjax.types import DecoderParams

# Kinds of sampling, for which acceptance is learned separately.
GREEDY, SAMPLED, MIXED = "greedy", "sampled", "mixed"
# By platform, the heads axes of views (`specjax.models.views`) that products take at no cost. A TPU
# keeps the last two axes of an array in tiles, so heads that are one of these would be moved in
# every step. On a CPU, which holds few weights, no view is as fast for few tokens.
VIEWED: dict[str, tuple[int | None, ...]] = {"tpu": (None, 0), "gpu": (None, 0, 1)}
FEWER_PAGES = 0.75  # fraction of the pages to try next after they did not fit


Planned = TypeVar("Planned")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Loaded models and settings, before the requests are known.

    `of` makes it; `for_run` makes a RunSetup of it, and only that makes a loop.
    """

    target: Model
    drafter: LoadedDrafter
    speculation: SpeculationConfig
    engine: EngineConfig
    mesh: Mesh | None
    rules: tuple[int, ...] = ()  # rules beyond equality that memory is planned for
    # Whether memory is planned for a policy that chooses row buckets; by default the config's.
    chooses_rows: bool | None = None
    # Kind of sampling, by which learned acceptance is kept.
    acceptance_kind: str = MIXED
    kept: KeptShape | None = None  # the hidden states that steps keep for a drafter that learns
    learner_bytes: int = 0  # of one device that learning takes: weights, optimiser, workspace

    @functools.cached_property
    def trusted_kernels(self) -> tuple[tuple[str, str], ...]:
        """Pairs of an op and a kernel that passed its self-test on the devices, which may run now:
        a minute or so, once per kind of device and version."""
        return trusted_kernels(self.engine, self._devices, self._dtype)

    @classmethod
    def of(
        cls,
        target: Model | str | os.PathLike[str],
        *,
        drafter: DrafterSource = None,
        verification: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        mesh_axes: MeshAxisMap | None = None,
    ) -> Setup:
        """Loads target and drafter and returns the setup; arguments as of `generate`."""
        mesh = sharding.automatic(mapped(mesh, mesh_axes))
        engine = made(EngineConfig, engine, "engine")  # what is misspelt is said before loading
        model = load_target(target, mesh)
        if mesh is not None:
            sharding.validate(model.config, mesh)
        with sharding.lowered(mesh):
            own = with_page_size(
                engine,
                model.config,
                dtype_of(model.params) or jnp.float32,
                kv_shards=sharding.axis_size(mesh, sharding.TENSOR),
            )
        loaded, speculation = _choose_drafter(
            model,
            drafter,
            _speculation(speculative_config, verification, num_speculative_tokens),
            own,
            mesh,
        )
        setup = cls(model, loaded, speculation, own, mesh)
        setup._check_kernels()
        setup._check_drafter()
        setup._check_budgets()
        _warn_of_context(model, setup.engine)
        return setup

    def _check_kernels(self) -> None:
        """Raises if a kernel's implementation is for another platform than that of the steps."""
        with sharding.lowered(self.mesh):
            own = target_platform()
        for op, name in dict(self.engine.kernels).items():
            if (needed := PLATFORMS.get(name, own)) != own:
                raise ValueError(
                    f"EngineConfig.kernels[{op!r}]={name!r} runs on {needed}, and this is {own}; "
                    "leave it out, or name another."
                )

    def _check_drafter(self) -> None:
        """Raises if the drafter's spec says figures that cannot be, or other weights than it has.

        A setup of shapes alone may get the drafter's weights later.
        """
        for depth in range(1, self.speculation.depth + 1):
            self.drafter.num_nodes(depth)
            self.drafter.tree_slots(depth)
        self._drafter_works()
        leaves = jax.tree.leaves(self.target.params)
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if self._has_drafter_params or not is_abstract:
            own = dtype_of(self.drafter.params) or self._dtype
            self.drafter.check_params(self.target.config, own)

    def _check_budgets(self) -> None:
        """Raises if memory or page settings are impossible, before compiling."""
        num_shards = sharding.axis_size(self.mesh, sharding.DATA)
        with sharding.lowered(self.mesh):
            check_pages(
                self._pooled,
                self.engine,
                self._dtype,
                num_shards,
                sharding.axis_size(self.mesh, sharding.TENSOR),
                self._device_bytes,
            )
        given, there = self.engine.memory_bytes, self._device_bytes
        if given is None or num_shards > 1:
            return
        if there is not None and given > there:
            raise ValueError(
                f"memory_bytes={given} is more than the {amount(there)} that the device has; "
                "lower it, or leave it out."
            )
        self._with_or_without_drafter(plans.check_memory)

    def check_kept(self, kept: KeptShape, num_layers: int) -> None:
        """Raises ValueError where hidden states of so many layers alone take more than a device."""
        num_bytes = kept.num_bytes(num_layers, self.target.config.hidden_size, self._dtype)
        num_bytes //= sharding.axis_size(self.mesh, sharding.DATA)
        there = self._device_bytes
        if there is not None and num_bytes > there:
            raise ValueError(
                f"{kept.num_windows} windows of {kept.length} tokens take {amount(num_bytes)} of a "
                f"device that has {amount(there)}; lower replay or length of adapt."
            )

    def for_run(
        self,
        rules: Iterable[int],
        policy: SpeculationPolicy | None = None,
        acceptance_kind: str = MIXED,
    ) -> RunSetup:
        """Returns a setup whose memory is planned for some rules and a policy.

        Args:
          acceptance_kind: GREEDY, SAMPLED or MIXED; acceptance is learned from runs of the same
            kind.

        Raises:
          TypeError: `policy` is no SpeculationPolicy.
          ValueError: the config names a policy too.
        """
        chooses_rows = None
        if policy is not None:
            check_policy(policy)
            if self.speculation.policy is not None:
                raise ValueError(
                    f"policy= is a {type(policy).__name__}, and speculative_config names another "
                    f"policy, {self.speculation.policy!r}; leave one out."
                )
            chooses_rows = getattr(policy, "chooses_rows", False)
        rules = self.drafter.effective_rules(rules)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(Setup)}
        own |= {
            "rules": rules,
            "chooses_rows": chooses_rows,
            "acceptance_kind": acceptance_kind,
        }
        return RunSetup(**own, given_policy=policy)

    @property
    def params(self) -> DecoderParams:
        return DecoderParams(self.target.params, self.drafter.params)

    def without_weights(self) -> Self:
        """Returns a setup of the shapes of the weights, so that others may take their place."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        return dataclasses.replace(
            self,
            target=dataclasses.replace(self.target, params=shapes.target),
            drafter=dataclasses.replace(self.drafter, params=shapes.drafter),
        )

    def policy(self, decoder: Decoder) -> SpeculationPolicy:
        """Returns the policy that chooses K: the config's table, goodput, or a fixed K."""
        return policy_of(
            self.speculation, self.drafter, decoder, self.acceptance_kind, lambda: self._prior
        )

    @functools.cached_property
    def _prior(self) -> Prior | None:
        """The prediction of a step's seconds by bytes and operations; None on unknown devices."""
        device = self._devices[0]
        is_known = of_kind(device.device_kind) is not None or device.platform == "cpu"
        # Lazy: a processor's speed is measured, once per machine.
        return (lambda *of: self._predicted(*of)) if is_known else None

    @functools.cached_property
    def _predicted(self) -> Prior:
        device = self._devices[0]
        figures = of_kind(device.device_kind)
        speed = processor_speed() if figures is None else Accelerator(figures.per_device())
        chips = sharding.axis_size(self.mesh, sharding.TENSOR)
        count = _num_weights(self.target.params)
        kept = kv_cache.pages_dtype(self.engine.kv_cache_dtype, self._dtype)
        target = plans.model_work(self.target.config, self._dtype, chips, count, kept)
        drafters = [(work, work.num_layers) for work in self._drafter_works()]
        return step_prior(speed, (target, self.target.config.num_layers), drafters)

    def _drafter_works(self) -> tuple[ModelWork, ...]:
        """Returns the work of each model that runs for a draft token."""
        own = dtype_of(self.drafter.params) or self._dtype
        return self.drafter.work(self.target.config, own, _num_weights(self.drafter.params))

    def keep(self, loop: Loop) -> None:
        """Keeps the speed that a run learned, for later runs and processes."""
        if isinstance(loop.policy, Goodput):
            shelf_of(loop.decoder).keep(loop.policy, self.acceptance_kind)

    def requests(
        self, prompts: Sequence[Any], sampling: Any, *, num_before: int = 0
    ) -> tuple[list[Request], list[Refused]]:
        """Returns the valid requests, n per prompt, and those refused; see make_requests."""
        return make_requests(
            self.target,
            prompts,
            one_each(sampling, self.target, len(prompts)),
            self.speculation,
            self.drafter,
            self.engine,
            num_before=num_before,
        )

    def standing_sizes(self) -> Sizes:
        """Returns sizes that depend only on EngineConfig and the model, not on requests."""
        context = self.target.config.max_position_embeddings
        with sharding.lowered(self.mesh):
            return standing_sizes(context, *self._memory_arguments)

    def with_memory_for(self, requests: Sequence[Request]) -> Self:
        """Returns a setup whose pages hold as many of the requests as the device's memory allows.

        Where the default pool suffices, or the config says how large it is, it is the same:
        planning memory compiles some steps.
        """
        engine = self.engine
        if engine.num_pages is not None or engine.kv_cache_bytes is not None:
            return self
        sizes, _, unfit = self.sizes(requests)
        is_enough = sizes is not None and sizes.num_pages >= sizes.rows * sizes.pages_per_row
        return self if is_enough and not unfit else self.with_reported_memory()

    def with_reported_memory(self) -> Self:
        """Returns a setup with memory_bytes set to the device's bytes that are not in use.

        Of a mesh, the smallest; unset if a device does not report its memory.
        """
        num_shards = sharding.axis_size(self.mesh, sharding.DATA)
        if self.engine.memory_bytes is not None or num_shards > 1:
            return self
        found = [
            available_bytes(device, bytes_on(device, self._weights_in_place))
            for device in self._devices
        ]
        known = [available for available in found if available is not None]
        if len(known) < len(found):
            return self
        engine = dataclasses.replace(self.engine, memory_bytes=min(known))
        return dataclasses.replace(self, engine=engine)

    @property
    def _devices(self) -> list[Any]:
        """The devices of this process that it runs on."""
        mesh = self.mesh
        return jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)

    @property
    def _device_bytes(self) -> int | None:
        """Bytes of the smallest device; None if one does not report them."""
        found = list(map(total_bytes, self._devices))
        known = [number for number in found if number is not None]
        return min(known) if known and len(known) == len(found) else None

    @property
    def _pooled(self) -> Pooled:
        """Target and drafter, whose pages are allocated together."""
        config = self.target.config
        return Pooled(config, self.drafter.bytes_per_token(config, self._dtype))

    @property
    def _weights_in_place(self) -> list[Any]:
        """The weights that already lie on their devices; others are copied and stay as well."""
        leaves, mesh = jax.tree.leaves(self.params), self.mesh
        if mesh is None:
            return leaves
        devices = set(mesh.devices.flat)
        return [x for x in leaves if getattr(x, "devices", set)() == devices]

    @functools.cached_property
    def memory(self) -> MemoryPlan | None:
        """The plan of memory_bytes beside the weights; None if memory_bytes is not given.

        None, with a warning, over a mesh's data axis too, where num_pages or kv_cache_bytes
        count. Compiles some of the steps from shapes, which the compilation cache keeps.

        Raises:
          ValueError: not even one page fits.
        """
        return self._planned[0]

    @functools.cached_property
    def _planned(self) -> tuple[MemoryPlan | None, str | None]:
        """The plan of memory, and why it is without the drafter; None if it is with it."""
        num_shards = sharding.axis_size(self.mesh, sharding.DATA)
        if self.engine.memory_bytes is None:
            return None, None
        if num_shards > 1:
            warnings.warn(
                f"memory_bytes={self.engine.memory_bytes} has no effect over the mesh's "
                f"{num_shards} data shards: nothing is planned for them yet. Say num_pages or "
                "kv_cache_bytes.",
                stacklevel=of_the_caller(),
            )
            return None, None
        plan, fault = self._with_or_without_drafter(plans.make_plan)
        for warning in plan.notes:
            warnings.warn(warning, stacklevel=of_the_caller())
        return plan.memory, fault

    @functools.cached_property
    def kernels(self) -> tuple[Taken, ...]:
        """The implementation of each op in the steps of these settings."""
        if self.memory is not None:
            return self.memory.kernels
        return self._with_or_without_drafter(plans.kernels_in_use)[0]

    def _with_or_without_drafter(
        self, plan: Callable[[plan_request.PlanRequest], Planned]
    ) -> tuple[Planned, str | None]:
        """Returns a plan, and what is wrong with the drafter if it had to be left out."""
        request = self._plan_request
        try:
            return plan(request), None
        except DrafterError as error:
            return plan(request.without_drafter()), str(error)

    @property
    def _plan_request(self) -> plan_request.PlanRequest:
        """The plan's input: this setup on the present devices."""
        chips = sharding.axis_size(self.mesh, sharding.TENSOR)
        shapes = jax.eval_shape(lambda weights: weights, self.drafter.params)
        return plan_request.PlanRequest(
            target=self.target.config,
            target_name=self.target.name,
            drafter=self.drafter.spec,
            drafter_name=self.drafter.name,
            device=devices.Device(devices.HERE, chips, None, self.mesh),
            dtype=self._dtype,
            num_speculative_tokens=self.speculation.depth,
            engine=self.engine,
            rules=self.rules,
            rule_options=_rule_options(self.speculation),
            max_drafts_per_shard=self._max_drafts_per_shard(self.engine.max_rows),
            drafter_dtype=dtype_of(self.drafter.params),
            drafter_params=shapes if self._has_drafter_params else None,
            chooses_rows=self._plans_row_buckets,
            trusted_kernels=self.trusted_kernels,
            kept=self.kept,
            learner_bytes=self.learner_bytes,
        )

    @functools.cached_property
    def abstract_drafter(self) -> Any:
        """The drafter's weights, or their shapes and dtypes if it was loaded without any; () where
        they are made from the target's."""
        if self._has_drafter_params or self.drafter.spec.made_by is not None:
            return self.drafter.params
        return self.drafter.spec.abstract_params(self.target.config, self._dtype)

    def handed_weights(self, layout: LayoutName | Layout) -> HandedWeights:
        """Returns what takes weights of a layout for the steps of this setup.

        Raises:
          ValueError, NotImplementedError: the layout does not fit the target.
        """
        config, drafter = self.target.config, self.abstract_drafter
        places, mesh = None, sharding.factored(self.mesh, self.drafter.spec.num_shards)
        if mesh is not None:
            both = DecoderParams(self.target.params, drafter)
            specs = sharding.weight_specs(both, mesh, config, self.drafter.spec)
            places = sharding.shardings(specs, mesh)
        with sharding.lowered(self.mesh):
            viewed = VIEWED.get(target_platform(), ()) if families.is_own(config) else ()
        return HandedWeights(
            layout,
            config,
            target=self.target.params,
            drafter=drafter,
            places=places,
            viewed=viewed,
        )

    @property
    def _has_drafter_params(self) -> bool:
        return bool(jax.tree.leaves(self.drafter.params))

    @property
    def _plans_row_buckets(self) -> bool:
        if self.chooses_rows is not None:
            return self.chooses_rows
        return kind_of_policy(self.speculation, self.rules).chooses_rows

    @property
    def _dtype(self) -> Any:
        return dtype_of(self.target.params)

    @property
    def _sized_engine(self) -> EngineConfig:
        """The engine's config with kv_cache_bytes lowered to the bytes that fit."""
        memory = self.memory
        if memory is None or self.engine.num_pages is not None:
            return self.engine
        kv_shards = sharding.axis_size(self.mesh, sharding.TENSOR)
        with sharding.lowered(self.mesh):
            of_page = page_bytes(self._pooled, self.engine, self._dtype, kv_shards)
        fitting = memory.num_pages * of_page
        asked = self.engine.kv_cache_bytes
        most = fitting if asked is None else min(fitting, asked)
        return dataclasses.replace(self.engine, kv_cache_bytes=most)

    @property
    def _memory_arguments(self) -> tuple[Any, ...]:
        return (
            self._pooled,
            self._sized_engine,
            self._dtype,
            sharding.axis_size(self.mesh, sharding.DATA),
            self.drafter.tree_slots(self.speculation.depth),
            sharding.axis_size(self.mesh, sharding.TENSOR),
        )

    def sizes(
        self, requests: Sequence[Request]
    ) -> tuple[Sizes | None, list[Request], list[Refused]]:
        """Returns sizes, the requests that they can serve, and the refused ones."""
        with sharding.lowered(self.mesh):
            return choose_sizes(requests, *self._memory_arguments)

    def decoder(self, sizes: Sizes, rules: Iterable[int]) -> Decoder:
        """Returns the compiled functions for requests of some rules, reused if built before."""
        config = DecoderConfig(
            target=self.target.config,
            drafter=self.drafter.spec,
            sizes=sizes,
            engine=self.engine,
            rules=tuple(map(Rule, self.drafter.effective_rules(rules))),
            rule_options=_rule_options(self.speculation),
            max_drafts_per_shard=self._max_drafts_per_shard(sizes.rows),
            mesh=self.mesh,
            kept=self.kept,
            trusted_kernels=self.trusted_kernels,
        )
        return shared_decoder(config)

    def _max_drafts_per_shard(self, rows: int) -> int | None:
        """Returns the most draft tokens that a shard verifies per step; None for all of them."""
        config = self.speculation
        return _drafts_per_shard(
            config.max_drafts_per_step, self.drafter, config.depth, rows, self.mesh
        )


@dataclasses.dataclass(frozen=True)
class RunSetup(Setup):
    """A setup that knows the rules and the policy of its run, and so its memory."""

    given_policy: SpeculationPolicy | None = None  # by default the config's

    def loop(
        self,
        sizes: Sizes,
        rules: Iterable[int],
        *,
        on_progress: Report,
        params: DecoderParams | None = None,
    ) -> Loop:
        """Returns the loop that runs requests of some rules.

        If the device has less memory than planned, it makes pages fewer, with a warning.

        Args:
          rules: the rules that requests use, among those that memory is planned for.
          params: weights; by default the setup's own.
        """
        rules = tuple(rules)
        with sharding.lowered(self.mesh):
            check_state(
                sizes,
                self._pooled,
                self.engine,
                sharding.axis_size(self.mesh, sharding.DATA),
                sharding.axis_size(self.mesh, sharding.TENSOR),
                self._device_bytes,
            )
        decoder = self.decoder(sizes, rules)
        weights = self.params if params is None else params

        def fewer_pages(decoder: Decoder) -> Decoder | None:
            fewer = self._fewer_pages(decoder.sizes)
            return None if fewer is None else self.decoder(fewer, rules)

        while True:
            try:
                return self._loop(decoder, weights, fewer_pages, on_progress)
            except jax.errors.JaxRuntimeError as error:
                fewer = fewer_pages(decoder) if OUT_OF_MEMORY in str(error) else None
                if fewer is None:
                    raise
                decoder = fewer

    def _fewer_pages(self, sizes: Sizes) -> Sizes | None:
        """Returns sizes with fewer pages, with a warning; None if a full row would not fit."""
        fewer = int(FEWER_PAGES * sizes.num_pages)
        fewer -= fewer % sharding.axis_size(self.mesh, sharding.DATA)
        if fewer < sizes.pages_per_row:
            return None
        warnings.warn(
            f"{sizes.num_pages} pages do not fit in the device's memory; going on with "
            f"{fewer}. Lower kv_cache_bytes, num_pages or memory_bytes to have no more "
            "to begin with.",
            stacklevel=of_the_caller(),
        )
        return dataclasses.replace(sizes, num_pages=fewer)

    def _loop(
        self,
        decoder: Decoder,
        params: DecoderParams,
        fewer_pages: Callable[[Decoder], Decoder | None],
        on_progress: Report,
    ) -> Loop:
        return Loop(
            decoder,
            params,
            self.given_policy or self.policy(decoder),
            gate=self._gate(decoder.sizes),
            most_tokens=self._most_tokens(decoder.sizes),
            fewer_pages=fewer_pages,
            drafter_name=self.drafter.name,
            drafter_fault=self._planned[1],
            on_progress=on_progress,
        )

    def _gate(self, sizes: Sizes) -> SpeculationGate:
        """Returns the largest batch that speculates."""
        most_rows, memory = self.speculation.speculation_max_rows, self.memory
        if memory is None:
            return SpeculationGate(max_rows=most_rows)
        # The pool may be smaller than planned: fewer pages fitted, or num_pages is set.
        has_all = sizes.num_pages >= sizes.rows * sizes.pages_per_row
        pool_tokens = None if has_all else sizes.num_pages * sizes.page_size
        fraction = self.engine.speculation_weight_fraction
        most = gate_tokens(fraction, memory.weight_limit / memory.next_token, pool_tokens)
        return SpeculationGate(max_rows=most_rows, max_tokens=min(most, memory.gate_tokens))

    def _most_tokens(self, sizes: Sizes) -> int | None:
        """Returns the tokens of a batch above which no request is admitted; None for no limit."""
        if self.memory is None or self.engine.num_pages is not None:
            return None  # an explicit num_pages overrides the plan
        share = min(sizes.num_pages / self.memory.num_pages, 1.0)
        return int(self.memory.most_tokens * share)

    def memory_watch(self, loop: Loop) -> MemoryWatch | None:
        """Returns the memory watch of a loop whose state is on the devices; None without a
        plan."""
        if self.memory is None:
            return None
        planned = self.memory.planned_workspace(loop.decoder.sizes.num_pages)
        planned += self.memory.learner_bytes
        return MemoryWatch(self._devices, planned)


def acceptance_kind(requests: Iterable[Request]) -> str:
    """Returns the kind of sampling of some requests: GREEDY, SAMPLED or MIXED."""
    kinds = {r.params.temperature == 0 for r in requests}
    return MIXED if len(kinds) != 1 else GREEDY if kinds.pop() else SAMPLED


def _warn_of_context(target: Model, engine: EngineConfig) -> None:
    """Warns if max_context is above the model's own limit."""
    most, asked = target.config.max_position_embeddings, engine.max_context
    if asked is not None and asked > most:
        warnings.warn(
            f"max_context={asked} is more than the {most} tokens that "
            f"{target.name or 'the model'!r} "
            f"was made for; prompt and output end at {most}.",
            stacklevel=of_the_caller(),
        )


def _speculation(
    given: Any, verification: str | None, num_speculative_tokens: int | None
) -> SpeculationConfig:
    """Returns the config of vLLM's JSON, overridden by the arguments."""
    if given is None:
        config = SpeculationConfig()
    elif isinstance(given, SpeculationConfig):
        config = given
    else:
        config = SpeculationConfig.from_json(given)
    if verification is not None:
        config = dataclasses.replace(config, verification=verification)
    if num_speculative_tokens is not None:
        config = dataclasses.replace(config, num_speculative_tokens=num_speculative_tokens)
    return config


def _choose_drafter(
    target: Model,
    drafter: Any,
    config: SpeculationConfig,
    engine: EngineConfig,
    mesh: Mesh | None,
) -> tuple[LoadedDrafter, SpeculationConfig]:
    """Returns the drafter of a call, and the config with its K.

    Args:
      drafter: as of `generate`; it overrides that of the config.
    """
    source = drafter
    named = config.method if config.method in BY_NAME else config.model
    if source is None:
        source = named
    elif isinstance(source, str) and config.method in BY_NAME and source != named:
        warnings.warn(
            f"drafter={source!r} is used, and not the {named!r} of speculative_config; leave one "
            "of them out.",
            stacklevel=of_the_caller(),
        )
    loaded = load_split_drafter(source, target, config, engine=engine, mesh=mesh)
    if not loaded.can_draft or config.depth == 0:
        # Plain decoding keeps no pages for a drafter.
        loaded = load_drafter(None, target)
    _warn_of_most_drafts(loaded, config)
    config = _with_depth(config, loaded)
    loaded.check_windows(target.config, config.depth)
    return loaded, config


def _warn_of_most_drafts(drafter: LoadedDrafter, config: SpeculationConfig) -> None:
    """Warns where a K that was asked for is more than the drafter ever drafts."""
    asked, most = config.num_speculative_tokens, drafter.spec.most_drafts
    if asked is not None and most is not None and asked > most:
        warnings.warn(
            f"num_speculative_tokens={asked}, and {drafter.name!r} drafts at most {most} tokens; "
            "lower it, so that steps have no room for more.",
            stacklevel=of_the_caller(),
        )


def _with_depth(config: SpeculationConfig, drafter: LoadedDrafter) -> SpeculationConfig:
    """Returns the config with the call's K, and without a tree if the drafter cannot draft."""
    if not drafter.can_draft:
        return dataclasses.replace(
            config,
            num_speculative_tokens=0,
            num_speculative_tokens_per_batch_size=None,
            speculative_token_tree=None,
            tree_top_k=None,
        )
    depth = config.depth
    if drafter.max_depth is not None:
        # The tree that the drafter was loaded with bounds K; its depth is the default K.
        is_asked_for = config.num_speculative_tokens is not None or config.has_tree
        depth = min(depth, drafter.max_depth) if is_asked_for else drafter.max_depth
    return dataclasses.replace(config, num_speculative_tokens=depth)


def _num_weights(params: Any) -> int | None:
    """Returns the number of weights in a pytree; None if there is none."""
    return sum(leaf.size for leaf in jax.tree.leaves(params)) or None


def _rule_options(config: SpeculationConfig) -> RuleOptions:
    return RuleOptions(
        lenience=config.lenience,
        typical_epsilon=config.typical_epsilon,
        typical_delta=config.typical_delta,
        synthetic_rates=config.synthetic_acceptance_rates or (),
    )


def _drafts_per_shard(
    most: int | None,
    drafter: LoadedDrafter,
    depth: int,
    rows: int,
    mesh: Mesh | None,
) -> int | None:
    """Returns the most draft tokens that a shard verifies per step; None for all of them.

    Raises:
      ValueError: max_drafts_per_step is below the number of shards.
    """
    if most is None:
        return None
    num_shards = sharding.axis_size(mesh, sharding.DATA)
    if most < num_shards:
        raise ValueError(
            f"max_drafts_per_step={most} is below the mesh's {num_shards} data shards, of "
            "which each verifies an equal part; raise it."
        )
    num_drafts = drafter.num_nodes(depth) - 1
    is_bound = most // num_shards < rows // num_shards * num_drafts
    return most // num_shards if is_bound else None
