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
    flag,
    optional_number,
    shown,
)
from specjax.models.loading import warn_of_activations
from specjax.models.weight_files import open_folder
from specjax.runtime.model_files import find_file, read_json

Tensors = Mapping[str, np.ndarray]

TARGET_IDS = "d2t"
NESTED = "transformer_layer_config"  # of `speculators`: the part that describes the layers
# Tensors of training, and tables that are computed.
_IDLE = re.compile(r"(^t2d$|^verifier_(norm|lm_head)\.weight$|rotary_emb\.\w+$)")
AS_PUBLISHED = "use both files as they were published."


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
        raise ValueError(f"{key}=true, and there is no tensor {name!r}; {AS_PUBLISHED}")
    return is_there


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
    # Offsets that are all 0 say nothing, as in heads that say every token.
    maps = config.maps_vocabulary or not np.any(tensors.get(TARGET_IDS, 0))
    known = {*needed, *([TARGET_IDS] if maps else [])}
    unknown = [name for name in tensors if name not in known and not _IDLE.search(name)]
    if unknown:
        raise ValueError(
            f"{folder} holds {len(unknown)} tensors that {head.title} of its config.json has no "
            f"use for: {_listed(unknown)}. Leaving them out would change the drafts."
        )


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
