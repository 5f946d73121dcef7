"""Weights of a drafter that are made from the target's: once per version, on the devices."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.implementations import default_device
from specjax.drafters.base import DrafterSpec, WeightMaker
from specjax.models import sharding
from specjax.models.base import ModelConfig
from specjax.models.layouts.once import Once
from specjax.models.quantised import num_bytes
from specjax.types import DecoderParams


class MadeWeights:
    """Makes a drafter's weights, and keeps them while it gets the same arrays of the target.

    They are freed when one of these arrays is, or before others are made. Each device makes its
    own part.

    Attributes:
      seconds, num_bytes: of the last call: what was made, without compiling; 0 where nothing was.
      num_traces: how many functions were traced.
    """

    def __init__(self, spec: DrafterSpec, config: ModelConfig, mesh: Mesh | None):
        """Takes a spec whose `made_by` is set, the target's config, and the mesh of steps."""
        self._spec, self._config, self._mesh = spec, config, mesh
        self._once = Once(self._make)
        self._compiled: dict[Any, Any] = {}
        self._structure: Any = None
        self._lock = threading.Lock()  # engines of several threads may share it
        self.seconds, self.num_bytes, self.num_traces = 0.0, 0, 0

    def __call__(self, target: Any) -> Any:
        """Returns the weights for those of the target, which lie on the devices of steps.

        Raises:
          ValueError: an array was deleted.
        """
        with self._lock:
            leaves, self._structure = jax.tree.flatten(target)
            self.seconds, self.num_bytes = 0.0, 0
            return self._once({str(index): leaf for index, leaf in enumerate(leaves)})

    def drop(self) -> None:
        """Frees what is kept."""
        self._once.drop()

    def _make(self, arrays: Any) -> Any:
        leaves = [*arrays.values()]
        form = lambda x: (x.shape, x.dtype, getattr(x, "sharding", None))
        key = self._structure, tuple(map(form, leaves))
        target = jax.tree.unflatten(self._structure, leaves)
        if key not in self._compiled:
            self._compiled[key] = self._compile(target)
        jax.block_until_ready(leaves)
        start = time.perf_counter()
        made = jax.block_until_ready(self._compiled[key](target))
        self.seconds = time.perf_counter() - start
        self.num_bytes = int(sum(map(num_bytes, jax.tree.leaves(made))))
        return made

    def _compile(self, target: Any) -> Any:
        maker = self._spec.made_by
        assert maker is not None

        device = default_device() if self._mesh is None else self._mesh.devices.flat[0]
        takes_int4 = passes_int4(device)

        def make(target: Any) -> Any:
            self.num_traces += 1
            made = maker(self._config, target)
            return made if takes_int4 else jax.tree.map(_without_int4, made)

        places = None
        if self._mesh is not None:
            shapes = jax.eval_shape(functools.partial(maker, self._config), target)
            both = DecoderParams(target, shapes)
            specs = sharding.weight_specs(both, self._mesh, self._config, self._spec)
            places = sharding.shardings(specs.drafter, self._mesh)
        return jax.jit(make, out_shardings=places).lower(target).compile()


@functools.cache
def passes_int4(device: Any) -> bool:
    """Returns whether compiled functions take int4 arrays that are committed to a device.

    With jax 0.10.2 on a CPU they do not: the array and the function disagree on its layout. Such
    numbers then lie in int8.
    """
    array = jax.device_put(jnp.zeros((8, 128), jnp.int8), device)
    narrow = jax.jit(lambda x: x.astype(jnp.int4))(array)
    read = jax.jit(lambda x: x.astype(jnp.int8)).lower(narrow).compile()
    try:
        read(narrow)
    except ValueError:
        return False
    return True


def _without_int4(leaf: Any) -> Any:
    return leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf


def made_weights(spec: DrafterSpec, config: ModelConfig, mesh: Mesh | None) -> MadeWeights:
    """Returns what makes the weights of a drafter; shared by drafters that make the same."""
    assert spec.made_by is not None
    found = _shared(spec.made_by, config, mesh)
    if not found:
        found.append(MadeWeights(spec, config, mesh))
    return found[0]


@functools.lru_cache(maxsize=8)
def _shared(maker: WeightMaker, config: ModelConfig, mesh: Mesh | None) -> list[MadeWeights]:
    """Returns a list for the one that serves these arguments, empty at first."""
    del maker, config, mesh
    return []
