"""The named layouts, each a function of a config, and the variants that a name stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models.base import ModelConfig
from specjax.models.families import class_names
from specjax.models.layouts.operations import Heads, Interleaved, Operation, Scaled, Transposed
from specjax.models.layouts.tables import LAYER, Layout, LayoutName, Place, leaves_with_names

# The matrices whose outputs are heads, and the one whose inputs are.
_TO_HEADS, _FROM_HEADS = ("q_proj", "k_proj", "v_proj"), "o_proj"


def specjax_own(config: ModelConfig, *, is_stacked: bool = False) -> Layout:
    """Returns specjax's own layout.

    Args:
      is_stacked: whether one array holds all layers, along its first axis.
    """
    name = "specjax, layers stacked" if is_stacked else "specjax"
    return Layout(name, _per_leaf(config, is_stacked, f"layers.{LAYER}", lambda leaf: (leaf, ())))


def nnx(config: ModelConfig, *, is_stacked: bool = False, has_heads: bool = False) -> Layout:
    """Returns the layout of a flax nnx module whose parts have specjax's names.

    Linear: kernel [in, out], bias; Embed: embedding; norms: scale, bias.

    Args:
      is_stacked: whether one array holds all layers along its first axis, as nnx.scan has them.
      has_heads: whether heads and head_dim are axes of their own, as LinearGeneral has them:
        q_proj, k_proj and v_proj [in, heads, head_dim], o_proj [heads, head_dim, out].
    """
    leaf = lambda name: _flax_leaf(config, name, has_heads)
    places = _per_leaf(config, is_stacked, f"layers.{LAYER}", leaf)
    return Layout(_described("nnx", is_stacked, has_heads), places)


def linen(config: ModelConfig, *, is_stacked: bool = False, has_heads: bool = False) -> Layout:
    """Returns the layout of a flax linen module whose parts have specjax's names.

    As `nnx`, but layers are layers_0, layers_1, ..., and the tree is {"params": ...}.
    """
    leaf = lambda name: _flax_leaf(config, name, has_heads)
    places = _per_leaf(config, is_stacked, f"layers_{LAYER}", leaf)
    return Layout(_described("linen", is_stacked, has_heads), places, is_wrapped=True)


def tunix(config: ModelConfig) -> Layout:
    """Returns the layout of tunix's Llama3, Qwen2 and Qwen3 without experts.

    Values are those of specjax. Source: tunix/models/*/params.py, google-tunix 0.1.7.

    Raises:
      NotImplementedError: the config is of another family, or has other biases.
    """
    _require(config, "tunix", ("llama", "qwen2", "qwen3"), has_qkv_bias=True)
    heads, matrix = Heads(1, config.head_dim), Transposed()
    places = {
        "embed_tokens": Place("embedder.input_embedding"),
        "norm": Place("final_norm.w"),
        "lm_head": Place("lm_head.w", (matrix,)),
    }
    of_layer: dict[str, tuple[str, tuple[Operation, ...]]] = {
        "input_norm": ("input_layernorm.w", ()),
        "post_attention_norm": ("post_attention_layernorm.w", ()),
        "q_norm": ("attn.q_norm.w", ()),
        "k_norm": ("attn.k_norm.w", ()),
        "o_proj": ("attn.o_proj.w", (Heads(0, config.head_dim), matrix)),
    }
    for name in _TO_HEADS:
        of_layer[name] = (f"attn.{name}.w", (heads, matrix))
        of_layer[f"{name}_bias"] = (f"attn.{name[0]}_bias", ())
    for name in ("gate_proj", "up_proj", "down_proj"):
        of_layer[name] = (f"mlp.{name}.kernel", (matrix,))
    for name, (path, operations) in of_layer.items():
        places[f"layers.{name}"] = Place(f"layers.{LAYER}.{path}", operations)
    return Layout("tunix", _of_config(places, config))


def maxtext(
    config: ModelConfig,
    *,
    is_stacked: bool = False,
    stack_axis: int = 1,
    is_interleaved: bool | None = None,
    has_scaled_queries: bool | None = None,
) -> Layout:
    """Returns the layout of MaxText's Llama, Mistral and Qwen3 without experts.

    Args:
      is_stacked: whether layers are scanned; stack_axis is then MaxText's param_scan_axis.
      is_interleaved: whether entries 2j and 2j + 1 of a head are rotated together. None: where
        the rotation is Llama 3.1's, as MaxText has it.
      has_scaled_queries: whether the query kernel is multiplied by head_dim ** -0.5, which the
        forward then leaves out, and is to be divided by it here. None: where queries have no
        norm, as MaxText has it, and the config's attention_scale is None. With an
        attention_scale of 1 the kernel is taken as it is.

    Raises:
      NotImplementedError: the config is of another family, or has biases.

    Source: MaxText, param_mapping.py of its checkpoint conversion (commit e591f30cb), and its
    layers of attention and rotary embeddings.
    """
    _require(config, "maxtext", ("llama", "mistral", "qwen3"))
    if is_interleaved is None:
        is_interleaved = config.rope.kind == "llama3"
    if has_scaled_queries is None:
        has_scaled_queries = not config.qk_norm and config.attention_scale is None
    matrix = Transposed()
    to_heads: tuple[Operation, ...] = (Heads(1, config.head_dim), matrix)
    # What heads are normed by is in their order.
    paired = (Interleaved(),) if is_interleaved else ()
    rotated = (*paired, *to_heads)
    scaled = (Scaled(config.head_dim**-0.5), *rotated) if has_scaled_queries else rotated
    attention, mlp = "self_attention", "mlp"
    of_layer: dict[str, tuple[str, tuple[Operation, ...]]] = {
        "input_norm": ("pre_self_attention_layer_norm.scale", ()),
        "q_proj": (f"{attention}.query.kernel", scaled),
        "k_proj": (f"{attention}.key.kernel", rotated),
        "v_proj": (f"{attention}.value.kernel", to_heads),
        "o_proj": (f"{attention}.out.kernel", (Heads(0, config.head_dim), matrix)),
        "q_norm": (f"{attention}.query_norm.scale", paired),
        "k_norm": (f"{attention}.key_norm.scale", paired),
        "post_attention_norm": ("post_self_attention_layer_norm.scale", ()),
        "gate_proj": (f"{mlp}.wi_0.kernel", (matrix,)),
        "up_proj": (f"{mlp}.wi_1.kernel", (matrix,)),
        "down_proj": (f"{mlp}.wo.kernel", (matrix,)),
    }
    layers = "decoder.layers" if is_stacked else f"decoder.layers_{LAYER}"
    axis = stack_axis if is_stacked else None
    places = {
        "embed_tokens": Place("token_embedder.embedding"),
        "norm": Place("decoder.decoder_norm.scale"),
        "lm_head": Place("decoder.logits_dense.kernel", (matrix,)),
    }
    for name, (path, operations) in of_layer.items():
        places[f"layers.{name}"] = Place(f"{layers}.{path}", operations, axis)
    name = _described("maxtext", is_stacked)
    return Layout(name, _of_config(places, config), is_wrapped=True)


# What a name stands for: the first is what `convert_back` gives, and `convert` takes any.
_VARIANTS: dict[LayoutName, tuple[Callable[[ModelConfig], Layout], ...]] = {
    "specjax": (specjax_own, lambda config: specjax_own(config, is_stacked=True)),
    "nnx": tuple(
        lambda config, stacked=stacked, heads=heads: nnx(
            config, is_stacked=stacked, has_heads=heads
        )
        for stacked in (False, True)
        for heads in (False, True)
    ),
    "linen": tuple(
        lambda config, stacked=stacked, heads=heads: linen(
            config, is_stacked=stacked, has_heads=heads
        )
        for stacked in (False, True)
        for heads in (False, True)
    ),
    "tunix": (tunix,),
    "maxtext": (maxtext, lambda config: maxtext(config, is_stacked=True)),
}
NAMES = tuple(_VARIANTS)

# Layouts that people ask for, of models that no family here runs: whose they are.
_OF_OTHER_FAMILIES = {"gemma": "google-deepmind/gemma (transformer/layer_0/attn/q_einsum/w)"}


def variants(layout: LayoutName | Layout, config: ModelConfig) -> tuple[Layout, ...]:
    """Returns the layouts that a name stands for; a Layout stands for itself.

    Raises:
      TypeError: it is neither a name nor a Layout.
      ValueError: there is no layout of that name, or one's own lacks a leaf of the config.
      NotImplementedError: the layout has no models like this config, or is of a family that
        specjax does not run.
    """
    if isinstance(layout, Layout):
        layout.expected(config)
        return (layout,)
    if not isinstance(layout, str):
        raise TypeError(
            f"layout is {layout!r:.100}; expected a name or a specjax.models.layouts.Layout."
        )
    if layout in _OF_OTHER_FAMILIES:
        raise NotImplementedError(
            f"{layout=} is that of {_OF_OTHER_FAMILIES[layout]}, whose models are of no family "
            f"that specjax runs: it runs {', '.join(class_names())}. Register the family by "
            "specjax.models.register (docs/adding-a-model.md), and pass its weights under its own "
            f"names. Layouts that have names are {', '.join(NAMES)}."
        )
    if layout not in _VARIANTS:
        raise ValueError(
            f"{layout=:.100} is none of {', '.join(NAMES)}; describe it as a "
            "specjax.models.layouts.Layout."
        )
    return tuple(variant(config) for variant in _VARIANTS[layout])


def _per_leaf(
    config: ModelConfig,
    is_stacked: bool,
    layer: str,
    leaf: Callable[[str], tuple[str, tuple[Operation, ...]]],
) -> dict[str, Place]:
    """Returns the places of leaves that have one rule; leaf gives a path and operations.

    Args:
      layer: the path to a layer, where an array holds only one.
    """
    layers = "layers" if is_stacked else layer
    places = {}
    for name, number, _ in leaves_with_names(config.param_shapes()):
        path, operations = leaf(name.removeprefix("layers."))
        if number is None:
            places[name] = Place(path, operations)
        else:
            places[name] = Place(f"{layers}.{path}", operations, 0 if is_stacked else None)
    return places


def _flax_leaf(
    config: ModelConfig, name: str, has_heads: bool
) -> tuple[str, tuple[Operation, ...]]:
    """Returns the path inside a layer, and the operations, of a leaf of flax's layers."""
    part = name.removesuffix("_bias")
    is_heads = has_heads and part in _TO_HEADS
    if name.endswith("_bias"):
        return f"{part}.bias", (Heads(0, config.head_dim),) if is_heads else ()
    if part.startswith("embed_"):
        return f"{part}.embedding", ()
    if part.endswith("norm"):
        return f"{part}.scale", ()
    if is_heads:
        return f"{part}.kernel", (Heads(1, config.head_dim), Transposed())
    if has_heads and part == _FROM_HEADS:
        return f"{part}.kernel", (Heads(0, config.head_dim), Transposed())
    return f"{part}.kernel", (Transposed(),)


def _of_config(places: dict[str, Place], config: ModelConfig) -> dict[str, Place]:
    """Returns the places of those leaves that a model of this config has."""
    names = {name for name, _, _ in leaves_with_names(config.param_shapes())}
    return {name: place for name, place in places.items() if name in names}


def _require(
    config: ModelConfig, layout: str, families: tuple[str, ...], *, has_qkv_bias: bool = False
) -> None:
    """Raises NotImplementedError for a config whose models the other library does not have."""
    biases: Any = [config.o_bias, config.mlp_bias, config.qkv_bias and not has_qkv_bias]
    if config.architecture != "llama" or config.family not in families or any(biases):
        fields = ("architecture", "family", "qkv_bias", "o_bias", "mlp_bias")
        given = {key: value for key, value in dataclasses.asdict(config).items() if key in fields}
        raise NotImplementedError(
            f"layout {layout!r} covers {', '.join(families)}, without experts"
            f"{'' if has_qkv_bias else ' and biases'}, and the config is {given}; describe the "
            "tree as a specjax.models.layouts.Layout."
        )


def _described(name: str, is_stacked: bool, has_heads: bool = False) -> str:
    """Returns the name of a variant, for messages."""
    return name + ", layers stacked" * is_stacked + ", heads apart" * has_heads
