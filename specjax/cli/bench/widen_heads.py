"""Widens a head over a target with the target, so that it drafts the same at a larger model's cost.

`widen` gives a target more weights that compute the same function. A head over it reads wider
hidden states and costs what a head of a target of that size would: its layers become as wide as the
target's, and have as many heads and as wide an MLP. All that is added is zeros.

    hidden states   [x, 0], and concatenated ones [a, 0, b, 0]: columns are padded piece by piece
    norms           as in `widen`
    captured layers those of the narrow target; its normed output is that of the wide one
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cli.bench.widen import pad
from specjax.heads.equations import dflash, eagle3
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.loading import LoadedDrafter
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import ModelConfig, Params


def widen_head(drafter: LoadedDrafter, target: ModelConfig, wide: ModelConfig) -> LoadedDrafter:
    """Returns a head for the wide target, which drafts what `drafter` drafts for the narrow one.

    Args:
      target: config of the narrow target.
      wide: of the same target after `widen`.

    Raises:
      NotImplementedError: it is no EAGLE-3, DFlash or DSpark head, or one with convolutions, a norm
        before fc, or another width than the target's.
    """
    spec = drafter.spec
    if not isinstance(spec, EagleDrafter | DFlashDrafter):
        raise NotImplementedError(
            f"drafter {drafter.name!r} cannot be widened: expected an EAGLE-3, DFlash or DSpark "
            "head."
        )
    config = spec.config
    if not isinstance(config, Eagle3Config | DFlashConfig) or _is_other(config, target):
        raise NotImplementedError(
            f"the head {drafter.name!r} has parts that are not widened: convolutions, a norm "
            "before fc, biases, or another width than the target's."
        )
    own = _wide_config(config, target, wide)
    params = _padded(drafter.params, config, own)
    return dataclasses.replace(drafter, spec=dataclasses.replace(spec, config=own), params=params)


def _is_other(config: Any, target: ModelConfig) -> bool:
    layers = config.layers
    has_more = getattr(config, "conv_kernel_size", 0) or getattr(config, "norm_before_fc", False)
    has_biases = layers.qkv_bias or layers.o_bias or layers.mlp_bias
    is_other_width = layers.hidden_size != target.hidden_size
    return bool(has_more or has_biases or is_other_width or getattr(config, "fc_bias", False))


def _wide_config(config: Any, target: ModelConfig, wide: ModelConfig) -> Any:
    layers = dataclasses.replace(
        config.layers,
        hidden_size=wide.hidden_size,
        intermediate_size=max(wide.intermediate_size, config.layers.intermediate_size),
        num_heads=max(wide.num_heads, config.layers.num_heads),
        num_kv_heads=max(wide.num_kv_heads, config.layers.num_kv_heads),
        norm_eps=config.layers.norm_eps * target.hidden_size / wide.hidden_size,
        attention_scale=config.layers.scale,
    )
    last = target.num_layers
    return dataclasses.replace(
        config,
        layers=layers,
        target_hidden_size=wide.hidden_size,
        aux_layers=tuple(wide.num_layers if one == last else one for one in config.aux_layers),
    )


def _padded(params: Params, config: Any, own: Any) -> Params:
    shrink = (config.hidden_size / own.hidden_size) ** 0.5
    module = eagle3 if isinstance(config, Eagle3Config) else dflash
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), own))
    wide = dict(jax.tree_util.tree_leaves_with_path(shapes))
    pieces, wide_pieces = _pieces(config), _pieces(own)

    def widened(path: tuple[Any, ...], leaf: Array) -> Array:
        if path not in wide:
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        before, after = (each.get(name, ()) for each in (pieces, wide_pieces))
        ends = [sum(before[: place + 1]) for place in range(len(before) - 1)]
        parts = jnp.split(leaf, ends, axis=-1)
        *others, last = wide[path].shape
        out = jnp.concatenate(
            [
                pad(part, (*others, size))
                for part, size in zip(parts, after or (last,), strict=True)
            ],
            axis=-1,
        )
        is_norm = "norm" in name and not name.endswith(("q_norm", "k_norm"))
        return out * jnp.asarray(shrink, out.dtype) if is_norm else out

    return jax.tree_util.tree_map_with_path(widened, params)


def _pieces(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns of each weight that reads several vectors at once the size of each, by its name."""
    d, captured = config.hidden_size, (config.target_hidden_size,) * len(config.aux_layers)
    pieces = {"fc": captured, "mask_hidden": captured}
    if isinstance(config, Eagle3Config):
        names = "q_proj", "k_proj", "v_proj"
        return pieces | {f"layers.0.{name}": (d, d) for name in names}
    rank = config.markov_rank
    pieces |= {"gate_proj": (d, rank), "joint_proj": (rank, rank, d)}
    return pieces | ({"confidence": (d, rank)} if config.confidence_reads_token else {})
