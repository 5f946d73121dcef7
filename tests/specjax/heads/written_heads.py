"""Heads of every kind and flag with random weights, and which namings can say each of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import test_dflash_files as block_files
import test_eagle_files
import test_parallel_eagle
from head_equations import TARGET as SHALLOW
from head_equations import VOCAB

import specjax
from specjax.heads.equations import dflash, eagle, eagle3, medusa, mlp_speculator
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter
from specjax.models.base import ModelConfig, RopeConfig, before_final_norm

DEEP = test_eagle_files.TARGET
WIDTH, DRAFT_VOCAB = 32, 20
MASK = test_parallel_eagle.MASK
TABLES = {"has_embedding": True, "has_head": True}
LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=16)
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)


class HeadCase(NamedTuple):
    """A head.

    Attributes:
      namings: that can say it; the first is what "auto" takes.
    """

    config: Any
    target: specjax.Model
    namings: tuple[str, ...]

    def load(self, seed: int = 1) -> specjax.LoadedDrafter:
        spec, equations = _BY_CONFIG[type(self.config)]
        params = equations.init(jax.random.key(seed), self.config, std=0.3)
        return specjax.LoadedDrafter("head", spec(self.config), params)


_BY_CONFIG = {
    Eagle3Config: (EagleDrafter, eagle3),
    EagleConfig: (EagleDrafter, eagle),
    dflash.DFlashConfig: (DFlashDrafter, dflash),
    MedusaConfig: (NewestStateDrafter, medusa),
    MlpSpeculatorConfig: (NewestStateDrafter, mlp_speculator),
}


def layers(**more: Any) -> ModelConfig:
    sizes = {
        "architecture": "llama",
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "norm_eps": 1e-5,
    }
    return ModelConfig(**sizes | more)


def eagle3_of(own: dict[str, Any] | None = None, **flags: Any) -> Eagle3Config:
    sizes = {"target_hidden_size": WIDTH, "target_vocab_size": VOCAB, "aux_layers": (0, 3, 6)}
    return Eagle3Config(layers=layers(**own or {}), **sizes | flags)


def eagle_of(own: dict[str, Any] | None = None, **flags: Any) -> EagleConfig:
    depth = SHALLOW.config.num_layers
    return EagleConfig(
        layers=layers(**own or {}), target_vocab_size=VOCAB, aux_layers=(depth,), **flags
    )


def mtp_of(own: dict[str, Any] | None = None, **flags: Any) -> EagleConfig:
    aux = before_final_norm(SHALLOW.config.num_layers)
    return dataclasses.replace(eagle_of(own, **flags), is_mtp=True, aux_layers=(aux,))


def block_of(own: dict[str, Any] | None = None, **flags: Any) -> dflash.DFlashConfig:
    return block_files.config_of(own, **flags)


ALL_OF_EAGLE3 = ("specforge", "speculators", "sglang")
BIASED = {"qkv_bias": True, "o_bias": True}
SMALL = {"vocab_size": DRAFT_VOCAB}
MASKED = {"mask_token_id": MASK, "has_embedding": True}
PART = {"maps_vocabulary": True}
WINDOWED = {"layer_windows": (40, None)}
SPARK = {"markov_rank": 6, "samples_from_anchor": True}
SURE = {"has_confidence": True, "confidence_reads_token": True}
SIZES = {
    "target_hidden_size": WIDTH,
    "target_vocab_size": VOCAB,
    "aux_layers": (SHALLOW.config.num_layers,),
    "most_drafts": 3,
}

# name: (config, the target, the namings that can say it).
_EAGLE3 = {
    "plain": (eagle3_of(), ALL_OF_EAGLE3),
    "a part of the vocabulary": (eagle3_of(SMALL, **PART), ALL_OF_EAGLE3),
    "an embedding": (eagle3_of(has_embedding=True), ("specforge", "speculators")),
    "the target's head": (eagle3_of(has_head=False), ("speculators", "sglang")),
    "a norm before fc": (eagle3_of(norm_before_fc=True), ("speculators",)),
    "norms before fc": (eagle3_of(has_fc_norms=True), ALL_OF_EAGLE3),
    "a bias of fc": (eagle3_of(fc_bias=True), ("sglang",)),
    "a normed residual": (eagle3_of(norm_before_residual=True), ("speculators",)),
    "a normed output": (eagle3_of(norm_output=True), ALL_OF_EAGLE3),
    "two layers": (eagle3_of({"num_layers": 2}), ("speculators",)),
    "norms of queries": (eagle3_of({"qk_norm": True}), ("speculators",)),
    "biases": (eagle3_of(BIASED | {"mlp_bias": True}), ("speculators",)),
    "biases and norms of queries": (eagle3_of(BIASED | {"qk_norm": True}), ("speculators",)),
    "biases of MLP and norms of queries": (eagle3_of({"mlp_bias": True, "qk_norm": True}), ()),
    "biases of queries alone": (eagle3_of({"qkv_bias": True}), ()),
    "a window": (eagle3_of({"layer_windows": (8,)}), ()),
    "llama3 rope": (eagle3_of({"rope": LLAMA3}), ALL_OF_EAGLE3),
    "yarn rope": (eagle3_of({"rope": YARN}), ALL_OF_EAGLE3),
    "another width": (
        eagle3_of({"hidden_size": 48, "head_dim": 12}, has_embedding=True),
        ("specforge", "sglang"),
    ),
    "two captured layers": (eagle3_of(aux_layers=(2, 6)), ("speculators", "sglang")),
}
_PEAGLE = {
    "plain": (eagle3_of({"num_layers": 2}, **MASKED), ("speculators", "specforge")),
    "a part of the vocabulary": (
        eagle3_of(SMALL | {"num_layers": 2}, norm_before_residual=True, **MASKED, **PART),
        ("speculators", "specforge"),
    ),
    "the target's tables": (eagle3_of(mask_token_id=MASK, has_head=False), ("speculators",)),
    "norms": (eagle3_of(has_fc_norms=True, norm_output=True, **MASKED), ("speculators",)),
    "llama3 rope": (eagle3_of({"rope": LLAMA3}, **MASKED), ("speculators",)),
}
_EAGLE = {
    "plain": (eagle_of(), ("eagle", "sglang")),
    "a bias of fc": (eagle_of(fc_bias=True), ("eagle", "sglang")),
    "tables": (eagle_of(**TABLES), ("eagle",)),
    "two layers": (eagle_of({"num_layers": 2}), ("eagle",)),
    "biases of queries alone": (eagle_of({"qkv_bias": True}), ("eagle",)),
    "biases": (eagle_of(BIASED), ()),
    "the hidden state first": (eagle_of(has_hidden_first=True), ()),
}
BOTH = ("z-lab", "specforge", "speculators")
_DFLASH = {
    "plain": (block_of(), BOTH),
    "tables": (block_of(**TABLES), ("speculators",)),
    "a part of the vocabulary": (
        block_of(SMALL, has_embedding=True, has_head=True, **PART),
        ("speculators",),
    ),
    "the anchor": (block_of(samples_from_anchor=True), ("speculators",)),
    "biases": (block_of(BIASED), BOTH),
    "biases of queries alone": (block_of({"qkv_bias": True}), ()),
    "no norms of queries": (block_of({"qk_norm": False}), ()),
    "a causal window": (block_of(WINDOWED, causal_layers=(True, False)), BOTH),
    "a window": (block_of(WINDOWED), BOTH),
    "windows": (block_of({"layer_windows": (40, 40)}, causal_layers=(True, True)), BOTH),
    "two windows": (
        block_of({"layer_windows": (40, 48)}, causal_layers=(True, True)),
        (),
    ),
    "causal": (block_of(causal_layers=(True, True)), ("z-lab", "specforge")),
    "causal with a window": (
        block_of(WINDOWED, causal_layers=(True, True)),
        ("z-lab", "specforge"),
    ),
    "half causal": (block_of(causal_layers=(True, False)), ()),
    "the first and the last layer": (block_of(aux_layers=(0, 6)), BOTH),
}
_OF_DFLASH2 = block_files.OF_DFLASH2
_DFLASH2 = {
    "plain": (block_of(**_OF_DFLASH2), ("z-lab", "speculators")),
    "tables": (block_of(**TABLES, **_OF_DFLASH2), ("speculators",)),
    "the anchor": (block_of(samples_from_anchor=True, **_OF_DFLASH2), ()),
}
_DSPARK = {
    "plain": (block_of(**SPARK), ("specforge", "speculators")),
    "gated": (block_of(**SPARK, **SURE, markov_kind="gated"), ("specforge", "speculators")),
    "recurrent": (block_of(**SPARK, markov_kind="rnn"), ("specforge", "speculators")),
    "tables": (block_of(**SPARK, **SURE, **TABLES), ("speculators", "deepspec")),
    "a part of the vocabulary": (
        block_of(SMALL, **SPARK, **TABLES, **PART),
        ("speculators",),
    ),
    "masks": (block_of(markov_rank=6, has_confidence=True), ("speculators",)),
    "confidence alone": (
        block_of(samples_from_anchor=True, has_confidence=True),
        ("specforge", "speculators"),
    ),
}
_MTP = {
    "plain": (mtp_of(), ("speculators",)),
    "norms of queries": (mtp_of({"qk_norm": True}), ("speculators",)),
    "tables": (mtp_of(has_embedding=True, has_head=True), ("speculators",)),
    "hidden state first": (mtp_of(has_hidden_first=True), ()),
    "biases of queries": (mtp_of({"qkv_bias": True}), ()),
    "a bias of fc": (mtp_of(fc_bias=True), ()),
}
_MEDUSA = {
    "plain": (MedusaConfig(**SIZES), ("medusa", "vllm")),
    "two blocks": (MedusaConfig(**SIZES, num_blocks=2), ("medusa", "vllm")),
    "no biases": (MedusaConfig(**SIZES, has_bias=False), ("vllm",)),
    "the target's head": (MedusaConfig(**SIZES, has_head=False), ("medusa",)),
    "neither": (MedusaConfig(**SIZES, has_head=False, has_bias=False), ()),
}
_MLP = {
    "plain": (MlpSpeculatorConfig(**SIZES, inner_size=24), ("ibm",)),
    "tied": (
        MlpSpeculatorConfig(**SIZES, inner_size=24, is_tied=True, scale_input=True),
        ("ibm",),
    ),
}
_KINDS = {
    "EAGLE-3": (_EAGLE3, DEEP),
    "P-EAGLE": (_PEAGLE, DEEP),
    "EAGLE": (_EAGLE, SHALLOW),
    "MTP": (_MTP, SHALLOW),
    "DFlash": (_DFLASH, DEEP),
    "DFlash2": (_DFLASH2, DEEP),
    "DSpark": (_DSPARK, DEEP),
    "Medusa": (_MEDUSA, SHALLOW),
    "MLP speculator": (_MLP, SHALLOW),
}
CASES = {
    f"{kind}, {name}": HeadCase(config, target, namings)
    for kind, (cases, target) in _KINDS.items()
    for name, (config, namings) in cases.items()
}
NAMINGS = {
    "EAGLE-3": ALL_OF_EAGLE3,
    "P-EAGLE": ("speculators", "specforge"),
    "EAGLE": ("eagle", "sglang"),
    "MTP": ("speculators",),
    "DFlash": BOTH,
    "DFlash2": ("z-lab", "speculators"),
    "DSpark": ("specforge", "speculators", "deepspec"),
    "Medusa": ("medusa", "vllm"),
    "MLP speculator": ("ibm",),
}
