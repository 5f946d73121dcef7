"""What the readers of heads over a target share: a folder, its layers, its vocabulary, its checks.

A wrong reading of a head is silent, since verification corrects every draft. So every tensor is
accounted for, or the folder is refused; where tensors tell a size or a flag, they decide.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.heads.equations.head_parts import HeadConfig
from specjax.models import two_places, weights
from specjax.models.base import Json, ModelConfig, Params
from specjax.models.config_values import MAX_LAYERS, flag, is_int, number, rope, shown, size
from specjax.models.loading import warn_of_activations
from specjax.models.weight_files import open_folder
from specjax.runtime.model_files import find_file, read_json

Tensors = Mapping[str, np.ndarray]

TARGET_IDS = "d2t"
_LAYER = re.compile(r"^layers\.(\d{1,6})\.")
# Tensors of training, and tables that are computed.
_IDLE = re.compile(r"(^t2d$|^verifier_(norm|lm_head)\.weight$|rotary_emb\.\w+$)")


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
      kind: what it is called in messages, as "an EAGLE-3 head".
      raw: its config.json.
      own: the part of it that describes the layers.
    """

    kind: str
    path: Path
    raw: Json
    own: Json
    tensors: Tensors

    @property
    def is_of_speculators(self) -> bool:
        return self.own is not self.raw


def open_head(folder: Path, kind: str, own_names: Sequence[str] = ()) -> Head:
    """Opens the folder of a head.

    Args:
      kind: what it is called in messages.
      own_names: of files that hold its weights, the first that is there counts; where none is, they
        are in a file of the usual names.

    Raises:
      FileNotFoundError: config.json or the weights are absent.
      ValueError: a file cannot be read.
    """
    path = find_file(folder, "config.json")
    if path is None:
        raise FileNotFoundError(f"{folder} holds no config.json; give the folder of a drafter.")
    raw, tensors = two_places.with_inner_model(read_json(path)), open_tensors(folder, own_names)
    nested = raw.get("transformer_layer_config")
    return Head(kind, path, raw, nested if isinstance(nested, dict) else raw, tensors)


def open_tensors(folder: Path, own_names: Sequence[str] = ()) -> Tensors:
    """Returns the tensors of a folder; arguments and errors as of `open_head`."""
    return open_folder(folder, own_names)


@contextlib.contextmanager
def naming(head: Head) -> Iterator[None]:
    """Has errors of what it encloses name the config.json of a head."""
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"{head.path}: key {error.args[0]!r} is missing, which {head.kind} has; add it."
        ) from error
    except ValueError as error:
        raise ValueError(f"{head.path}: {error!s:.1000}") from error


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


def check_reads_last(aux_layer_ids: Any) -> None:
    """Raises ValueError if layers are named for a head that reads what the target's head reads."""
    if aux_layer_ids is not None:
        raise ValueError(
            f"{aux_layer_ids=} is for heads that read several layers; this one reads the last "
            "hidden state. Leave it out."
        )


class Tables(NamedTuple):
    """Which tables a head has of its own, and the tokens that its head can say."""

    vocab: int
    has_embedding: bool
    has_head: bool
    maps_vocabulary: bool


def check_sees_all(own: Json) -> None:
    """Raises ValueError where layers of a head do not see all tokens before them."""
    types = own.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise ValueError(
            f"layer_types={shown(types)} of such a head must be a list of 'full_attention' alone; "
            "sliding windows in it are not supported."
        )


def tables_of(head: Head, target: ModelConfig, width: int, *, ties_head: bool = True) -> Tables:
    """Returns the tables of a head whose layers are `width` wide.

    Args:
      ties_head: whether tie_word_embeddings speaks of its own tables, and not of the target's.

    Raises:
      ValueError: its vocabulary does not fit its tensors, or it lacks tables that the target
        cannot lend.
    """
    raw, tensors = head.raw, head.tensors
    has_head = "lm_head.weight" in tensors
    vocab = shape_of(head, "lm_head.weight")[0] if has_head else target.vocab_size
    if not 1 <= vocab <= target.vocab_size:
        raise ValueError(
            f"lm_head.weight has {vocab} rows, and the target {target.vocab_size} tokens; expected "
            "at least one row and no more than tokens."
        )
    draft_vocab = size(raw, "draft_vocab_size", vocab)
    if draft_vocab != vocab:
        raise ValueError(
            f"draft_vocab_size={draft_vocab}, and "
            + (f"lm_head.weight has {vocab} rows" if has_head else "there is no lm_head.weight")
            + "; they must agree: use both files as they were published."
        )
    maps = TARGET_IDS in tensors and (vocab != target.vocab_size or np.any(tensors[TARGET_IDS]))
    if vocab < target.vocab_size and not maps:
        raise ValueError(
            f"the head says {vocab} of {target.vocab_size} tokens, and no tensor {TARGET_IDS!r} "
            "says which; use the file as it was published."
        )
    if maps and not has_head:
        raise ValueError(
            f"a tensor {TARGET_IDS!r} numbers the tokens of lm_head.weight, which is not there; "
            "use the file as it was published."
        )
    has_embedding = "embed_tokens.weight" in tensors
    if width != target.hidden_size and not (has_embedding and has_head):
        raise ValueError(
            f"hidden_size={width} is not the target's {target.hidden_size}, so that it cannot use "
            "the target's embedding and head; expected embed_tokens.weight and lm_head.weight."
        )
    if (
        ties_head
        and has_embedding
        and not has_head
        and flag(head.own, "tie_word_embeddings", False)
    ):
        raise ValueError(
            "tie_word_embeddings=true, with an embedding of its own, is not supported; store its "
            "head as lm_head.weight too."
        )
    return Tables(vocab, has_embedding, has_head, bool(maps))


def whole_tables_of(head: Head, target: ModelConfig, width: int, kind: str) -> Tables:
    """Returns the tables of a kind of head that says all tokens; `ties_head` is False.

    Raises:
      ValueError: as `tables_of`, or its vocabulary is a part of the target's.
    """
    tables = tables_of(head, target, width, ties_head=False)
    if tables.maps_vocabulary:
        raise ValueError(
            f"{kind} over a part of the vocabulary is not supported; give a head that says all "
            f"{target.vocab_size} tokens, or EAGLE-3."
        )
    return tables


def shape_of(head: Head, name: str) -> tuple[int, int]:
    """Returns the shape of a matrix.

    Raises:
      ValueError: there is no such tensor, or it is no matrix with rows and columns.
    """
    if name not in head.tensors:
        raise ValueError(f"there is no tensor {name!r}; expected {head.kind}, which has it.")
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


def layers_of(
    head: Head,
    prefix: str,
    *,
    num_layers: int,
    width: int,
    vocab: int,
    layer_windows: tuple[int | None, ...] = (),
) -> ModelConfig:
    """Returns the sizes of a head's layers; tensors decide where they tell.

    Args:
      prefix: of the names of the first layer.
    """
    own, tensors = head.own, head.tensors
    num_heads = size(own, "num_attention_heads")
    num_kv_heads = size(own, "num_key_value_heads", num_heads)
    q_name = f"{prefix}self_attn.q_proj.weight"
    num_rows = shape_of(head, q_name)[0]
    head_dim = num_rows // num_heads
    if size(own, "head_dim", head_dim) != head_dim:
        raise ValueError(
            f"head_dim={shown(own['head_dim'])}, and {q_name} has {num_rows} rows for "
            f"{num_heads=}; they must agree: use both files as they were published."
        )
    if num_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"{num_heads=} must be a multiple of {num_kv_heads=}, and {head_dim=} even."
        )
    if flag(own, "attention_bias", False) and f"{prefix}self_attn.q_proj.bias" not in tensors:
        raise ValueError(
            f"attention_bias=true, and there is no tensor '{prefix}self_attn.q_proj.bias'; use the "
            "files as they were published."
        )
    most = size(own, "max_position_embeddings", 2048)
    has = lambda name: f"{prefix}{name}" in tensors
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=size(own, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=most,
        norm_eps=number(own, "rms_norm_eps", 1e-6, most=1.0),
        rope=rope(own, most),
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
        layer_windows=layer_windows,
    )


def captured_layers(
    head: Head, target: ModelConfig, ids: Any, source: str, *, are_outputs: bool
) -> tuple[tuple[int, ...], str]:
    """Returns the target's layers whose inputs are captured, and a note that says so.

    Args:
      ids: as they were given, to be checked.
      source: where they come from, for messages.
      are_outputs: whether they name outputs of layers: that of layer i is the input of i + 1.
    """
    depth = target.num_layers
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


def read_weights(head: Head, config: HeadConfig, leaves: Any, dtype: DTypeLike | None) -> Params:
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
            f"{folder} lacks {len(missing)} of the {len(needed)} tensors of {head.kind}: "
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
            f"{folder} holds {len(unknown)} tensors that {head.kind} of its config.json has no "
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
