"""Attention over random batches: any rows, lengths, trees, prompts, and pages in any order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.example_inputs import pack_ancestors
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from pallas_kernels.tree_attention.xla_gpu import tree_attention_xla_gpu

# One shape, so that everything is compiled once; a batch fills a part of it.
ROWS, MOST_NEW, MOST_LENGTH, PAGE_SIZE = 8, 9, 300, 16
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
PAGES_PER_ROW = -(-(MOST_LENGTH + MOST_NEW) // PAGE_SIZE)
NUM_PAGES = ROWS * PAGES_PER_ROW
STATIC = {"scale": HEAD_DIM**-0.5, "max_tokens_per_row": MOST_NEW}

rows = st.tuples(
    st.integers(0, MOST_LENGTH),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=0, max_size=MOST_NEW),
    st.booleans(),
)


def batch(drawn, seed):
    """Returns arguments and options of a batch, of (length, a parent of each node, is_causal)."""
    rng = np.random.default_rng(seed)
    drawn = [*drawn, *[(0, [], False)] * (ROWS - len(drawn))]
    lengths = np.array([length for length, _, _ in drawn])
    num_new = np.array([len(places) for _, places, _ in drawn])
    bits = [
        # A node follows any node before it, or begins the tree.
        pack_ancestors([int(place * (i + 1)) - 1 for i, place in enumerate(places)])
        for _, places, _ in drawn
        if places
    ]
    num_tokens = ROWS * MOST_NEW
    all_bits = np.zeros((num_tokens, 1), np.uint32)
    if bits:
        together = np.concatenate(bits)
        all_bits[: len(together)] = together
    shape = layout.page_shape(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    table = rng.permutation(NUM_PAGES).reshape(ROWS, PAGES_PER_ROW)
    pages = np.full((2, *shape), np.nan, np.float32)
    for row, end in enumerate(lengths + num_new):
        at = np.arange(end)
        new = rng.standard_normal((2, end, KV_HEADS, HEAD_DIM))
        pages[:, table[row, at // PAGE_SIZE], :, at % PAGE_SIZE] = new.swapaxes(0, 1)
        table[row, -(-end // PAGE_SIZE) :] = layout.NO_PAGE
    q = rng.standard_normal((num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    q[num_new.sum() :] = np.nan
    arguments = (
        q,
        *pages,
        table.astype(np.int32),
        np.cumsum([0, *num_new]).astype(np.int32),
        lengths.astype(np.int32),
    )
    causal = np.array([is_causal for _, _, is_causal in drawn])
    options = {"ancestor_bits": all_bits, "is_causal": causal}
    return jax.tree.map(jnp.asarray, (arguments, options))


@functools.cache
def run(implementation):
    if implementation == "mosaic_tpu":
        return jax.jit(
            functools.partial(
                tree_attention_mosaic_tpu, **STATIC, interpret=pltpu.InterpretParams()
            )
        )
    return jax.jit(functools.partial(tree_attention, **STATIC, implementation=implementation))


def check(implementation, drawn, seed):
    arguments, options = batch(drawn, seed)
    num_tokens = int(arguments[4][-1])
    out = run(implementation)(*arguments, **options)
    assert jnp.isfinite(out).all()  # padding too
    expected = run("reference")(*arguments, **options)
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], 0, 1e-5)
    again = run(implementation)(*arguments, **options)
    np.testing.assert_array_equal(out, again)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(rows, max_size=ROWS), seed=st.integers(0, 99))
def test_xla(drawn, seed):
    check("xla", drawn, seed)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(rows, max_size=ROWS), seed=st.integers(0, 99))
def test_tpu_kernel(drawn, seed):
    check("mosaic_tpu", drawn, seed)


@pytest.mark.parametrize(
    "kernel", quick([tree_attention_mosaic_tpu, tree_attention_xla_gpu], tree_attention_xla_gpu)
)
def test_plain_steps_with_rows_that_take_no_part(kernel):
    """A token per row: every block is a flat token, and those behind the last are padding."""
    options = {**STATIC, "max_tokens_per_row": 1}
    if kernel is tree_attention_mosaic_tpu:
        options["interpret"] = pltpu.InterpretParams()
    run_kernel = jax.jit(functools.partial(kernel, **options))
    for taking_part in (
        (1, 1, 1, 1, 1, 1, 1, 1),
        (0, 1, 0, 0, 1, 1, 0, 1),
        (0,) * 7 + (1,),
        (0,) * 8,
    ):
        drawn = [(37 * row, [0.0] * takes, True) for row, takes in enumerate(taking_part)]
        arguments, _ = batch(drawn, seed=7)
        arguments = (arguments[0][:ROWS], *arguments[1:])
        num_tokens = sum(taking_part)
        out = run_kernel(*arguments)
        assert not out[num_tokens:].any()
        expected = tree_attention(*arguments, **STATIC, implementation="reference")
        np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], 0, 1e-5)
