"""The sizes of a run: what pages take, and how many rows and pages there are."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama, tiny_llama_config

from pallas_kernels.implementations import lowered_for
from specjax.api.engine import Engine
from specjax.api.sizing import (
    Pooled,
    choose_sizes,
    page_bytes,
    power_of_two,
    standing_sizes,
)
from specjax.config.engine import KV_CACHE_DTYPES, EngineConfig
from specjax.drafters.spec import ModelDrafter, NgramDrafter

TARGET = tiny_llama_config()  # 2 layers of 2 heads of 8 numbers, keys and values
DRAFT = tiny_llama_config(num_layers=1)
FLOAT32 = np.dtype(np.float32)
PAGES_OF_16 = EngineConfig(page_size=16)
TARGET_BYTES = 2 * 2 * 2 * 8 * 4  # of a token
DRAFT_BYTES = 2 * 1 * 2 * 8 * 4
ALONE, BOTH = Pooled(TARGET), Pooled(TARGET, DRAFT_BYTES)


class Asked:
    """What sizes are chosen from of a request."""

    prompt_index = sample_index = seed = 0

    def __init__(self, max_length):
        self.max_length = max_length


def chosen(lengths, pooled=ALONE, *, num_shards=1, tree_slots=0, **engine):
    config = EngineConfig(page_size=16, **engine)
    return choose_sizes(list(map(Asked, lengths)), pooled, config, FLOAT32, num_shards, tree_slots)


def standing(context, pooled=ALONE, *, num_shards=1, tree_slots=0, **engine):
    config = EngineConfig(page_size=16, **engine)
    return standing_sizes(context, pooled, config, FLOAT32, num_shards, tree_slots)


def test_a_page_holds_the_keys_and_values_of_all_models():
    assert page_bytes(ALONE, PAGES_OF_16, FLOAT32) == 16 * TARGET_BYTES
    assert page_bytes(BOTH, PAGES_OF_16, FLOAT32) == 16 * (TARGET_BYTES + DRAFT_BYTES)
    assert page_bytes(ALONE, PAGES_OF_16, jnp.dtype(jnp.bfloat16)) == 8 * TARGET_BYTES


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_one_byte_pages_are_the_target_s_alone(name):
    """A draft model's pages keep the dtype of its weights."""
    engine = EngineConfig(page_size=16, kv_cache_dtype=name)
    assert page_bytes(ALONE, engine, FLOAT32) == 4 * TARGET_BYTES
    assert page_bytes(BOTH, engine, FLOAT32) == 4 * TARGET_BYTES + 16 * DRAFT_BYTES
    given = {"kv_cache_bytes": 80 * 16 * TARGET_BYTES, "max_rows": 32}
    counts = [standing(512, **given, kv_cache_dtype=each).num_pages for each in (None, name)]
    assert counts == [80, 320]


def test_pages_in_lanes_are_padded_on_each_device():
    """The two heads of 16 numbers fill 128 lanes together, and each does on a device of its own."""
    with lowered_for("tpu", "TPU v5 lite"):
        both = Pooled(TARGET, ModelDrafter(DRAFT).bytes_per_token(TARGET, FLOAT32))
        together = page_bytes(both, PAGES_OF_16, FLOAT32)
        apart = page_bytes(both, PAGES_OF_16, FLOAT32, kv_shards=2)
    of_line = 16 * 128 * 4
    assert together == 2 * (2 + 1) * of_line
    # The draft model's heads are not split: both devices hold them all.
    assert apart == 2 * (2 * 2 + 2 * 1) * of_line


@pytest.mark.parametrize("pooled", [ALONE, BOTH])
def test_pages_take_no_more_bytes_than_they_may(pooled):
    of_page = page_bytes(pooled, PAGES_OF_16, FLOAT32)
    given = 20 * of_page + of_page - 1
    assert standing(512, pooled, kv_cache_bytes=given).num_pages == 20
    sizes, _, _ = chosen([300] * 9, pooled, kv_cache_bytes=given)
    assert sizes is not None
    assert sizes.num_pages == 20


@pytest.mark.parametrize(
    ("max_context", "tree_slots", "pages"),
    [(None, 0, 7), (40, 0, 3), (44, 5, 4), (10**6, 0, 7), (None, 13, 8)],
)
def test_a_row_has_room_for_the_context_and_no_more(max_context, tree_slots, pages):
    sizes = standing(100, tree_slots=tree_slots, max_context=max_context, max_rows=3)
    assert sizes.pages_per_row == pages
    assert sizes.num_pages == 3 * pages
    assert sizes.tree_slots == tree_slots


def test_rows_and_their_tokens_are_powers_of_two():
    sizes, fits, refused = chosen([10, 300, 20], max_rows=32)
    assert sizes is not None
    assert (sizes.rows, sizes.pages_per_row, sizes.num_pages) == (4, 32, 4 * 32)
    assert [request.max_length for request in fits] == [10, 300, 20]
    assert refused == []
    # Short rows share an executable.
    sizes, _, _ = chosen([10] * 50, max_rows=6)
    assert sizes is not None
    assert (sizes.rows, sizes.pages_per_row) == (6, 256 // 16)
    assert list(map(power_of_two, range(10))) == [1, 1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_shards_have_as_many_rows_and_pages_each():
    sizes, _, _ = chosen([300] * 5, num_shards=3, num_pages=100)
    assert sizes is not None
    assert (sizes.rows, sizes.num_pages) == (9, 99)
    sizes = standing(100, num_shards=4, max_rows=6)
    assert (sizes.rows, sizes.num_pages) == (8, 8 * 7)


def test_a_request_that_no_pool_holds_is_refused_alone():
    sizes, fits, refused = chosen([64, 65, 30], num_pages=4)
    assert sizes is not None
    assert [request.max_length for request in fits] == [64, 30]
    (one,) = refused
    assert "need 65 tokens, and the pool holds 64" in one.error
    assert "raise num_pages" in one.error
    # Nodes of a tree need slots as well.
    sizes, fits, refused = chosen([61], tree_slots=4, num_pages=4)
    assert (sizes, fits) == (None, [])
    assert "61 tokens and 4 more for nodes of a tree" in refused[0].error
    assert chosen([60], tree_slots=4, num_pages=4)[2] == []


class Heavy(NgramDrafter):
    """Keeps 1,000 bytes per token in pages of its own."""

    def bytes_per_token(self, target, dtype):
        return 1000


def test_a_drafter_of_ones_own_says_what_its_pages_take():
    """So that pages and rows together stay within kv_cache_bytes."""
    target = tiny_llama(0)
    engine = EngineConfig(page_size=16, kv_cache_bytes=16 * 10 * (TARGET_BYTES + 1000))
    counts = []
    for spec in (NgramDrafter(1, 3), Heavy(1, 3)):
        with Engine(target, drafter=spec, engine=engine) as running:
            counts.append(running._loop._run.decoder.sizes.num_pages)
    assert counts == [10 * (TARGET_BYTES + 1000) // TARGET_BYTES, 10]
