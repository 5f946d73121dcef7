"""Building blocks of model forwards. The static options of a block are its arguments.

    x = embedding                           [..., hidden_size]
    each layer:  x = x + out_norm(attention(norm(x)))      families have norm, out_norm or both
                 x = x + out_norm(mlp(norm(x)))            or experts instead of the MLP
    logits = head(norm(x))

A block finds the weights of a layer by their names: q_proj, k_proj, v_proj, o_proj, gate_proj,
up_proj and down_proj are matrices [out, in], and each may have a bias, `{name}_bias`. Under a
mesh every block may run on a shard of the heads and of the MLP; `tensor_axis` names the mesh
axis over which partial sums are added. Shards have equally many heads.

A block does not norm its input or its output: a family puts norms where they belong, before a
branch, after it, or both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from specjax.models.base import (
    Attend,
    ForwardWork,
    LayerCache,
    MeshAxes,
    ModelConfig,
    Params,
    before_final_norm,
)
from specjax.models.layers import (
    along_last_axis,
    einsum,
    linear,
    rope_tables,
    rotate,
    soft_cap,
)

# Name of what a branch adds to its input, for the policies of jax.checkpoint: from these and the
# embedding a backward pass computes everything else again, layer by layer.
BRANCH = "specjax_branch"

# head_norm(q or k [..., own heads, head_dim], its weight) -> the same shape, normed
Norm = Callable[[Array, Array], Array]
Activation = Callable[[Array], Array]

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Taps:
    """Collects the hidden states that a forward returns besides the last.

    Args:
      taps: layers; tap i is the input of layer i, tap num_layers the normed output, and tap
        num_layers + 1 what the final norm reads. None: the forward returns no taps.

    Raises:
      ValueError: there is no such layer.
    """

    def __init__(self, taps: tuple[int, ...] | None, num_layers: int):
        wrong = [tap for tap in taps or () if not 0 <= tap <= num_layers + 1]
        if wrong:
            raise ValueError(
                f"{taps=} must be from 0 to {num_layers=} + 1, the inputs of layers and, last, the "
                f"normed output and what its norm reads; {wrong} are not."
            )
        self._taps, self._num_layers = taps, num_layers
        self._seen: dict[int, Array] = {}

    def see(self, layer: int, x: Array) -> None:
        """Records the input of a layer; with the number of layers, what the final norm reads."""
        tap = layer if layer < self._num_layers else before_final_norm(self._num_layers)
        if self._taps is not None and tap in self._taps:
            self._seen[tap] = x

    def results(self, hidden: Array, caches: tuple[LayerCache, ...]) -> Any:
        """Returns the results of `Family.forward`: hidden, caches, and the taps, if any."""
        if self._taps is None:
            return hidden, caches
        seen = self._seen | {self._num_layers: hidden}
        return hidden, caches, tuple(seen[tap] for tap in self._taps)


def rotary_tables(config: ModelConfig, positions: Array) -> list[Array | None]:
    """Returns each layer's table of rotations, as `rotate` takes it; None without rotation.

    Layers with equal rope share one table.
    """
    tables: dict[Any, Array | None] = {None: None}
    for layer in range(config.num_layers):
        rope = config.rope_of(layer)
        if rope is not None and rope not in tables:
            tables[rope] = rope_tables(rope, config.head_dim, positions)
    return [tables[config.rope_of(layer)] for layer in range(config.num_layers)]


def project(x: Array, layer: Params, name: str) -> Array:
    """Returns x times a matrix, and its bias if it has one."""
    return with_bias(linear(x, layer[name]), layer, name)


def with_bias(out: Array, layer: Params, name: str) -> Array:
    """Returns out plus the bias of a matrix, if it has one."""
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + along_last_axis(bias, out)


def sum_over_shards(partial: Array, tensor_axis: MeshAxes | None) -> Array:
    """Returns the sum of the shards' partial products."""
    return partial if tensor_axis is None else jax.lax.psum(partial, tensor_axis)


def attend_heads(
    x: Array,
    layer: Params,
    attend: Attend,
    index: int,
    cache: LayerCache,
    *,
    head_dim: int,
    table: Array | None = None,
    head_norm: Norm | None = None,
) -> tuple[Array, LayerCache]:
    """Returns the heads' outputs side by side, [..., heads * head_dim], and the cache.

    Args:
      x: [..., hidden_size], the branch's input, normed if the family norms it.
      index: the layer's number.
      head_dim: size of a head; the matrices say how many heads this shard has.
      table: of rotations, see `rotary_tables`; None: no rotation.
      head_norm: norm of queries and of keys before the rotation, a function of q or k
        [..., own heads, head_dim] and its weight, layer["q_norm"] or layer["k_norm"]. `rms_norm`
        norms each head. None: no norm.

    A layer with a weight `sinks` f32[heads] has attention sinks.
    """
    names = "q_proj", "k_proj", "v_proj"
    q, k, v = (project(x, layer, name).reshape(*x.shape[:-1], -1, head_dim) for name in names)
    if head_norm is not None:
        q, k = head_norm(q, layer["q_norm"]), head_norm(k, layer["k_norm"])
    if table is not None:
        q, k = rotate(q, table), rotate(k, table)
    arrays = {"sinks": layer["sinks"]} if "sinks" in layer else {}
    mixed, cache = attend(index, q, k, v, cache, **arrays)
    return mixed.reshape(*mixed.shape[:-2], -1), cache


def attention(
    x: Array,
    layer: Params,
    attend: Attend,
    index: int,
    cache: LayerCache,
    *,
    head_dim: int,
    table: Array | None = None,
    head_norm: Norm | None = None,
    tensor_axis: MeshAxes | None = None,
) -> tuple[Array, LayerCache]:
    """Returns attention's output, [..., hidden_size], and the cache; see `attend_heads`."""
    mixed, cache = attend_heads(
        x, layer, attend, index, cache, head_dim=head_dim, table=table, head_norm=head_norm
    )
    return project_and_sum(mixed, layer, "o_proj", tensor_axis), cache


def project_and_sum(x: Array, layer: Params, name: str, tensor_axis: MeshAxes | None) -> Array:
    """Returns `project` summed over shards that each hold part of x; the bias is added once."""
    out = with_bias(sum_over_shards(linear(x, layer[name]), tensor_axis), layer, name)
    return checkpoint_name(out, BRANCH)


def gated_mlp(
    x: Array, layer: Params, activation: Activation, tensor_axis: MeshAxes | None = None
) -> Array:
    """Returns (activation(x @ gate.T) * (x @ up.T)) @ down.T, [..., hidden_size].

    Args:
      x: [..., hidden_size], the branch's input, normed if the family norms it.
      layer: gate_proj and up_proj [mlp, hidden_size], down_proj [hidden_size, mlp].
    """
    gated = activation(project(x, layer, "gate_proj")) * project(x, layer, "up_proj")
    return project_and_sum(gated, layer, "down_proj", tensor_axis)


def experts(
    x: Array,
    layer: Params,
    *,
    experts_per_token: int,
    activate: Callable[[Array, Array], Array],
    renormalises: bool,
    is_token: Array | None = None,
    tensor_axis: MeshAxes | None = None,
) -> Array:
    """Returns the weighted sum of the experts that a router chooses for each token.

    All experts run on all tokens, and the results of those not chosen are left out. That suits
    the few tokens of a step, whose time is spent reading weights, and is wasteful for long
    prompts.

    Args:
      x: [..., hidden_size], the branch's input, normed if the family norms it.
      layer: router [experts, hidden_size]; experts_gate_proj and experts_up_proj [experts,
        mlp, hidden_size]; experts_down_proj [experts, hidden_size, mlp]. Each may have a
        bias, [experts] of the router and [experts, out] of the others.
      activate: function of gate and up, [..., experts, mlp] each.
      renormalises: whether the weights of a token's experts sum to 1; otherwise they are
        probabilities among all experts.
      is_token: bool[...], False for padding, which no expert gets and whose result is 0. None:
        no padding.
    """
    scores = with_bias(linear(x, layer["router"], jnp.float32), layer, "router")
    best, chosen = jax.lax.top_k(scores, experts_per_token)
    if renormalises:
        shares = jax.nn.softmax(best, axis=-1)
    else:
        shares = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), chosen, axis=-1)
    is_chosen = jax.nn.one_hot(chosen, scores.shape[-1], dtype=shares.dtype)
    weights = jnp.sum(is_chosen * shares[..., None], axis=-2)  # [..., experts]
    if is_token is not None:
        weights = jnp.where(is_token[..., None], weights, 0.0)
    weights = weights.astype(x.dtype)

    def widened(name: str) -> Array:
        matrices = layer[name]
        flat = linear(x, matrices.reshape(-1, matrices.shape[-1]))
        out = flat.reshape(*x.shape[:-1], *matrices.shape[:2])
        bias = layer.get(f"{name}_bias")
        return out if bias is None else out + bias.reshape(*(1,) * (x.ndim - 1), *bias.shape)

    active = activate(widened("experts_gate_proj"), widened("experts_up_proj"))
    own = weights[..., None]
    # A product with 0 would be NaN where an expert that was not chosen overflows.
    shared = jnp.where(own != 0, active * own, jnp.zeros_like(active))
    out = einsum("...ef,edf->...d", shared, layer["experts_down_proj"])
    out = sum_over_shards(out, tensor_axis)
    bias = layer.get("experts_down_proj_bias")
    return out if bias is None else out + einsum("...e,ed->...d", weights, bias)


def head(
    hidden: Array,
    weight: Array,
    config: ModelConfig,
    tensor_axis: MeshAxes | None = None,
) -> Array:
    """Returns f32[..., vocab] from hidden [..., hidden_size].

    The logits are divided by config.logits_divisor and capped by config.logits_softcap.

    Args:
      weight: [vocab, hidden_size], or a shard of its rows.
      tensor_axis: mesh axis to gather the logits over, where weight is a shard; None: the logits
        of that shard, f32[..., its rows].
    """
    out = linear(hidden, weight, jnp.float32)
    if tensor_axis is not None and out.shape[-1] != config.vocab_size:
        out = jax.lax.all_gather(out, tensor_axis, axis=out.ndim - 1, tiled=True)
    if config.logits_divisor != 1.0:
        out = out / config.logits_divisor
    return out if config.logits_softcap is None else soft_cap(out, config.logits_softcap)


def dense_work(config: ModelConfig, num_weights: int, num_looked_up: int) -> ForwardWork:
    """Returns the work of a model whose weights, except lookup tables, multiply every token.

    Args:
      num_weights: numbers in all leaves.
      num_looked_up: numbers among them in tables of which a forward reads one row per token:
        vocab_size * hidden_size where the head is untied, 0 where it is the embedding.
    """
    multiplied = num_weights - num_looked_up
    return ForwardWork(
        weights_read=multiplied,
        token_products=multiplied,
        # One product for scores, one for the sum of values.
        context_products=2 * config.num_layers * config.num_heads * config.head_dim,
        layer_windows=config.layer_windows,
    )
