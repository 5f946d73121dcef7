"""Says DFlash, DFlash2 and DSpark heads in the namings that they are published in.

Captured layers are inputs of layers here and in `speculators`; all others name outputs of layers.
"""

from __future__ import annotations

from specjax.heads.equations import dflash
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.dspark import SELECTOR
from specjax.heads.namings import dflash2_files, head_writing
from specjax.heads.namings.dflash_files import AUX_KEY, DSPARK, OUTPUTS_KEY, OWN_KEY
from specjax.heads.namings.eagle_writing import SPECULATORS_VERSION
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget, unlike
from specjax.models.base import Json

# Of training alone; the class of DeepSpec asks for it.
_NUM_ANCHORS = 1


def is_dspark(config: DFlashConfig) -> bool:
    """Returns whether a head is a DSpark head, which may lack all of what makes one but a part."""
    return config.has_confidence or (config.markov_rank > 0 and config.markov_kind != SELECTOR)


def is_dflash2(config: DFlashConfig) -> bool:
    return config.conv_kernel_size > 0 or config.markov_kind == SELECTOR


# Which layers are causal.


def _in_windows(config: DFlashConfig) -> tuple[bool, ...]:
    windows = config.layers.layer_windows or (None,) * config.layers.num_layers
    return tuple(window is not None for window in windows)


def _follows_windows(config: DFlashConfig) -> bool:
    """Returns whether the layers with a window, and no others, are causal."""
    return config.causal_layers == _in_windows(config)


def _nested_causality(config: DFlashConfig) -> list[str]:
    """Returns the causal layers where `speculators` cannot say them."""
    if _follows_windows(config) or not any(config.causal_layers):
        return []
    return [f"causal_layers={config.causal_layers}"]


def _flat_causality(config: DFlashConfig) -> list[str]:
    return [] if all(config.causal_layers) else _nested_causality(config)


def _said_of_causality(config: DFlashConfig) -> tuple[Json, Json]:
    """Returns what a flat config.json says of causal layers, and its `dflash_config`."""
    if _follows_windows(config):
        return ({"sliding_window_non_causal": False} if any(_in_windows(config)) else {}), {}
    (is_causal,) = {*config.causal_layers}
    # z-lab reads the first, vLLM the last, and some releases of it the second.
    top = {"is_causal": is_causal, "sliding_window_non_causal": not is_causal}
    return top, {"causal": is_causal}


# What no naming, and what none of the flat ones can say.


def _refusals(config: DFlashConfig) -> list[str]:
    own = config.layers
    found = head_writing.width(config) + head_writing.biases(own)
    found += unlike(config, layers__qk_norm=True, layers__mlp_bias=False)
    sizes = {window for window in own.layer_windows if window is not None}
    return found + ([f"layers.layer_windows={own.layer_windows}"] if len(sizes) > 1 else [])


def _of_target(target: OfTarget) -> list[str]:
    return [] if target.config is not None else ["the target's number of layers (pass target=)"]


def _flat_refusals(config: DFlashConfig, target: OfTarget) -> list[str]:
    found = _refusals(config) + _flat_causality(config) + _of_target(target)
    return found + unlike(config, has_embedding=False, has_head=False, maps_vocabulary=False)


def _z_lab_refusals(config: DFlashConfig, target: OfTarget) -> list[str]:
    return _flat_refusals(config, target) + unlike(config, samples_from_anchor=False)


def _specforge_refusals(config: DFlashConfig, target: OfTarget) -> list[str]:
    return _flat_refusals(config, target) + unlike(config, samples_from_anchor=True)


def _deepspec_refusals(config: DFlashConfig, target: OfTarget) -> list[str]:
    found = _refusals(config) + _flat_causality(config) + _of_target(target)
    return found + unlike(
        config,
        has_embedding=True,
        has_head=True,
        maps_vocabulary=False,
        samples_from_anchor=True,
    )


def _nested_refusals(config: DFlashConfig, target: OfTarget) -> list[str]:
    found = _refusals(config) + _nested_causality(config)
    if not is_dflash2(config):
        return found
    scales = dflash2_files.scales(config, target.config)
    found += [f"{key}={value} of the target" for key, value in scales.items()]
    return found + unlike(config, samples_from_anchor=False, maps_vocabulary=False)


# config.json.


def _layers(config: DFlashConfig) -> Json:
    raw = head_writing.layers_json(config.layers, config.target_vocab_size, "qwen3")
    return raw | {"layer_types": head_writing.layer_types(config.layers)}


def _outputs(config: DFlashConfig) -> list[int]:
    return [layer - 1 for layer in config.aux_layers]


def _flat(config: DFlashConfig, target: OfTarget, class_name: str, said: Json) -> Json:
    """Returns the config.json of z-lab and SpecForge; `said` is in its `dflash_config`."""
    assert target.config is not None
    top, nested = _said_of_causality(config)
    own = {"mask_token_id": config.mask_token_id, OUTPUTS_KEY: _outputs(config)}
    return (
        _layers(config)
        | top
        | {
            "architectures": [class_name],
            "block_size": config.block_size,
            "num_target_layers": target.config.num_layers,
            OWN_KEY: own | nested | said,
        }
    )


def _dflash(config: DFlashConfig, target: OfTarget) -> Json:
    return _flat(config, target, "DFlashDraftModel", {})


def _dflash2(config: DFlashConfig, target: OfTarget) -> Json:
    said = dflash2_files.sizes(config) | dflash2_files.scales(config, target.config)
    return _flat(config, target, "DFlash2DraftModel", said)


def _of_dspark(config: DFlashConfig) -> Json:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
    }


def _specforge(config: DFlashConfig, target: OfTarget) -> Json:
    own = config.layers
    said = _of_dspark(config) | {
        "projector_type": DSPARK,
        "attention_mode": "gqa" if own.num_kv_heads < own.num_heads else "mha",
        "confidence_head_alpha": 1.0 if config.has_confidence else 0.0,  # of its loss
        "sample_from_anchor": True,
    }
    return _flat(config, target, "DSparkDraftModel", said)


def _deepspec(config: DFlashConfig, target: OfTarget) -> Json:
    assert target.config is not None
    top, _ = _said_of_causality(config)
    return (
        _layers(config)
        | _of_dspark(config)
        | top
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": config.block_size,
            "num_target_layers": target.config.num_layers,
            OUTPUTS_KEY: _outputs(config),
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": True,
            "num_anchors": _NUM_ANCHORS,
        }
    )


def _nested(config: DFlashConfig, target: OfTarget) -> Json:
    name, class_name, said = "dflash", "DFlashDraftModel", {}
    if is_dspark(config):
        name, class_name, said = DSPARK, "DSparkDraftModel", _of_dspark(config)
    elif is_dflash2(config):
        name, class_name = dflash2_files.NAME, "DFlash2DraftModel"
        said = dflash2_files.sizes(config)
    return said | {
        "architectures": [class_name],
        "speculators_model_type": name,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": head_writing.speculators_config(name, config.most_drafts, target),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        AUX_KEY: [*config.aux_layers],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.samples_from_anchor,
        "sliding_window_non_causal": not _follows_windows(config),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(config),
    }


_NESTED = Naming(
    _nested_refusals,
    _nested,
    dflash.weights_of,
    ("vLLM",),
    nested="transformer_layer_config",
)
_Z_LAB = Naming(_z_lab_refusals, _dflash, dflash.weights_of, ("vLLM", "SGLang", "sglang-jax"))

# SpecForge writes DFlash heads as z-lab does.
DFLASH = Kind("dflash", "DFlash", {"z-lab": _Z_LAB, "specforge": _Z_LAB, "speculators": _NESTED})
DFLASH2 = Kind(
    "dflash",
    "DFlash2",
    {
        "z-lab": Naming(_z_lab_refusals, _dflash2, dflash.weights_of, ("vLLM", "SGLang")),
        "speculators": _NESTED,
    },
)
DSPARK_KIND = Kind(
    "dspark",
    "DSpark",
    {
        "specforge": Naming(
            _specforge_refusals, _specforge, dflash.weights_of, ("SGLang", "sglang-jax")
        ),
        "speculators": _NESTED,
        "deepspec": Naming(
            _deepspec_refusals, _deepspec, dflash.weights_of, ("vLLM", "SGLang", "sglang-jax")
        ),
    },
)


def kind_of(config: DFlashConfig) -> Kind:
    if is_dspark(config):
        return DSPARK_KIND
    return DFLASH2 if is_dflash2(config) else DFLASH
