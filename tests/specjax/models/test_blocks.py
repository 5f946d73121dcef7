"""Blocks against the same written out, one number or one expert at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_llama_config
from jax.sharding import Mesh, PartitionSpec
from made_up_families import norm_across_heads

from specjax.models import blocks
from specjax.models.base import RopeConfig
from specjax.models.layers import dense_causal_attention, rms_norm

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def expert(layer, index, x, activate):
    """Returns one expert's output for one token x [hidden_size]."""
    side = lambda name, y: layer[name][index] @ y + layer[f"{name}_bias"][index]
    gate, up = side("experts_gate_proj", x), side("experts_up_proj", x)
    return side("experts_down_proj", np.asarray(activate(gate, up)))


@pytest.mark.full
@pytest.mark.parametrize("renormalises", [True, False])
def test_experts_are_a_loop_over_tokens_and_their_choices(renormalises):
    num_experts, chosen, d, f = 5, 2, 8, 6
    layer = {
        "router": normal(num_experts, d),
        "router_bias": normal(num_experts),
        "experts_gate_proj": normal(num_experts, f, d),
        "experts_gate_proj_bias": normal(num_experts, f),
        "experts_up_proj": normal(num_experts, f, d),
        "experts_up_proj_bias": normal(num_experts, f),
        "experts_down_proj": normal(num_experts, d, f),
        "experts_down_proj_bias": normal(num_experts, d),
    }
    # Clipped, as those of gpt-oss are: any function of gate and up.
    activate = lambda gate, up: jnp.minimum(gate, 1.0) * (jnp.clip(up, -1.0, 1.0) + 1)
    x = normal(3, 2, d)
    is_token = np.array([[True, True], [True, False], [True, True]])
    out = blocks.experts(
        jnp.asarray(x),
        jax.tree.map(jnp.asarray, layer),
        experts_per_token=chosen,
        activate=activate,
        renormalises=renormalises,
        is_token=jnp.asarray(is_token),
    )
    for place in np.ndindex(3, 2):
        scores = layer["router"] @ x[place] + layer["router_bias"]
        probs = np.exp(scores) / np.exp(scores).sum()
        best = np.argsort(-probs)[:chosen]
        shares = probs[best] / (probs[best].sum() if renormalises else 1.0)
        expected = sum(
            share * expert(layer, index, x[place], activate) for share, index in zip(shares, best)
        )
        np.testing.assert_allclose(out[place], expected * is_token[place], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_an_expert_that_overflows_counts_only_where_it_is_chosen():
    num_experts, d, f, large = 4, 32, 16, 2
    half = lambda x: jnp.asarray(x, jnp.float16)
    layer = {
        "router": half(np.zeros((num_experts, d))),
        "router_bias": half([0, 0, -9, -9]),
        "experts_gate_proj": half(normal(num_experts, f, d)),
        "experts_up_proj": half(normal(num_experts, f, d)),
        "experts_down_proj": half(normal(num_experts, d, f)),
    }
    x = half(normal(3, d))
    run = lambda layer: blocks.experts(
        x,
        layer,
        experts_per_token=2,
        activate=lambda gate, up: gate * up,
        renormalises=True,
        is_token=jnp.array([True, True, False]),
    )
    expected = run(layer)
    assert np.isfinite(expected).all()
    overflows = {
        name: matrices if name.startswith("router") else matrices.at[large].set(200)
        for name, matrices in layer.items()
    }
    np.testing.assert_array_equal(run(overflows), expected)


def test_norms_of_gemma_multiply_by_one_more_in_float32():
    x = jnp.asarray(normal(4, 64), jnp.bfloat16)
    weight = jnp.asarray(0.1 * normal(64), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    expected = jnp.asarray(scaled * (1 + np.asarray(weight, np.float32)), jnp.bfloat16)
    actual = rms_norm(x, weight, 1e-6, offset=1.0, is_wide=True)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected)
    narrow = rms_norm(x, weight, 1e-6, offset=1.0)
    assert (narrow != expected).any(), "rounding before the product must show"


@pytest.mark.parametrize("num_shards", [1, 4])
def test_norms_across_heads_are_of_all_shards(num_shards):
    x, weight = normal(3, 8, 4), normal(32)
    flat = x.reshape(3, 32)
    expected = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6) * weight
    norm = functools.partial(
        norm_across_heads, eps=1e-6, tensor_axis="tensor" if num_shards > 1 else None
    )
    split = jax.shard_map(
        norm,
        mesh=Mesh(np.array(jax.devices()[:num_shards]), ("tensor",)),
        in_specs=(PartitionSpec(None, "tensor"), PartitionSpec("tensor")),
        out_specs=PartitionSpec(None, "tensor"),
    )
    actual = jax.jit(split)(x, weight)
    np.testing.assert_allclose(actual, expected.reshape(3, 8, 4), rtol=1e-5, atol=1e-6)


def test_dense_attention_with_caps_and_sinks_written_out():
    length, heads, kv_heads, size, cap, scale = 5, 4, 2, 8, 1.5, 0.7
    q, k, v = normal(1, length, heads, size), normal(1, length, kv_heads, size), None
    v = normal(1, length, kv_heads, size)
    sinks = normal(heads)
    out = dense_causal_attention(
        *map(jnp.asarray, (q, k, v)), scale=scale, softcap=cap, sinks=jnp.asarray(sinks)
    )
    for head, token in np.ndindex(heads, length):
        keys, values = (x[0, : token + 1, head // 2] for x in (k, v))
        scores = cap * np.tanh(keys @ q[0, token, head] * scale / cap)
        shares = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
        np.testing.assert_allclose(out[0, token, head], shares @ values, rtol=1e-4, atol=1e-5)


def test_activations():
    x = jnp.linspace(-3.0, 3.0, 13)
    gelu = [0.5 * y * (1 + np.vectorize(__import__("math").erf)(y / 2**0.5)) for y in np.asarray(x)]
    np.testing.assert_allclose(blocks.ACTIVATIONS["gelu"](x), gelu, atol=1e-6)
    tanh = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(blocks.ACTIVATIONS["gelu_tanh"](x), tanh, atol=1e-6)
    np.testing.assert_allclose(blocks.ACTIVATIONS["silu"](x), x / (1 + np.exp(-x)), atol=1e-6)


def test_layers_that_rotate_alike_share_a_table():
    local, far = RopeConfig(theta=100.0), RopeConfig(theta=1e6)
    config = tiny_llama_config(num_layers=4, layer_ropes=(local, far, None, local))
    tables = blocks.rotary_tables(config, jnp.arange(3))
    assert tables[0] is tables[3]
    assert tables[2] is None
    assert (tables[0][1] != tables[1][1]).any()
    same = blocks.rotary_tables(tiny_llama_config(num_layers=4, rope=local), jnp.arange(3))
    assert len(set(map(id, same))) == 1
    np.testing.assert_array_equal(same[0], tables[0])


def test_the_first_layers_have_their_own_windows_and_rotations():
    config = tiny_llama_config(layer_windows=(4, None), layer_ropes=(RopeConfig(), None))
    first = config.first_layers(1)
    assert (first.num_layers, first.layer_windows, first.layer_ropes) == (1, (4,), (RopeConfig(),))


@pytest.mark.parametrize("tap", [-1, 4])
def test_taps_of_layers_that_are_not_there(tap):
    with pytest.raises(
        ValueError, match=rf"must be from 0 to num_layers=2 \+ 1.*\[{tap}\] are not"
    ):
        blocks.Taps((0, tap), 2)


# Whole blocks of 16, one query in the last, and most of it.
@pytest.mark.parametrize("length", quick([16, 17, 30, 32], 17))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5, "softcap": 3.0},
        {"has_sinks": True, "window": 20},
        {"has_mask": True},
        {"has_mask": True, "has_positions": True, "has_sinks": True, "window": 4},
        {"dtype": jnp.bfloat16, "has_mask": True},
    ],
    ids=str,
)
def test_attention_over_blocks_of_queries(options, length):
    options = dict(options)
    dtype = options.pop("dtype", jnp.float32)
    mask = np.random.default_rng(length).random((3, length)) < 0.6
    mask[1], mask[2] = False, np.arange(length) < 3  # nothing but padding, and padding at the end
    extra = {"key_mask": mask} if options.pop("has_mask", False) else {}
    if options.pop("has_positions", False):
        extra["positions"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    q, k, v, ct = (jnp.asarray(normal(3, length, n, 8), dtype) for n in (4, 2, 2, 4))
    sinks = jnp.asarray(normal(4)) if options.pop("has_sinks", False) else None
    extra = jax.tree.map(jnp.asarray, extra)

    def of(queries_at_once):
        def attend(q, k, v, sinks):
            return dense_causal_attention(
                q,
                k,
                v,
                scale=0.3,
                sinks=sinks,
                queries_at_once=queries_at_once,
                **options,
                **extra,
            )

        out, backwards = jax.vjp(attend, q, k, v, sinks)
        return out, backwards(ct)

    whole, parts = jax.jit(lambda: of(None))(), jax.jit(lambda: of(16))()
    bound = 1e-5 if dtype == jnp.float32 else 0.1
    for ours, theirs in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.isfinite(np.float32(ours)).all()
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), atol=bound, rtol=bound)
