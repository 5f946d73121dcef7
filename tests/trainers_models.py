"""A small Llama as trainers write it: in flax nnx, in flax linen, and as MaxText and tunix compute.

Nothing of specjax is used but the sizes of its config.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def causal_mixing(q, k, v, scale):
    """Returns softmax attention of each token over itself and those before it."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    length = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool))[None, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def half_rotated(x, theta):
    """Rotates entry j of each head with entry j + head_dim / 2, by its token's position."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(np.float32)[None, :, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# flax nnx


class NnxLayer(nnx.Module):
    """A layer whose parts have specjax's names; heads beside each other, or axes of their own."""

    def __init__(self, config, rngs, has_heads):
        self.config = config
        d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
        norm = lambda size: nnx.RMSNorm(size, epsilon=config.norm_eps, rngs=rngs)
        linear = lambda *sizes: nnx.Linear(*sizes, use_bias=config.qkv_bias, rngs=rngs)
        if has_heads:
            linear = lambda size, out: nnx.LinearGeneral(
                size, (out // hd, hd), use_bias=config.qkv_bias, rngs=rngs
            )
        self.input_norm, self.post_attention_norm = norm(d), norm(d)
        self.q_proj = linear(d, config.num_heads * hd)
        self.k_proj = linear(d, config.num_kv_heads * hd)
        self.v_proj = linear(d, config.num_kv_heads * hd)
        if has_heads:
            size = (config.num_heads, hd)
            self.o_proj = nnx.LinearGeneral(size, d, axis=(-2, -1), use_bias=False, rngs=rngs)
        else:
            self.o_proj = nnx.Linear(config.num_heads * hd, d, use_bias=False, rngs=rngs)
        self.gate_proj = nnx.Linear(d, f, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(d, f, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(f, d, use_bias=False, rngs=rngs)
        self.has_heads = has_heads

    def __call__(self, x):
        config, normed = self.config, self.input_norm(x)
        projections = self.q_proj, self.k_proj, self.v_proj
        heads = lambda y: y.reshape(*x.shape[:2], -1, config.head_dim)
        q, k, v = (heads(projection(normed)) for projection in projections)
        q, k = (half_rotated(y, config.rope.theta) for y in (q, k))
        mixed = causal_mixing(q, k, v, config.head_dim**-0.5)
        x = x + self.o_proj(mixed if self.has_heads else mixed.reshape(*x.shape[:2], -1))
        normed = self.post_attention_norm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(normed)) * self.up_proj(normed))


class NnxLlama(nnx.Module):
    """A Llama of nnx.Linear, nnx.Embed and nnx.RMSNorm."""

    def __init__(self, config, rngs, has_heads=False):
        d, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = nnx.Embed(vocab, d, rngs=rngs)
        self.layers = nnx.List(
            [NnxLayer(config, rngs, has_heads) for _ in range(config.num_layers)]
        )
        self.norm = nnx.RMSNorm(d, epsilon=config.norm_eps, rngs=rngs)
        self.lm_head = nnx.Linear(d, vocab, use_bias=False, rngs=rngs)

    def __call__(self, token_ids):
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


# flax linen


class LinenLayer(nn.Module):
    """A layer whose parts have specjax's names."""

    config: object
    has_heads: bool

    @nn.compact
    def __call__(self, x, _=None):
        config, hd = self.config, self.config.head_dim
        norm = lambda name: nn.RMSNorm(epsilon=config.norm_eps, name=name)
        plain = lambda size, name: nn.Dense(size, use_bias=False, name=name)

        def heads(count, name):
            if self.has_heads:
                return nn.DenseGeneral((count, hd), use_bias=config.qkv_bias, name=name)(normed)
            flat = nn.Dense(count * hd, use_bias=config.qkv_bias, name=name)(normed)
            return flat.reshape(*x.shape[:2], count, hd)

        normed = norm("input_norm")(x)
        q = half_rotated(heads(config.num_heads, "q_proj"), config.rope.theta)
        k = half_rotated(heads(config.num_kv_heads, "k_proj"), config.rope.theta)
        v = heads(config.num_kv_heads, "v_proj")
        mixed = causal_mixing(q, k, v, hd**-0.5)
        if self.has_heads:
            out = nn.DenseGeneral(config.hidden_size, (-2, -1), use_bias=False, name="o_proj")
            x = x + out(mixed)
        else:
            x = x + plain(config.hidden_size, "o_proj")(mixed.reshape(*x.shape[:2], -1))
        normed = norm("post_attention_norm")(x)
        gate, up = (plain(config.intermediate_size, n)(normed) for n in ("gate_proj", "up_proj"))
        return x + plain(config.hidden_size, "down_proj")(jax.nn.silu(gate) * up), None


class LinenLlama(nn.Module):
    """A Llama of nn.Dense, nn.Embed and nn.RMSNorm, its layers scanned or not."""

    config: object
    is_scanned: bool = False
    has_heads: bool = False

    @nn.compact
    def __call__(self, token_ids):
        config = self.config
        x = nn.Embed(config.vocab_size, config.hidden_size, name="embed_tokens")(token_ids)
        if self.is_scanned:
            scanned = nn.scan(
                LinenLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=config.num_layers,
            )
            x, _ = scanned(config, self.has_heads, name="layers")(x, None)
        else:
            for index in range(config.num_layers):
                x, _ = LinenLayer(config, self.has_heads, name=f"layers_{index}")(x)
        x = nn.RMSNorm(epsilon=config.norm_eps, name="norm")(x)
        return nn.Dense(config.vocab_size, use_bias=False, name="lm_head")(x)


# MaxText: in numpy and float64, or traced by jax


def normed(x, scale, eps, xp=np):
    mean = xp.mean(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(mean + eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def softmax(scores, xp):
    exponentials = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def llama31_frequencies(head_dim, rope):
    """Returns the frequencies of Llama 3.1 for each pair of entries: slow ones are slowed down."""
    frequencies = rope.theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    longest = rope.original_max_position_embeddings
    waves = 2 * np.pi / frequencies
    low, high = longest / rope.low_freq_factor, longest / rope.high_freq_factor
    smooth = (longest / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return np.where(
        waves > low, frequencies / rope.factor, np.where(waves < high, frequencies, between)
    )


def pair_rotated(x, rope, xp):
    """Rotates entries 2j and 2j + 1 of each head together, by their token's position."""
    angles = np.arange(x.shape[1])[:, None] * llama31_frequencies(x.shape[-1], rope)
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (np.cos, np.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return xp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def maxtext_shapes(config):
    """Returns the shapes of an unscanned MaxText Llama, by path."""
    d, f, v, hd = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.head_dim,
    )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    shapes = {
        "token_embedder.embedding": (v, d),
        "decoder.decoder_norm.scale": (d,),
        "decoder.logits_dense.kernel": (d, v),
    }
    for index in range(config.num_layers):
        layer = f"decoder.layers_{index}"
        shapes |= {
            f"{layer}.pre_self_attention_layer_norm.scale": (d,),
            f"{layer}.self_attention.query.kernel": (d, heads, hd),
            f"{layer}.self_attention.key.kernel": (d, kv_heads, hd),
            f"{layer}.self_attention.value.kernel": (d, kv_heads, hd),
            f"{layer}.self_attention.out.kernel": (heads, hd, d),
            f"{layer}.post_self_attention_layer_norm.scale": (d,),
            f"{layer}.mlp.wi_0.kernel": (d, f),
            f"{layer}.mlp.wi_1.kernel": (d, f),
            f"{layer}.mlp.wo.kernel": (f, d),
        }
    return shapes


def maxtext_logits(weights, config, token_ids, xp=np):
    """Returns the logits of MaxText's Llama 3.1: scores are not scaled, the queries' kernel is."""
    if xp is np:
        weights = {path: np.asarray(leaf, np.float64) for path, leaf in weights.items()}
    x = weights["token_embedder.embedding"][token_ids]
    for index in range(config.num_layers):
        of = lambda name, index=index: weights[f"decoder.layers_{index}.{name}"]
        y = normed(x, of("pre_self_attention_layer_norm.scale"), config.norm_eps, xp)
        q, k, v = (
            xp.einsum("btd,dnh->btnh", y, of(f"self_attention.{name}.kernel"))
            for name in ("query", "key", "value")
        )
        q, k = (pair_rotated(y, config.rope, xp) for y in (q, k))
        group = config.num_heads // config.num_kv_heads
        k, v = xp.repeat(k, group, axis=2), xp.repeat(v, group, axis=2)
        scores = xp.einsum("bqnh,bknh->bnqk", q, k)
        scores = xp.where(np.tril(np.ones(scores.shape[-2:], bool))[None, None], scores, -np.inf)
        mixed = xp.einsum("bnqk,bknh->bqnh", softmax(scores, xp), v)
        x = x + xp.einsum("btnh,nhd->btd", mixed, of("self_attention.out.kernel"))
        y = normed(x, of("post_self_attention_layer_norm.scale"), config.norm_eps, xp)
        gate, up = y @ of("mlp.wi_0.kernel"), y @ of("mlp.wi_1.kernel")
        x = x + (gate / (1 + xp.exp(-gate)) * up) @ of("mlp.wo.kernel")
    x = normed(x, weights["decoder.decoder_norm.scale"], config.norm_eps, xp)
    return x @ weights["decoder.logits_dense.kernel"]


# tunix


def tunix_shapes(config):
    """Returns the shapes of tunix's Qwen3 with an embedding that is the head, by path."""
    d, f, v, hd = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.head_dim,
    )
    shapes = {"embedder.input_embedding": (v, d), "final_norm.w": (d,)}
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.w": (d,),
            f"{layer}.attn.q_proj.w": (d, config.num_heads, hd),
            f"{layer}.attn.k_proj.w": (d, config.num_kv_heads, hd),
            f"{layer}.attn.v_proj.w": (d, config.num_kv_heads, hd),
            f"{layer}.attn.o_proj.w": (config.num_heads, hd, d),
            f"{layer}.attn.q_norm.w": (hd,),
            f"{layer}.attn.k_norm.w": (hd,),
            f"{layer}.post_attention_layernorm.w": (d,),
            f"{layer}.mlp.gate_proj.kernel": (d, f),
            f"{layer}.mlp.up_proj.kernel": (d, f),
            f"{layer}.mlp.down_proj.kernel": (f, d),
        }
    return shapes


def tunix_logits(weights, config, token_ids, xp=np):
    """Returns the logits of tunix's Qwen3, whose queries and keys are normed by head."""
    norm = lambda x, w: normed(x, w, config.norm_eps, xp)
    x = xp.asarray(weights["embedder.input_embedding"])[token_ids]
    for index in range(config.num_layers):
        of = lambda name, index=index: xp.asarray(weights[f"layers.{index}.{name}"])
        y = norm(x, of("input_layernorm.w"))
        q, k, v = (xp.einsum("btd,dnh->btnh", y, of(f"attn.{n}_proj.w")) for n in "qkv")
        q, k = norm(q, of("attn.q_norm.w")), norm(k, of("attn.k_norm.w"))
        q, k = (half_rotated(y, config.rope.theta) for y in (q, k))
        mixed = xp.asarray(causal_mixing(q, k, v, config.head_dim**-0.5))
        x = x + xp.einsum("btnh,nhd->btd", mixed, of("attn.o_proj.w"))
        y = norm(x, of("post_attention_layernorm.w"))
        gate, up = y @ of("mlp.gate_proj.kernel"), y @ of("mlp.up_proj.kernel")
        x = x + (gate / (1 + xp.exp(-gate)) * up) @ of("mlp.down_proj.kernel")
    x = norm(x, xp.asarray(weights["final_norm.w"]))
    return x @ xp.asarray(weights["embedder.input_embedding"]).T
