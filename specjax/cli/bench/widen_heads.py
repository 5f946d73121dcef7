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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.loading import LoadedDrafter
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import ModelConfig, Params

# What an axis is made of: sizes of its pieces, each of which is padded at its end.
Pieces = tuple[int, ...]


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
    params = _padded(drafter.params, _shapes(config), _shapes(own), config, own)
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


def _shapes(config: Any) -> dict[str, tuple[Pieces, ...]]:
    """Returns the axes of each weight by its name, those of a layer after "layers."."""
    own = config.layers
    d, mlp, taps = own.hidden_size, own.intermediate_size, len(config.aux_layers)
    queries, keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    layer = {
        "q_proj": ((queries,), (d,)),
        "k_proj": ((keys,), (d,)),
        "v_proj": ((keys,), (d,)),
        "o_proj": ((d,), (queries,)),
        "gate_proj": ((mlp,), (d,)),
        "up_proj": ((mlp,), (d,)),
        "down_proj": ((d,), (mlp,)),
        **dict.fromkeys(("input_norm", "post_attention_norm", "hidden_norm"), ((d,),)),
        **dict.fromkeys(("q_norm", "k_norm"), ((own.head_dim,),)),
    }
    shapes = {f"layers.{name}": axes for name, axes in layer.items()}
    shapes["fc"] = ((d,), (config.target_hidden_size,) * taps)
    shapes |= dict.fromkeys(("norm", "hidden_norm"), ((d,),))
    shapes["fc_norms"] = ((config.target_hidden_size,),)
    shapes["mask_hidden"] = ((config.target_hidden_size,) * taps,)
    shapes["lm_head"] = ((own.vocab_size,), (d,))
    shapes["embed_tokens"] = ((config.target_vocab_size,), (d,))
    if isinstance(config, Eagle3Config):
        first = {name: (layer[name][0], (d, d)) for name in ("q_proj", "k_proj", "v_proj")}
        return shapes | {f"first.{name}": axes for name, axes in first.items()}
    rank = config.markov_rank
    shapes["gate_proj"] = ((rank,), (d, rank))
    shapes["joint_proj"] = ((rank, rank, rank), (rank, rank, d))
    shapes["confidence"] = ((1,), (d, rank) if config.confidence_reads_token else (d,))
    return shapes


def _padded(
    params: Params,
    old: dict[str, tuple[Pieces, ...]],
    new: dict[str, tuple[Pieces, ...]],
    config: Any,
    own: Any,
) -> Params:
    shrink = (config.hidden_size / own.hidden_size) ** 0.5

    def pad(names: Sequence[str], leaf: Array) -> Array:
        name = next((each for each in names if each in old), None)
        if name is None:
            return leaf  # as a table of ranks, which has no axis of the target's width
        out = leaf
        for axis, (before, after) in enumerate(zip(old[name], new[name], strict=True)):
            out = _pad_pieces(out, axis, before, after)
        is_norm = "norm" in name and not name.endswith(("q_norm", "k_norm"))
        return out * jnp.asarray(shrink, out.dtype) if is_norm else out

    def of_layer(index: int) -> Callable[[str, Array], Array]:
        first = ["first."] if index == 0 else []
        return lambda name, leaf: pad([f"{p}{name}" for p in [*first, "layers."]], leaf)

    padded: Params = {}
    for name, leaf in params.items():
        if name == "layers":
            padded[name] = tuple(
                {key: of_layer(index)(key, each) for key, each in layer.items()}
                for index, layer in enumerate(leaf)
            )
        else:
            padded[name] = jax.tree.map(lambda each, name=name: pad([name], each), leaf)
    return padded


def _pad_pieces(x: Array, axis: int, old: Pieces, new: Pieces) -> Array:
    """Returns x with zeros after each piece of an axis."""
    if old == new:
        return x
    ends = [sum(old[: i + 1]) for i in range(len(old) - 1)]
    pieces = jnp.split(x, ends, axis=axis)
    widths = [[(0, 0)] * x.ndim for _ in pieces]
    for width, before, after in zip(widths, old, new, strict=True):
        width[axis] = (0, after - before)
    return jnp.concatenate(
        [jnp.pad(piece, width) for piece, width in zip(pieces, widths, strict=True)], axis=axis
    )
