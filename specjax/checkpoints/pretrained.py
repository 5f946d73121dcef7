"""save_pretrained(): a model, or a head over one, as a folder in Hugging Face format."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints import pretrained_heads, records, tokenizer_files
from specjax.checkpoints.pretrained_folder import (
    CONFIG,
    GENERATION,
    MAX_FILE_BYTES,
    check_folder,
    check_is_here,
    check_is_path,
    main_dtype,
    write_json,
)
from specjax.checkpoints.stored_tree import listed
from specjax.config.keywords import keyword_check
from specjax.drafters.spec import ModelDrafter
from specjax.heads.loading import LoadedDrafter
from specjax.heads.namings.head_writing import AUTO
from specjax.models import int8_config, int8_writing
from specjax.models.base import Json, Model, ModelConfig
from specjax.models.families import family_of
from specjax.models.hf_config import parse_config, read_config
from specjax.models.layouts.converting import convert
from specjax.models.weight_writing import tensors_of, write_files
from specjax.runtime.jax_settings import entrance
from specjax.runtime.model_files import find_file, read_json
from specjax.runtime.whole_folders import written_whole


@entrance("specjax.save_pretrained", keyword_check)
def save_pretrained(
    model: Model | LoadedDrafter,
    folder: str | os.PathLike[str],
    *,
    stored: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    naming: str = AUTO,
    target: Model | None = None,
    card: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model or a head over one as a folder that vLLM, SGLang and specjax read.

    A model's folder, which transformers reads too, holds config.json, generation_config.json, the
    weights as safetensors in the dtype that they have, and the tokenizer's files where the model
    has one. Files of the folder that the model was loaded from (`Model.folder`) are copied where
    they still say the same.

    A head's folder holds config.json, its weights and README.md, a card. Each kind of head is
    published in several namings of keys and tensors; docs/heads.md says which flags each can say
    and who reads it. What was written is read by `load_drafter`'s reader, and compared: the config,
    and every weight to the bit.

    The folder is replaced as a whole: a process that is killed leaves the earlier content.

    Args:
      model: its weights may lie on a mesh of this process's devices; one tensor at a time is
        gathered. Of drafters, heads over a target and a draft model of the target's own vocabulary
        can be written.
      folder: absent, empty, or of an earlier save.
      stored: "int8" stores each matrix in int8 with a scale per output, as compressed-tensors does
        in its format "int-quantized", in half the bytes of bfloat16; norms and biases stay as they
        are. `load_model` and `load_drafter` multiply them out; of other engines few read weights
        so stored without quantised activations, and none reads such heads. None: the dtype that
        the weights have.
      max_file_bytes: weights of more bytes than this are written as several files and an index.
      naming: of a head: "specforge", "speculators" or "sglang" for EAGLE-3; "speculators" or
        "specforge" for P-EAGLE; "eagle" or "sglang" for EAGLE; "speculators" for MTP; "z-lab" or
        "speculators" for DFlash and DFlash2; "specforge", "speculators" or "deepspec" for DSpark;
        "medusa" or "vllm" for Medusa; "ibm" for MLP speculators. "auto" takes the first that can
        say the head.
      target: of a head: the model that it is for. Its name and class are written, and its number of
        layers, which flat files of DFlash and DSpark need.
      card: of a head: facts of its training for the card, as {"target": name, "data": ...,
        "steps": ..., "acceptance": [...], "versions": {...}}; "target" is the target's name.

    Raises:
      TypeError: it is neither a model nor a drafter, or the folder is no path.
      ValueError: the folder holds other files, the weights are not those of the config or cannot
        be stored as asked, a config.json cannot say the config, the naming cannot say a flag of a
        head, or the head is for another target.
      NotImplementedError: other drafters than those above; families that say no `unparse`; weights
        on devices of other processes.
    """
    check_is_path(folder, "save_pretrained(model, folder)")
    folder = Path(folder).expanduser()
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ValueError(f"{max_file_bytes=} must be a whole number of at least 1.")
    int8_writing.check_stored(stored)
    if pretrained_heads.is_head(model):
        return pretrained_heads.save_head(
            model,
            folder,
            stored=stored,
            naming=naming,
            target=target,
            card=card,
            max_file_bytes=max_file_bytes,
        )
    model = _model_of(model)
    if naming != AUTO or target is not None or card is not None:
        raise ValueError(
            f"naming, target and card are for heads over a target, and {model.name!r} is a model; "
            "leave them out."
        )
    _save_model(model, folder, stored=stored, max_file_bytes=max_file_bytes)


def _save_model(model: Model, folder: Path, *, stored: str | None, max_file_bytes: int) -> None:
    """Writes a model; arguments and errors as of `save_pretrained`."""
    check_folder(folder)
    params = convert(model.params, "specjax", model.config)
    check_is_here(params)
    tensors = tensors_of(family_of(model.config).sources(model.config, ()), params)
    raw = _config_json(model, main_dtype(params))
    if stored is not None:
        raw |= {int8_config.KEY: int8_config.config_of(tensors)}
        tensors = int8_writing.in_int8(tensors)
    with written_whole(folder) as new:
        write_json(new / CONFIG, raw)
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
            f"drafter {what.name!r} is no draft model of the target's vocabulary, nor a head over "
            "a target; save_orbax saves drafters of every kind."
        )
    return Model(what.spec.config, what.params, what.tokenizer, what.name)


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
    # It may have been loaded from files in int8, whose key has an old name too.
    return {
        key: value
        for key, value in raw.items()
        if key not in ("dtype", int8_config.KEY, int8_config.OLD_KEY)
    }


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
        said, defaults = read_config(model.folder)
        # The ids that end a text may be the tokenizer's.
        said = dataclasses.replace(said, eos_token_ids=config.eos_token_ids)
        if path is not None and (said, defaults) == (config, model.generation_defaults):
            raw = read_json(path)
    if not raw:
        raw = {"bos_token_id": config.bos_token_id, **model.generation_defaults}
    write_json(new / GENERATION, raw | {"eos_token_id": _eos(config)})


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
        copy = new / path.relative_to(model.folder or "")
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    if model.folder is not None and read_json(new / CONFIG).get("auto_map"):
        for path in sorted(Path(model.folder).glob("*.py")):
            shutil.copyfile(path, new / path.name)
    if not copied:
        texts = tokenizer_files.texts_of(model.tokenizer, model.config.max_position_embeddings)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
