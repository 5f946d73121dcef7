"""Compiles steps from shapes alone: without weights, state or a present device."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from specjax.decode.bucket import BURST, MIXED, PREFILL, Bucket
from specjax.decode.compiler_options import compile_with
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import PromptShape
from specjax.decode.state import DecodeState
from specjax.decode.steps import Step, Steps
from specjax.drafters.guard import abstract_drafter_params
from specjax.models import sharding
from specjax.models.abstract import abstract_weights as abstract_weights
from specjax.types import DecoderParams

# Variables that the TPU compiler reads; without them it waits for an answer from a TPU host.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so several processes may compile
}
# These executables never run, so their code need not be fast. Buffers are assigned before code
# generation: memory_analysis() returns the same bytes, in half the time.
_CPU_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class AbstractDecoder(Steps):
    """Steps that are lowered and compiled from shapes alone, and never run.

    A mesh of described devices (`described_mesh`) makes it compile for those.

    Args:
      drafter_dtype: of the drafter's weights; by default that of the pages.
      drafter_params: shapes of the drafter's weights; by default `abstract_params` of its spec.
    """

    def __init__(
        self, config: DecoderConfig, *, drafter_dtype: Any = None, drafter_params: Any = None
    ):
        super().__init__(config)
        self._drafter_dtype = drafter_dtype
        self._drafter_params = drafter_params

    def compile_burst(
        self, num_speculative_tokens: int, num_rows: int | None = None
    ) -> jax.stages.Compiled:
        """Returns the compiled burst of a K, for a row bucket or all rows."""
        return self._compile(BURST, self.lower_burst(num_speculative_tokens, num_rows))

    def lower_burst(
        self, num_speculative_tokens: int, num_rows: int | None = None
    ) -> jax.stages.Lowered:
        """Returns what `compile_burst` compiles."""
        rows = self.sizes.rows if num_rows is None else num_rows
        return self._lower_bucket(Bucket(rows, num_speculative_tokens))

    def compile_prefill(self, num_places: int, num_tokens: int) -> jax.stages.Compiled:
        """Returns the compiled prefill of num_tokens tokens of at most `num_places` prompts."""
        return self._compile(PREFILL, self.lower_prefill(num_places, num_tokens))

    def lower_prefill(self, num_places: int, num_tokens: int) -> jax.stages.Lowered:
        """Returns what `compile_prefill` compiles."""
        params, places = self.abstract_params, jax.ShapeDtypeStruct((num_places,), jnp.int32)
        table = self.plan_shapes(Bucket(self.sizes.rows, 0)).block_table
        prompts = PromptShape(num_places // self.num_shards, num_tokens)
        step = self.prefill_step(params, prompts)
        return self._lower(step, self.abstract_state, params, table, places, places)

    def compile_mixed(
        self, num_places: int, num_tokens: int, num_speculative_tokens: int = 0
    ) -> jax.stages.Compiled:
        """Returns the compiled step of all rows at a K with a prefill beside it."""
        bucket = Bucket(self.sizes.rows, num_speculative_tokens)
        prompts = PromptShape(num_places // self.num_shards, num_tokens)
        return self._compile(MIXED, self._lower_bucket(bucket, prompts))

    def _lower_bucket(
        self, bucket: Bucket, beside: PromptShape | None = None
    ) -> jax.stages.Lowered:
        params = self.abstract_params
        inputs = self.inputs_of(params, self.abstract_state, bucket, beside)
        return self._lower(self.bucket_step(params, bucket, beside), *inputs)

    def _lower(self, step: Step, state: DecodeState, *arguments: Any) -> jax.stages.Lowered:
        """Returns the lowered step; its arguments are split as those of a decoder that runs it."""
        if self.mesh is not None:
            # The compiler's copies depend on the sharding of the arguments.
            state = _lay(state, self.state_specs(state), self.mesh)
            pairs = zip(arguments, step.in_specs, strict=True)
            arguments = tuple(_lay(argument, specs, self.mesh) for argument, specs in pairs)
        return self.lower(step, state, *arguments)

    def _compile(self, kind: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a step with the options of the decoder that runs it, but on a CPU."""
        if self.device.platform == "cpu":
            return lowered.compile(compiler_options=_CPU_OPTIONS)
        return compile_with(lowered, self.compiler_options(kind))

    @property
    def abstract_state(self) -> DecodeState:
        """The shapes and dtypes of `initial_state`."""
        with sharding.lowered(self.mesh):
            return jax.eval_shape(functools.partial(self.initial_state, True))

    @property
    def taps(self) -> tuple[int, ...]:
        """As many layers as the drafter taps in the whole target, clipped to those present."""
        most = self.target.num_layers
        named = (tap if tap >= 0 else tap + most + 1 for tap in self.drafter.taps)
        return tuple(min(max(tap, 0), most) for tap in named)

    @property
    def abstract_params(self) -> DecoderParams:
        """Shapes and dtypes of the weights of target and drafter.

        Raises:
          DrafterError: the drafter's `abstract_params` raised.
        """
        dtype = self.sizes.dtype
        drafter = self._drafter_params
        if drafter is None:
            own = self._drafter_dtype or dtype
            drafter = abstract_drafter_params(self.drafter, self.target, own)
        return DecoderParams(abstract_weights(self.target, dtype), drafter)


def described_mesh(topology: str, num_chips: int) -> Mesh:
    """Returns a mesh of described chips, which need not be present, all on the tensor axis.

    Args:
      topology: of TPUs, as "v5e:2x2"; compiling for them takes libtpu.
      num_chips: at most those of the topology.

    Raises:
      ValueError: the topology is unknown, or has fewer chips.
      NotImplementedError: libtpu is not installed.
    """
    from jax.experimental import topologies

    if not _has_libtpu():
        raise NotImplementedError(
            f"compiling for {topology=} needs libtpu, which is not installed; install it: "
            'pip install "jax[tpu]".'
        )
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as error:  # of several kinds, by what libtpu says
        raise ValueError(
            f"{topology=} is not known to libtpu ({_first_line(error)}); expected one as "
            "v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2 or tpu7x:2x2x1."
        ) from error
    devices = found.devices
    if num_chips > len(devices):
        raise ValueError(
            f"{topology=} has {len(devices)} chips, and {num_chips} are asked for; lower "
            "the tensor parallelism or name a larger topology."
        )
    return Mesh(np.array(devices[:num_chips]), (sharding.TENSOR,))


def _has_libtpu() -> bool:
    """Whether jax will find a TPU compiler: where it is told to look, else the package."""
    if os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
        return True
    return importlib.util.find_spec("libtpu") is not None


def _lay(values: Any, specs: Any, mesh: Mesh) -> Any:
    """Returns shapes with their shardings; a spec may stand for a whole subtree."""

    def of_subtree(spec: PartitionSpec, subtree: Any) -> Any:
        place = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            subtree,
        )

    is_spec = lambda x: isinstance(x, PartitionSpec)
    return jax.tree.map(of_subtree, specs, values, is_leaf=is_spec)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
