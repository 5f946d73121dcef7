"""The block table: which slot each position has, at every edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.base import ModelConfig
from specjax.paged import kv_cache
from specjax.paged.kv_cache import NO_PAGE

CONFIG = ModelConfig(
    architecture="llama",
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)
PAGE_SIZE = 4

slots = jax.jit(kv_cache.slots, static_argnames=("page_size", "num_slots"))


def i32(*values) -> jax.Array:
    return jnp.array(values, jnp.int32)


def test_init_has_empty_rows():
    cache = kv_cache.init(
        CONFIG, rows=3, num_pages=9, page_size=4, pages_per_row=2, dtype=jnp.float32
    )
    assert (cache.num_pages, cache.page_size, cache.num_slots) == (9, 4, 36)
    assert len(cache.pages) == CONFIG.num_layers
    assert np.all(np.asarray(cache.block_table) == NO_PAGE)
    assert kv_cache.num_held(cache).tolist() == [0, 0, 0]


def test_own_pages_are_nobody_elses():
    np.testing.assert_array_equal(kv_cache.own_pages(2, 3), [[0, 1, 2], [3, 4, 5]])
    # Each shard counts its own pages.
    np.testing.assert_array_equal(
        kv_cache.own_pages(4, 2, num_shards=2), [[0, 1], [2, 3], [0, 1], [2, 3]]
    )


def test_commit_makes_tokens_final():
    cache = kv_cache.init(
        CONFIG, rows=2, num_pages=4, page_size=4, pages_per_row=2, dtype=jnp.float32
    )
    cache = jax.jit(kv_cache.commit)(cache, i32(3, 0))
    assert cache.lengths.tolist() == [3, 0]


def test_slots_at_every_edge():
    table = jnp.array([[3, 0, NO_PAGE], [NO_PAGE] * 3, [2, 4, 1]], jnp.int32)
    none = 20  # five pages of four
    cases = {
        (0, 0): 12,
        (0, 3): 15,
        (0, 4): 0,
        (0, 7): 3,
        (0, 8): none,  # a page it lacks
        (0, -1): none,
        (0, -5): none,
        (1, 0): none,  # an empty row
        (2, 11): 7,
        (2, 12): none,  # past the table
        (2, 2**30): none,
        (3, 0): none,  # padding: no such row
        (-1, 0): none,
    }
    row_ids, positions = map(lambda ids: i32(*ids), zip(*cases, strict=True))
    found = slots(table, row_ids, positions, page_size=4, num_slots=none)
    assert found.tolist() == list(cases.values())


@pytest.mark.parametrize("page_size", [1, 8])
def test_slots_are_pages_in_order(page_size):
    table = jnp.array([[2, 0, 1]], jnp.int32)
    positions = jnp.arange(3 * page_size)
    found = slots(
        table,
        jnp.zeros_like(positions),
        positions,
        page_size=page_size,
        num_slots=3 * page_size,
    )
    within = np.arange(page_size)
    expected = np.concatenate([page * page_size + within for page in (2, 0, 1)])
    assert found.tolist() == expected.tolist()
