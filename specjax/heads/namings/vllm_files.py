"""Heads as vLLM converts them: names with a prefix, norms that are not used, a part of the tokens.

Source: the loaders of vLLM for its `medusa` and `eagle` configs, before 0.33 (behaviour).
"""

from __future__ import annotations

import re

import numpy as np

from specjax.heads.namings.head_files import TARGET_IDS, Head, check_logit_scale
from specjax.models.base import ModelConfig
from specjax.models.config_values import flag, shown, size

TOKEN_MAP = "token_map"
# What vLLM's EAGLE leaves out unless `model` says otherwise; files have them all the same.
_LEFT_OUT = ("layers.0.input_layernorm.weight", "norm.weight")
_USUAL = {"skip_prenorm": True, "skip_output_norm": True, "add_para_norm": False}
_PREFIX = re.compile(r"^(model\.)+")


def plain_eagle(head: Head) -> tuple[Head, list[str]]:
    """Returns an EAGLE head of vLLM's form in the naming of EAGLE, and tensors that are left out.

    Raises:
      ValueError: it has norms that vLLM's own form of EAGLE adds.
    """
    raw = head.raw
    for key, usual in _USUAL.items():
        if flag(raw, key, usual) is not usual:
            raise ValueError(
                f"{key}={shown(raw[key])} is not supported: its head has norms that EAGLE has not."
            )
    check_logit_scale(raw)
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in head.tensors.items()}
    if len(tensors) != len(head.tensors):
        raise ValueError("two tensors have one name but for its prefix; use the file as published.")
    left_out = [name for name in _LEFT_OUT if tensors.pop(name, None) is not None]
    return head._replace(tensors=tensors), left_out


def with_offsets(head: Head, target: ModelConfig, heads: tuple[str, ...]) -> Head:
    """Returns a head whose `token_map`, the target's number of each of its tokens, is offsets.

    Args:
      heads: names of its matrices, which may have a row for each of the target's tokens.

    Raises:
      ValueError: config.json and the table disagree.
    """
    tensors = dict(head.tensors)
    ids = tensors.pop(TOKEN_MAP, None)
    vocab = size(head.raw, "vocab_size", target.vocab_size)
    said = size(head.raw, "truncated_vocab_size", vocab)
    count = vocab if ids is None else ids.size
    if said != count or (ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu")):
        found = "there is none" if ids is None else f"it is {ids.dtype}{list(ids.shape)}"
        raise ValueError(
            f"truncated_vocab_size={said} of {vocab} tokens needs a tensor {TOKEN_MAP!r} with as "
            f"many whole numbers, and {found}; use both files as they were published."
        )
    if ids is None:
        return head
    if count == vocab and np.array_equal(ids, np.arange(vocab)):
        return head._replace(tensors=tensors)
    if count == vocab:
        raise ValueError(f"{TOKEN_MAP!r} of all tokens must number them in order.")
    if TARGET_IDS in tensors:
        raise ValueError(f"there are both {TOKEN_MAP!r} and {TARGET_IDS!r}; expected one of them.")
    # Clipped, so that nothing overflows: what is clipped is no token in any case.
    tokens = np.clip(ids.astype(np.int64), -1, vocab)
    for name in heads:
        if name in tensors and len(tensors[name]) == vocab != count:
            tensors[name] = tensors[name][np.clip(tokens, 0, vocab - 1)]
    offsets = {TARGET_IDS: tokens - np.arange(count)}
    return head._replace(tensors=tensors | offsets)
