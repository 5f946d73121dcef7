"""Finds the tree of weights in a folder of Orbax checkpoints.

<path>/_METADATA                     a tree
<path>/params/_METADATA              a checkpoint with items
<path>/12/params/_METADATA           checkpoints by step, as CheckpointManager writes them
<path>/12/specjax/checkpoint.json    beside `params`: one that `save_orbax` wrote
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from etils import epath

from specjax.checkpoints.stored_tree import METADATA, is_remote, is_tree, listed

OWN_ITEM, PARAMS_ITEM = "specjax", "params"
OWN_FILE = "checkpoint.json"
# Names of items that hold weights, where there are several with trees: the first one counts.
_ITEMS = (PARAMS_ITEM, "model_params", "model", "items", "default", "state")
_TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"^(?:.*[^0-9])?(\d{1,18})$")


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint on disk.

    Attributes:
      tree: the folder of the tree that holds the weights.
      own: the folder of what `save_orbax` wrote beside it; None: others wrote the checkpoint.
    """

    tree: epath.Path
    own: epath.Path | None


def find(path: str | epath.Path, step: int | None = None) -> Found:
    """Returns the checkpoint in a folder, the newest whole one unless a step is named.

    Unfinished saves, which a process that was killed leaves, are passed over.

    Raises:
      FileNotFoundError: there is no such folder, or no checkpoint of that step.
      ValueError: it is no Orbax folder, or holds nothing but unfinished checkpoints.
    """
    folder = epath.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(path)[:500]!r}; give one that save_orbax or Orbax wrote."
        )
    if _is_unfinished(folder):
        raise ValueError(f"{folder} is a save that did not end; load the folder that it lies in.")
    if (found := _checkpoint(folder)) is not None:
        if step is not None and _step_of(folder) != step:
            raise ValueError(
                f"{step=}, and {folder} is one checkpoint, not a folder of several; leave step "
                "out, or give the folder that it lies in."
            )
        return found
    return _of_step(folder, step)


def steps_in(folder: epath.Path) -> list[int]:
    """Returns the steps of the whole checkpoints in a folder, the newest first."""
    return [step for step, each in _numbered(folder) if _checkpoint(each) is not None]


def _of_step(folder: epath.Path, step: int | None) -> Found:
    """Returns the checkpoint of a step, None: of the newest."""
    numbered = _numbered(folder)
    for number, each in numbered:
        if step in (None, number) and (found := _checkpoint(each)) is not None:
            return found
    whole = [number for number, each in numbered if _checkpoint(each) is not None]
    if whole:
        raise FileNotFoundError(
            f"{folder} holds no whole checkpoint of {step=}; it has "
            f"{listed(map(str, whole))}. Name one of them."
        )
    names = [each.name for each in _subfolders(folder)]
    if numbered or any(map(_looks_written, [folder, *_subfolders(folder)])):
        raise ValueError(
            f"{folder} holds no whole checkpoint: none of {listed(names) or 'its files'} has a "
            f"{METADATA}. A save that was killed, or a copy that was broken off, leaves this; copy "
            "it again, or load another."
        )
    raise ValueError(
        f"{folder} is no Orbax checkpoint: neither it nor a folder in it has a {METADATA}. Give "
        "the folder that was saved to (<base>, <base>/<step>, or <base>/<step>/items); a folder in "
        "Hugging Face format is loaded with specjax.load_model."
    )


def _checkpoint(folder: epath.Path) -> Found | None:
    """Returns the checkpoint that a folder is, None if it is none."""
    if is_tree(folder):
        own = folder.parent / OWN_ITEM
        is_item = folder.name == PARAMS_ITEM and (own / OWN_FILE).is_file()
        return Found(folder, own if is_item else None)
    if (folder / OWN_ITEM / OWN_FILE).is_file():
        return Found(folder / PARAMS_ITEM, folder / OWN_ITEM)
    trees = [each for each in _subfolders(folder) if is_tree(each) and _step_of(each) is None]
    return Found(_of_weights(folder, trees), None) if trees else None


def _of_weights(folder: epath.Path, trees: Sequence[epath.Path]) -> epath.Path:
    """Returns the item that holds weights."""
    if len(trees) == 1:
        return trees[0]
    by_name = {each.name: each for each in trees}
    found = [by_name[name] for name in _ITEMS if name in by_name]
    if not found:
        raise ValueError(
            f"{folder} holds {len(trees)} trees, {listed(sorted(by_name))}, and nothing says which "
            "are the weights; give the folder of one of them."
        )
    return found[0]


def _numbered(folder: epath.Path) -> list[tuple[int, epath.Path]]:
    """Returns the finished folders of steps, the newest first."""
    numbered = [
        (step, each)
        for each in _subfolders(folder)
        if (step := _step_of(each)) is not None and _is_committed(each)
    ]
    return sorted(numbered, key=lambda one: one[0], reverse=True)


def _step_of(folder: epath.Path) -> int | None:
    if _is_unfinished(folder):  # whose name ends with a number too
        return None
    match = _STEP.match(folder.name)
    return int(match[1]) if match else None


def _is_unfinished(folder: epath.Path) -> bool:
    """Returns whether a save of this folder did not end: the last thing it does is to rename it."""
    return _TEMPORARY in folder.name


def _is_committed(folder: epath.Path) -> bool:
    """Returns whether a folder in a bucket is whole; there, Orbax writes a file in place of
    renaming."""
    return not is_remote(folder) or (folder / "commit_success.txt").exists()


def _looks_written(folder: epath.Path) -> bool:
    """Returns whether Orbax wrote in a folder, or began to."""
    names = (METADATA, "_CHECKPOINT_METADATA", "manifest.ocdbt", "ocdbt.process_0")
    return _is_unfinished(folder) or any((folder / name).exists() for name in names)


def _subfolders(folder: epath.Path) -> list[epath.Path]:
    return sorted((each for each in folder.iterdir() if each.is_dir()), key=lambda one: one.name)
