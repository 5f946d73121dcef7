"""What the readers of heads over a target share: a folder, its layers, its vocabulary, its checks.

A wrong reading of a head is silent, since verification corrects every draft. So every tensor is
accounted for, or the folder is refused; where tensors tell a size or a flag, they decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.heads.equations.head_parts import HeadConfig
from specjax.models import two_places, weights
from specjax.models.base import Json, ModelConfig, Params
from specjax.models.config_values import (
    MAX_LAYERS,
    flag,
    is_int,
    number,
    optional_number,
    require,
    rope,
    shown,
    size,
)
from specjax.models.loading import warn_of_activations
from specjax.models.weight_files import open_folder
from specjax.runtime.model_files import find_file, read_json

Tensors = Mapping[str, np.ndarray]

TARGET_IDS = "d2t"
NESTED = "transformer_layer_config"  # of `speculators`: the part that describes the layers
_LAYER = re.compile(r"^layers\.(\d{1,6})\.")
# Tensors of training, and tables that are computed.
_IDLE = re.compile(r"(^t2d$|^verifier_(norm|lm_head)\.weight$|rotary_emb\.\w+$)")
_AS_PUBLISHED = "use both files as they were published."


class FoundHead(NamedTuple):
    """A head that was read, and what was decided for lack of a clear word in the file.

    Attributes:
      config: static sizes and flags, of the head's kind.
    """

    config: Any
    params: Params
    notes: tuple[str, ...]


class Head(NamedTuple):
    """The files of a head, before they are understood.

    Attributes:
      title: what it is called in messages, as "an EAGLE-3 head".
      raw: its config.json.
      own: the part of it that describes the layers.
      aux_layer_ids: layers of the target whose inputs are captured, whatever the files say.
      reads_values: whether tensors are read, else their names and shapes alone.
    """

    title: str
    path: Path
    raw: Json
    own: Json
    tensors: Tensors
    aux_layer_ids: Sequence[int] | None = None
    reads_values: bool = True

    @property
    def is_of_speculators(self) -> bool:
        return self.own is not self.raw


class Parsed(NamedTuple):
    """What the files of a head say.

    Attributes:
      head: the files, with tensors under the names of `leaves`.
      config: of its kind.
      leaves: a tree with a Weight at each leaf of floating point.
    """

    head: Head
    config: Any
    leaves: Any
    notes: Sequence[str]


class Reader(NamedTuple):
    """Reads folders with a kind of head.

    Attributes:
      title: of Head.
      parse: (the files, the target) -> what they say; raises KeyError for a key that is missing,
        and ValueError.
      captures: whether such a head captures layers of the target that may be named.
      prepare: the files -> the files as they are parsed, under another title, or other tensors.
      weights_files: names of files that hold its weights, the first that is there counts; where
        none is, they are in a file of the usual names.
    """

    title: str
    parse: Callable[[Head, ModelConfig], Parsed]
    captures: bool = False
    prepare: Callable[[Head], Head] = lambda head: head
    weights_files: Sequence[str] = ()

    def __call__(
        self,
        folder: Path,
        target: ModelConfig,
        dtype: DTypeLike | None,
        aux_layer_ids: Sequence[int] | None = None,
    ) -> FoundHead:
        """Returns the head in a folder, for a target.

        Args:
          dtype: of its weights; None: no weights are read, and params are {}.
          aux_layer_ids: layers of the target whose inputs are captured, whatever the file says;
            None for heads that read the last hidden state.

        Raises:
          FileNotFoundError: config.json or the weights are absent.
          ValueError: a file cannot be read, the head is for another target, a tensor or key is
            missing, impossible, or unknown, or aux_layer_ids is not for this kind.
        """
        path = find_file(folder, "config.json")
        if path is None:
            raise FileNotFoundError(f"{folder} holds no config.json; give the folder of a drafter.")
        raw = two_places.with_inner_model(read_json(path))
        tensors = open_folder(folder, self.weights_files)
        own = nested if isinstance(nested := raw.get(NESTED), dict) else raw
        head = Head(self.title, path, raw, own, tensors, aux_layer_ids, dtype is not None)
        head = self.prepare(head)
        try:
            if aux_layer_ids is not None and not self.captures:
                raise ValueError(
                    f"{aux_layer_ids=} is for heads that read several layers; this one reads the "
                    "last hidden state. Leave it out."
                )
            head, config, leaves, notes = self.parse(head, target)
        except KeyError as error:
            raise ValueError(
                f"{path}: key {error.args[0]!r} is missing, which {head.title} has; add it."
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}: {error!s:.1000}") from error
        return FoundHead(config, _read_weights(head, config, leaves, dtype), tuple(notes))


def classes_of(raw: Json) -> list[str]:
    """Returns the names in `architectures` of a config.json."""
    classes = raw.get("architectures")
    return [one for one in classes if isinstance(one, str)] if isinstance(classes, list) else []


def check_target(target_width: int, said_vocab: int, target: ModelConfig) -> None:
    """Raises ValueError unless a head was made for a target of this width and vocabulary."""
    if target_width != target.hidden_size or said_vocab != target.vocab_size:
        raise ValueError(
            f"the head is for a target of {target_width} hidden numbers and {said_vocab} tokens; "
            f"this target has {target.hidden_size} and {target.vocab_size}. Give the head that was "
            "trained for it."
        )


def check_logit_scale(raw: Json) -> None:
    """Raises ValueError where logits are scaled."""
    if optional_number(raw, "logit_scale") not in (None, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported; expected 1.")


def stored_flag(raw: Json, key: str, tensors: Tensors, name: str) -> bool:
    """Returns whether there is a tensor, which tells a flag.

    Raises:
      ValueError: config.json has the flag, and there is no such tensor.
    """
    is_there = name in tensors
    if flag(raw, key, is_there) and not is_there:
        raise ValueError(f"{key}=true, and there is no tensor {name!r}; {_AS_PUBLISHED}")
    return is_there


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
            f"draft_vocab_size={draft_vocab}, and {found}; they must agree: {_AS_PUBLISHED}"
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


def shape_of(head: Head, name: str) -> tuple[int, int]:
    """Returns the shape of a matrix.

    Raises:
      ValueError: there is no such tensor, or it is no matrix with rows and columns.
    """
    if name not in head.tensors:
        raise ValueError(f"there is no tensor {name!r}; expected {head.title}, which has it.")
    shape = head.tensors[name].shape
    if len(shape) != 2 or not all(shape):
        raise ValueError(f"{name} is {list(shape)}; expected a matrix, [rows, columns].")
    return shape


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
            f"{num_heads=}; they must agree: {_AS_PUBLISHED}"
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
    head: Head, target: ModelConfig, said: Sequence[Place], default: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    """Returns the target's layers whose inputs are captured, and a note that says so.

    Args:
      said: places in config.json, of which the first that says something counts, and the others
        must agree; what a caller names goes before them.
      default: inputs, where nothing is said.
    """
    depth = target.num_layers
    if head.aux_layer_ids is not None:
        said = [Place(head.aux_layer_ids, "aux_layer_ids", False)]
    usual = Place(default, "the default, for lack of a word in config.json", False)
    first, *others = [place for place in said if place.ids is not None] or [usual]
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


def _read_weights(head: Head, config: HeadConfig, leaves: Any, dtype: DTypeLike | None) -> Params:
    """Returns the weights of a head, if its files hold exactly the tensors that it needs.

    With `maps_vocabulary`, "target_ids" is among them.

    Args:
      leaves: a tree with a Weight at each leaf.
      dtype: of the weights; None: they are checked by name and shape, not read, and {} returned.

    Raises:
      ValueError: tensors are missing, of another shape or dtype, or unknown.
    """
    folder, vocab = head.path.parent, config.vocab_size
    target_vocab = config.target_vocab_size
    _check(head, config, leaves)
    if dtype is None:
        return {}
    warn_of_activations(folder, head.tensors)
    read = lambda weight: jax.device_put(weight.source.read(head.tensors, jnp.dtype(dtype)))
    params = weights.map_weights(read, leaves)
    if not config.maps_vocabulary:
        return params
    ids = _target_ids(head.tensors[TARGET_IDS], vocab, target_vocab, folder)
    said = head.tensors.get("t2d")
    if said is not None and not (
        said.shape == (target_vocab,) and np.all(said[ids]) and np.count_nonzero(said) == len(ids)
    ):
        raise ValueError(
            f"{folder}: {TARGET_IDS} and t2d name different tokens; use the file as published."
        )
    return params | {"target_ids": jax.device_put(ids)}


def _check(head: Head, config: HeadConfig, leaves: Any) -> None:
    folder, tensors = head.path.parent, head.tensors
    needed = dict(
        each for leaf in jax.tree.leaves(weights.sources_of(leaves)) for each in leaf.tensors()
    )
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(needed)} tensors of {head.title}: "
            f"{_listed(missing)}. Give the folder of a whole head."
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if tensors[name].shape != shape
    ]
    wrong += [
        f"{name} is {tensors[name].dtype}, expected floating point"
        for name in needed
        if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
    ]
    if wrong:
        raise ValueError(
            f"{folder} holds {len(wrong)} tensors that are not those of its config.json: "
            f"{_listed(wrong)}."
        )
    known = {*needed, *([TARGET_IDS] if config.maps_vocabulary or _keeps_numbers(head) else [])}
    unknown = [name for name in tensors if name not in known and not _IDLE.search(name)]
    if unknown:
        raise ValueError(
            f"{folder} holds {len(unknown)} tensors that {head.title} of its config.json has no "
            f"use for: {_listed(unknown)}. Leaving them out would change the drafts."
        )


def _keeps_numbers(head: Head) -> bool:
    """Returns whether offsets of a head's tokens are all 0, as in heads that say every token."""
    return not np.any(head.tensors.get(TARGET_IDS, 0))


def _target_ids(offsets: np.ndarray, count: int, most: int, folder: Path) -> np.ndarray:
    """Returns the target's number of each of the head's tokens, i32[count], from offsets."""
    if offsets.shape != (count,) or not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(
            f"{folder}: {TARGET_IDS} is {offsets.dtype}{list(offsets.shape)}, expected a whole "
            f"number for each of the head's {count} tokens."
        )
    # Clipped, so that no sum overflows: what is clipped leads past the tokens in any case.
    ids = np.arange(count, dtype=np.int64) + np.clip(offsets.astype(np.int64), -most, most)
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) != count:
        raise ValueError(
            f"{folder}: {TARGET_IDS} must lead to {count} different tokens below {most}: it holds "
            "what is added to the head's number of a token."
        )
    return ids.astype(np.int32)


def _listed(names: Sequence[str], most: int = 10) -> str:
    text = ", ".join(name[:200] for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text
