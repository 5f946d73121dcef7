"""The kinds of heads over a target, and which of them a folder holds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.config.speculation import SpeculationConfig
from specjax.drafters.base import DrafterSpec
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import HybridDrafter
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.namings import mtp_files
from specjax.heads.namings.dflash_files import is_dflash, read_dflash
from specjax.heads.namings.dspark_files import is_dspark
from specjax.heads.namings.eagle1_files import is_eagle, read_eagle
from specjax.heads.namings.eagle_files import is_eagle3, read_eagle3
from specjax.heads.namings.head_files import FoundHead, Reader
from specjax.heads.namings.newest_state_files import (
    is_medusa,
    is_mlp_speculator,
    read_medusa,
    read_mlp_speculator,
)
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter
from specjax.models import two_places
from specjax.models.base import Json, ModelConfig, embed_tokens
from specjax.models.config_values import shown
from specjax.models.families import family_of
from specjax.models.loading import Model, resolve_folder
from specjax.models.weight_files import open_folder
from specjax.runtime.model_files import find_file, read_json


class HeadKind(NamedTuple):
    """A kind of head.

    Attributes:
      method: as `SpeculationConfig.method` names it.
      is_kind_of: (config.json, names of tensors) -> whether they are those of such a head.
      read: of such a folder.
      spec: FoundHead.config -> the drafter's spec.
    """

    method: str
    is_kind_of: Callable[[Json, Collection[str]], bool]
    read: Reader
    spec: Callable[[Any], DrafterSpec]


KINDS = (
    HeadKind("dflash", lambda raw, names: is_dflash(raw), read_dflash, DFlashDrafter),
    HeadKind("dspark", lambda raw, names: is_dspark(raw), read_dflash, DFlashDrafter),
    HeadKind("eagle3", lambda raw, names: is_eagle3(raw), read_eagle3, EagleDrafter),
    HeadKind("medusa", lambda raw, names: is_medusa(raw), read_medusa, NewestStateDrafter),
    HeadKind(
        "mlp_speculator",
        lambda raw, names: is_mlp_speculator(raw),
        read_mlp_speculator,
        NewestStateDrafter,
    ),
    HeadKind(mtp_files.METHOD, mtp_files.is_mtp, mtp_files.read_mtp, EagleDrafter),
    HeadKind("eagle", is_eagle, read_eagle, EagleDrafter),
)


def check_method(source: Any, method: str | None) -> None:
    """Raises ValueError where a config names a kind of head, and a folder holds something else.

    Args:
      source: of a drafter; what is no name or path of a folder is not checked.
      method: of the config.
    """
    named = next((kind for kind in KINDS if kind.method == method), None)
    if named is None or not isinstance(source, str | os.PathLike):
        return
    folder = resolve_folder(source)
    found = kind_in(folder)
    if found is not named:
        holds = f"a head of method {found.method!r}" if found else "no head over a target"
        family = mtp_files.other_naming(_tensor_names(folder))
        if method == mtp_files.METHOD and family is not None:
            raise ValueError(
                f"{method=} is named, and {source} holds MTP layers as {family} have them, which "
                "are not run: specjax loads no such targets. Draft with a draft model, or 'ngram'."
            )
        raise ValueError(
            f"method={method!r} is named, and {source} holds {holds}; leave the method out, or "
            "name the folder of such a head."
        )


def check_drafts_by(spec: DrafterSpec, source: Any, config: SpeculationConfig) -> None:
    """Raises ValueError where a config names a kind of head, and another drafter stands beside it.

    Args:
      source: what the spec was loaded from; None: no drafter is given.
    """
    named = next((kind for kind in KINDS if kind.method == config.method), None)
    if named is None or source is None or not spec.can_draft:
        return
    if config.method in _methods_of(spec):
        return
    what = repr(source) if isinstance(source, str | os.PathLike) else type(spec).__name__
    where = "" if config.model is None else f" of {config.model!r:.200}"
    raise ValueError(
        f"the drafter is {what:.200}, and speculative_config names method={config.method!r}"
        f"{where}; leave one of them out."
    )


def _methods_of(spec: Any) -> tuple[str, ...]:
    """Returns the methods that a head may be named by; () for other drafters."""
    if isinstance(spec, HybridDrafter):
        spec = spec.model
    config = getattr(spec, "config", None)
    if isinstance(config, EagleConfig):
        return (mtp_files.METHOD,) if config.is_mtp else ("eagle",)
    methods = {
        Eagle3Config: ("eagle3",),
        DFlashConfig: ("dflash", "dspark"),
        MedusaConfig: ("medusa",),
        MlpSpeculatorConfig: ("mlp_speculator",),
    }
    return methods.get(type(config), ())


def check_fits(spec: DrafterSpec, target: ModelConfig) -> None:
    """Raises ValueError where a head was made for another target, or this one lacks layers."""
    if isinstance(spec, HybridDrafter):
        spec = spec.model
    if isinstance(spec, SelfDrafter):
        spec.check_fits(target)
    if not isinstance(spec, DFlashDrafter | EagleDrafter | NewestStateDrafter):
        return
    config, deepest = spec.config, max(spec.config.aux_layers)
    if isinstance(config, EagleConfig) and config.is_mtp:
        deepest -= 1  # the tap before the final norm comes after that of the normed output
    made_for = config.target_hidden_size, config.target_vocab_size
    reads_last = not isinstance(config, Eagle3Config | DFlashConfig)
    fits = deepest == target.num_layers if reads_last else deepest <= target.num_layers
    if made_for != (target.hidden_size, target.vocab_size) or not fits:
        at_least = "" if reads_last else "at least "
        raise ValueError(
            f"the head is for a target of {made_for[0]} hidden numbers, {made_for[1]} tokens and "
            f"{at_least}{deepest} layers; this one has {target.hidden_size}, {target.vocab_size} "
            f"and {target.num_layers}. Load the head that was trained for it."
        )


def without_copies(found: FoundHead, target: Model) -> FoundHead:
    """Returns a head that uses the target's embedding, where its own is equal to it.

    EAGLE's files hold a copy: 1 GB of a target of 128,256 tokens and 4,096 hidden numbers. Beside a
    target of shapes alone, whose weights a training loop changes, the copy is kept.
    """
    own, table = found.params.get("embed_tokens"), target.params.get("embed_tokens")
    is_plain = family_of(target.config).embed is embed_tokens
    is_plain = is_plain and target.config.embedding_multiplier == 1.0
    if own is None or not is_plain or not _are_equal(own, table):
        return found
    params = {name: leaf for name, leaf in found.params.items() if name != "embed_tokens"}
    config = dataclasses.replace(found.config, has_embedding=False)
    notes = (*found.notes, "has a copy of the target's embedding, which is not kept")
    return FoundHead(config, params, notes)


def _are_equal(own: Any, table: Any) -> bool:
    if own.shape != getattr(table, "shape", None) or own.dtype != table.dtype:
        return False
    if isinstance(table, jax.ShapeDtypeStruct):
        return False
    if not getattr(table, "is_fully_addressable", True):
        return False
    return np.array_equal(np.asarray(own[:1]), np.asarray(table[:1])) and np.array_equal(
        np.asarray(own), np.asarray(table)
    )


def kind_in(folder: Path) -> HeadKind | None:
    """Returns the kind of head that a folder holds; None for a model, or nothing.

    Raises:
      ValueError: it is of a kind of `speculators` that is not read.
    """
    config = find_file(folder, "config.json")
    if config is None:
        return None
    raw, names = two_places.with_inner_model(read_json(config)), _tensor_names(folder)
    found = next((kind for kind in KINDS if kind.is_kind_of(raw, names)), None)
    said = raw.get("speculators_model_type")
    if found is None and said is not None:
        raise ValueError(
            f"{config}: speculators_model_type={shown(said)} is not supported; expected "
            "dflash, dflash2, dspark, eagle3, mtp or peagle."
        )
    return found


def _tensor_names(folder: Path) -> Collection[str]:
    """Returns the names of the tensors in a folder; none where its files cannot be read."""
    try:
        return open_folder(folder, compares=False).keys()
    except (OSError, ValueError):
        return ()
