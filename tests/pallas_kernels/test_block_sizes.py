"""Block sizes: which are taken, and that none changes a result."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import lowered_for
from pallas_kernels.tree_attention import block_sizes, tree_attention
from pallas_kernels.tree_attention.block_sizes import (
    CANDIDATES,
    DEFAULT,
    BlockSizes,
    Entry,
)
from pallas_kernels.tree_attention.example_inputs import EXAMPLES, make_inputs
from pallas_kernels.tree_attention.mosaic_tpu import (
    tiling,
    tree_attention_mosaic_tpu,
    vmem_bytes,
)
from specjax.configs.devices import DEVICES, of_kind

FEW, MANY = BlockSizes(16, 512), BlockSizes(32, 256)
TABLE = (
    Entry("TPU v5 lite", 128, 4, 1, 8, 2048, FEW),
    Entry("TPU v5 lite", 128, 4, 64, 8, 2048, MANY),
    Entry("TPU v5 lite", 128, 4, 64, 256, 2048, DEFAULT),
)


def test_those_of_the_nearest_shape_on_the_device(monkeypatch):
    monkeypatch.setattr(block_sizes, "table", lambda: TABLE)
    choose = functools.partial(block_sizes.choose, kv_heads=8)
    assert choose("TPU v5 lite", 128, 4, 8, 1, 512) == FEW
    assert choose("TPU v5 lite", 128, 4, 512, 1, 512) == MANY
    assert choose("TPU v5 lite", 128, 4, 512, 200, 512) == DEFAULT
    for other in (("TPU v4", 128, 4), (None, 128, 4), ("TPU v5 lite", 256, 4)):
        assert choose(*other, 8, 1, 512) == DEFAULT
    # By what it is traced for.
    arguments, options = make_inputs(
        dataclasses.replace(EXAMPLES["prefill"], head_dim=128, heads=16)
    )
    q, k_pages, _, table, *_ = arguments
    sizes = {"max_tokens_per_row": options["max_tokens_per_row"]}
    with lowered_for("tpu"):
        default = vmem_bytes(q, k_pages, table, None, **sizes)
    with lowered_for("tpu", "TPU v5 lite"):
        assert vmem_bytes(q, k_pages, table, None, **sizes) < default


def test_matrix_units_of_256_rows_take_blocks_of_512_query_rows():
    """So that scores of some rows are computed beside the softmax of others."""
    for kind, heads, kv_heads, head_dim, queries, tile_tokens in (
        ("TPU v6 lite", 16, 8, 128, 256, 512),
        ("TPU7x", 16, 8, 128, 256, 512),
        ("TPU v6 lite", 32, 8, 128, 128, 512),  # four heads of each key head
        ("TPU v6 lite", 8, 8, 128, 128, 512),  # one: 512 tokens would not fit
        ("TPU v6 lite", 16, 8, 256, 256, 1024),
        ("TPU v6 lite", 4, 2, 256, 256, 1024),
        ("TPU v6 lite", 32, 16, 256, 256, 512),  # a wider tile would leave 64 queries
        ("TPU v6 lite", 16, 8, 512, 256, 512),
        ("TPU7x", 16, 8, 256, 128, 512),  # has half of that memory
        ("TPU v6 lite", 8, 8, 256, 128, 512),
        ("TPU v5 lite", 16, 8, 256, 128, 512),
        ("TPU v5 lite", 16, 8, 128, 128, 512),
        ("TPU v5", 16, 8, 128, 128, 512),
    ):
        page = jax.ShapeDtypeStruct((64, kv_heads, 128, head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((512, heads, head_dim), jnp.bfloat16)
        table = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        with lowered_for("tpu", kind):
            cut = tiling(q, page, table, None, max_tokens_per_row=512)
        assert (cut.queries, cut.tile_tokens) == (queries, tile_tokens)
        # A step of few tokens has as few rows as before, and as wide a tile.
        few = jax.ShapeDtypeStruct((8, heads, head_dim), jnp.bfloat16)
        with lowered_for("tpu", kind):
            cut = tiling(few, page, table, None, max_tokens_per_row=8)
        assert (cut.queries, cut.tile_tokens) == (8, tile_tokens)


def test_generations_differ_by_their_memory():
    """v4 has 16 MiB of VMEM; no more than half of a larger one is taken."""
    for kind, budget in (("TPU v4", 14), ("TPU v5", 32), ("TPU v5 lite", 64), (None, 14)):
        assert block_sizes.vmem_budget(kind) == budget << 20
        needed = block_sizes.vmem_budget(kind)
        assert needed < block_sizes.vmem_limit_bytes(kind, needed) <= max(2 * needed, 16 << 20)
    assert [block_sizes.cores_of(kind) for kind in ("TPU v4", "TPU v6 lite")] == [2, 1]


@pytest.mark.parametrize("nodes", [1, 5, 16, 64])
def test_drafting_changes_no_tile(nodes):
    """Sums of keys are in one order, however many tokens of a row a step verifies."""
    for kind, kv_heads in (("TPU v4", 8), ("TPU v5 lite", 8), ("TPU v6 lite", 2)):
        page = jax.ShapeDtypeStruct((64, kv_heads, 128, 128), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((8 * nodes, 4 * kv_heads, 128), jnp.bfloat16)
        table = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        with lowered_for("tpu", kind):
            cut = tiling(q, page, table, None, max_tokens_per_row=nodes)
        assert cut.tile_tokens == 512
        ahead = (cut.slots - 1) * 512 * 2 * kv_heads * 128 * 2
        assert ahead >= 1 << 20


def test_the_table_that_is_shipped_can_be_read():
    assert all(entry.sizes in CANDIDATES for entry in block_sizes.table())


def test_new_entries_replace_those_of_their_shapes(tmp_path):
    path = tmp_path / "block_sizes.json"
    block_sizes.write(list(TABLE), path)
    newer = dataclasses.replace(TABLE[0], sizes=DEFAULT)
    block_sizes.write([newer], path)
    documents = json.loads(path.read_text())
    assert documents == [dataclasses.asdict(entry) for entry in (*TABLE[1:], newer)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FEW, MANY, BlockSizes(32, 16)])
def test_no_size_changes_a_result(sizes):
    example = dataclasses.replace(EXAMPLES["trees_and_prompts"], head_dim=128)
    arguments, options = make_inputs(example)
    out = tree_attention_mosaic_tpu(
        *arguments, **options, block_sizes=sizes, interpret=pltpu.InterpretParams()
    )
    expected = tree_attention(*arguments, **options, implementation="reference")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_devices_are_known_by_their_kind():
    assert of_kind("TPU v5 lite") is DEVICES["v5e"]
    assert of_kind("TPU v5") is DEVICES["v5p"]
    assert of_kind("NVIDIA H200 141GB HBM3e") is DEVICES["h200"]
    assert of_kind("cpu") is None
