"""What folders in Hugging Face format share: which files a save may replace, and small writers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints import tokenizer_files
from specjax.checkpoints.stored_tree import listed
from specjax.heads.cards import CARD_START
from specjax.heads.namings.newest_state_files import MEDUSA_FILES
from specjax.models.base import Json, Params
from specjax.runtime.model_files import read_json

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
MAX_FILE_BYTES = 5 * 10**9  # as transformers has it
# What a save replaces: nothing else may be in the folder.
_OWN_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d{5}-of-\d{5})?\.safetensors|"
    r"model\.safetensors\.index\.json|"
    + "|".join(map(re.escape, (MEDUSA_FILES[0], *tokenizer_files.FILES)))
)


def check_is_path(path: Any, order: str) -> None:
    """Raises TypeError for what is no path, as where a save's two arguments are swapped.

    Args:
      order: the call as it is meant.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the folder is {path!r:.100}; expected a path, as in {order}. Are the arguments "
            "swapped?"
        )


def check_folder(folder: Path) -> None:
    """Raises ValueError where a save would delete files that no save wrote."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder.")
    names = sorted(path.name for path in folder.iterdir())
    is_saved = CONFIG in names and any(name.endswith(".safetensors") for name in names)
    has_code = is_saved and bool(read_json(folder / CONFIG).get("auto_map"))
    is_own = lambda name: (
        _OWN_FILES.fullmatch(name)
        or (has_code and name.endswith(".py"))
        or (name == CARD and _is_own_card(folder / CARD))
    )
    others = [name for name in names if not is_own(name)]
    if others or (names and not is_saved):
        raise ValueError(
            f"{folder} holds {listed(others or names)}, and a save replaces the folder as a whole; "
            "give one that is empty or absent, or move these away."
        )


def has_own_card(folder: Path) -> bool:
    """Whether a folder has a card that specjax wrote."""
    return (folder / CARD).is_file() and _is_own_card(folder / CARD)


def _is_own_card(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(CARD_START)) == CARD_START.encode()


def check_is_here(params: object) -> None:
    """Raises NotImplementedError for weights on devices of other processes."""
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(params)):
        raise NotImplementedError(
            "the weights lie on devices of several processes, and this one writes a whole folder; "
            "use save_orbax, and save_pretrained after load_orbax in one process."
        )


def main_dtype(params: Params) -> str:
    """Returns the name of the dtype with most bytes; config.json has room for one."""
    num_bytes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params):
        name = jnp.dtype(leaf.dtype).name
        num_bytes[name] = num_bytes.get(name, 0) + leaf.nbytes
    return max(num_bytes, key=lambda name: num_bytes[name])


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
