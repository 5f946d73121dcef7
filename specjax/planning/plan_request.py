"""The inputs of a plan: a model, a drafter and a device, found by name and not loaded."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.gpu_targets import described_devices
from pallas_kernels.implementations import default_device, lowered_for
from specjax import sharding
from specjax.checkpoints.any_model import config_of
from specjax.config.engine import EngineConfig
from specjax.config.names import (
    BY_NAME,
    DEMO,
    DEMO_FOLDERS,
    DEMO_HEADS,
    DRAFTERS,
    MATCHING,
    NO_DRAFTER,
    SELF_DRAFTING,
    suggestion,
)
from specjax.config.rules import Rule
from specjax.config.speculation import MAX_DEPTH
from specjax.configs import heads as known_heads
from specjax.configs import models
from specjax.configs.devices import DEVICES, GOOGLE, NVIDIA, DeviceFigures
from specjax.decode.config import DecoderConfig
from specjax.decode.kept import KeptShape
from specjax.decode.rules import NO_OPTIONS, RuleOptions
from specjax.decode.sizes import Sizes, default_tokens, ridge_of
from specjax.drafters import heads
from specjax.drafters.head_specs import DFlashDrafter, EagleDrafter
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import (
    DrafterSpec,
    HistoryDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specjax.models.base import ModelConfig
from specjax.models.dflash import DFlashConfig
from specjax.models.eagle3 import Eagle3Config
from specjax.models.loading import resolve_folder
from specjax.paged.page_sizes import with_page_size
from specjax.planning.abstract_decoder import described_mesh
from specjax.planning.drafter_split import TABLE_CONTEXT, draft_token_s, split_drafter

DEMO_NAMES = {"demo": "demo-draft"}
NGRAM, HISTORY = MATCHING
_HEAD_SPECS = {Eagle3Config: EagleDrafter, DFlashConfig: DFlashDrafter}
_VENDORS = {"tpu": GOOGLE, "gpu": NVIDIA}
HERE = "here"  # the device that this process runs on
_TOPOLOGY = re.compile("[1-9][0-9]*(x[1-9][0-9]*){1,2}")  # chips along two or three axes


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of a plan: `count` chips of one kind, on the tensor axis."""

    name: str  # as the user wrote it
    count: int
    figures: DeviceFigures | None  # of one device; None if unknown
    mesh: Mesh | None  # to compile for; None for one CPU
    is_compiled_for: bool = True  # otherwise the steps are compiled for CPU

    @property
    def platform(self) -> str:
        """The platform that steps are compiled for: "cpu", "gpu" or "tpu"."""
        if self.mesh is not None:
            return self.mesh.devices.flat[0].platform
        return default_device().platform if self.name == HERE else "cpu"

    @property
    def kind(self) -> str | None:
        """What jax calls the devices that steps are compiled for; None for a CPU."""
        if self.mesh is not None:
            return self.mesh.devices.flat[0].device_kind
        return default_device().device_kind if self.name == HERE else None

    @property
    def traced_for(self) -> str:
        """The platform whose implementations of ops steps use: the GPU's also where the CPU's
        compiler stands in."""
        return self.platform if self.is_compiled_for else self.name.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The inputs of a plan.

    Attributes:
      engine: its max_rows, row_buckets, max_context, page_size, margins and memory_bytes (of
        one device) are used.
      acceptance_rate: the probability, assumed to choose K, that a draft token is accepted.
      rules, rule_options: verification rules of the steps, beyond equality.
      max_drafts_per_shard: as in DecoderConfig.
      drafter_dtype: of the drafter's weights; by default that of the target and the pages.
      drafter_params: shapes of the drafter's weights; by default `abstract_params` of its spec.
      chooses_rows: whether the policy chooses row buckets where the engine names none.
      trusted_kernels: as in DecoderConfig.
      kept: the hidden states that steps keep, as in DecoderConfig.
      learner_bytes: of one device that a drafter that learns takes beside its weights and steps.
    """

    target: ModelConfig
    target_name: str
    drafter: DrafterSpec
    drafter_name: str
    device: Device
    dtype: Any
    num_speculative_tokens: int
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    acceptance_rate: float = 0.7
    rules: tuple[int, ...] = ()
    rule_options: RuleOptions = NO_OPTIONS
    max_drafts_per_shard: int | None = None
    drafter_dtype: Any = None
    drafter_params: Any = None
    chooses_rows: bool = True
    trusted_kernels: tuple[tuple[str, str], ...] = ()
    kept: KeptShape | None = None
    learner_bytes: int = 0

    def __post_init__(self):
        if not 0 <= self.acceptance_rate <= 1:
            raise ValueError(f"acceptance_rate={self.acceptance_rate} must be from 0 to 1.")
        if not 0 <= self.num_speculative_tokens <= MAX_DEPTH:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be from 0 (no "
                f"speculation) to {MAX_DEPTH}."
            )
        for config in self.drafter.configs:
            if config.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"target and drafter have vocabularies of {self.target.vocab_size} and "
                    f"{config.vocab_size} tokens; expected equal sizes."
                )
        with lowered_for(self.device.traced_for):
            engine = with_page_size(
                self.engine, self.target, self.dtype, kv_shards=self.device.count
            )
        object.__setattr__(self, "engine", engine)

    def as_compiled(self) -> PlanRequest:
        """Returns the request whose steps are compiled: this one, or one for a stand-in.

        A CPU computes bfloat16 and float16 in float32, and its compiler would widen all weights
        at once, for a whole burst. Where it stands in for a GPU's, weights and pages are
        float32 from the start: activations then count twice, and weights are not copied.
        """
        if self.device.is_compiled_for:
            return self
        params = jax.tree.map(_widened, self.drafter_params)
        engine = dataclasses.replace(self.engine, kernels=())  # which no CPU could run
        wide = dict(dtype="float32", drafter_dtype="float32", drafter_params=params)
        return dataclasses.replace(self, engine=engine, **wide)

    def without_drafter(self) -> PlanRequest:
        """Returns the request of the same engine for plain decoding."""
        nothing = dict(drafter_dtype=None, drafter_params=None, max_drafts_per_shard=None)
        nothing |= dict(kept=None, learner_bytes=0)
        return dataclasses.replace(
            self, drafter=NoDrafter(), num_speculative_tokens=0, rules=(), **nothing
        )

    @property
    def max_context(self) -> int:
        most = self.target.max_position_embeddings
        return min(most, self.engine.max_context or most)

    @property
    def draft_config(self) -> ModelConfig | None:
        """The config of the draft model, if there is one."""
        return next(iter(self.drafter.configs), None)

    @property
    def most_drafted(self) -> int:
        return self.num_speculative_tokens if self.drafter.can_draft else 0

    @property
    def tree_slots(self) -> int:
        """Slots that a row's nodes take past its last token; 0 for chains."""
        return self.drafter.tree_slots(self.most_drafted)

    def decoder_config(self, num_layers: int, num_pages: int) -> DecoderConfig:
        """Returns the config of a decoder with the first layers of the target."""
        engine = self.engine
        slots = self.max_context + self.tree_slots
        dtype, figures = jnp.dtype(self.dtype), self.device.figures
        if engine.max_prefill_tokens is None and figures is not None:
            # A device that is not compiled for has the prompt buckets of its own figures.
            most = default_tokens(ridge_of(figures, dtype.itemsize))
            engine = dataclasses.replace(engine, max_prefill_tokens=most)
        return DecoderConfig(
            target=self.target.first_layers(num_layers),
            drafter=self.drafter,
            sizes=Sizes(
                rows=engine.max_rows,
                page_size=engine.chosen_page_size,
                num_pages=num_pages,
                pages_per_row=-(-slots // engine.chosen_page_size),
                burst_steps=engine.burst_steps,
                tree_slots=self.tree_slots,
                dtype=dtype,
            ),
            engine=engine,
            rules=tuple(map(Rule, self.rules)),
            rule_options=self.rule_options,
            max_drafts_per_shard=self.max_drafts_per_shard,
            mesh=self.device.mesh,
            kept=self.kept,
            trusted_kernels=self.trusted_kernels,
        )

    @property
    def limits_memory(self) -> int | None:
        """Bytes of one device that weights, state, pages and steps share; None if unknown."""
        if self.engine.memory_bytes is not None:
            return self.engine.memory_bytes
        figures = self.device.figures
        return None if figures is None else figures.memory_bytes


def find_device(name: str, num_chips: int | None = None) -> Device:
    """Returns the device of a name: "cpu", "tpu:v5e:2x2", "gpu:h100".

    Args:
      num_chips: over which the target is split; by default all of a topology, else 1.

    Raises:
      ValueError: the name is unknown, or the chips are fewer than 1.
      NotImplementedError: the device is a TPU, and its compiler is not installed.
    """
    if num_chips is not None and num_chips < 1:
        raise ValueError(
            f"a target cannot be split over {num_chips} chips; expected at least 1. Raise the "
            "tensor parallelism or leave it out."
        )
    if name == "cpu":
        return Device(name, num_chips or 1, None, _local_mesh(num_chips or 1))
    kind, _, rest = name.partition(":")
    generation, _, shape = rest.partition(":")
    figures = _figures(name, kind, generation, shape)
    if kind == "gpu":
        count = num_chips or 1
        devices = described_devices(generation, count)
        if devices is not None:
            mesh = Mesh(np.array(devices), (sharding.TENSOR,))
            return Device(name, count, figures.per_device(), mesh)
        mesh = _local_mesh(count)
        return Device(name, count, figures.per_device(), mesh, is_compiled_for=False)
    if num_chips is None:
        num_chips = math.prod(map(int, shape.split("x"))) * figures.devices_per_chip
    mesh = described_mesh(rest, num_chips)
    return Device(name, num_chips, figures.per_device(), mesh)


def _figures(name: str, kind: str, generation: str, shape: str) -> DeviceFigures:
    """Returns the figures of a chip; raises ValueError if the parts of `name` name no device."""
    figures, is_gpu = DEVICES.get(generation), kind == "gpu"
    if figures is None or figures.vendor != _VENDORS.get(kind) or (is_gpu and shape):
        raise ValueError(
            f"device={name!r} is unknown; expected cpu, gpu:NAME with NAME one of "
            f"{_names_of(NVIDIA)}, or tpu:NAME:TOPOLOGY (as tpu:v5e:2x2) with NAME one of "
            f"{_names_of(GOOGLE)}."
        )
    if not is_gpu and not _TOPOLOGY.fullmatch(shape):
        raise ValueError(
            f"device={name!r} has the topology {shape!r}; expected chips along two or three "
            f"axes, as tpu:{generation}:2x2."
        )
    return figures


def _names_of(vendor: str) -> str:
    return ", ".join(name for name, chip in DEVICES.items() if chip.vendor == vendor)


def find_config(source: str | os.PathLike[str], also: Sequence[str] = (DEMO,)) -> ModelConfig:
    """Returns the config of a folder, a demo name, or a name in `specjax.configs.models`.

    Args:
      also: names that an error lists beside folders and shapes.

    Raises:
      FileNotFoundError: no config has this name.
    """
    name = os.fspath(source)
    shape = known_shape(name)
    if shape is not None:
        return importlib.import_module(f"{models.__name__}.{shape}").get_config()
    if not Path(name).expanduser().exists() and name not in DEMO_FOLDERS:
        raise FileNotFoundError(
            f"{name!r} is no folder with a config.json, and no known shape"
            f"{suggestion(name, [*_modules(models), *also])}; expected a folder, "
            f"{', '.join(map(repr, also))}, or one of {', '.join(_modules(models))}."
        )
    return config_of(source)


def known_shape(name: str) -> str | None:
    """Returns the name of the module in `specjax.configs.models` for a model, if there is one."""
    return _known(name, models)


def _known(name: str, package: ModuleType) -> str | None:
    shape = name.replace("-", "_").replace(".", "_")
    return shape if shape in _modules(package) else None


def _modules(package: ModuleType) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def with_split_drafter(request: PlanRequest, asked: int | None = None) -> PlanRequest:
    """Returns the request with its drafter split over chips, with a warning if not as asked.

    Args:
      asked: SpeculationConfig.draft_tensor_parallel_size; None: the number of chips with the
        shortest time of a draft token.

    Raises:
      ValueError: fewer than 1 chip.
    """
    if asked is not None and asked < 1:
        raise ValueError(
            f"a drafter cannot be split over {asked} chips; expected at least 1. Raise the "
            "drafter's tensor parallelism or leave it out."
        )
    figures = request.device.figures

    def seconds(split: DrafterSpec) -> float:
        assert figures is not None
        return draft_token_s(
            split,
            request.target,
            request.drafter_dtype or request.dtype,
            figures,
            rows=request.engine.max_rows,
            context=min(TABLE_CONTEXT, request.max_context),
            num_speculative_tokens=request.num_speculative_tokens,
        )

    drafter, note = split_drafter(
        request.drafter, asked, request.device.count, None if figures is None else seconds
    )
    if note:
        warnings.warn(note, stacklevel=2)
    return dataclasses.replace(request, drafter=drafter)


def find_drafter(
    source: str | os.PathLike[str] | None,
    target: ModelConfig | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> DrafterSpec:
    """Returns the drafter of a name, of which no weights are read.

    Args:
      source: None, "none", "ngram", "history", "self-int8", "self-int4", the folder of a head over
        the target, a name in `specjax.configs.heads`, or what `find_config` finds.
      target: that it drafts for; None: heads are not looked for, and a draft model keeps its own
        vocabulary.
      aux_layer_ids: layers of the target whose inputs a head in a folder captures, whatever its
        files say.

    Raises:
      FileNotFoundError: there is no such name or folder.
      ValueError: the files are not those of a drafter for this target, or aux_layer_ids is given
        for another drafter.
    """
    name = NO_DRAFTER if source is None else os.fspath(source)
    folder = resolve_folder(name) if name in DEMO_HEADS else Path(name).expanduser()
    is_folder = name not in (NO_DRAFTER, *BY_NAME) and folder.is_dir()
    if target is not None and is_folder and (kind := heads.kind_in(folder)) is not None:
        return kind.spec(kind.read(folder, target, None, aux_layer_ids).config)
    if aux_layer_ids is not None:
        raise ValueError(
            f"{aux_layer_ids=} is for the folder of a head over the target, and the drafter is "
            f"{name!r}; leave it out."
        )
    if name == NO_DRAFTER:
        return NoDrafter()
    if name == NGRAM:
        return NgramDrafter()
    if name == HISTORY:
        return HistoryDrafter()
    if name in SELF_DRAFTING:
        return SelfDrafter.named(name)
    head = _known(name, known_heads)
    if head is not None:
        config = importlib.import_module(f"{known_heads.__name__}.{head}").get_config()
        spec = _HEAD_SPECS[type(config)](config)
        if target is not None:
            heads.check_fits(spec, target)
        return spec
    own = find_config(DEMO_NAMES.get(name, name), [*DRAFTERS, *_modules(known_heads)])
    if target is not None:
        # A draft model of another vocabulary is rewritten in the target's.
        own = dataclasses.replace(own, vocab_size=target.vocab_size)
    return ModelDrafter(own)


def _widened(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a weight, in float32 where it is a float of fewer bits."""
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_narrow else leaf.dtype)


def _local_mesh(count: int) -> Mesh | None:
    """Returns a mesh of `count` CPU devices; None for one."""
    if count == 1:
        return None
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"{count} chips are asked for and jax sees {len(devices)} CPU devices to compile "
            "for; set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return Mesh(np.array(devices[:count]), (sharding.TENSOR,))
