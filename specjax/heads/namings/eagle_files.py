"""EAGLE-3 and P-EAGLE heads in folders: in the naming of EAGLE and SpecForge, or of `speculators`.

Files differ in names, and say little of what their reader must know: which hidden states of the
target are captured is stored in four ways or not at all. They are inputs of layers here, and in
`speculators` and vLLM under a key at the top; SGLang and SpecForge say outputs of layers, under the
same key in `eagle_config`. Flat files are written with both, so that no reader takes its default.
"""

from __future__ import annotations

import functools
from typing import Any

from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import FLAT_PREFIX, MASK_HIDDEN, NUMBERED_PREFIX, Eagle3Config
from specjax.heads.namings import head_files, head_layers, head_writing, keys
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
from specjax.models import hf_config
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import flag, shown, size, token_id

# In names of `architectures`, and of the key speculators_model_type.
KIND, PARALLEL_KIND = "eagle3", "peagle"
# Names of the mask token of P-EAGLE: that of training libraries, and those that vLLM reads.
MASK_KEYS = ("mask_token_id", *hf_config.MASK_KEYS)
AUX_KEY, OUTPUTS_KEY = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
_FLAGS = (
    Key("norm_before_residual", "norm_before_residual"),
    Key("norm_before_fc", "norm_before_fc", tensor="input_norm.weight"),
    Key("fc_norm", "has_fc_norms", tensor="fc_norm.0.weight"),
    Key("norm_output", "norm_output"),
)


def is_eagle3(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds an EAGLE-3 or P-EAGLE head.

    Some have the class of a whole model, and only draft_vocab_size tells them from one.
    """
    if (kind := raw.get("speculators_model_type")) is not None:
        return kind in (KIND, PARALLEL_KIND)
    names = " ".join(map(str, head_files.classes_of(raw))).lower()
    return KIND in names or PARALLEL_KIND in names or "draft_vocab_size" in raw


# Reading.


def _with_flat_mask(head: Head) -> Head:
    """Returns a head whose mask state is a vector; files have it as [1, 1, width] or [1, width]."""
    mask = head.tensors.get(MASK_HIDDEN)
    if mask is None:
        return head
    if any(size != 1 for size in mask.shape[:-1]):
        raise ValueError(
            f"{head.path.parent}: {MASK_HIDDEN} is {list(mask.shape)}; expected one state, "
            "[1, 1, width]."
        )
    tensors = {**head.tensors, MASK_HIDDEN: mask.reshape(-1)}
    return head._replace(title="a P-EAGLE head", tensors=tensors)


def _parse(head: Head, target: ModelConfig) -> Parsed:
    raw, tensors = head.raw, head.tensors
    head_files.check_logit_scale(raw)
    flags, notes = keys.parse(_FLAGS, raw, tensors), []
    if head.is_of_speculators and raw.get("norm_before_residual") is None:
        # As vLLM's reader of such files takes it; the library that writes them writes it always.
        flags["norm_before_residual"] = True
        notes.append("adds to the normed feature, for lack of norm_before_residual in config.json")
    if flags["norm_before_fc"] and flags["has_fc_norms"]:
        raise ValueError("tensors input_norm.* and fc_norm.* exclude each other; expected one.")
    _check_not_over_one_state(head, size(head.own, "hidden_size"))
    is_flat = any(name.startswith(FLAT_PREFIX) for name in tensors)
    prefix = FLAT_PREFIX if is_flat else NUMBERED_PREFIX
    num_layers = head_layers.num_numbered_layers(tensors, starts=int(is_flat))
    width = size(raw, "target_hidden_size", target.hidden_size)
    body = head_layers.body_of(head, target, prefix, num_layers, target_width=width)
    # Where nothing is said, they are 2, the middle one, and the last but two.
    usual = 2, target.num_layers // 2, target.num_layers - 3
    aux, note = head_layers.captured_layers(head, target, _places(raw), usual)
    mask = _mask_token_id(head, target)
    if mask is not None:
        masks = f"P-EAGLE: drafts all tokens in one pass, with token {mask} as their mask"
        notes = [masks, *notes]
    config = Eagle3Config(
        layers=body.layers,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        aux_layers=aux,
        fc_bias="fc.bias" in tensors,
        mask_token_id=mask,
        **flags,
        **body.tables,
    )
    return Parsed(head, config, eagle3.weights_of(config, prefix), [note, *notes])


read_eagle3 = Reader("an EAGLE-3 head", _parse, captures=True, prepare=_with_flat_mask)


def _mask_token_id(head: Head, target: ModelConfig) -> int | None:
    """Returns the mask token of P-EAGLE; None: the head drafts token by token.

    Raises:
      ValueError: config.json and the tensors disagree, or the token is unclear or none of the
        target's.
    """
    raw = head.raw
    said = {key: token_id(key, raw.get(key), target.vocab_size) for key in MASK_KEYS}
    said = {key: token for key, token in said.items() if token is not None}
    kinds = (*head_files.classes_of(raw), raw.get("speculators_model_type"))
    is_said = any(PARALLEL_KIND in str(kind).lower() for kind in kinds)
    if MASK_HIDDEN not in head.tensors:
        if said or is_said or flag(raw, "parallel_drafting", False):
            raise ValueError(
                f"it describes P-EAGLE, and there is no tensor {MASK_HIDDEN!r}; use both files as "
                "they were published."
            )
        return None
    if not flag(raw, "parallel_drafting", True):
        raise ValueError(
            f"parallel_drafting=false, and there is a tensor {MASK_HIDDEN!r}, of P-EAGLE; use both "
            "files as they were published."
        )
    if len({*said.values()}) != 1:
        raise ValueError(
            f"the mask token is {shown(said) if said else 'missing'}; add it as {MASK_KEYS[0]!r}, "
            "the token that the head was trained with."
        )
    return next(iter(said.values()))


def _check_not_over_one_state(head: Head, width: int) -> None:
    """Raises ValueError where masks and fc are those of a head with the equations of EAGLE."""
    shapes = (getattr(head.tensors.get(name), "shape", None) for name in (MASK_HIDDEN, "fc.weight"))
    if (*shapes,) == ((width,), (width, 2 * width)):
        raise ValueError(
            "P-EAGLE over one hidden state (fc.weight reads an embedding and a state) is not "
            "supported; give a head over several hidden states, or one of EAGLE."
        )


def _places(raw: Json) -> list[Place]:
    """Returns where captured layers may be said; DeepSpec has outputs of layers at the top."""
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    return [
        Place(raw.get(AUX_KEY), AUX_KEY, False),
        Place(nested.get(AUX_KEY), f"eagle_config.{AUX_KEY}", True),
        Place(raw.get(OUTPUTS_KEY), OUTPUTS_KEY, True),
    ]


# Writing.


def drops_embedding(config: Any) -> bool:
    """Returns whether SGLang has the target's embedding in place of a head's own."""
    is_as_wide = (
        isinstance(config, Eagle3Config) and config.target_hidden_size == config.hidden_size
    )
    return is_as_wide and config.has_embedding


def _nested(config: Eagle3Config, target: OfTarget) -> Json:
    own = {
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        AUX_KEY: [*config.aux_layers],
        **keys.unparse(_FLAGS, config),
        "tie_word_embeddings": False,
    }
    name, class_name = KIND, "Eagle3DraftModel"
    if config.takes_masks:
        name, class_name = PARALLEL_KIND, "PEagleDraftModel"
        own["mask_token_id"] = config.mask_token_id
    layers = head_writing.layers_json(config, "qwen3" if config.layers.qk_norm else "llama")
    # How many tokens it drafts is any number: three is what servers take.
    return head_writing.speculators_json(name, class_name, 3, target, own, layers)


def _flat(config: Eagle3Config, target: OfTarget) -> Json:
    del target
    outputs = [layer - 1 for layer in config.aux_layers]
    raw = head_writing.layers_json(config, "llama") | {
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


def _flat_with_masks(config: Eagle3Config, target: OfTarget) -> Json:
    return _flat(config, target) | {
        "architectures": ["PEagleDraftModel"],
        "norm_before_residual": config.norm_before_residual,
        "mask_token_id": config.mask_token_id,
        "pard_token": config.mask_token_id,  # as vLLM reads it
        "parallel_drafting": True,
    }


def _mask_shape(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    return {MASK_HIDDEN: (1, 1, config.fc_width)}


_OF_FLAT = {
    "norm_before_fc": False,
    "layers.qk_norm": False,
    "layers.qkv_bias": False,
    "layers.o_bias": False,
    "layers.mlp_bias": False,
    "layers.layer_windows": (),
}
_OF_TOKENS = {"norm_before_residual": False, "layers.num_layers": 1}
_CAPTURES_THREE = {"aux_layers": lambda config: len(config.aux_layers) == 3}
_flat_weights = functools.partial(eagle3.weights_of, first_prefix=FLAT_PREFIX)
_numbered_weights = functools.partial(eagle3.weights_of, first_prefix=NUMBERED_PREFIX)

EAGLE3 = Kind(
    "eagle3",
    "EAGLE-3",
    {
        "specforge": Naming(
            _flat,
            _flat_weights,
            ("vLLM", "SGLang", "sglang-jax"),
            given=_OF_FLAT | _OF_TOKENS | {"fc_bias": False, "has_head": True} | _CAPTURES_THREE,
            always_maps=True,
        ),
        "speculators": Naming(
            _nested,
            _numbered_weights,
            ("vLLM",),
            given={
                "fc_bias": False,
                "layers.layer_windows": (),
                **AS_WIDE_AS_TARGET,
                **BIASES_OF_ALL,
                "layers.mlp_bias": lambda config: (
                    not (config.layers.qk_norm and config.layers.mlp_bias)
                ),
            },
            nested=NESTED,
        ),
        "sglang": Naming(
            _flat,
            _flat_weights,
            ("SGLang",),
            given=_OF_FLAT | _OF_TOKENS | {"has_embedding": lambda c: not drops_embedding(c)},
            always_maps=True,
        ),
    },
)
PARALLEL_EAGLE = Kind(
    "eagle3",
    "P-EAGLE",
    {
        "speculators": EAGLE3.namings["speculators"]._replace(shapes=_mask_shape),
        "specforge": Naming(
            _flat_with_masks,
            _numbered_weights,
            ("vLLM",),
            given={
                "has_fc_norms": False,
                "norm_output": False,
                "fc_bias": False,
                "has_embedding": True,
                "has_head": True,
                "layers.rope.kind": "default",
                **_OF_FLAT,
                **_CAPTURES_THREE,
            },
            shapes=_mask_shape,
            always_maps=True,
        ),
    },
)
