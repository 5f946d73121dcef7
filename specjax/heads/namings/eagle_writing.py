"""Says EAGLE, EAGLE-3, P-EAGLE and MTP heads in the namings that they are published in.

Captured layers are inputs of layers here. `speculators` and vLLM say them so, under a key at the
top; SGLang and SpecForge say outputs of layers, under the same key in `eagle_config`. Flat files
hold both, so that no reader takes its default.
"""

from __future__ import annotations

import functools
from typing import Any

from specjax.heads.equations import eagle, eagle3
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import FLAT_PREFIX, MASK_HIDDEN, NUMBERED_PREFIX, Eagle3Config
from specjax.heads.namings import head_writing, mtp_files
from specjax.heads.namings.eagle_files import AUX_KEY, KIND, PARALLEL_KIND
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget, unlike
from specjax.models.base import Json

# Of `speculators`, whose files these are as it writes them.
SPECULATORS_VERSION = "0.9.0"
# What a server drafts where it is not told, of heads that draft any number.
_USUAL_DRAFTS = 3
_NUM_CAPTURED = 3  # of EAGLE-3, where its code has no other number


def _nested_refusals(config: Eagle3Config, target: OfTarget) -> list[str]:
    """Returns what `speculators` cannot say of an EAGLE-3 or P-EAGLE head."""
    del target
    own = config.layers
    found = unlike(config, fc_bias=False, layers__layer_windows=())
    found += head_writing.width(config) + head_writing.biases(own)
    return found + (unlike(config, layers__mlp_bias=False) if own.qk_norm else [])


def _nested(config: Eagle3Config, target: OfTarget) -> Json:
    name = PARALLEL_KIND if config.takes_masks else KIND
    own = config.layers
    model_type = "qwen3" if own.qk_norm else "llama"
    raw = {
        "architectures": ["PEagleDraftModel" if config.takes_masks else "Eagle3DraftModel"],
        "speculators_model_type": name,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": head_writing.speculators_config(name, _USUAL_DRAFTS, target),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        AUX_KEY: [*config.aux_layers],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.has_fc_norms,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
    }
    if config.takes_masks:
        raw["mask_token_id"] = config.mask_token_id
    layers = head_writing.layers_json(own, config.target_vocab_size, model_type)
    return raw | {"transformer_layer_config": layers}


def _flat_refusals(config: Eagle3Config) -> list[str]:
    """Returns what neither SpecForge nor SGLang can say of an EAGLE-3 head."""
    return unlike(
        config,
        norm_before_fc=False,
        norm_before_residual=False,
        layers__num_layers=1,
        layers__qk_norm=False,
        layers__qkv_bias=False,
        layers__o_bias=False,
        layers__mlp_bias=False,
        layers__layer_windows=(),
    )


def _specforge_refusals(config: Eagle3Config, target: OfTarget) -> list[str]:
    del target
    return _flat_refusals(config) + unlike(config, fc_bias=False, has_head=True) + _captured(config)


def _sglang_refusals(config: Eagle3Config, target: OfTarget) -> list[str]:
    del target
    found = _flat_refusals(config)
    return found + (unlike(config, has_embedding=False) if drops_embedding(config) else [])


def drops_embedding(config: Any) -> bool:
    """Returns whether SGLang has the target's embedding in place of a head's own."""
    is_of_pairs = isinstance(config, EagleConfig | Eagle3Config)
    return is_of_pairs and config.has_embedding and not head_writing.width(config)


def _captured(config: Eagle3Config) -> list[str]:
    is_usual = len(config.aux_layers) == _NUM_CAPTURED
    return [] if is_usual else [f"aux_layers={config.aux_layers}"]


def _flat(config: Eagle3Config, target: OfTarget) -> Json:
    del target
    outputs = [layer - 1 for layer in config.aux_layers]
    raw = head_writing.layers_json(config.layers, config.target_vocab_size, "llama")
    raw |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        # None has SGLang take the target's head.
        "draft_vocab_size": config.vocab_size if config.has_head else None,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.aux_layers),
        AUX_KEY: [*config.aux_layers],
        "eagle_config": {"use_aux_hidden_state": True, AUX_KEY: outputs},
        "bias": config.fc_bias,
        "fc_norm": config.has_fc_norms,
    }
    # SpecForge reads false as a head without its last norm.
    return raw | ({"norm_output": True} if config.norm_output else {})


EAGLE3 = Kind(
    "eagle3",
    "EAGLE-3",
    {
        "specforge": Naming(
            _specforge_refusals,
            _flat,
            functools.partial(eagle3.weights_of, first_prefix=FLAT_PREFIX),
            ("vLLM", "SGLang", "sglang-jax"),
            always_maps=True,
        ),
        "speculators": Naming(
            _nested_refusals,
            _nested,
            functools.partial(eagle3.weights_of, first_prefix=NUMBERED_PREFIX),
            ("vLLM",),
            nested="transformer_layer_config",
        ),
        "sglang": Naming(
            _sglang_refusals,
            _flat,
            functools.partial(eagle3.weights_of, first_prefix=FLAT_PREFIX),
            ("SGLang",),
            always_maps=True,
        ),
    },
)


def _masks_refusals(config: Eagle3Config, target: OfTarget) -> list[str]:
    """Returns what SpecForge cannot say of a P-EAGLE head."""
    del target
    return _captured(config) + unlike(
        config,
        norm_before_fc=False,
        has_fc_norms=False,
        norm_output=False,
        fc_bias=False,
        has_embedding=True,
        has_head=True,
        layers__rope__kind="default",
        layers__qk_norm=False,
        layers__qkv_bias=False,
        layers__o_bias=False,
        layers__mlp_bias=False,
        layers__layer_windows=(),
    )


def _masks_flat(config: Eagle3Config, target: OfTarget) -> Json:
    raw = _flat(config, target)
    return raw | {
        "architectures": ["PEagleDraftModel"],
        "norm_before_residual": config.norm_before_residual,
        "mask_token_id": config.mask_token_id,
        "pard_token": config.mask_token_id,  # as vLLM reads it
        "parallel_drafting": True,
    }


def _mask_shape(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    return {MASK_HIDDEN: (1, 1, config.fc_width)}


PARALLEL_EAGLE = Kind(
    "eagle3",
    "P-EAGLE",
    {
        "speculators": EAGLE3.namings["speculators"]._replace(shapes=_mask_shape),
        "specforge": Naming(
            _masks_refusals,
            _masks_flat,
            functools.partial(eagle3.weights_of, first_prefix=NUMBERED_PREFIX),
            ("vLLM",),
            shapes=_mask_shape,
            always_maps=True,
        ),
    },
)


def _eagle_refusals(config: EagleConfig, target: OfTarget) -> list[str]:
    del target
    return unlike(
        config,
        has_hidden_first=False,
        maps_vocabulary=False,
        layers__qk_norm=False,
        layers__o_bias=False,
        layers__mlp_bias=False,
        layers__layer_windows=(),
    )


def _sglang1_refusals(config: EagleConfig, target: OfTarget) -> list[str]:
    # It drops tables of such a head for the target's, and adds biases to all of attention.
    return _eagle_refusals(config, target) + unlike(
        config, has_embedding=False, has_head=False, layers__num_layers=1, layers__qkv_bias=False
    )


def _eagle(config: EagleConfig, target: OfTarget, class_name: str) -> Json:
    del target
    raw = head_writing.layers_json(config.layers, config.target_vocab_size, "llama")
    return raw | {
        "architectures": [class_name],
        "bias": config.fc_bias,  # for lack of it, some readers take true
        "attention_bias": False,
        "qkv_bias": config.layers.qkv_bias,
    }


EAGLE = Kind(
    "eagle",
    "EAGLE",
    {
        "eagle": Naming(
            _eagle_refusals,
            functools.partial(_eagle, class_name="LlamaForCausalLM"),
            eagle.weights_of,
            ("vLLM",),
        ),
        "sglang": Naming(
            _sglang1_refusals,
            functools.partial(_eagle, class_name="LlamaForCausalLMEagle"),
            eagle.weights_of,
            ("SGLang",),
        ),
    },
)


def _mtp_refusals(config: EagleConfig, target: OfTarget) -> list[str]:
    del target
    own = config.layers
    found = unlike(config, has_hidden_first=False, fc_bias=False, layers__layer_windows=())
    return found + head_writing.biases(own) + unlike(config, layers__mlp_bias=False)


def _mtp(config: EagleConfig, target: OfTarget) -> Json:
    own, name = config.layers, mtp_files.METHOD
    model_type = "qwen3" if own.qk_norm else "llama"
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": name,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": head_writing.speculators_config(name, 1, target),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": head_writing.layers_json(
            own, config.target_vocab_size, model_type
        ),
    }


MTP = Kind(
    mtp_files.METHOD,
    "MTP",
    {
        "speculators": Naming(
            _mtp_refusals, _mtp, eagle.weights_of, (), nested="transformer_layer_config"
        ),
    },
)
