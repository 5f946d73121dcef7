"""Medusa heads and MLP speculators in folders."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from specjax.config.speculation import MAX_DEPTH
from specjax.heads.equations import medusa, mlp_speculator
from specjax.heads.equations.medusa import OF_VLLM, PUBLISHED, SHARED_HEAD, MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.namings import head_files, keys, vllm_files
from specjax.heads.namings.head_files import Head, Parsed, Reader
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget
from specjax.heads.namings.keys import Key
from specjax.models.base import Json, ModelConfig
from specjax.models.config_values import flag, size

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX, _MEDUSA_PREFIX = "speculator.", "medusa_heads."
_SHARED = f"{SHARED_HEAD}.weight"
_TIED = re.compile(r"\b(emb|head|ln|proj)\.(\d{1,6})\.(\w+)$")
_NOTE = "reads the last hidden state of the target, after the final norm"
_OF_MLP_SPECULATOR = (
    Key("vocab_size", "target_vocab_size", size, None),
    Key("emb_dim", "target_hidden_size", size, None),
    Key("inner_dim", "inner_size", functools.partial(size, least=0), 0),
    Key("n_predict", "most_drafts", functools.partial(size, most=MAX_DEPTH), None),
    Key("scale_input", "scale_input"),
    Key("tie_weights", "is_tied"),
)


def is_medusa(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds Medusa heads."""
    return raw.get("medusa_num_heads") is not None or raw.get("model_type") == "medusa"


def is_mlp_speculator(raw: Json) -> bool:
    """Returns whether a config.json says that its folder holds an MLP speculator."""
    return raw.get("model_type") == "mlp_speculator"


def _without_copies(head: Head) -> Head:
    """Leaves out copies of tied weights: what torch.save writes has them under each name."""
    tensors, kept = head.tensors, {}
    for name, tensor in tensors.items():
        first = _first_of(name)
        is_copy = first != name and first in tensors and tensors[first].shape == tensor.shape
        if not is_copy or (head.reads_values and not np.array_equal(tensors[first], tensor)):
            kept[name] = tensor
    return head._replace(tensors=kept)


def _first_of(name: str) -> str:
    """Returns the name of the tensor that a tied one is equal to; proj.0 has a size of its own."""
    match = _TIED.search(name)
    if match is None:
        return name
    part, number, of_part = match.groups()
    first = min(int(number), 1 if part == "proj" else 0)
    return f"{name[: match.start()]}{part}.{first}.{of_part}"


def _parse_mlp_speculator(head: Head, target: ModelConfig) -> Parsed:
    fields = keys.parse(_OF_MLP_SPECULATOR, head.raw)
    width = fields["target_hidden_size"]
    head_files.check_target(width, fields["target_vocab_size"], target)
    fields["inner_size"] = fields["inner_size"] or width
    config = MlpSpeculatorConfig(aux_layers=(target.num_layers,), **fields)
    is_prefixed = any(name.startswith(PREFIX) for name in head.tensors)
    leaves = mlp_speculator.weights_of(config, PREFIX if is_prefixed else "")
    if config.is_tied:
        head = _without_copies(head)
    return Parsed(head, config, leaves, (_NOTE, f"drafts at most {config.most_drafts} tokens"))


read_mlp_speculator = Reader("an MLP speculator", _parse_mlp_speculator)


def _parse_medusa(head: Head, target: ModelConfig) -> Parsed:
    raw = head.raw
    tensors = {name.removeprefix(_MEDUSA_PREFIX): each for name, each in head.tensors.items()}
    if len(tensors) != len(head.tensors):
        raise ValueError(f"two tensors have one name but for {_MEDUSA_PREFIX!r}; expected one.")
    head_files.check_logit_scale(raw)
    is_of_vllm = any(name.startswith("blocks.") for name in tensors)
    naming = OF_VLLM if is_of_vllm else PUBLISHED
    first = naming[0].format(head=0, block=0)
    head = head._replace(tensors=tensors)
    width = head_files.shape_of(head, f"{first}.weight")[0]
    of_block = _numbers(naming[0] + ".weight", tensors)
    count = 1 + max(index for index, _ in of_block)
    num_blocks = 1 + max(place for _, place in of_block)
    if max(count, num_blocks) > MAX_DEPTH:
        raise ValueError(f"{count} heads of {num_blocks} blocks are more than {MAX_DEPTH}.")
    head = _with_shared(head, naming[1])
    matrices = [f"{naming[1].format(head=i, blocks=num_blocks)}.weight" for i in range(count)]
    head = vllm_files.with_offsets(head, target, (*matrices, _SHARED))
    maps = head_files.TARGET_IDS in head.tensors.keys() - tensors.keys()
    tensors = head.tensors
    shares_head = _SHARED in tensors and matrices[0] not in tensors
    matrix = _SHARED if shares_head else matrices[0]
    vocab = head_files.shape_of(head, matrix)[0] if matrix in tensors else target.vocab_size
    whole = target.vocab_size if maps else vocab
    head_files.check_target(width, size(raw, "vocab_size", whole), target)
    head_files.check_target(size(raw, "hidden_size", width), whole, target)
    config = MedusaConfig(
        target_hidden_size=width,
        target_vocab_size=whole,
        aux_layers=(target.num_layers,),
        most_drafts=count,
        num_blocks=num_blocks,
        has_bias=head_files.stored_flag(raw, "medusa_fc_bias", tensors, f"{first}.bias"),
        has_head=matrix in tensors,
        shares_head=shares_head,
        own_vocab_size=vocab if maps else None,
    )
    note = f"drafts at most {count} tokens, one for each head"
    return Parsed(head, config, medusa.weights_of(config, naming), (_NOTE, note))


read_medusa = Reader("Medusa heads", _parse_medusa, weights_files=MEDUSA_FILES)


def _with_shared(head: Head, of_head: str) -> Head:
    """Returns a head whose one matrix, where config.json says that it has one, has its own name."""
    first = f"{of_head.format(head=0, blocks=0)}.weight"
    if not flag(head.raw, "original_lm_head", False) or first not in head.tensors:
        return head
    others = {name: tensor for name, tensor in head.tensors.items() if name != first}
    return head._replace(tensors=others | {_SHARED: head.tensors[first]})


def _numbers(pattern: str, names: Any) -> list[tuple[int, int]]:
    """Returns head and block of each name that fits a pattern."""
    parts = {"head": r"(\d{1,6})", "block": r"(\d{1,6})"}
    wanted = re.compile(re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}").format(**parts))
    found = (wanted.fullmatch(name) for name in names)
    return [(int(match[1]), int(match[2])) for match in found if match]


def _published_medusa(config: MedusaConfig, target: OfTarget) -> Json:
    return {
        "medusa_num_heads": config.most_drafts,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": target.name,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.target_vocab_size,
    }


def _medusa_of_vllm(config: MedusaConfig, target: OfTarget) -> Json:
    del target
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": config.most_drafts,
        "num_hidden_layers": config.num_blocks,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.target_vocab_size,
        "truncated_vocab_size": None,
        "medusa_fc_bias": config.has_bias,
        "original_lm_head": False,
    }


_GIVEN = {"shares_head": False, "own_vocab_size": None}

MEDUSA = Kind(
    "medusa",
    "Medusa",
    {
        "medusa": Naming(
            _published_medusa,
            functools.partial(medusa.weights_of, naming=PUBLISHED),
            (),
            # Without matrices of their own, heads are those of the first release.
            given=_GIVEN | {"has_bias": True},
            weights_file=MEDUSA_FILES[0],
        ),
        "vllm": Naming(
            _medusa_of_vllm,
            functools.partial(medusa.weights_of, naming=OF_VLLM),
            ("vLLM before 0.33",),
            given=_GIVEN | {"has_head": True},
        ),
    },
)


def _mlp_speculator(config: MlpSpeculatorConfig, target: OfTarget) -> Json:
    del target
    return {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        **keys.unparse(_OF_MLP_SPECULATOR, config),
        # A tree that its servers may draft: the likeliest tokens of each place, and paths.
        "top_k_tokens_per_head": [max(5 - place, 1) for place in range(config.most_drafts)],
        "n_candidates": 5,
    }


MLP_SPECULATOR = Kind(
    "mlp_speculator",
    "MLP speculator",
    {
        "ibm": Naming(
            _mlp_speculator,
            functools.partial(mlp_speculator.weights_of, prefix=PREFIX),
            ("vLLM before 0.33",),
        )
    },
)
