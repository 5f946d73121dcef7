"""EAGLE-3 and its family: training-time test, in which a head reads what it reads when it drafts.

Source: Li et al. 2025, arXiv:2503.01840, section 3.2. At step s = 0 the pair at the slot of token p
is that of the token and the target's feature of the token before. At step s > 0 its feature is what
step s - 1 gave at slot p - 1. When it drafts so, the keys of the slots below p - s are those of the
target's features, and those of p - s + 1 ... p are of steps 1 ... s. So a query of step s sees

    keys of step 0 at slots 1 ... p - s,  of step 1 at p - s + 1,  ...,  of step s at p

The draft token that step s says at slot p is number s of the root p - s.

EAGLE and MTP (`specjax.training.eagle`) differ in their equations alone. P-EAGLE differs in its
pairs: at each step s > 0 that of a mask, which knows no draft token. Its queries see the same keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.heads.eagle import AnyEagle, equations_of
from specjax.heads.equations import eagle3, head_parts
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import EagleDrafter
from specjax.models.base import LayerCache, ModelConfig, Params
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import (
    captured_layers,
    layer_defaults,
    layers_like,
    mask_token,
    read,
    vocabulary,
    with_quiet_layers,
    with_vocabulary,
)
from specjax.training.texts import QUERIES_AT_ONCE, Along, Target, in_parts

FIRST_SLOT = 1  # of the first token that has a token before it
MOST_TOKENS_KEPT = 4096  # of a batch: with more, the inside of a step is not kept
FLAGS = "norm_before_fc", "has_fc_norms", "norm_before_residual", "norm_output"
DEFAULTS = {"aux_layers": None, "draft_vocab_size": None, **dict.fromkeys(FLAGS, False)}


def configure(target: ModelConfig, options: dict[str, Any]) -> Eagle3Config:
    """Returns the config of a head for a target.

    Args:
      options: aux_layers, see `captured_layers`; num_layers (1), intermediate_size, num_heads and
        num_kv_heads (the target's); norm_before_fc, has_fc_norms, norm_before_residual and
        norm_output, see Eagle3Config (False); draft_vocab_size, see `vocabulary`.
    """
    return _config(target, read("eagle3", options, DEFAULTS | layer_defaults(target)))


def configure_masks(target: ModelConfig, options: dict[str, Any]) -> Eagle3Config:
    """Returns the config of a P-EAGLE head for a target.

    Args:
      options: those of EAGLE-3, of which num_layers is 4 by default; mask_token_id, see
        `mask_token`.
    """
    defaults = DEFAULTS | layer_defaults(target, num_layers=4) | {"mask_token_id": None}
    own = read("p-eagle", options, defaults)
    mask = mask_token(target, own["mask_token_id"])
    return dataclasses.replace(_config(target, own), mask_token_id=mask)


def _config(target: ModelConfig, own: dict[str, Any]) -> Eagle3Config:
    if own["norm_before_fc"] and own["has_fc_norms"]:
        raise ValueError(
            "norm_before_fc and has_fc_norms exclude each other: one norm over all captured "
            "states, or one for each. Give one of them."
        )
    vocab, tables = vocabulary(target, own["draft_vocab_size"])
    return Eagle3Config(
        layers=layers_like(target, own, vocab),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        aux_layers=captured_layers(target, own["aux_layers"]),
        **{name: own[name] for name in FLAGS},
        **tables,
    )


def propose(
    params: Params, config: AnyEagle, along: Along, depth: int, key: Array | None
) -> Drafts:
    """Returns the drafts after every token but the first, of any head of pairs; see `Propose`."""
    del key
    model = equations_of(config)
    target, text = along.target, along.text
    rows, length = text.token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    table = params["embed_tokens"] if config.has_embedding else None
    embed = lambda token_ids: target.embed(token_ids) if table is None else table[token_ids]
    pairs = embed(text.token_ids), _from_slot_before(model.feature(params, config, along.taps))
    caches: tuple[LayerCache, ...] = ((),) * config.layers.num_layers
    attend = functools.partial(_attend, config.layers.scale)

    def run(embedded: Array, features: Array, caches: tuple[LayerCache, ...]) -> Any:
        x = model.joined(params, config, embedded, features)
        return model.forward(params, config, embedded, x, positions, attend, caches)

    if rows * length > MOST_TOKENS_KEPT:
        run = jax.checkpoint(run)  # the backward pass computes the inside of a step again
    masks = None
    if isinstance(config, Eagle3Config) and config.takes_masks:
        feature = eagle3.mask_feature(params, config)
        masked = embed(jnp.full_like(text.token_ids, jnp.int32(config.mask_token_id)))
        masks = masked, jnp.broadcast_to(feature, (rows, length, *feature.shape))
    hidden = []
    for _ in range(depth):
        out, caches = run(*pairs, caches)
        hidden.append(model.normed_output(params, config, out))
        following = _from_slot_before(model.next_feature(params, config, out))
        pairs = (pairs[0], following) if masks is None else masks

    def score(read: Array, s: int) -> Array:
        del s
        return head_parts.own_logits(params, read) if config.has_head else target.logits(read)

    return Drafts.after_each(text, tuple(hidden), score, params.get("target_ids"))


def _from_slot_before(x: Array) -> Array:
    """Returns x [rows, length, width] of the slot before each; nothing reads that of the first."""
    return jnp.roll(x, 1, axis=1)


def _attend(
    scale: float, layer: int, q: Array, k: Array, v: Array, cache: LayerCache
) -> tuple[Array, LayerCache]:
    """Attends as the module says; the cache holds keys and values of the steps before.

    Args:
      q: [rows, length, heads, head_dim]; k, v: [rows, length, kv_heads, head_dim].
      cache: a tuple of (k, v), one per step.
    """
    del layer
    steps = (*cache, (k, v))
    s, length = len(cache), q.shape[1]
    later = [(jnp.roll(a, s - i, 1), jnp.roll(b, s - i, 1)) for i, (a, b) in enumerate(steps)][1:]
    some = functools.partial(_attend_some, scale, s, *steps[0])
    slots = jnp.arange(length)
    if length <= QUERIES_AT_ONCE:
        return some(slots, q, later), steps
    count = -(-length // QUERIES_AT_ONCE)
    block = jax.checkpoint(lambda part: some(part[0][0], *part[1:]))
    return in_parts(block, (slots[None], q, later), -(-length // count)), steps


def _attend_some(
    scale: float,
    s: int,
    first_k: Array,
    first_v: Array,
    slots: Array,
    q: Array,
    later: Sequence[tuple[Array, Array]],
) -> Array:
    """Returns the attention of some queries of step s, in the shape and dtype of q.

    Args:
      first_k, first_v: [rows, length, kv_heads, head_dim], of step 0.
      slots: i32[n], of the queries.
      q: [rows, n, heads, head_dim].
      later: of each step after the first, the one key and value that each query sees,
        [rows, n, kv_heads, head_dim].
    """
    rows, count, heads, head_dim = q.shape
    length, kv_heads = first_k.shape[1:3]
    grouped = q.reshape(rows, count, kv_heads, heads // kv_heads, head_dim)
    of_first = scale * jnp.einsum(
        "blkgd,bmkd->bkglm", grouped, first_k, preferred_element_type=jnp.float32
    )
    keys, own = jnp.arange(length)[None, :], slots[:, None]
    sees = (keys >= FIRST_SLOT) & (keys <= own - s)
    # Slot 0 has no pair, and slots up to s no whole chain: let them see something.
    sees |= (own <= s) & (keys == own)
    scores = [jnp.where(sees[None, None, None], of_first, -jnp.inf)]
    for its_k, _ in later:
        one = jnp.einsum("blkgd,blkd->bkgl", grouped, its_k, preferred_element_type=jnp.float32)
        scores.append(scale * one[..., None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(first_v.dtype)
    out = jnp.einsum("bkglm,bmkd->blkgd", weights[..., :length], first_v)
    for i, (_, its_v) in enumerate(later):
        out += jnp.einsum("bkgl,blkd->blkgd", weights[..., length + i], its_v)
    return out.reshape(q.shape)


def begin(key: Array, config: Eagle3Config, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with; see `Kind.begin`.

    What layers add begins at zero, so that the first drafts are made of the features alone.
    """
    params = with_quiet_layers(eagle3.init(key, config, jnp.float32))
    return with_vocabulary(params, target, target_ids)


def _is_eagle3(spec: DrafterSpec, takes_masks: bool = False) -> bool:
    own = spec.config if isinstance(spec, EagleDrafter) else None
    return isinstance(own, Eagle3Config) and own.takes_masks == takes_masks


KIND = Kind(
    name="eagle3",
    configure=configure,
    begin=begin,
    propose=propose,
    spec=EagleDrafter,
    is_kind_of=_is_eagle3,
)
KIND_OF_MASKS = KIND._replace(
    name="p-eagle",
    configure=configure_masks,
    is_kind_of=functools.partial(_is_eagle3, takes_masks=True),
)
