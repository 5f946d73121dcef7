"""save_pretrained(): a model as a folder in Hugging Face format."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.checkpoints import records, tokenizer_files
from specjax.checkpoints.stored_tree import listed
from specjax.drafters.loading import LoadedDrafter
from specjax.drafters.spec import ModelDrafter
from specjax.layouts.converting import convert
from specjax.models.base import Json, Model, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.hf_config import parse_config, read_config
from specjax.models.weight_writing import tensors_of, write_files
from specjax.runtime.jax_settings import entrance
from specjax.runtime.model_files import find_file, read_json
from specjax.runtime.whole_folders import written_whole

CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_FILE_BYTES = 5 * 10**9  # as transformers has it
# What a save replaces: nothing else may be in the folder.
_OWN_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d{5}-of-\d{5})?\.safetensors|"
    r"model\.safetensors\.index\.json|" + "|".join(map(re.escape, tokenizer_files.FILES))
)


@entrance("specjax.save_pretrained")
def save_pretrained(
    model: Model | LoadedDrafter,
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model as a folder that transformers, vLLM and `specjax.load_model` read.

    It holds config.json, generation_config.json, the weights as safetensors in the dtype that they
    have, and the tokenizer's files where the model has one. Files of the folder that the model was
    loaded from (`Model.folder`) are copied where they still say the same. The folder is replaced as
    a whole: a process that is killed leaves the earlier content.

    Args:
      model: its weights may lie on a mesh of this process's devices; one tensor at a time is
        gathered. Of drafters a draft model of the target's own vocabulary can be written.
      folder: absent, empty, or of an earlier save.
      max_file_bytes: weights of more bytes than this are written as several files and an index.

    Raises:
      TypeError: it is neither a model nor a drafter.
      ValueError: the folder holds other files, the weights are not those of the config, or a
        config.json cannot say the config.
      NotImplementedError: heads over a target; families that say no `unparse`; weights on devices
        of other processes.
    """
    model, folder = _model_of(model), Path(folder).expanduser()
    _check_folder(folder)
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ValueError(f"{max_file_bytes=} must be a whole number of at least 1.")
    params = convert(model.params, "specjax", model.config)
    _check_is_here(params)
    tensors = tensors_of(family_of(model.config).sources(model.config, ()), params)
    with written_whole(folder) as new:
        _write_json(new / CONFIG, _config_json(model, _main_dtype(params)))
        _write_generation_config(new, model)
        _check_config(new, model.config)
        _write_tokenizer(new, model)
        write_files(new, tensors, max_file_bytes)


def _model_of(what: object) -> Model:
    """Returns a model, also of the drafter that is one."""
    if isinstance(what, Model):
        return what
    if not isinstance(what, LoadedDrafter):
        raise TypeError(f"{what!r:.200} is neither a Model nor what load_drafter returned.")
    if not isinstance(what.spec, ModelDrafter) or what.spec.said is not None:
        raise NotImplementedError(
            f"drafter {what.name!r} is no draft model of the target's vocabulary; save_orbax saves "
            "drafters of every kind."
        )
    return Model(what.spec.config, what.params, what.tokenizer, what.name)


def _check_folder(folder: Path) -> None:
    """Raises ValueError where a save would delete files that no save wrote."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the name of a folder.")
    names = sorted(path.name for path in folder.iterdir())
    is_saved = CONFIG in names and any(name.endswith(".safetensors") for name in names)
    has_code = is_saved and bool(read_json(folder / CONFIG).get("auto_map"))
    is_own = lambda name: _OWN_FILES.fullmatch(name) or (has_code and name.endswith(".py"))
    others = [name for name in names if not is_own(name)]
    if others or (names and not is_saved):
        raise ValueError(
            f"{folder} holds {listed(others or names)}, and a save replaces the folder as a whole; "
            "give one that is empty or absent, or move these away."
        )


def _check_is_here(params: object) -> None:
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(params)):
        raise NotImplementedError(
            "the weights lie on devices of several processes, and this one writes a whole folder; "
            "use save_orbax, and save_pretrained after load_orbax in one process."
        )


def _config_json(model: Model, dtype: str) -> Json:
    """Returns the contents of config.json: those it was loaded from, if they say the same."""
    raw = _published(model)
    if raw is None:
        family = family_of(model.config)
        if family.unparse is None:
            raise NotImplementedError(
                f"the family {family.name!r} says no unparse, which makes a config.json of a "
                "ModelConfig; add it to its Family."
            )
        name = model.config.family
        if name not in family.model_types:
            raise ValueError(
                f"config.family={name!r:.100} is no model_type of the family {family.name!r}; "
                f"expected one of {listed(family.model_types)}."
            )
        raw = {"architectures": [family.model_types[name]], "model_type": name}
        raw |= family.unparse(model.config)
    # Of these layers no weights are written.
    raw |= {"num_nextn_predict_layers": 0} if raw.get("num_nextn_predict_layers") else {}
    raw |= {"torch_dtype": dtype, "eos_token_id": _eos(model.config)}
    return {key: value for key, value in raw.items() if key != "dtype"}


def _main_dtype(params: Params) -> str:
    """Returns the name of the dtype with most bytes; config.json has room for one."""
    num_bytes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params):
        name = jnp.dtype(leaf.dtype).name
        num_bytes[name] = num_bytes.get(name, 0) + leaf.nbytes
    return max(num_bytes, key=lambda name: num_bytes[name])


def _eos(config: ModelConfig) -> int | list[int] | None:
    """Returns the ids that end a text, as both files have them."""
    ids = list(config.eos_token_ids)
    return ids if len(ids) > 1 else (ids or [None])[0]


def _published(model: Model) -> Json | None:
    """Returns the config.json that a model was loaded from, None where it says another config."""
    if model.folder is None:
        return None
    try:
        path = find_file(Path(model.folder), CONFIG)
        raw = None if path is None else read_json(path)
        said = None if raw is None else parse_config(raw)
    except (OSError, ValueError):
        return None
    if said is None:
        return None
    # The ids that end a text may be those of generation_config.json.
    said = dataclasses.replace(said, eos_token_ids=model.config.eos_token_ids)
    return None if said != model.config else raw


def _write_generation_config(new: Path, model: Model) -> None:
    """Writes what ends a text, and the sampling defaults."""
    config, raw = model.config, {}
    if model.folder is not None and _published(model) is not None:
        path = find_file(Path(model.folder), GENERATION)
        if path is not None and read_config(model.folder) == (config, model.generation_defaults):
            raw = read_json(path)
    if not raw:
        raw = {"bos_token_id": config.bos_token_id, **model.generation_defaults}
    _write_json(new / GENERATION, raw | {"eos_token_id": _eos(config)})


def _check_config(new: Path, config: ModelConfig) -> None:
    """Raises ValueError unless what was written is read as the config."""
    read, _ = read_config(new)
    with_scale = lambda one: dataclasses.replace(one, attention_scale=one.scale)
    if difference := records.difference(with_scale(config), with_scale(read)):
        raise ValueError(
            f"a config.json of {config.family!r} cannot say this config: {difference:.1000} as it "
            "would be read. Use save_orbax, which saves any."
        )


def _write_tokenizer(new: Path, model: Model) -> None:
    copied = tokenizer_files.published_files(model.tokenizer, model.folder)
    for path in copied:
        shutil.copyfile(path, new / path.name)
    if model.folder is not None and read_json(new / CONFIG).get("auto_map"):
        for path in sorted(Path(model.folder).glob("*.py")):
            shutil.copyfile(path, new / path.name)
    if not copied:
        texts = tokenizer_files.texts_of(model.tokenizer, model.config.max_position_embeddings)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
