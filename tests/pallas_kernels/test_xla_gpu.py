"""Attention written for GPUs, on a CPU: XLA compiles the same program there."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from pallas_kernels import layout
from pallas_kernels.implementations import lowered_for
from pallas_kernels.tree_attention import tree_attention, xla_gpu
from pallas_kernels.tree_attention.example_inputs import EXAMPLES, Example, make_inputs, widened
from pallas_kernels.tree_attention.query_blocks import Blocks

# float32: sums in another order. bfloat16: weights are rounded to 8 bits, and results again.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
# Rows of one tile and of six, beside each other.
UNEQUAL = Example(lengths=(390, 7, 129, 0, 64), num_new=(3, 1, 0, 2, 5), padding=2)


@pytest.fixture
def small(monkeypatch):
    """Tiles, lanes and turns so small that every example has several of each."""
    monkeypatch.setattr(xla_gpu, "TILE_TOKENS", 64)
    monkeypatch.setattr(xla_gpu, "MOST_QUERIES", 8)
    monkeypatch.setattr(xla_gpu, "MOST_LANES", 2)
    monkeypatch.setattr(xla_gpu, "FEWEST_ENTRIES", 3)
    monkeypatch.setattr(xla_gpu, "MOST_ENTRIES", 3)


def attend(arguments, options, platform="gpu"):
    """Returns what a platform's program makes of the arguments; traced anew in each call."""
    with lowered_for(platform):
        run = jax.jit(functools.partial(tree_attention, **options, implementation="xla"))
        return run(*arguments)


def assert_attends(example, seed=0):
    arguments, options = make_inputs(example, seed)
    actual = np.asarray(attend(arguments, options), np.float32)
    assert np.isfinite(actual).all()  # padding too
    expected = tree_attention(*widened(arguments), **options, implementation="reference")
    num_tokens = sum(example.num_new)
    tolerance = TOLERANCE[example.dtype]
    np.testing.assert_allclose(actual[:num_tokens], expected[:num_tokens], 0, tolerance)


@pytest.mark.parametrize("name", quick(EXAMPLES, "trees_and_prompts_window", "fp8_tree_bfloat16"))
def test_it_agrees_with_the_reference_in_small_tiles(name, small):
    assert_attends(EXAMPLES[name])


@pytest.mark.parametrize(
    "name", quick(["ragged", "tree", "prefill", "window", "fp8_tree_bfloat16"], "tree")
)
def test_it_agrees_with_the_reference_as_it_is(name):
    assert_attends(EXAMPLES[name])


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", quick([{}, {"window": 70}, {"has_sinks": True}], {"window": 70}), ids=str
)
def test_rows_of_unequal_length(changes, small):
    for seed in range(3):
        assert_attends(dataclasses.replace(UNEQUAL, **changes), seed)


@pytest.mark.full
def test_mixed_dtypes_are_multiplied_in_the_wider(small):
    arguments, options = make_inputs(EXAMPLES["ragged"])
    q, *rest = arguments
    narrow = (q.astype(jnp.bfloat16), *rest)
    expected = tree_attention(*widened(narrow), **options, implementation="reference")
    actual = np.asarray(attend(narrow, options), np.float32)
    np.testing.assert_allclose(actual[:8], expected[:8], 0, TOLERANCE["bfloat16"])


@pytest.mark.full
def test_what_lies_before_a_window_may_hold_nan(small):
    """Pages there may be another row's by now, or none."""
    example = Example(lengths=(150,), num_new=(5,), window=40)
    (q, k, v, table, *rest), options = make_inputs(example)
    expected = tree_attention(q, k, v, table, *rest, **options, implementation="reference")
    k, v = (pages.at[table[0, 5]].set(jnp.nan) for pages in (k, v))  # positions 80 to 95
    table = table.at[0, :5].set(layout.NO_PAGE)
    actual = attend((q, k, v, table, *rest), options)
    np.testing.assert_allclose(actual, expected, 0, TOLERANCE["float32"])


@pytest.mark.full
@pytest.mark.parametrize("platform", quick(["cpu", "gpu"], "gpu"))
def test_bits_of_the_next_row_use_no_keys_of_this_one(platform, small):
    """A block's places past its tokens hold the next row's bits, which name other nodes."""
    example = EXAMPLES["tree"]  # 6 nodes in each of the first three rows
    (q, k, v, table, _, lengths), options = make_inputs(example)
    tokens = jnp.array([3, 9, 10, 11, 15])  # node 3 of row 0, nodes 3, 4, 5 of row 1, 3 of row 2
    options["ancestor_bits"] = options["ancestor_bits"][tokens]
    options |= dict(num_new_keys=jnp.array([6, 6, 6, 0], jnp.int32), max_tokens_per_row=3)
    at = np.asarray(lengths)[0] + np.array([2, 4, 5])  # nodes that node 3 does not follow
    page, offset = np.asarray(table)[0, at // 16], at % 16
    k, v = (pages.at[page, :, offset].set(jnp.nan) for pages in (k, v))
    starts = jnp.array([0, 1, 4, 5, 5], jnp.int32)
    arguments = (q[tokens], k, v, table, starts, lengths)
    expected = tree_attention(*arguments, **options, implementation="reference")
    assert np.isfinite(expected).all()
    actual = attend(arguments, options, platform)
    np.testing.assert_allclose(actual, expected, 0, TOLERANCE["float32"])


@pytest.mark.full
@pytest.mark.parametrize("num_new", quick([1, 5], 5))
def test_other_rows_change_no_bits(num_new, small):
    """The row under test is the second: the first's tiles come before its own in the list."""
    example = Example(lengths=(70, 333, 5), num_new=(num_new,) * 3)
    arguments, options = make_inputs(example)
    q, k, v, table, starts, lengths = arguments
    with lowered_for("gpu"):
        call = jax.jit(functools.partial(tree_attention, **options, implementation="xla"))
        expected = call(*arguments)
        for others in ((0, 0), (1, 3), (69, 6)):
            moved = lengths.at[np.array([0, 2])].set(np.array(others))
            other = q.at[:num_new].multiply(2.0)
            out = call(other, k, v, table, starts, moved)
            own = slice(num_new, 2 * num_new)
            np.testing.assert_array_equal(out[own], expected[own])


def list_of_work(lengths, num_blocks=None, **changes):
    """Returns the shape of a call with one query per row, and its work."""
    tiles = -(-max(lengths) // 64)
    shape = xla_gpu._Shape(
        **dict(
            kv_heads=1,
            group=1,
            head_dim=64,
            queries=1,
            num_blocks=len(lengths),
            tile_pages=4,
            tile_tokens=64,
            num_tiles=max(tiles, 1),
            lanes=2,
            entries=3,
        )
        | changes
    )
    of_row = jnp.arange(len(lengths), dtype=jnp.int32)
    ends = jnp.asarray(lengths, jnp.int32)
    blocks = Blocks(of_row, jnp.zeros_like(of_row), (ends > 0).astype(jnp.int32))
    keys = xla_gpu._Keys(ends - 1, jnp.zeros_like(ends), ends)
    work = xla_gpu._list_work(blocks, keys, changes.pop("window", None), 0, shape)
    return shape, jax.tree.map(np.asarray, work)


@pytest.mark.parametrize(
    ("lengths", "num_turns"),
    [
        ((1300, 300), 13),  # waves of 4, 4, 3, seven times 2, and 1 tiles
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in [
                ((64, 65, 0, 128), 2),
                ((1,), 1),
                ((0, 0), 0),
                ((640,), 5),
                ((64,) * 7, 3),
            ]
        ),
    ],
)
def test_every_tile_is_listed_once_and_no_lane_twice_in_a_turn(lengths, num_turns):
    shape, work = list_of_work(lengths)
    block, tile, lane = work.entries
    used = lane < shape.num_lanes
    listed = sorted(zip(block[used].tolist(), tile[used].tolist(), strict=True))
    expected = [(row, t) for row, size in enumerate(lengths) for t in range(-(-size // 64))]
    assert listed == expected
    assert not used[work.num_turns :].any()
    assert (lane[used] == block[used] * 2 + tile[used] % 2).all()
    for turn in lane:
        assert len(set(turn.tolist())) == len(turn)  # those of no work too: they are unique indices
    assert work.num_turns == num_turns
    # Per lane, tiles come in their order.
    for each in range(shape.num_lanes):
        assert (np.diff(tile[lane == each]) > 0).all()


@pytest.mark.full
def test_turns_follow_each_rows_own_length():
    """31 short rows beside a long one do not take as long as 32 long ones."""
    sizes = dict(lanes=16, entries=32)
    _, unequal = list_of_work((64 * 128,) + (64,) * 31, **sizes)
    _, equal = list_of_work((64 * 128,) * 32, **sizes)
    assert unequal.num_turns == 2 + 7  # of the first wave, and one of each wave after
    assert equal.num_turns == 32 * 128 / 32


def test_each_block_has_its_own_first_and_last_key():
    """Two blocks of a prompt in order, beside a tree, whose nodes count from its root."""
    ints = lambda *values: jnp.array(values, jnp.int32)
    blocks = Blocks(ints(0, 0, 1), ints(0, 8, 0), ints(8, 2, 6))
    bits, is_causal = jnp.zeros((16, 1), jnp.uint32), jnp.array([True, False])
    arguments = (blocks, ints(100, 30), ints(10, 6), ints(10, 9))
    beside = xla_gpu._keys_of(*arguments, bits, is_causal)
    assert beside.oldest_query.tolist() == [0, 8, 0]
    assert beside.end.tolist() == [108, 110, 39]
    trees = xla_gpu._keys_of(*arguments, bits, None)
    assert (trees.oldest_query.tolist(), trees.end.tolist()) == ([0, 0, 0], [110, 110, 39])
    chains = xla_gpu._keys_of(blocks, ints(100, 30), ints(10, 6), None, None, None)
    assert chains.oldest_query.tolist() == [0, 8, 0]
    assert chains.end.tolist() == [108, 110, 36]


def shape_of(rows, width, context, *, heads=32, kv_heads=8, page_size=16):
    of = jax.ShapeDtypeStruct
    q = of((rows * width, heads, 128), jnp.bfloat16)
    pages = of((4096, kv_heads, page_size, 128), jnp.bfloat16)
    table = of((rows, context // page_size), jnp.int32)
    return xla_gpu._shape_of(q, pages, table, width, jnp.bfloat16)


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("width", [1, 5, 512])
@pytest.mark.parametrize("context", [256, 8192, 131072])
def test_a_turn_and_all_lanes_fit_their_bytes(rows, width, context):
    shape = shape_of(rows, width, context)
    assert shape.tile_tokens == min(512, context)
    read = 2 * 2 * 128 * 8 * shape.tile_tokens
    scored = 32 * shape.queries * shape.tile_tokens * 6
    assert shape.entries * (read + scored) <= xla_gpu.TURN_BYTES
    assert 1 <= shape.entries <= shape.num_lanes
    lanes = shape.num_lanes * 32 * shape.queries * 130 * 4
    assert shape.lanes == 1 or lanes <= xla_gpu.LANE_BYTES


def test_pages_that_do_not_divide_a_tile():
    assert shape_of(2, 1, 48 * 40, page_size=48).tile_tokens == 528


def test_keys_and_values_stay_in_their_dtype():
    example = dataclasses.replace(EXAMPLES["bfloat16"], lengths=(600, 63, 130))
    arguments, options = make_inputs(example)
    with lowered_for("gpu"):
        run = functools.partial(tree_attention, **options, implementation="xla")
        text = jax.jit(run).lower(*arguments).as_text()
    dots = re.findall(r"stablehlo.dot_general .*: \((.*)\) -> (.*)", text)
    assert len(dots) == 2
    for factors, result in dots:
        assert factors.count("xbf16>") == 2, factors
        assert result.endswith("xf32>"), result
    # No array of a tile's keys or values is widened: [entries, heads, 512 tokens, head_dim].
    assert not re.search(r"convert .*x4x512x64xbf16>\) -> tensor<.*f32>", text)


def test_a_cpu_and_a_gpu_have_each_their_own():
    arguments, options = make_inputs(EXAMPLES["decode"])
    run = functools.partial(tree_attention, **options)
    on_cpu = jax.jit(run).lower(*arguments).as_text()
    with lowered_for("gpu"):
        on_gpu = jax.jit(run).lower(*arguments).as_text()
    assert on_cpu != on_gpu
