"""What a folder says of a head's layers, its tables, and the layers of the target that it reads.

Where tensors tell a size or a flag, they decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.heads.namings.head_files import (
    AS_PUBLISHED,
    TARGET_IDS,
    Head,
    Tensors,
    check_target,
    shape_of,
    stored_flag,
)
from specjax.models.base import ModelConfig
from specjax.models.config_values import (
    MAX_LAYERS,
    flag,
    is_int,
    number,
    require,
    rope,
    shown,
    size,
)

_LAYER = re.compile(r"^layers\.(\d{1,6})\.")


class Body(NamedTuple):
    """The layers of a head, and the tables that it has of its own.

    Attributes:
      layers: their sizes; the vocabulary is what the head can say.
      tables: `has_embedding`, `has_head` and `maps_vocabulary`, as the configs of heads have them.
    """

    layers: ModelConfig
    tables: dict[str, bool]


def body_of(
    head: Head,
    target: ModelConfig,
    prefix: str,
    num_layers: int,
    *,
    target_width: int | None = None,
    ties_head: bool = True,
    is_whole: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> Body:
    """Returns layers and tables of a head, which is for a target.

    Args:
      prefix: of the names of the first layer.
      target_width: of the hidden states that it reads; None: as wide as its layers.
      ties_head: whether tie_word_embeddings speaks of its own tables, and not of the target's.
      is_whole: whether its kind says all tokens, and never a part of them.
      windows: of its layers; None: they must see all tokens before them.
    """
    own = head.own
    require(own, "hidden_act", ("silu", "swish"), "silu")
    types = own.get("layer_types") or []
    is_full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    if windows is None and not is_full:
        raise ValueError(
            f"layer_types={shown(types)} of such a head must be a list of 'full_attention' alone; "
            "sliding windows in it are not supported."
        )
    width = size(own, "hidden_size")
    check_target(target_width or width, size(own, "vocab_size", target.vocab_size), target)
    vocab, tables = _tables_of(head, target, width, ties_head=ties_head)
    if is_whole and tables["maps_vocabulary"]:
        raise ValueError(
            f"{head.title} over a part of the vocabulary is not supported; give one that says all "
            f"{target.vocab_size} tokens, or an EAGLE-3 head."
        )
    sizes = {"hidden_size": width, "vocab_size": vocab, "num_layers": num_layers}
    return Body(_layers_of(head, prefix, **sizes, layer_windows=windows or ()), tables)


def _tables_of(
    head: Head, target: ModelConfig, width: int, *, ties_head: bool
) -> tuple[int, dict[str, bool]]:
    """Returns the tokens that a head can say, and its tables.

    Raises:
      ValueError: its vocabulary does not fit its tensors, or it lacks tables that the target
        cannot lend.
    """
    tensors = head.tensors
    has_embedding, has_head = (f"{name}.weight" in tensors for name in ("embed_tokens", "lm_head"))
    vocab = shape_of(head, "lm_head.weight")[0] if has_head else target.vocab_size
    if not 1 <= vocab <= target.vocab_size:
        raise ValueError(
            f"lm_head.weight has {vocab} rows, and the target {target.vocab_size} tokens; expected "
            "at least one row and no more than tokens."
        )
    draft_vocab = size(head.raw, "draft_vocab_size", vocab)
    if draft_vocab != vocab:
        found = f"lm_head.weight has {vocab} rows" if has_head else "there is no lm_head.weight"
        raise ValueError(
            f"draft_vocab_size={draft_vocab}, and {found}; they must agree: {AS_PUBLISHED}"
        )
    is_part = vocab < target.vocab_size
    maps = TARGET_IDS in tensors and (is_part or bool(np.any(tensors[TARGET_IDS])))
    if is_part and not maps:
        raise ValueError(
            f"the head says {vocab} of {target.vocab_size} tokens, and no tensor {TARGET_IDS!r} "
            "says which; use the file as it was published."
        )
    if maps and not has_head:
        raise ValueError(
            f"a tensor {TARGET_IDS!r} numbers the tokens of lm_head.weight, which is not there; "
            "use the file as it was published."
        )
    if width != target.hidden_size and not (has_embedding and has_head):
        raise ValueError(
            f"hidden_size={width} is not the target's {target.hidden_size}, so that it cannot use "
            "the target's embedding and head; expected embed_tokens.weight and lm_head.weight."
        )
    is_tied = ties_head and has_embedding and not has_head
    if is_tied and flag(head.own, "tie_word_embeddings", False):
        raise ValueError(
            "tie_word_embeddings=true, with an embedding of its own, is not supported; store its "
            "head as lm_head.weight too."
        )
    tables = {"has_embedding": has_embedding, "has_head": has_head, "maps_vocabulary": maps}
    return vocab, tables


def num_numbered_layers(tensors: Tensors, *, starts: int = 0) -> int:
    """Returns the layers of the names "layers.0.", "layers.1." and so on.

    Args:
      starts: the lowest number that a layer has; those below count as if they were there.

    Raises:
      ValueError: they are too many.
    """
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    num_layers = len(numbers | {*range(starts)})
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{num_layers} layers are more than {MAX_LAYERS}.")
    return max(num_layers, 1)


def _layers_of(head: Head, prefix: str, **sizes: Any) -> ModelConfig:
    """Returns the sizes of a head's layers; tensors decide where they tell.

    Args:
      sizes: those that are known.
    """
    own, tensors = head.own, head.tensors
    num_heads = size(own, "num_attention_heads")
    num_kv_heads = size(own, "num_key_value_heads", num_heads)
    q_proj = f"{prefix}self_attn.q_proj"
    num_rows = shape_of(head, f"{q_proj}.weight")[0]
    head_dim = num_rows // num_heads
    if size(own, "head_dim", head_dim) != head_dim:
        raise ValueError(
            f"head_dim={shown(own['head_dim'])}, and {q_proj}.weight has {num_rows} rows for "
            f"{num_heads=}; they must agree: {AS_PUBLISHED}"
        )
    if num_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} even."
        )
    most = size(own, "max_position_embeddings", 2048)
    return ModelConfig(
        architecture="llama",
        family="llama",
        intermediate_size=size(own, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=most,
        norm_eps=number(own, "rms_norm_eps", 1e-6, most=1.0),
        rope=rope(own, most),
        qkv_bias=stored_flag(own, "attention_bias", tensors, f"{q_proj}.bias"),
        o_bias=f"{prefix}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{prefix}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in tensors,
        **sizes,
    )


class Place(NamedTuple):
    """Where captured layers are said.

    Attributes:
      ids: as they were given, to be checked; None: nothing is said there.
      source: its name, for messages.
      are_outputs: whether they name outputs of layers: that of layer i is the input of i + 1.
    """

    ids: Any
    source: str
    are_outputs: bool

    @property
    def inputs(self) -> Any:
        """The ids as inputs of layers; what is no list of ints as it is."""
        if not isinstance(self.ids, list) or not all(map(is_int, self.ids)):
            return self.ids
        return [number + self.are_outputs for number in self.ids]


def captured_layers(
    head: Head, target: ModelConfig, places: Sequence[Place], default: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    """Returns the target's layers whose inputs are captured, and a note that says so.

    Args:
      places: in config.json, of which the first that says something counts, and the others
        must agree; what a caller names goes before them.
      default: inputs, where nothing is said.
    """
    depth = target.num_layers
    if head.aux_layer_ids is not None:
        places = [Place(head.aux_layer_ids, "aux_layer_ids", False)]
    usual = Place(default, "the default, for lack of a word in config.json", False)
    first, *others = [place for place in places if place.ids is not None] or [usual]
    for other in others:
        if other.inputs != first.inputs:
            raise ValueError(
                f"{first.source}={first.ids!r:.100} and {other.source}={other.ids!r:.100} capture "
                "different layers; give aux_layer_ids=[...] (inputs of layers, from 0), or use the "
                "file as published."
            )
    ids, source, are_outputs = first
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        ids = tuple(ids)
    if not isinstance(ids, tuple) or not ids or not all(map(is_int, ids)):
        raise ValueError(f"{source}={shown(ids)} must be a list of layers.")
    layers = tuple(one + are_outputs for one in ids)
    if any(not 0 <= layer <= depth for layer in layers):
        what = "outputs" if are_outputs else "inputs"
        least, most = (-1, depth - 1) if are_outputs else (0, depth)
        raise ValueError(
            f"the captured layers {shown(list(ids))} ({source}) must be {what} of layers from "
            f"{least} to {most}, as the target has {depth} layers; say others by aux_layer_ids= or "
            "--aux-layer-ids, or in config.json."
        )
    needed = shape_of(head, "fc.weight")[1]
    if needed != len(layers) * target.hidden_size:
        raise ValueError(
            f"fc.weight takes {needed} numbers, and the {len(layers)} captured layers {layers} of "
            f"{target.hidden_size} numbers give {len(layers) * target.hidden_size}; pass "
            "aux_layer_ids= with as many layers as the head was trained with."
        )
    note = f"captures the inputs of layers {', '.join(map(str, layers))} ({source})"
    if depth in layers:
        note += f"; what follows the last layer, {depth}, is captured after the final norm"
    return layers, note
