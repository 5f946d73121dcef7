"""load_orbax(): a model or a drafter from an Orbax checkpoint, one's own or a trainer's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from specjax.checkpoints import folders, records, tokenizer_files
from specjax.checkpoints.restoring import restore_model, restore_tree
from specjax.checkpoints.saving import DRAFTER, FORMAT, FORMAT_VERSION, MODEL
from specjax.checkpoints.stored_tree import is_remote, read_bytes
from specjax.drafters.base import DrafterSpec
from specjax.heads.loading import LoadedDrafter, load_drafter
from specjax.models.base import Model, ModelConfig
from specjax.models.hf_config import read_config, sampling_defaults, with_eos_of
from specjax.models.layouts.named import NAMES
from specjax.models.layouts.tables import Layout, LayoutName
from specjax.models.loading import places_of, resolve_folder, weight_dtype
from specjax.models.mesh_axes import MeshAxisMap, mapped
from specjax.runtime.jax_settings import entrance
from specjax.runtime.model_files import parse_object
from specjax.text.tokenization import Tokenizer

OWN_LAYOUT = "specjax"


@entrance("specjax.load_orbax")
def load_orbax(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    mesh_axes: MeshAxisMap | None = None,
    dtype: DTypeLike | None = None,
    layout: LayoutName | Layout = OWN_LAYOUT,
    config: ModelConfig | str | os.PathLike[str] | None = None,
    step: int | None = None,
    root: str | None = None,
    target: Model | None = None,
) -> Model | LoadedDrafter:
    """Loads a model or a drafter from an Orbax checkpoint.

    Arrays are read straight into their shardings, layout and dtype, and no others are read: not
    the state of an optimiser that lies beside the weights.

    Args:
      path: what `save_orbax` wrote, or a trainer: a folder of checkpoints by step, one of them, or
        the folder of a tree (MaxText's `<base>/<step>/items`). Of several the newest whole one is
        taken; saves that did not end are passed over.
      mesh: devices to split the weights over, as for `load_model`; a drafter's lie whole on each
        of them. None: the default device.
      mesh_axes: what axes of other names split, as for `load_model`.
      dtype: of every weight, as for `load_model`; None: the stored one. What `save_orbax` wrote may
        have several; of a trainer's tree with several, one must be named.
      layout: of a trainer's tree, as for `convert`. Layers may be scanned.
      config: of the model, or the folder or the name of a model in Hugging Face format, whose
        config, tokenizer and sampling defaults are then used. What `save_orbax` wrote has its own;
        a config that is given must be equal to it.
      step: the checkpoint of this step; None: the newest.
      root: path of the weights in a trainer's tree, such as "state.params", "" for its top. None:
        it is looked for, by the names of the weights.
      target: of a drafter, which must fit it.

    Returns:
      A Model, or of a drafter's checkpoint what `load_drafter` returns.

    Raises:
      FileNotFoundError: there is no such folder or step.
      ValueError: it is no Orbax checkpoint, or none that is whole; it needs a config, or differs
        from the one that was given; weights are missing, of another shape or layout; the mesh
        cannot split the model.
    """
    mapped(mesh, mesh_axes)  # so that its errors come first
    dtype = None if dtype is None else weight_dtype(dtype)
    found = folders.find(os.path.expanduser(path), step)
    given, tokenizer, defaults, name = _given(config)
    if found.own is None:
        given = _check_for_trainers(found, given, target)
        places = places_of(given, mesh, mesh_axes)
        params = restore_model(found.tree, layout, given, root=root, places=places, dtype=dtype)
        name = name or epath.Path(path).name
        return Model(given, params, tokenizer, name, generation_defaults=defaults)
    own = _Own(found.own)
    own.check_not_of_trainers(layout, root)
    if own.document["kind"] == DRAFTER:
        return own.drafter(found.tree, given, mesh, dtype, target)
    own_config = own.config(given, target)
    return own.model(found.tree, own_config, places_of(own_config, mesh, mesh_axes), dtype)


def config_in(path: str | os.PathLike[str]) -> ModelConfig:
    """Returns the config of the newest checkpoint of a model; errors as of `load_orbax`."""
    found = folders.find(os.path.expanduser(path))
    if found.own is None:
        return _check_for_trainers(found, None, None)
    return _Own(found.own).config()


class _Own:
    """What `save_orbax` wrote about a checkpoint.

    Raises:
      ValueError: it is corrupt, or of another version.
    """

    def __init__(self, folder: epath.Path):
        self.folder, self.path = folder, folder / folders.OWN_FILE
        self.document = document = parse_object(read_bytes(self.path), str(self.path))
        version, kind = document.get("format_version"), document.get("kind")
        if document.get("format") != FORMAT or not isinstance(version, int) or version < 1:
            raise ValueError(
                f"{self.path} does not say format {FORMAT!r} and a format_version; it is corrupt."
            )
        if version > FORMAT_VERSION or kind not in (MODEL, DRAFTER):
            raise ValueError(
                f"{self.path} has format_version={version} and {kind=!r:.100}, of specjax "
                f"{document.get('specjax_version')!r:.50}; this one reads version "
                f"{FORMAT_VERSION}, of a {MODEL} or a {DRAFTER}. Install that specjax, or a newer "
                "one."
            )

    @property
    def name(self) -> str:
        return str(self.document.get("name", ""))

    def check_not_of_trainers(self, layout: LayoutName | Layout, root: str | None) -> None:
        """Raises ValueError for arguments that are for checkpoints of trainers."""
        if layout != OWN_LAYOUT or root is not None:
            raise ValueError(
                f"{self.folder} was written by save_orbax, whose layout is {OWN_LAYOUT!r} and "
                f"whose weights have no other root; leave {layout=:.100} and {root=} out."
            )

    def config(self, given: ModelConfig | None = None, target: Model | None = None) -> ModelConfig:
        """Returns the config of a model; ValueError unless a given one is equal to it."""
        _check_no_target(self.folder, target)
        config = self._record("config", ModelConfig)
        if given is not None and (difference := records.difference(given, config)):
            raise ValueError(
                f"the config that was given is not the one that {self.folder} was saved with: "
                f"{difference:.1000}. Leave config out, or load another checkpoint."
            )
        return config

    def model(self, tree: epath.Path, config: ModelConfig, places: Any, dtype: Any) -> Model:
        params = restore_model(tree, OWN_LAYOUT, config, places=places, dtype=dtype, may_mix=True)
        said = self.document.get("generation_defaults")
        defaults = sampling_defaults(said if isinstance(said, dict) else {})
        return Model(config, params, self._tokenizer(), self.name, defaults)

    def drafter(
        self,
        tree: epath.Path,
        given: ModelConfig | None,
        mesh: Mesh | None,
        dtype: Any,
        target: Model | None,
    ) -> LoadedDrafter:
        if given is not None:
            raise ValueError(
                f"config= is for a model, and {self.folder} holds a drafter; leave it out."
            )
        spec = self._record("spec", DrafterSpec)
        expected = self._read("params", records.tree_from_json)
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        params = restore_tree(tree, expected, sharding=sharding, dtype=dtype)
        notes = tuple(map(str, self.document.get("notes", ())))
        drafter = LoadedDrafter(self.name, spec, params, notes, self._tokenizer())
        return drafter if target is None else load_drafter(drafter, target)

    def _record(self, key: str, kind: type) -> Any:
        """Returns a config or a spec."""
        value = self._read(key, records.from_json)
        if not isinstance(value, kind):
            raise ValueError(
                f"{self.path}: {key} is {value!r:.100}, expected a {kind.__name__}; the file is "
                "corrupt."
            )
        return value

    def _read(self, key: str, from_json: Callable[[Any], Any]) -> Any:
        try:
            return from_json(self.document.get(key))
        except ValueError as error:
            raise ValueError(f"{self.path}: {key}: {error!s:.1000}") from error

    def _tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer; its files in a bucket are copied first."""
        if not is_remote(self.folder):
            return Tokenizer.from_folder(str(self.folder))
        with tempfile.TemporaryDirectory() as folder:
            for name in tokenizer_files.FILES:
                if (self.folder / name).exists():
                    (epath.Path(folder) / name).write_bytes((self.folder / name).read_bytes())
            return Tokenizer.from_folder(folder)


def _given(
    config: ModelConfig | str | os.PathLike[str] | None,
) -> tuple[ModelConfig | None, Tokenizer | None, dict[str, Any], str]:
    """Returns config, tokenizer, sampling defaults and name of what a caller gave as config."""
    if config is None or isinstance(config, ModelConfig):
        return config, None, {}, ""
    if not isinstance(config, str | os.PathLike):
        raise TypeError(
            f"config={config!r:.200} must be a ModelConfig, such as model.config, or the folder or "
            "name of a model in Hugging Face format."
        )
    folder = resolve_folder(config)
    read, defaults = read_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    read, _ = with_eos_of(read, tokenizer)  # as load_model has it
    return read, tokenizer, defaults, os.path.basename(os.fspath(config))


def _check_for_trainers(
    found: folders.Found, given: ModelConfig | None, target: Model | None
) -> ModelConfig:
    """Returns the config for a checkpoint that says none."""
    _check_no_target(found.tree, target)
    if given is None:
        raise ValueError(
            f"{found.tree} says no config, since save_orbax did not write it; pass config=, a "
            "specjax.ModelConfig or the folder of the model in Hugging Face format, and layout=, "
            f"one of {', '.join(NAMES)}."
        )
    return given


def _check_no_target(folder: epath.Path, target: Model | None) -> None:
    if target is not None:
        raise ValueError(f"target= is for a drafter, and {folder} holds a model; leave it out.")
