"""Invariant numerics below the engine: a token's bits follow from its own row alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_model, tiny_gpt2_config, tiny_llama_config, uncached_logits
from made_up_families import heron_config

from pallas_kernels import layout
from specjax.models import blocks
from specjax.paged import forward as flat
from specjax.paged import kv_cache
from specjax.paged.token_buckets import equal_chunk, in_buckets, round_up

BUCKET, ROWS, PAGE_SIZE, LENGTH = 8, 3, 8, 32
CONFIGS = {
    "llama": tiny_llama_config(),
    "window": tiny_llama_config(layer_windows=(None, 6)),
    "gpt2": tiny_gpt2_config(),
}


def test_in_buckets_runs_what_is_used_in_order():
    tokens = {"a": jnp.arange(12), "b": jnp.arange(24.0).reshape(12, 2)}

    def run(carry, part):
        return carry * 10 + part["a"][0], {"sum": part["a"] + 100, "b": part["b"]}

    run_all = jax.jit(lambda used: in_buckets(run, jnp.int32(0), tokens, 4, used))
    for used, carry, num_buckets in ((12, 48, 3), (9, 48, 3), (8, 4, 2), (0, 0, 0)):
        end, results = run_all(jnp.int32(used))
        assert int(end) == carry
        expected = np.zeros(12, int)
        expected[: 4 * num_buckets] = np.arange(4 * num_buckets) + 100
        np.testing.assert_array_equal(results["sum"], expected)
        assert (results["b"][4 * num_buckets :] == 0).all()
    with pytest.raises(ValueError, match="multiple of the bucket"):
        in_buckets(run, jnp.int32(0), tokens, 5, jnp.int32(3))


def test_round_up():
    assert [round_up(n, 8) for n in (1, 8, 9)] == [8, 8, 16]
    assert round_up(9, None) == 9


@functools.cache
def compiled(name: str, num_tokens: int):
    config = CONFIGS[name]

    @jax.jit
    def run(params, pages, history, table, lengths, counts):
        batch = flat.make_batch(
            history,
            table,
            lengths,
            counts,
            num_tokens=num_tokens,
            page_size=PAGE_SIZE,
            num_slots=layout.num_slots(pages[0][0]),
        )
        hidden, pages = flat.forward(
            params,
            config,
            pages,
            batch,
            max_tokens_per_row=num_tokens,
            token_bucket=BUCKET,
        )
        return hidden, pages, batch.row_starts

    return run


class Rows:
    """Three rows, of which the middle one is watched; pages nobody wrote hold NaN."""

    def __init__(self, name, params, dtype, seed):
        rng = np.random.default_rng(seed)
        self.name, self.params = name, params
        num_pages = ROWS * LENGTH // PAGE_SIZE
        pages = kv_cache.init_pages(CONFIGS[name], num_pages, PAGE_SIZE, dtype)
        self.pages = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pages)
        order = rng.permutation(num_pages).reshape(ROWS, -1)
        self.table = jnp.asarray(order, jnp.int32)
        self.history = rng.integers(0, 61, (ROWS, LENGTH))
        self.history[1] = np.random.default_rng(99).integers(0, 61, LENGTH)
        self.lengths = np.zeros(ROWS, np.int32)

    def feed(self, counts, num_tokens):
        """Returns the hidden states of the middle row's new tokens."""
        hidden, self.pages, starts = compiled(self.name, num_tokens)(
            self.params,
            self.pages,
            jnp.asarray(self.history, jnp.int32),
            self.table,
            jnp.asarray(self.lengths),
            jnp.asarray(counts, jnp.int32),
        )
        self.lengths = self.lengths + np.asarray(counts, np.int32)
        return np.asarray(hidden.astype(jnp.float32))[int(starts[1]) : int(starts[2])]


# One dtype of each in every run, the other nightly.
OTHERS = [("llama", "bfloat16"), ("gpt2", "float32"), ("window", "float32")]
QUICK = ("llama", "float32")
SLOW, FULL = pytest.mark.slow, pytest.mark.full


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        case if case == QUICK else pytest.param(*case, marks=SLOW if case in OTHERS else FULL)
        for case in itertools.product(CONFIGS, ("float32", "bfloat16"))
    ],
)
def test_bits_at_every_flat_position_and_in_any_chunks(name, dtype):
    model = random_model(CONFIGS[name], 0)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    length = 20
    alone = Rows(name, params, dtype, 0)
    one_by_one = np.concatenate([alone.feed((0, 1, 0), BUCKET) for _ in range(length)])
    if dtype == "float32":
        config = CONFIGS[name]
        whole = uncached_logits(params, config, jnp.asarray(alone.history[1:2]))
        ours = jax.jit(flat.logits, static_argnums=1)(params, config, jnp.asarray(one_by_one))
        np.testing.assert_allclose(ours, whole[0, :length], atol=1e-4, rtol=1e-4)
    for before in range(BUCKET):
        rows = Rows(name, params, dtype, before + 1)
        # A prompt in two chunks, then drafts and plain steps, behind another row.
        parts = [rows.feed((before, count, 3), 3 * BUCKET) for count in (7, 6, 1, 4, 1, 1)]
        np.testing.assert_array_equal(np.concatenate(parts), one_by_one)


def test_experts_are_told_which_tokens_of_a_bucket_are_padding(monkeypatch):
    told, plain = [], blocks.experts

    def experts(*arguments, is_token, **options):
        told.append(is_token)
        return plain(*arguments, is_token=is_token, **options)

    monkeypatch.setattr(blocks, "experts", experts)
    monkeypatch.setitem(CONFIGS, "experts", heron_config())
    model = random_model(CONFIGS["experts"], 0)
    Rows("experts", model.params, "float32", 0).feed((2, 1, 3), BUCKET)
    assert {each.shape for each in told} == {(BUCKET,)}


@pytest.mark.parametrize(
    ("num_tokens", "most", "size"),
    [(10, 10, 10), (10, 9, 5), (10, 4, 4), (9, 4, 3), (7, 1, 1), (7, 0, 1), (3, 99, 3)],
)
def test_chunks_are_equal_and_no_larger_than_they_may_be(num_tokens, most, size):
    assert equal_chunk(num_tokens, most) == size
