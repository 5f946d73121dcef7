"""Weights over a mesh: who holds what, looking up rows of a split table, loading slice by slice."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import save_llama, tiny_gpt2, tiny_llama, uncached_logits
from jax.sharding import Mesh, PartitionSpec

from specjax.models import loading, partition
from specjax.models.base import look_up
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.models.loading import load_model, load_params
from specjax.models.weights import Source, Stacked

WIDE = dict(  # every size divides by 8, and norms are a hundredth of a device's share
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
)


def mesh_of(**sizes):
    count = int(np.prod([*sizes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


# Rows that sums with zeros would change, or that would leak out of a masked place.
ODD_ROWS = [-0.0, 0.0, np.nan, -np.inf, np.inf, 1e-42, -1.5, 3.25]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_parts", [None, 2])
def test_rows_of_a_split_table_come_bit_for_bit(dtype, num_parts):
    mesh = partition.factored(mesh_of(tensor=8), num_parts or 8)
    axes = partition.tensor_axes(mesh, num_parts)
    table = np.stack([np.full(4, odd) for odd in ODD_ROWS * 2]).astype(jnp.dtype(dtype))
    # Past the end, and below 0: proposals that are cut later hold such ids.
    token_ids = jnp.array([[0, 1, 2, 3, 4, 5, 6, 7], [15, 9, 16, 99, -1, -16, -99, 8]])
    split = jax.shard_map(
        lambda table, ids: look_up(table, ids, len(table) * (num_parts or 8), axes),
        mesh=mesh,
        in_specs=(PartitionSpec(axes), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = np.asarray(jax.jit(split)(table, token_ids))
    whole = np.asarray(jnp.asarray(table)[token_ids])
    is_nan = np.isnan(whole)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    unsigned = {2: np.uint16, 4: np.uint32}[found.dtype.itemsize]
    bits = lambda rows: np.where(is_nan, 0, rows.view(unsigned))
    np.testing.assert_array_equal(bits(found), bits(whole))


@pytest.mark.parametrize(
    "model",
    [
        tiny_llama(0, vocab_size=64, tie_word_embeddings=True, embedding_multiplier=12.0),
        tiny_llama(0, vocab_size=64),
        pytest.param(tiny_llama(0), marks=pytest.mark.full),  # a vocabulary of 61 stays whole
        pytest.param(tiny_gpt2(0, vocab_size=64), marks=pytest.mark.full),
    ],
    ids=["tied", "untied", "whole", "gpt2"],
)
def test_a_model_over_a_split_vocabulary_gives_the_logits_of_one_device(model):
    mesh, config = mesh_of(tensor=2), model.config
    token_ids = np.arange(12, dtype=np.int32).reshape(2, 6) * 5
    specs = partition.param_specs(model.params, mesh, config)
    rows = specs["embed_tokens"][0]
    assert rows == ("tensor" if config.vocab_size == 64 else None)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def split(params):
        def attend(layer, q, k, v, cache):
            return dense_causal_attention(q, k, v, **config.attention_options(layer)), cache

        positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
        family, caches = family_of(config), (None,) * config.num_layers
        hidden, _ = family.forward(
            params, config, jnp.asarray(token_ids), positions, attend, caches, "tensor"
        )
        return family.logits(params, config, hidden, "tensor")

    found = jax.jit(split)(model.params)
    expected = uncached_logits(model.params, config, token_ids)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def bytes_by_device(exempt=()):
    """Returns the bytes of live arrays on each device, each buffer once."""
    held = {}
    for array in jax.live_arrays():
        if not array.is_deleted() and id(array) not in exempt:
            for shard in array.addressable_shards:
                key = shard.device, shard.data.unsafe_buffer_pointer()
                held[key] = shard.data.nbytes
    devices = jax.devices()
    return {d: sum(size for (device, _), size in held.items() if device == d) for d in devices}


@pytest.fixture
def watch(monkeypatch):
    """Records, at each read of a slice, live bytes by device and the slice's bytes."""
    # What others left may be freed meanwhile, but its id must not be given to a new array.
    others = [*jax.live_arrays()]
    exempt = {id(array) for array in others}
    seen, slices = [], []
    read = Source.read

    def watched(source, *arguments):
        seen.append(bytes_by_device(exempt))
        found = read(source, *arguments)
        slices.append(found.nbytes)
        return found

    monkeypatch.setattr(Source, "read", watched)
    yield lambda: ([*seen, bytes_by_device(exempt)], slices)
    del others


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("sizes", "shards"), [({"tensor": 8}, 8), ({"data": 2, "tensor": 4}, 4), ({"data": 2}, 1)]
)
def test_no_device_ever_holds_more_than_its_share(tmp_path, watch, sizes, shards, tied):
    model = tiny_llama(0, tie_word_embeddings=tied, **WIDE)
    save_llama(tmp_path, model)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    params = jax.tree.map(np.array, model.params)  # copies: views would keep the arrays
    config = model.config
    del model
    mesh = mesh_of(**sizes)
    loaded = load_model(tmp_path, mesh=mesh)
    seen, slices = watch()
    most = 1.1 * total / shards
    for held in seen:
        assert max(held.values()) <= most, (held, total, shards)
    used = {*mesh.devices.flat}
    assert min(seen[-1][device] for device in used) > 0.9 * total / shards
    assert max(slices) <= max(leaf.nbytes for leaf in jax.tree.leaves(params)) / shards
    # A slice that several devices hold is read once.
    assert sum(slices) < 1.1 * total
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    specs = partition.param_specs(params, mesh, config)
    for leaf, spec in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(specs)):
        assert leaf.sharding.spec == spec


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_a_draft_model_may_be_loaded_over_part_of_the_axis(tmp_path, num_shards):
    model = tiny_llama(0, **WIDE)
    save_llama(tmp_path, model)
    mesh = mesh_of(tensor=8)
    loaded = load_model(tmp_path, mesh=mesh, num_shards=num_shards)
    leaf = loaded.params["layers"][0]["q_proj"]
    assert {shard.data.shape for shard in leaf.addressable_shards} == {(128 // num_shards, 128)}
    # Neighbours on the axis are the shards of one copy.
    by_device = {shard.device: shard.index[0].start or 0 for shard in leaf.addressable_shards}
    starts = [by_device[device] for device in mesh.devices.flat]
    assert starts == [128 // num_shards * (i % num_shards) for i in range(8)]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_slices_of_published_layouts(golden, name, dtype):
    """GPT-2 stores matrices transposed, and three of them in one tensor."""
    whole = load_model(golden(name), dtype=dtype)
    split = load_model(golden(name), dtype=dtype, mesh=mesh_of(data=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)


def test_slices_of_stacked_experts():
    rng = np.random.default_rng(0)
    tensors = {f"e{i}": rng.standard_normal((6, 4)).astype(np.float32) for i in range(3)}
    parts = tuple(Source(name, (6, 4), is_transposed=True) for name in tensors)
    whole = np.stack([tensor.T for tensor in tensors.values()])
    for index in (..., (slice(1, 3), slice(0, 2), slice(3, 6)), (slice(0, 3),) * 3):
        found = Stacked(parts).read(tensors, np.dtype(np.float32), index)
        np.testing.assert_array_equal(found, whole[index])


def test_a_slice_shares_no_memory_with_the_file():
    tensors = {"a": np.zeros((4, 4), np.float32)}
    found = Source("a", (4, 4)).read(tensors, np.dtype(np.float32), (slice(0, 2), slice(0, 4)))
    assert not np.shares_memory(found, tensors["a"])


def test_the_dtype_is_that_of_the_devices_of_the_mesh(golden, monkeypatch):
    tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(loading, "default_device", lambda: tpu)
    assert load_model(golden("llama")).params["norm"].dtype == "bfloat16"
    loaded = load_model(golden("llama"), mesh=mesh_of(tensor=2))
    assert loaded.params["norm"].dtype == "float32"


@pytest.mark.parametrize(
    ("mesh", "num_shards", "message"),
    [
        ("tensor=2", None, "mesh='tensor=2' must be a jax.sharding.Mesh"),
        ({"model": 2}, None, r"unknown names, .model. \(2 devices\)"),
        ({"tensor": 8}, None, "num_heads=4 is not divisible by the mesh's tensor axis of 8"),
        ({"tensor": 8}, 8, "num_heads=4 is not divisible by num_shards=8"),
        ({"tensor": 4}, 3, "intermediate_size=64 is not divisible by num_shards=3|num_heads"),
        ({"tensor": 1}, 2, "over 2 devices does not fit a tensor axis of 1"),
    ],
)
def test_what_cannot_be_split_is_refused_before_weights_are_read(
    tmp_path, monkeypatch, mesh, num_shards, message
):
    save_llama(tmp_path, tiny_llama(0, num_heads=4, num_kv_heads=2))
    monkeypatch.setattr(Source, "read", lambda *_: pytest.fail("weights were read"))
    mesh = mesh_of(**mesh) if isinstance(mesh, dict) else mesh
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, mesh=mesh, num_shards=num_shards)


def test_factors_of_a_tensor_axis():
    mesh = mesh_of(data=2, tensor=4)
    assert partition.factored(mesh, 1) is mesh
    assert partition.factored(mesh, 4) is mesh
    split = partition.factored(mesh, 2)
    assert split.shape == {"data": 2, partition.COPIES: 2, partition.PART: 2}
    assert [*split.devices.flat] == [*mesh.devices.flat]
    assert partition.axis_size(split, "tensor") == 4
    assert partition.tensor_axes(split) == (partition.COPIES, partition.PART)
    assert partition.tensor_axes(split, 2) == partition.PART
    assert partition.tensor_axes(split, 1) is None
    assert partition.tensor_axes(mesh) == partition.tensor_axes(mesh, 4) == "tensor"
    with pytest.raises(ValueError, match="over 3 devices does not fit a tensor axis of 4"):
        partition.factored(mesh, 3)


def test_load_params_takes_the_mesh_too(golden):
    model = load_model(golden("llama"))
    params = load_params(golden("llama"), model.config, mesh=mesh_of(tensor=2))
    assert params["norm"].sharding.is_fully_replicated
    assert not params["layers"][0]["q_proj"].sharding.is_fully_replicated


def test_shards_without_a_mesh_are_refused():
    with pytest.raises(ValueError, match="is for a mesh"):
        load_model("demo-draft", num_shards=2)
