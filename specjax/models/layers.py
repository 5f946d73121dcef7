"""Products with weights, norms, rotary positions and dense causal attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.implementations import by_platform
from specjax.models.base import MeshAxes, RopeConfig
from specjax.models.quantised import Quantised
from specjax.models.views import View


def along_last_axis(vector: Array, x: Array) -> Array:
    """Returns vector [size] with x's rank, so that no broadcast adds axes silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


# Numbers of tokens for products weight @ x.T on a CPU; other numbers are padded to the next.
# Full vectors are fast: 14 tokens took 1.2 to 1.6 times as long as 16 (x86-64 with AVX-512,
# jax 0.10.2 and 0.12.0.1; docs/decisions/0002-weights-from-the-left.md).
PRODUCT_WIDTHS = (1, 2, 3, 4, 8, 16, 32, 40, 48, 64)
MOST_TOKENS_FROM_THE_LEFT = PRODUCT_WIDTHS[-1]


def product_width(num_tokens: int) -> int:
    """Returns the number of tokens that `linear` pads num_tokens to on a CPU."""
    fits = (width for width in PRODUCT_WIDTHS if width >= num_tokens)
    return next(fits, num_tokens)


def linear(x: Array, weight: Array | View | Quantised, dtype: DTypeLike | None = None) -> Array:
    """Returns x [..., in] times the transpose of weight [out, in], as [..., out].

    On a CPU, up to 64 tokens are multiplied as weight @ x.T, padded to one of
    PRODUCT_WIDTHS. A barrier keeps XLA from fusing the result [out, tokens] with the
    transpose after it into x @ weight.T, which takes 1.3 to 2 times as long at 2 to 64
    tokens. At 256 both take the same time.

    A View is multiplied as it lies, and so is a Quantised matrix, except on a CPU, whose products
    of few bits are slow: it widens the matrix first.

    Where x has more digits than the weight, products are exact and sums are of float32.

    Args:
      dtype: of the sums and of the result; by default that of x.
    """
    if isinstance(weight, Quantised):
        return by_platform(
            x,
            weight,
            cpu=lambda x, weight: linear(x, weight.matrix(x.dtype), dtype),
            default=lambda x, weight: _linear_in_few_bits(x, weight, dtype),
        )
    if x.dtype != weight.dtype and x.dtype == jnp.float32:
        return by_platform(
            x,
            weight,
            cpu=lambda x, weight: linear(x, weight.astype(x.dtype)),
            default=_linear_in_parts,
        )
    tokens = x.reshape(-1, x.shape[-1])
    if isinstance(weight, View):
        return weight.times(tokens, dtype).reshape(*x.shape[:-1], -1)
    whole = lambda tokens, weight: jax.lax.dot(tokens, weight.T, preferred_element_type=dtype)

    def from_the_left(tokens: Array, weight: Array) -> Array:
        num_tokens = tokens.shape[0]
        columns = jnp.pad(tokens.T, ((0, 0), (0, product_width(num_tokens) - num_tokens)))
        out = jax.lax.dot(weight, columns, preferred_element_type=dtype)
        return jax.lax.optimization_barrier(out)[:, :num_tokens].T

    if tokens.shape[0] <= MOST_TOKENS_FROM_THE_LEFT:
        out = by_platform(tokens, weight, cpu=from_the_left, default=whole)
    else:
        out = whole(tokens, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _linear_in_few_bits(x: Array, weight: Quantised, dtype: DTypeLike | None) -> Array:
    out = weight.times(x.reshape(-1, x.shape[-1]), dtype)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def einsum(subscripts: str, x: Array, weight: Array) -> Array:
    """Returns jnp.einsum of x and a weight in x's dtype; see `linear` where x has more digits."""

    def product(x: Array, weight: Array, dtype: DTypeLike | None = None) -> Array:
        return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)

    if x.dtype != weight.dtype and x.dtype == jnp.float32:
        return by_platform(
            x,
            weight,
            cpu=lambda x, weight: product(x, weight.astype(x.dtype)),
            default=functools.partial(_in_parts, product),
        )
    return product(x, weight)


def _linear_in_parts(x: Array, weight: Array | View) -> Array:
    """Returns `linear` of x in float32 and a weight of 16 bits, f32[..., out]."""
    return _in_parts(linear, x, weight)


def _in_parts(product: Callable[..., Array], x: Array, weight: Array | View) -> Array:
    """Returns product(x, weight, dtype) of x in float32 and a weight of 16 bits, in float32.

    Matrix units round their inputs to 16 bits unless they are told to multiply several times. Here
    x is split into three parts of 8 bits each, whose sum it is, and which the weight is read for
    once. A weight in float16 has more digits than bfloat16, and is widened.
    """
    if weight.dtype != jnp.bfloat16:
        with jax.default_matmul_precision("highest"):
            return product(x, weight.astype(x.dtype), x.dtype)
    parts, rest = [], x
    for _ in range(3):
        # Not by a cast and back, which XLA may leave out.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(part), rest - part, 0.0)  # inf - inf would be NaN
    high, middle, low = product(jnp.stack(parts), weight, jnp.float32)
    return high + (middle + low)


def rms_norm(
    x: Array,
    weight: Array,
    eps: float,
    *,
    offset: float = 0.0,
    is_wide: bool = False,
    tensor_axis: MeshAxes | None = None,
) -> Array:
    """Normalises the last axis by its root mean square.

    It computes in float32 and casts back before it applies the weight, as Llama-type
    models do; the order matters only in bfloat16.

    Args:
      offset: added to the weight; Gemma's norms multiply by 1 + weight.
      is_wide: whether the weight is applied in float32 too, before the cast, as in Gemma and
        gpt-oss.
      tensor_axis: mesh axis over which the last axis of x is split into equal parts; None: x
        holds the whole axis.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    if tensor_axis is not None:
        mean = jax.lax.pmean(mean, tensor_axis)
    scaled = wide * jax.lax.rsqrt(mean + eps)
    if is_wide:
        weight = weight.astype(jnp.float32)
    else:
        scaled = scaled.astype(x.dtype)
    if offset:
        weight = weight + offset
    out = scaled * along_last_axis(weight, x)
    return out.astype(x.dtype) if is_wide else out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Normalises the last axis by mean and variance, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    scaled = scaled.astype(x.dtype) * along_last_axis(weight, x)
    return scaled + along_last_axis(bias, x)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns radians per position f64[head_dim // 2] and the factor on cos and sin.

    Raises:
      ValueError: a kind that depends on the current length, or is unknown.

    Source: the formula published with Llama 3.1 (llama3) and Peng et al. 2023,
    arXiv:2309.00071 (yarn).
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return frequencies, 1.0
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequencies
        original = rope.original_max_position_embeddings
        blend = (original / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies, 1.0
    if rope.kind == "yarn":
        low, high = (
            _yarn_dimension(rope, head_dim, beta) for beta in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        amplitude = rope.attention_factor
        if amplitude is None:
            amplitude = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return frequencies / rope.factor * ramp + frequencies * (1 - ramp), amplitude
    raise ValueError(
        f"rope type {rope.kind!r} is not supported; expected default, linear, llama3 "
        "or yarn. A type that depends on the current length (dynamic) would change "
        "keys that are already cached."
    )


def _yarn_dimension(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """Returns the dimension that turns `rotations` times over the original context."""
    original = rope.original_max_position_embeddings
    return head_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    """Returns cosines, then sines, for positions i32[...], as f32[..., 1, head_dim].

    As one array behind a barrier they are computed once; otherwise XLA fuses them into every
    layer, which took 2 % of a step on a CPU. A barrier on two arrays works in jax 0.12.0.1,
    not in 0.10.2.
    """
    frequencies, amplitude = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32)
    angles = angles * along_last_axis(jnp.asarray(frequencies, jnp.float32), angles)
    tables = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * amplitude
    return jax.lax.optimization_barrier(tables[..., None, :])


def rotate(x: Array, tables: Array) -> Array:
    """Applies rotary positions to x [..., heads, head_dim], in float32.

    Args:
      tables: from `rope_tables`; entry i of the first half is paired with entry i of the second.
    """
    cos, sin = jnp.split(tables, 2, axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def soft_cap(scores: Array, cap: float) -> Array:
    """Returns scores between -cap and cap, nearly unchanged about 0: cap * tanh(score / cap)."""
    return cap * jnp.tanh(scores / cap)


def dense_causal_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    key_mask: Array | None = None,
    positions: Array | None = None,
    precision: jax.lax.Precision | None = None,
    queries_at_once: int | None = None,
) -> Array:
    """Returns attention over whole sequences without a cache, for training and as a reference.

    Args:
      q: [batch, length, heads, head_dim]; k, v: [batch, length, kv_heads, head_dim].
      window: number of tokens that a query sees, itself included; None: all.
      softcap: scores become softcap * tanh(score / softcap), after the scale.
      sinks: f32[heads], the score of one extra key of each head, whose value is 0.
      key_mask: bool[batch, length], which tokens may be seen; each token always sees itself.
      positions: i32[batch, length], what a window counts in; None: places. Needed where padding
        stands inside a text.
      precision: of both products.
      queries_at_once: most queries of a sequence whose scores exist at a time; the backward pass
        computes these again. None: all, and the backward pass keeps them.

    Returns:
      [batch, length, heads, head_dim], in q's dtype; scores and softmax in float32.
    """
    length = q.shape[1]

    def attend(queries: Array, places: Array) -> Array:
        visible = _visible(places, length, window, key_mask, positions)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "precision": precision}
        return _attention_of(queries, k, v, visible, **options)

    if queries_at_once is None or length <= queries_at_once:
        return attend(q, jnp.arange(length))
    return _over_blocks(jax.checkpoint(attend), q, queries_at_once)


def _over_blocks(attend: Callable[[Array, Array], Array], q: Array, size: int) -> Array:
    """Returns attend(queries [batch, size, ...], their places) of all queries, block by block."""
    batch, length = q.shape[:2]
    count = -(-length // size)
    wide = jnp.pad(q, ((0, 0), (0, count * size - length)) + ((0, 0),) * (q.ndim - 2))
    blocks = jnp.moveaxis(wide.reshape(batch, count, size, *q.shape[2:]), 1, 0)
    # Padding stands at the last place: a query that sees no key would give NaN.
    places = jnp.minimum(jnp.arange(count * size), length - 1).reshape(count, size)
    out = jax.lax.map(lambda block: attend(*block), (blocks, places))
    return jnp.moveaxis(out, 0, 1).reshape(wide.shape)[:, :length]


def _visible(
    places: Array,
    length: int,
    window: int | None,
    key_mask: Array | None,
    positions: Array | None,
) -> Array:
    """Returns which keys queries see, bool[batch or 1, queries, length].

    They stand at `places`, i32[queries]. The other arguments are those of `dense_causal_attention`.
    """
    distance = places[:, None] - jnp.arange(length)[None, :]
    visible = (distance >= 0)[None]
    if window is not None:
        apart = distance[None]
        if positions is not None:
            apart = positions[:, places, None] - positions[:, None, :]
        visible = visible & (apart < window)
    if key_mask is not None:
        # A query that sees no key would give NaN, in its gradient too.
        visible = visible & (key_mask[:, None, :] | (distance == 0)[None])
    return visible


def _attention_of(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
    precision: jax.lax.Precision | None,
) -> Array:
    """Returns the attention of queries [batch, queries, heads, head_dim], in their shape and dtype.

    Args:
      visible: from `_visible`; the others are those of `dense_causal_attention`.
    """
    batch, num_queries, heads, head_dim = q.shape
    length, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, num_queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "blkgd,bmkd->bkglm",
        grouped,
        k,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores = scores * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        own_sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        own_sinks = jnp.broadcast_to(own_sinks, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, own_sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    out = jnp.einsum("bkglm,bmkd->blkgd", weights.astype(v.dtype), v, precision=precision)
    return out.reshape(q.shape)
