"""DFlash and DSpark: blocks of masks after roots that are drawn anew in every step.

Each root begins a block, as when it is drafted from: the root's token and masks, which see the
contexts of the tokens before the root and the block itself. The blocks of a text share these
contexts, and do not see each other. A Markov head reads the text's tokens.

Sources: Chen et al. 2026, arXiv:2602.06036 (DFlash), whose blocks begin at tokens drawn at random;
DeepSpec's DSpark, arXiv:2607.05147; the equations are `specjax.heads.equations.dflash` and
`dspark`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import DrafterSpec
from specjax.heads.equations import dflash, dspark
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.head_parts import own_logits
from specjax.heads.specs import DFlashDrafter
from specjax.models.base import Params
from specjax.training import roots
from specjax.training.dflash_options import (
    TOKENS_PER_ROOT,
    LearnedConfig,
    configure_dflash,
    configure_dspark,
)
from specjax.training.drafts import Drafts, Kind
from specjax.training.options import with_quiet_layers, with_vocabulary
from specjax.training.texts import QUERIES_AT_ONCE, Along, Target, TextBatch, in_parts

LEAST_AT_ONCE = 64  # roots of a row, where all are drafted after


def propose(
    params: Params, config: DFlashConfig, along: Along, depth: int, key: Array | None
) -> Drafts:
    """Returns the drafts after roots that `key` draws; see `Propose` and `roots.sampled`."""
    assert depth <= config.most_drafts
    assert config.markov_kind != dspark.SELECTOR
    every = config.tokens_per_root if isinstance(config, LearnedConfig) else TOKENS_PER_ROOT
    text = along.text
    count = -(-text.token_ids.shape[1] // every)
    keys = _context_keys(params, config, text, along.taps)
    blocks = lambda starts: _blocks(params, config, along, keys, starts, depth)
    if key is None:
        starts, is_root = roots.after_first(text)
        out = in_parts(blocks, starts, max(count, LEAST_AT_ONCE))
    else:
        starts, is_root = roots.sampled(key, text, depth, count)
        out = blocks(starts)
    normed = dflash.normed_output(params, config, out)
    hidden, estimates = [], []
    state = jnp.zeros((*starts.shape, config.markov_rank), normed.dtype)
    for s in range(depth):
        row = normed[:, :, config.first_row + s]
        latent = embedded = None
        if config.markov_rank:
            embedded = dspark.markov_embedding(params, _tokens_at(text, starts + s))
            latent, state = dspark.markov_step(params, config, embedded, row, state)
        if config.has_confidence:
            estimates.append(dspark.confidence_logits(params, config, row, embedded))
        hidden.append(row if latent is None else jnp.concatenate([row, latent], axis=-1))
    score = functools.partial(_score, params, config, along.target)
    ids = params.get("target_ids")
    has_all = key is None
    return Drafts(starts, is_root, tuple(hidden), score, tuple(estimates), ids, has_all)


def _score(params: Params, config: DFlashConfig, target: Target, read: Array, s: int) -> Array:
    """Returns f32[n, tokens that it can say] of [n, hidden_size + markov_rank]; see `Drafts`."""
    del s
    normed, latent = read[:, : config.hidden_size], read[:, config.hidden_size :]
    logits = own_logits(params, normed) if config.has_head else target.logits(normed)
    if config.markov_rank:
        logits += dspark.markov_logits(params["markov_w2"], latent)
    return logits


def _tokens_at(text: TextBatch, positions: Array) -> Array:
    """Returns the tokens at positions i32[rows, n]; those past the end are any."""
    last = text.token_ids.shape[1] - 1
    return jnp.take_along_axis(text.token_ids, jnp.minimum(positions, last), axis=1)


def _context_keys(
    params: Params, config: DFlashConfig, text: TextBatch, taps: Sequence[Array]
) -> tuple[tuple[Array, Array], ...]:
    """Returns keys and values of the contexts by layer, [rows, length, kv_heads, head_dim] each."""
    contexts = dflash.context(params, config, [tap.astype(params["fc"].dtype) for tap in taps])
    places = jnp.broadcast_to(jnp.arange(text.token_ids.shape[1]), text.token_ids.shape)
    return tuple(dflash.context_keys(params, config, contexts, places))


def _blocks(
    params: Params,
    config: DFlashConfig,
    along: Along,
    keys: tuple[tuple[Array, Array], ...],
    starts: Array,
    depth: int,
) -> Array:
    """Returns x [rows, roots, tokens of a block, hidden_size] before the last norm.

    Args:
      keys: of the contexts, see `_context_keys`.
      starts: i32[rows, roots].
    """
    width = config.num_rows(depth)
    positions = starts[:, :, None] + jnp.arange(width)[None, None]
    ids = jnp.full(positions.shape, config.mask_token_id)
    ids = ids.at[:, :, 0].set(_tokens_at(along.text, starts))
    embedded = params["embed_tokens"][ids] if config.has_embedding else along.target.embed(ids)
    flat = embedded.astype(params["fc"].dtype).reshape(-1, config.hidden_size)
    attend = functools.partial(_attend, config, starts, width)
    out, _ = dflash.forward(params, config, flat, positions.reshape(-1), attend, keys, width)
    return out.reshape(*positions.shape, -1)


def _attend(
    config: DFlashConfig,
    starts: Array,
    width: int,
    layer: int,
    q: Array,
    k: Array,
    v: Array,
    cache: tuple[Array, Array],
) -> tuple[Array, tuple[Array, Array]]:
    """Attends as the module says, some blocks at a time; the backward pass computes these again.

    Args:
      starts: i32[rows, roots].
      q, k, v: [rows * roots * width, heads, head_dim], of the blocks.
      cache: keys and values of the contexts, [rows, length, kv_heads, head_dim] each.
    """
    count = starts.shape[1]
    first = lambda x: jnp.moveaxis(x.reshape(*starts.shape, width, *x.shape[1:]), 1, 0)
    one = jax.checkpoint(functools.partial(_attend_once, config, layer, cache))
    blocks = starts.T, first(q), first(k), first(v)
    size = max(QUERIES_AT_ONCE // width, 1)
    over = lambda block: one(*block)
    out = jax.vmap(over)(blocks) if count <= size else jax.lax.map(over, blocks, batch_size=size)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape), cache


def _attend_once(
    config: DFlashConfig,
    layer: int,
    cache: tuple[Array, Array],
    starts: Array,
    q: Array,
    k: Array,
    v: Array,
) -> Array:
    """Returns the attention of one block of each row, [rows, width, heads, head_dim].

    Args:
      starts: i32[rows], the positions of the roots.
      q, k, v: [rows, width, heads, head_dim].
    """
    own, (context_k, context_v) = config.layers, cache
    rows, width, heads, head_dim = q.shape
    length, kv_heads = context_k.shape[1:3]
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim)
    scores = functools.partial(
        jnp.einsum, "bqkgd,bmkd->bkgqm", grouped, preferred_element_type=jnp.float32
    )
    sees = _visible(config, layer, starts, width, length)
    both = own.scale * jnp.concatenate([scores(context_k), scores(k)], axis=-1)
    weights = jax.nn.softmax(jnp.where(sees[:, None, None], both, -jnp.inf), axis=-1)
    weights = weights.astype(v.dtype)
    out = jnp.einsum("bkgqm,bmkd->bqkgd", weights[..., :length], context_v)
    out += jnp.einsum("bkgqm,bmkd->bqkgd", weights[..., length:], v)
    return out.reshape(q.shape)


def _visible(config: DFlashConfig, layer: int, starts: Array, width: int, length: int) -> Array:
    """Returns which contexts, and then which tokens of their blocks, blocks see.

    Args:
      starts: i32[rows], the positions of the roots.

    Returns:
      bool[rows, width, length + width].
    """
    start = starts[:, None, None]
    query, own = start + jnp.arange(width)[None, :, None], start + jnp.arange(width)[None, None]
    context = jnp.broadcast_to(jnp.arange(length)[None, None], (len(starts), 1, length))
    key = jnp.concatenate([context, own], axis=2)
    is_own = jnp.arange(length + width)[None, None] >= length
    is_causal, window = config.causal_layers[layer], config.layers.window(layer)
    sees = is_own | (key < start)
    if is_causal:
        sees &= key <= query
    if window is not None:
        sees &= key > (query if is_causal else start) - window
    return jnp.broadcast_to(sees, (len(starts), width, length + width))


def begin(key: Array, config: DFlashConfig, target: Target, target_ids: Array | None) -> Params:
    """Returns the weights that training begins with; see `Kind.begin`.

    What layers add, and what a Markov head adds, begins at zero.
    """
    params: Params = with_quiet_layers(dflash.init(key, config, jnp.float32))
    if config.markov_rank:
        params |= {"markov_w2": jnp.zeros((config.vocab_size, config.markov_rank))}
    return with_vocabulary(params, target, target_ids)


def _spec(config: DFlashConfig) -> DFlashDrafter:
    return DFlashDrafter(config.served if isinstance(config, LearnedConfig) else config)


def _is_dflash(spec: DrafterSpec, is_dspark: bool = False) -> bool:
    """Returns whether a drafter is a DFlash head, or one of DSpark; DFlash2 is neither."""
    config = getattr(spec, "config", None)
    if not isinstance(config, DFlashConfig) or config.conv_kernel_size or config.selector_top_k:
        return False
    return is_dspark == (config.markov_rank > 0 or config.has_confidence)


KIND = Kind(
    name="dflash",
    configure=configure_dflash,
    begin=begin,
    propose=propose,
    spec=_spec,
    is_kind_of=_is_dflash,
)
KIND_OF_DSPARK = KIND._replace(
    name="dspark",
    configure=configure_dspark,
    is_kind_of=functools.partial(_is_dflash, is_dspark=True),
)
