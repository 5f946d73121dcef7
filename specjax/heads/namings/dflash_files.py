"""DFlash, DFlash2 and DSpark heads in folders, in the namings of the libraries that write them.

Captured layers are inputs of layers here and in `speculators`; all others name outputs of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import dflash, dflash2, dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.namings import (
    dflash2_files,
    dspark_files,
    head_files,
    head_layers,
    head_writing,
    keys,
)
from specjax.heads.namings.dflash2_files import is_dflash2
from specjax.heads.namings.dspark_files import is_dspark
from specjax.heads.namings.head_files import NESTED, Head, Parsed, Reader
from specjax.heads.namings.head_layers import Place
from specjax.heads.namings.head_writing import (
    AS_WIDE_AS_TARGET,
    BIASES_OF_ALL,
    Kind,
    Naming,
    OfTarget,
)
from specjax.heads.namings.keys import Key
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import (
    MAX_LAYERS,
    flag,
    layer_windows,
    require,
    shown,
    size,
    token_id,
)

DFLASH_CLASSES = "DFlashDraftModel", "DFlashSpeculator"
OWN_KEY = "dflash_config"
AUX_KEY, OUTPUTS_KEY = "aux_hidden_state_layer_ids", "target_layer_ids"
_PROJECTOR = "projector_type"  # the kind of head, as SpecForge names it
# At the top or in OWN_KEY, of every kind.
_BLOCK_KEYS = "block_size", "mask_token_id", "sample_from_anchor"
_KNOWN = (
    *_BLOCK_KEYS,
    "attention_sink_bias",
    "causal",
    _PROJECTOR,
    OUTPUTS_KEY,
    "swa_window_size",
    "use_swa",
)


class _Family(NamedTuple):
    """A kind of DFlash head.

    Attributes:
      name, class_name: in config.json.
      keys: that it has beside those of a block, at the top or in OWN_KEY.
      others: more keys that its OWN_KEY may have.
      parts: of names of tensors that it alone has.
    """

    title: str
    name: str
    class_name: str
    keys: tuple[Key, ...] = ()
    others: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


_DFLASH = _Family("DFlash", "dflash", "DFlashDraftModel")
_DFLASH2 = _Family(
    "DFlash2",
    dflash2_files.NAME,
    dflash2_files.CLASS,
    dflash2_files.SIZES,
    dflash2_files.SCALES,
    (*dflash2.CONVOLUTIONS, dflash2.CANDIDATES),
)
_DSPARK = _Family(
    "DSpark",
    dspark_files.NAME,
    "DSparkDraftModel",
    dspark_files.KEYS,
    dspark_files.KEYS_OF_TRAINING,
    dspark_files.PARTS,
)
# Parts of names of tensors that are not read, and whose they are.
_UNREAD = {
    "DSpark with a correction head": ("correction_head.",),
    "DSpark of an earlier naming": ("logit_head.",),
}


def is_dflash(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds a DFlash head."""
    return (
        raw.get("speculators_model_type") == "dflash"
        or is_dflash2(raw)
        or any(one in DFLASH_CLASSES for one in head_files.classes_of(raw))
    )


def _family_of(raw: Json) -> _Family:
    if is_dspark(raw):
        return _DSPARK
    return _DFLASH2 if is_dflash2(raw) else _DFLASH


# Reading.


def _titled(head: Head) -> Head:
    return head._replace(title=f"a {_family_of(head.raw).title} head")


def _parse(head: Head, target: ModelConfig) -> Parsed:
    raw, own, family = head.raw, head.own, _family_of(head.raw)
    _check_tensors(head, family)
    inner = _inner_of(raw, family)
    num_layers = size(own, "num_hidden_layers", most=MAX_LAYERS)
    windows = layer_windows(own, ["full_attention"] * num_layers)
    size(own, "vocab_size")  # is there, whatever the target's is
    width = size(raw, "target_hidden_size", size(own, "hidden_size"))
    if (depth := raw.get("num_target_layers")) not in (None, target.num_layers):
        raise ValueError(
            f"num_target_layers={shown(depth)}, and this target has {target.num_layers} layers. "
            "Give the head that was trained for it."
        )
    body = head_layers.body_of(
        head, target, "layers.0.", num_layers, target_width=width, windows=windows
    )
    causal_layers = _causal_layers(raw, inner, windows or (None,) * num_layers)
    # Of several places, the first counts.
    places = [place for place in _places(raw, inner) if place.ids is not None][:1]
    usual = _usual_layers(target.num_layers, num_layers)
    aux, note = head_layers.captured_layers(head, target, places, usual)
    block = _block_of(_values(raw, inner, _BLOCK_KEYS), target, is_dspark=family is _DSPARK)
    block_size, from_anchor = block["block_size"], block["samples_from_anchor"]
    _check_windows(windows, causal_layers, block_size)
    more = {}
    if family is _DSPARK:
        values = _values(raw, inner, [key.name for key in dspark_files.KEYS])
        more = dspark_files.own_fields(head, values, from_anchor, body.layers.hidden_size)
    elif family is _DFLASH2:
        more = dflash2_files.own_fields(head, inner, target, body, from_anchor, block_size)
    config = DFlashConfig(
        layers=body.layers,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=aux,
        causal_layers=causal_layers,
        **block,
        **body.tables,
        **more,
    )
    masks = f"drafts blocks of {block_size} with token {config.mask_token_id} as their mask"
    notes = [note, masks]
    if family is _DSPARK and not config.markov_rank:
        notes.append("has no Markov head: each token is drafted as DFlash does")
    if config.has_confidence:
        notes.append(
            "has a confidence head, which ranks drafts over rows under max_drafts_per_step"
        )
    return Parsed(head, config, dflash.weights_of(config), notes)


read_dflash = Reader("a DFlash head", _parse, captures=True, prepare=_titled)


def _check_tensors(head: Head, family: _Family) -> None:
    """Raises ValueError for heads that are more than their kind."""
    others = {other.title: other.parts for other in (_DSPARK, _DFLASH2) if other is not family}
    for name in head.tensors:
        for title, parts in (_UNREAD | others).items():
            if any(part in name for part in parts):
                raise ValueError(
                    f"tensor {name!r:.200} is of {title}, which is not supported in a config.json "
                    f"of {family.title}."
                )


def _inner_of(raw: Json, family: _Family) -> Json:
    """Returns `dflash_config`, {} where there is none."""
    inner = raw.get(OWN_KEY)
    if inner is None:
        return {}
    if not isinstance(inner, dict):
        raise ValueError(f"{OWN_KEY}={shown(inner)} must be an object.")
    known = [*_KNOWN, *(key.name for key in family.keys), *family.others]
    if unknown := sorted(set(inner) - set(known)):
        raise ValueError(
            f"{OWN_KEY} has the keys {shown(unknown)}, which are not supported; expected some of "
            f"{', '.join(known)}."
        )
    require(inner, _PROJECTOR, (None, dspark_files.NAME if family is _DSPARK else "dflash"), None)
    for key in ("use_swa", "attention_sink_bias"):
        if inner.get(key):
            raise ValueError(f"{OWN_KEY}.{key}={shown(inner[key])} is not supported; leave it out.")
    return inner


def _values(raw: Json, inner: Json, names: Sequence[str]) -> Json:
    """Returns what config.json says of some keys, at the top or below it.

    A key that is null is kept if it has no other value.

    Raises:
      ValueError: both say something, and not the same.
    """
    found = {}
    for name in names:
        values = [each[name] for each in (raw, inner) if each.get(name) is not None]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{name}={shown(values[0])}, and {OWN_KEY}.{name}={shown(values[1])}; they must "
                "agree: use the file as it was published."
            )
        if values or name in raw or name in inner:
            found[name] = values[0] if values else None
    return found


def _block_of(raw: Json, target: ModelConfig, *, is_dspark: bool) -> dict[str, Any]:
    """Returns the tokens of a block, by the fields of DFlashConfig."""
    from_anchor = flag(raw, "sample_from_anchor", is_dspark)
    least, most = (1, MAX_DEPTH) if from_anchor else (2, MAX_DEPTH + 1)
    mask = token_id("mask_token_id", raw.get("mask_token_id"), target.vocab_size)
    if mask is None:
        raise ValueError(f"mask_token_id is missing, at the top and in {OWN_KEY}; add it.")
    return {
        "block_size": size(raw, "block_size", least=least, most=most),
        "mask_token_id": mask,
        "samples_from_anchor": from_anchor,
    }


def _places(raw: Json, inner: Json) -> list[Place]:
    return [
        Place(raw.get(AUX_KEY), AUX_KEY, False),
        Place(inner.get(OUTPUTS_KEY), f"{OWN_KEY}.{OUTPUTS_KEY}", True),
        Place(raw.get(OUTPUTS_KEY), OUTPUTS_KEY, True),
    ]


def _usual_layers(depth: int, num_layers: int) -> list[int]:
    """Returns the layers whose inputs are captured for lack of a word, as published code has it.

    Their inputs are outputs of as many layers, evenly from the second to the last but two.
    """
    if num_layers == 1:
        return [depth // 2 + 1]
    places = range(num_layers)
    return [1 + round(1 + index * (depth - 4) / (num_layers - 1)) for index in places]


# Which layers are causal, read and written.


def _causal_layers(raw: Json, inner: Json, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Returns for each layer whether a token of a block sees only those before it.

    What is_causal says holds for all layers, else `dflash_config.causal`, as servers have it.
    Otherwise it is those with a window, but where sliding_window_non_causal says that they are not:
    DFlash2 of `speculators` has that as its default.
    """
    for holder, key in ((raw, "is_causal"), (inner, "causal")):
        if holder.get(key) is not None:
            return (flag(holder, key, False),) * len(windows)
    is_of_dflash2 = raw.get("speculators_model_type") == dflash2_files.NAME
    in_windows = not flag(raw, "sliding_window_non_causal", is_of_dflash2)
    return tuple(in_windows and window is not None for window in windows)


def _check_windows(
    windows: Sequence[int | None], causal_layers: Sequence[bool], block_size: int
) -> None:
    """Raises ValueError for a window that may hide a part of a block that sees itself whole."""
    most = 32 * math.ceil(block_size / 32)
    for window, is_causal in zip(windows, causal_layers):
        if window is not None and not is_causal and window <= most:
            raise ValueError(
                f"sliding_window={window} of layers that are not causal is not supported with "
                f"{block_size=}; expected more than {most}."
            )


def _in_windows(config: DFlashConfig) -> tuple[bool, ...]:
    windows = config.layers.layer_windows or (None,) * config.layers.num_layers
    return tuple(window is not None for window in windows)


def _is_causal_in_windows(config: DFlashConfig) -> bool:
    """Returns whether the layers with a window, and no others, are causal."""
    return config.causal_layers == _in_windows(config)


def _causality(config: DFlashConfig) -> tuple[Json, Json]:
    """Returns what a flat config.json has on causal layers, and its `dflash_config`."""
    if _is_causal_in_windows(config):
        return ({"sliding_window_non_causal": False} if any(_in_windows(config)) else {}), {}
    (is_causal,) = {*config.causal_layers}
    # z-lab reads the first, vLLM the last, and some releases of it the second.
    top = {"is_causal": is_causal, "sliding_window_non_causal": not is_causal}
    return top, {"causal": is_causal}


# Writing.


def _family_in(config: DFlashConfig) -> _Family:
    """Returns the family of a head; DSpark may lack all of what makes one but a part."""
    is_dflash2 = config.conv_kernel_size > 0 or config.markov_kind == dspark.SELECTOR
    if config.has_confidence or (config.markov_rank > 0 and not is_dflash2):
        return _DSPARK
    return _DFLASH2 if is_dflash2 else _DFLASH


def _layers(config: DFlashConfig) -> Json:
    windows = _in_windows(config)
    types = ["sliding_attention" if is_in else "full_attention" for is_in in windows]
    return head_writing.layers_json(config, "qwen3") | {"layer_types": types}


def _outputs(config: DFlashConfig) -> list[int]:
    return [layer - 1 for layer in config.aux_layers]


def _flat(config: DFlashConfig, target: OfTarget) -> Json:
    """Returns the config.json of z-lab and SpecForge."""
    assert target.config is not None
    own, family = config.layers, _family_in(config)
    top, inner = _causality(config)
    inner |= keys.unparse(family.keys, config)
    if family is _DFLASH2:
        inner |= dflash2_files.scales(config, target.config)
    if family is _DSPARK:
        inner |= {
            _PROJECTOR: dspark_files.NAME,
            "attention_mode": "gqa" if own.num_kv_heads < own.num_heads else "mha",
            "confidence_head_alpha": 1.0 if config.has_confidence else 0.0,  # of its loss
            "sample_from_anchor": True,
        }
    return {
        **_layers(config),
        **top,
        "architectures": [family.class_name],
        "block_size": config.block_size,
        "num_target_layers": target.config.num_layers,
        OWN_KEY: {"mask_token_id": config.mask_token_id, OUTPUTS_KEY: _outputs(config), **inner},
    }


def _deepspec(config: DFlashConfig, target: OfTarget) -> Json:
    assert target.config is not None
    top, _ = _causality(config)
    return {
        **_layers(config),
        **keys.unparse(dspark_files.KEYS, config),
        **top,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "num_target_layers": target.config.num_layers,
        OUTPUTS_KEY: _outputs(config),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "num_anchors": 1,  # of training alone; its class asks for it
    }


def _nested(config: DFlashConfig, target: OfTarget) -> Json:
    family = _family_in(config)
    own = {
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        AUX_KEY: [*config.aux_layers],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.samples_from_anchor,
        "sliding_window_non_causal": not _is_causal_in_windows(config),
    }
    return keys.unparse(family.keys, config) | head_writing.speculators_json(
        family.name, family.class_name, config.most_drafts, target, own, _layers(config)
    )


def _is_one_size(config: DFlashConfig) -> bool:
    return len({*config.layers.layer_windows} - {None}) <= 1


_GIVEN = {
    **AS_WIDE_AS_TARGET,
    **BIASES_OF_ALL,
    "layers.qk_norm": True,
    "layers.mlp_bias": False,
    "layers.layer_windows": _is_one_size,
}
_GIVEN_NESTED = _GIVEN | {
    "causal_layers": lambda c: _is_causal_in_windows(c) or not any(c.causal_layers)
}
_GIVEN_FLAT = _GIVEN | {
    "causal_layers": lambda c: _is_causal_in_windows(c) or len({*c.causal_layers}) == 1,
    "maps_vocabulary": False,
}


def _unsaid_of_depth(config: DFlashConfig, target: OfTarget) -> list[str]:
    del config
    return [] if target.config is not None else ["the target's number of layers (pass target=)"]


def _unsaid_of_scales(config: DFlashConfig, target: OfTarget) -> list[str]:
    scales = dflash2_files.scales(config, target.config)
    return [f"{key}={value} of the target" for key, value in scales.items()]


def _naming(raw: Any, readers: tuple[str, ...], *, tables: bool, from_anchor: bool) -> Naming:
    """Returns a naming with the target's number of layers in config.json.

    Args:
      tables: whether its readers expect that a head has its own embedding and matrix.
      from_anchor: whether they expect that the first row drafts.
    """
    expected = {"has_embedding": tables, "has_head": tables, "samples_from_anchor": from_anchor}
    return Naming(raw, dflash.weights_of, readers, _GIVEN_FLAT | expected, _unsaid_of_depth)


_NESTED = Naming(_nested, dflash.weights_of, ("vLLM",), _GIVEN_NESTED, nested=NESTED)
_ALL = "vLLM", "SGLang", "sglang-jax"
_Z_LAB = _naming(_flat, _ALL, tables=False, from_anchor=False)
_NAMINGS = {
    # SpecForge writes DFlash heads as z-lab does.
    _DFLASH: {"z-lab": _Z_LAB, "specforge": _Z_LAB, "speculators": _NESTED},
    _DFLASH2: {
        "z-lab": _Z_LAB._replace(readers=("vLLM", "SGLang")),
        "speculators": _NESTED._replace(
            given=_GIVEN_NESTED | {"samples_from_anchor": False, "maps_vocabulary": False},
            unsaid=_unsaid_of_scales,
        ),
    },
    _DSPARK: {
        "specforge": _naming(_flat, ("SGLang", "sglang-jax"), tables=False, from_anchor=True),
        "speculators": _NESTED,
        "deepspec": _naming(_deepspec, _ALL, tables=True, from_anchor=True),
    },
}


def kind_of(config: DFlashConfig) -> Kind:
    family = _family_in(config)
    method = "dspark" if family is _DSPARK else "dflash"
    return Kind(method, family.title, _NAMINGS[family])
