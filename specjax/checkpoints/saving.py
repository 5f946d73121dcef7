"""save_orbax(): a model or a drafter as an Orbax checkpoint that says what it is.

Orbax writes it: every process its own shards, into a folder that gets its name when all is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from specjax.checkpoints import folders, records, tokenizer_files
from specjax.checkpoints.pretrained_folder import check_is_path
from specjax.checkpoints.stored_tree import is_remote, listed
from specjax.heads.loading import LoadedDrafter
from specjax.models.base import Model
from specjax.models.layouts.converting import convert
from specjax.runtime.jax_settings import entrance
from specjax.runtime.version import __version__

FORMAT, FORMAT_VERSION = "specjax", 1
MODEL, DRAFTER = "model", "drafter"
# Of what is written and read at a time: a slice for another mesh needs no whole array.
_CHUNK_BYTES = 4 * 2**20


class FilesHandler(ocp.CheckpointHandler):
    """Writes small text files as an item of a checkpoint."""

    def save(self, directory: epath.Path, args: FilesArgs) -> None:
        if ocp.utils.is_primary_host(0):
            for name, text in args.texts.items():
                (directory / name).write_text(text, encoding="utf-8")

    def restore(self, directory: epath.Path, args: Any = None) -> dict[str, str]:
        del args
        return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


@ocp.args.register_with_handler(FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FilesArgs(ocp.args.CheckpointArgs):
    """The contents of the files by name."""

    texts: dict[str, str] = dataclasses.field(default_factory=dict)


class Saving:
    """A save under way; the arrays that were given may be donated or changed already.

    Attributes:
      path: of the checkpoint, which has this name once all of it is there.
    """

    def __init__(self, path: str, manager: ocp.CheckpointManager):
        self.path = path
        self._manager: ocp.CheckpointManager | None = manager

    def wait(self) -> str:
        """Returns the path when the checkpoint is whole; it may be called again.

        Raises:
          Exception: what Orbax raised where it could not be written.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.wait_until_finished()
            finally:
                manager.close()
        return self.path


# The last save into each folder. Another one would delete its unfinished files as left over.
_under_way: dict[str, Saving] = {}
# Two threads would take the same step, and delete each other's unfinished files.
_one_at_a_time = threading.Lock()


@entrance("specjax.save_orbax")
def save_orbax(
    path: str | os.PathLike[str],
    what: Model | LoadedDrafter,
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Saves a model or a drafter as `<path>/<step>`, for `load_orbax`.

    The checkpoint holds the weights as they are sharded, the config, the tokenizer and the version
    of this format. It gets its name when all of it is written: a process that is killed leaves the
    checkpoints before it as they are. Every process of a job calls this, with a path that all of
    them see.

    Args:
      path: folder of checkpoints; it is made if it is absent.
      what: its arrays may lie on any mesh.
      step: number of the checkpoint, from 0; None: the one after the newest. Folders named by a
        number count as checkpoints here and for `keep`, whatever they hold.
      keep: most checkpoints that stay in the folder; the oldest are deleted once this one is
        whole. None: all.
      wait: False: returns once the arrays may be changed, and the files are written by a thread.
        `Saving.wait` waits for them, and so does the next save into this folder; a process that
        ends before loses the checkpoint.

    Raises:
      TypeError: `what` is neither, or the path is none.
      ValueError: the step is taken or older than the newest, or keep or step is out of range, or
        a spec or config has a field that cannot be saved.
      RuntimeError: Orbax would not write this step.
    """
    check_is_path(path, "save_orbax(path, model)")
    document, texts, params = _contents(what)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name}={value!r:.100} must be a whole number of at least {least}.")
    name = os.path.expanduser(path)
    folder = epath.Path(name if is_remote(name) else os.path.abspath(name))
    texts = {folders.OWN_FILE: json.dumps(document, indent=1), **texts}
    with _one_at_a_time:
        return _saved(folder, step, keep, wait, texts, params)


def _saved(
    folder: epath.Path,
    step: int | None,
    keep: int | None,
    wait: bool,
    texts: dict[str, str],
    params: Any,
) -> Saving:
    """Saves texts and weights as a checkpoint of a folder; see `save_orbax`."""
    if (earlier := _under_way.pop(str(folder), None)) is not None:
        earlier.wait()
    items: dict[str, Any] = {folders.OWN_ITEM: FilesArgs(texts)}
    if jax.tree.leaves(params):  # n-grams have none
        in_chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
        items[folders.PARAMS_ITEM] = ocp.args.PyTreeSave(params, in_chunks)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    manager = ocp.CheckpointManager(folder, options=options)
    try:
        step = _step(folder, step, manager.all_steps())
        saving = Saving(str(folder / str(step)), manager)
        if not manager.save(step, args=ocp.args.Composite(**items)):
            raise RuntimeError(
                f"Orbax would not write {saving.path}; it has the steps "
                f"{listed(map(str, manager.all_steps())) or 'none'}. Give another folder."
            )
    except BaseException:
        manager.close()
        raise
    if wait:
        saving.wait()
    else:
        _under_way[str(folder)] = saving
    return saving


def _contents(what: Any) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Returns the description, the tokenizer's files and the weights of a checkpoint."""
    document: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    document |= {"specjax_version": __version__}
    if isinstance(what, Model):
        document |= {"kind": MODEL, "name": what.name, "config": records.to_json(what.config)}
        document |= {"generation_defaults": what.generation_defaults}
        params = convert(what.params, "specjax", what.config)
        return document, tokenizer_files.texts_of(what.tokenizer), params
    if isinstance(what, LoadedDrafter):
        document |= {"kind": DRAFTER, "name": what.name, "spec": records.to_json(what.spec)}
        document |= {"notes": list(what.notes), "params": records.tree_to_json(what.params)}
        return document, tokenizer_files.texts_of(what.tokenizer), what.params
    raise TypeError(
        f"{what!r:.200} is neither a Model nor what load_drafter returned; for weights alone pass "
        "dataclasses.replace(model, params=weights)."
    )


def _step(folder: epath.Path, step: int | None, taken: Sequence[int]) -> int:
    """Returns the step of a new checkpoint.

    Args:
      taken: the steps that Orbax sees, which writes none before the newest of them. Their folders
        need not hold a checkpoint: a copy that was broken off leaves such folders too.
    """
    whole = folders.steps_in(folder)
    newest = max([*whole, *taken], default=-1)
    if step is not None and step <= newest:
        what = "the newest checkpoint" if newest in whole else "the folder without a checkpoint"
        raise ValueError(
            f"{step=} is not after {what} of {folder}, {newest}; name a later step, delete that "
            "one, or give another folder."
        )
    return newest + 1 if step is None else step
