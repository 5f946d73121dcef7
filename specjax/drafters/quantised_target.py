"""The weights of a drafter that is its own target in few bits.

They are the target's matrices alone, by the names that they have there:

    {"layers": {"0": {"q_proj": Quantised, ...}, "1": ...}, "lm_head": Quantised}

without the layers that are skipped, and with "embed_tokens" where the head is the embedding. Norms,
biases, and the embedding that tokens are looked up in are the target's own arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.abstract import abstract_weights
from specjax.models.base import ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.partition import RULES, TENSOR
from specjax.models.quantised import num_bytes, num_groups, quantise

HEAD_BITS = 8  # errors of the head go into the scores directly
MATRIX_SUFFIX = "_proj"


@dataclasses.dataclass(frozen=True)
class QuantisedTarget:
    """Makes the drafter's weights from the target's; hashable.

    Attributes:
      bits: 8 or 4, of the matrices of layers.
      group_size: most inputs that share a scale per output; None: all.
      skip_layers: layers of the target that the drafter leaves out.
      num_shards: devices that the target's heads and MLP are split over.
    """

    bits: int
    group_size: int | None = None
    skip_layers: tuple[int, ...] = ()
    num_shards: int = 1

    def kept_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Returns the layers of the target that the drafter has.

        Of a target cut to its first layers, as plans have it, all stay where none would.
        """
        every = range(target.num_layers)
        return tuple(layer for layer in every if layer not in self.skip_layers) or (*every,)

    def config(self, target: ModelConfig) -> ModelConfig:
        """Returns the config of the target without the layers that are skipped."""
        return target.of_layers(self.kept_layers(target))

    def __call__(self, target: ModelConfig, params: Params) -> Params:
        """Returns the drafter's weights; traceable. Views among the target's are read as such."""
        axes = family_of(target).axes(target)

        def few_bits(weight: Any, own_axes: tuple[str | None, ...], bits: int) -> Any:
            size = weight.shape[1]
            # Inputs that a mesh splits are quantised in groups of one device each.
            is_split = RULES[own_axes[1]] == TENSOR and size % self.num_shards == 0
            shards = self.num_shards if is_split else 1
            most = self.group_size if bits == self.bits else None
            return quantise(weight, bits, num_groups(size, most, shards))

        layers = {
            str(index): {
                name: few_bits(weight, axes["layers"][index][name], self.bits)
                for name, weight in params["layers"][index].items()
                if is_matrix(name, axes["layers"][index][name])
            }
            for index in self.kept_layers(target)
        }
        head = head_name(target)
        own = {head: few_bits(params[head], axes[head], HEAD_BITS)} if head in params else {}
        return {"layers": layers, **own}

    def abstract(self, target: ModelConfig, dtype: Any) -> Params:
        """Returns their shapes and dtypes, for a target whose weights have a dtype."""
        return jax.tree.map(lambda leaf: leaf, _abstract(self, target, jnp.dtype(dtype)))

    def num_bytes(self, target: ModelConfig) -> float:
        """Returns the bytes of the drafter's own weights, over all devices."""
        return sum(map(num_bytes, jax.tree.leaves(self.abstract(target, jnp.float32))))


@functools.lru_cache(maxsize=16)  # tracing takes 40 ms for 8 layers, in every call
def _abstract(maker: QuantisedTarget, target: ModelConfig, dtype: jnp.dtype) -> Params:
    shapes = abstract_weights(target, dtype)
    made = jax.eval_shape(lambda params: maker(target, params), shapes)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)


def is_matrix(name: str, axes: tuple[str | None, ...]) -> bool:
    """Returns whether a weight of a layer is a matrix that `blocks.project` multiplies with."""
    return name.endswith(MATRIX_SUFFIX) and len(axes) == 2


def head_name(config: ModelConfig) -> str:
    """Returns the name of the matrix that logits are made with."""
    return "embed_tokens" if config.tie_word_embeddings else "lm_head"


def layers_of(target: Params, own: Params) -> Params:
    """Returns weights for a forward over the drafter's layers."""
    kept = sorted(map(int, own["layers"]))
    layers = tuple({**target["layers"][index], **own["layers"][str(index)]} for index in kept)
    return {**target, "layers": layers}


def head_of(target: Params, own: Params, config: ModelConfig) -> Params:
    """Returns weights for the logits, which no embedding may be looked up in."""
    head = head_name(config)
    return {**target, head: own[head]} if head in own else target
