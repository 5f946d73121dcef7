"""Which axis of which array is split over a mesh."""

import types

import jax
import numpy as np
import pytest
from helpers import tiny_llama_config
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.implementations import by_platform, lowered_for
from specjax.config.engine import EngineConfig
from specjax.decode.state import DecodeState
from specjax.drafters import history
from specjax.models import sharding
from specjax.paged import kv_cache
from specjax.planning.abstract_decoder import abstract_weights
from specjax.sampling import RowSampling

WHOLE = PartitionSpec(None)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))


def specs_of(mesh, **fields):
    config = tiny_llama_config(vocab_size=64, **fields)
    weights = abstract_weights(config, np.dtype(np.float32))
    return sharding.param_specs(weights, mesh, config)


def test_heads_and_mlp_are_split_and_what_is_summed_over_them_is_whole(mesh):
    specs = specs_of(mesh, qkv_bias=True, o_bias=True, mlp_bias=True)
    layer = specs["layers"][0]
    columns = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
    for name in columns:
        assert layer[name] == PartitionSpec("tensor", None), name
        assert layer[f"{name}_bias"] == PartitionSpec("tensor"), name
    for name in ("o_proj", "down_proj"):
        assert layer[name] == PartitionSpec(None, "tensor"), name
        # Added once, after the sum over shards.
        assert layer[f"{name}_bias"] == WHOLE, name
    for name in ("input_norm", "post_attention_norm"):
        assert layer[name] == WHOLE, name
    for name in ("q_norm", "k_norm"):
        assert specs_of(mesh, qk_norm=True)["layers"][0][name] == WHOLE, name
    assert specs["embed_tokens"] == PartitionSpec("tensor", None)
    assert specs["lm_head"] == PartitionSpec("tensor", None)


def test_a_vocabulary_that_does_not_divide_stays_whole(mesh):
    config = tiny_llama_config(vocab_size=61)
    weights = abstract_weights(config, np.dtype(np.float32))
    specs = sharding.param_specs(weights, mesh, config)
    assert specs["lm_head"] == PartitionSpec(None, None)
    assert specs["embed_tokens"] == PartitionSpec(None, None)
    assert specs["layers"][0]["q_proj"] == PartitionSpec("tensor", None)


def test_a_history_drafter_shares_its_corpus_and_splits_its_rows(mesh):
    rows = 4
    integers = lambda *shape: np.zeros(shape, np.int32)
    state = DecodeState(
        cache=kv_cache.init(
            tiny_llama_config(),
            rows=rows,
            num_pages=8,
            page_size=4,
            pages_per_row=2,
            dtype=np.float32,
        ),
        drafter=history.init(rows, 8, 128),
        drafter_lengths=integers(rows),
        history=integers(rows, 8),
        sampling=RowSampling.empty(rows, EngineConfig()),
        max_lengths=integers(rows),
        draft_caps=integers(rows),
        rules=integers(rows),
        is_active=integers(rows) > 0,
    )
    specs = sharding.state_specs(state, mesh, history.state_axes(state.drafter))
    assert specs.drafter.corpus == PartitionSpec()
    assert specs.drafter.corpus_groups == PartitionSpec()
    assert specs.drafter.head == PartitionSpec()
    assert specs.drafter.own_match[0] == "data"
    assert specs.history == PartitionSpec("data", None)
    assert specs.sampling.temperature == PartitionSpec("data")
    assert specs.cache.pages[0][0][:2] == ("data", "tensor")
    assert specs.cache.lengths == PartitionSpec("data")


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3"),
        ({"num_heads": 4, "num_kv_heads": 1}, "num_kv_heads=1"),
        ({"intermediate_size": 47}, "intermediate_size=47"),
    ],
)
def test_what_does_not_divide_is_refused(mesh, sizes, name):
    fields = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48} | sizes
    with pytest.raises(ValueError, match=f"{name} is not divisible .* of 2"):
        sharding.validate(types.SimpleNamespace(**fields), mesh)
    sharding.validate(tiny_llama_config(), mesh)


def test_axes_of_other_names_are_refused():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    with pytest.raises(ValueError, match=r"\['model'\] are unknown"):
        sharding.validate(tiny_llama_config(), mesh)


def test_without_a_mesh_there_is_one_shard(mesh):
    sizes = [sharding.axis_size(m, "tensor") for m in (None, mesh)]
    assert sizes == [1, 2]
    assert sharding.tensor_axis(None) is None
    assert sharding.tensor_axis(mesh) == "tensor"
    alone = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert sharding.tensor_axis(alone) is None
    assert sharding.axis_size(alone, "tensor") == 1


def test_a_mesh_says_for_which_platform_steps_are_traced():
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    branch = lambda: by_platform(cpu=lambda: "cpu", default=lambda: "default")
    assert branch() == ("cpu" if jax.default_backend() == "cpu" else "default")
    with sharding.lowered(mesh):
        assert branch() == "default"
    with lowered_for("gpu", compiler="cpu"), sharding.lowered(None):
        assert branch() == "cpu"
