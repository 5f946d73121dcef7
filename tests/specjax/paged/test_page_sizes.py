"""Page sizes chosen by device and shape."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.implementations import lowered_for
from specjax.config.engine import EngineConfig
from specjax.configs.models import SHAPES
from specjax.paged.page_sizes import with_page_size

LLAMA, QWEN = SHAPES["llama-3.1-8b"], SHAPES["qwen3-0.6b"]
ENGINE = EngineConfig(max_context=8192)


def chosen(platform, engine=ENGINE, config=LLAMA, dtype=jnp.bfloat16, kv_shards=1):
    with lowered_for(platform):
        return with_page_size(engine, config, dtype, kv_shards=kv_shards).page_size


def test_a_cpu_has_small_pages():
    assert chosen("cpu") == 16


def test_a_given_page_size_is_kept():
    engine = EngineConfig(page_size=8)
    with lowered_for("tpu"):
        assert with_page_size(engine, LLAMA, jnp.bfloat16) is engine


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_page_is_a_long_copy_on_every_chip(platform):
    # 8 key heads of 128 in bfloat16: 2 KiB of keys per token and layer.
    assert chosen(platform) == 64
    assert chosen(platform, kv_shards=4) == 128  # 512 bytes
    assert chosen(platform, kv_shards=8) == 256
    assert chosen(platform, config=QWEN) == 64


def test_one_byte_keys_need_longer_pages():
    engine = dataclasses.replace(ENGINE, kv_cache_dtype="int8")
    assert chosen("tpu", engine, kv_shards=4) == 256


def test_a_long_context_of_many_rows_has_a_short_table():
    assert chosen("tpu", EngineConfig(max_rows=32, max_context=131_072)) == 64
    assert chosen("tpu", EngineConfig(max_rows=128, max_context=131_072)) == 128
    assert chosen("tpu", EngineConfig(max_rows=256, max_context=131_072)) == 256
    # No page is large enough: the largest is taken, and the kernel says that it needs more.
    assert chosen("tpu", EngineConfig(max_rows=4096, max_context=131_072)) == 256


def test_the_context_of_the_model_counts_where_none_is_given():
    assert LLAMA.max_position_embeddings == 131_072
    assert chosen("tpu", EngineConfig(max_rows=128)) == 128
    assert chosen("tpu", EngineConfig(max_rows=128, max_context=8192)) == 64


def test_a_small_budget_still_has_a_page_for_each_row():
    of_token = 32 * 2 * 8 * 128 * 2  # bytes, all layers
    budget = lambda tokens: dataclasses.replace(ENGINE, kv_cache_bytes=32 * tokens * of_token)
    assert chosen("tpu", budget(64)) == 64
    assert chosen("tpu", budget(63)) == 32
    assert chosen("tpu", budget(1)) == 16
    int8 = dataclasses.replace(budget(1), kv_cache_dtype="int8")
    assert chosen("tpu", int8) == 32  # a tile of int8 has 32 tokens


def test_heads_in_lanes_are_counted_as_they_lie():
    narrow = dataclasses.replace(LLAMA, num_kv_heads=2, num_heads=8, head_dim=64)
    # 2 heads of 64 fill one line of 128 on a TPU: 256 bytes per token, as on a GPU.
    assert chosen("tpu", config=narrow) == 256
    padded = dataclasses.replace(LLAMA, num_kv_heads=8, num_heads=8, head_dim=80)
    assert chosen("tpu", config=padded) == 64  # 8 lines of 128
    assert chosen("gpu", config=padded) == 64  # 8 heads of 80: 1,280 bytes, 80 KiB


def test_a_page_size_is_asked_for_too_early():
    with pytest.raises(ValueError, match="chosen once the model is known"):
        _ = EngineConfig().chosen_page_size
