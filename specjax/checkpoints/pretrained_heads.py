"""Writes a head over a target as a folder of a published naming, which is read before it counts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import records
from specjax.checkpoints.pretrained_folder import (
    CARD,
    CONFIG,
    check_folder,
    check_is_here,
    main_dtype,
    write_json,
)
from specjax.heads import cards, kinds
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.loading import LoadedDrafter
from specjax.heads.namings import (
    dflash_files,
    eagle1_files,
    eagle_files,
    head_writing,
    mtp_files,
    newest_state_files,
)
from specjax.heads.namings.head_files import FoundHead
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter
from specjax.models import int8_config, int8_writing
from specjax.models.base import Json, Model, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.loading import demo_name
from specjax.models.weight_writing import write_file, write_files
from specjax.runtime.model_files import find_file, read_json
from specjax.runtime.whole_folders import written_whole

_HEADS = EagleDrafter, NewestStateDrafter, DFlashDrafter
# Where the hub's client keeps what it fetched.
_IN_HUB_CACHE = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")


def is_head(what: object) -> TypeGuard[LoadedDrafter]:
    """Returns whether something is a drafter that is a head over a target."""
    return isinstance(what, LoadedDrafter) and isinstance(what.spec, _HEADS)


def save_head(
    head: LoadedDrafter,
    folder: Path,
    *,
    stored: str | None,
    naming: str,
    target: Model | None,
    card: Mapping[str, Any] | None,
    max_file_bytes: int,
) -> None:
    """Writes a head; arguments and errors as of `save_pretrained`."""
    spec: Any = head.spec
    config, params = spec.config, head.params
    _check_kinds(target, card)
    kind = kind_of(config)
    if target is not None:
        kinds.check_fits(head.spec, target.config)
    known = of_target(target, card)
    naming = head_writing.choose(kind, config, known, naming)
    reader = known.config or _stand_in(config)
    head.check_params(reader, jnp.float32)
    check_folder(folder)
    check_is_here(params)
    way, dtype = kind.namings[naming], main_dtype(_floats(params))
    tensors = head_writing.tensors_to_write(way, config, params)
    raw = _with_dtype(way, way.raw(config, known), dtype)
    if stored is not None:
        raw |= {int8_config.KEY: int8_config.config_of(tensors)}
        tensors = int8_writing.in_int8(tensors)
    text = cards.text_of(head, kind, naming, known, card or {}, stored=stored)
    with written_whole(folder) as new:
        write_json(new / CONFIG, raw)
        if way.weights_file is None:
            write_files(new, tensors, max_file_bytes)
        else:
            write_file(new / way.weights_file, tensors)
        _check_read(new, kind, config, params, reader, is_rounded=stored is not None)
        (new / CARD).write_text(text, encoding="utf-8")


def _check_kinds(target: object, card: object) -> None:
    """Raises TypeError for arguments of another kind."""
    if target is not None and not isinstance(target, Model):
        raise TypeError(
            f"target is {target!r:.200}; expected a Model, as load_model returns. A name alone is "
            'said by card={"target": name}.'
        )
    if card is not None and not isinstance(card, Mapping):
        raise TypeError(f"card is {card!r:.200}; expected a mapping of names to facts.")


def kind_of(config: Any) -> Kind:
    """Returns the kind of a head by its config."""
    if isinstance(config, Eagle3Config):
        return eagle_files.PARALLEL_EAGLE if config.takes_masks else eagle_files.EAGLE3
    if isinstance(config, DFlashConfig):
        return dflash_files.kind_of(config)
    if isinstance(config, MedusaConfig):
        return newest_state_files.MEDUSA
    if not hasattr(config, "is_mtp"):
        return newest_state_files.MLP_SPECULATOR
    return mtp_files.MTP if config.is_mtp else eagle1_files.EAGLE


def of_target(target: Model | None, card: Mapping[str, Any] | None) -> OfTarget:
    """Returns what is known of a target; what a card calls it counts first."""
    named = (card or {}).get("target")
    if target is None:
        return OfTarget(None, None if named is None else str(named))
    name = str(named) if named is not None else _name_of(target)
    return OfTarget(target.config, name, _classes_of(target))


def _name_of(target: Model) -> str | None:
    """Returns the name on the hub or in the package of what came from there, else the folder.

    Of a model that came from neither, None: readers would look for its name on the hub.
    """
    if target.folder is None:
        return target.name if cards.HUB_NAME.fullmatch(target.name) else None
    found = _IN_HUB_CACHE.search(f"{target.folder}/")
    return "/".join(found.groups()) if found else demo_name(target.folder) or target.folder


def _classes_of(target: Model) -> tuple[str, ...]:
    """Returns `architectures` of a target."""
    path = None if target.folder is None else find_file(Path(target.folder), CONFIG)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            said = read_json(path).get("architectures")
            if isinstance(said, list) and said:
                return tuple(map(str, said))
    found = family_of(target.config).model_types.get(target.config.family)
    return () if found is None else (found,)


def _stand_in(config: Any) -> ModelConfig:
    """Returns the least target that a head may be for, by which its folder is read."""
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=config.target_vocab_size,
        hidden_size=config.target_hidden_size,
        intermediate_size=1,
        # The tap before the final norm comes after that of the normed output.
        num_layers=max(config.aux_layers) - getattr(config, "is_mtp", False),
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position_embeddings=1,
    )


def _with_dtype(way: Naming, raw: Json, dtype: str) -> Json:
    """Returns a config.json that says the weights' dtype, beside the layers too."""
    raw = raw | {"torch_dtype": dtype}
    if way.nested is None:
        return raw
    return raw | {"dtype": dtype, way.nested: raw[way.nested] | {"torch_dtype": dtype}}


def _floats(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name != "target_ids"}


# Reading what was written.


def _check_read(
    new: Path,
    kind: Kind,
    config: Any,
    params: Params,
    target: ModelConfig,
    *,
    is_rounded: bool = False,
) -> None:
    """Raises ValueError unless a folder is read as the head that it was written from.

    Args:
      is_rounded: matrices were stored in int8, and may differ by a rounding to that.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(_floats(params))}
    dtype = jnp.dtype(jnp.float32)  # holds all that is written
    if len(dtypes) == 1 and not is_rounded:
        dtype = dtypes.pop()
    found = _read(new, kind, target, dtype)
    if difference := _difference(config, found.config):
        raise ValueError(
            f"the files of {kind.title} heads cannot say this config: {difference:.1000} as it "
            "would be read. Use save_orbax, which saves any."
        )
    check = _check_near if is_rounded else _check_equal
    jax.tree.map_with_path(check, params, found.params)


def _read(new: Path, kind: Kind, target: ModelConfig, dtype: Any) -> FoundHead:
    found = kinds.kind_in(new)
    if found is None or found.method != kind.method:
        raise AssertionError(f"{new} is read as {found}, and is to be {kind.method}.")
    try:
        with _in_host_memory():
            return found.read(new, target, dtype)
    except ValueError as error:
        text = str(error).replace(f"{new / CONFIG}: ", "").replace(str(new), "the folder")
        raise ValueError(f"what would be written cannot be read: {text}") from error


@contextlib.contextmanager
def _in_host_memory() -> Iterator[None]:
    """Has arrays be made in host memory, where this process has that device."""
    try:
        (first, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        first = None
    with jax.default_device(first):
        yield


def _difference(config: Any, found: Any) -> str | None:
    """Returns how two configs differ, by the fields of their layers too."""
    if hasattr(config, "layers") and (inner := records.difference(config.layers, found.layers)):
        return f"layers.{inner}"
    return records.difference(config, found)


def _check_equal(path: Any, ours: Any, theirs: Any) -> None:
    ours, theirs = np.asarray(jax.device_get(ours)), np.asarray(jax.device_get(theirs))
    if ours.astype(theirs.dtype).tobytes() != theirs.tobytes():
        raise AssertionError(f"{jax.tree_util.keystr(path)} is read as other numbers.")


def _check_near(path: Any, ours: Any, theirs: Any) -> None:
    """Raises AssertionError where numbers differ by more than a rounding to int8."""
    if ours.ndim < 2:
        return _check_equal(path, ours, theirs)
    ours, theirs = (np.asarray(jax.device_get(one), np.float32) for one in (ours, theirs))
    most = int8_writing.largest_error(ours)
    if ours.shape != theirs.shape or not np.all(np.abs(ours - theirs) <= most):
        raise AssertionError(f"{jax.tree_util.keystr(path)} is read as other numbers.")
    return None
