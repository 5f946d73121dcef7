"""The TPU kernels on CPU by the interpreter, which looks for races too."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import layout, page_updates
from pallas_kernels.move_kv import mosaic_tpu as moving
from pallas_kernels.move_kv.mosaic_tpu import move_kv_mosaic_tpu
from pallas_kernels.move_kv.xla import move_kv_xla
from pallas_kernels.tree_attention import mosaic_tpu as attention
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.block_sizes import BlockSizes
from pallas_kernels.tree_attention.example_inputs import (
    EXAMPLES,
    TOLERANCE,
    Example,
    make_inputs,
    widened,
)
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from pallas_kernels.write_kv.mosaic_tpu import write_kv_mosaic_tpu
from pallas_kernels.write_kv.xla import write_kv_xla

# Two cores, as some chips have: they share what a grid marks as parallel.
INTERPRET = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
SUBLANES = {"float32": 8, "bfloat16": 16, "int8": 32, "float8_e4m3fn": 32}


def fitted(example):
    """Returns an example whose pages lie in whole tiles of a TPU."""
    page_size = max(example.page_size, SUBLANES[example.page_dtype or example.dtype])
    head_dim = max(example.head_dim, 128)
    return dataclasses.replace(example, head_dim=head_dim, page_size=page_size)


def some(params, quick=None, full=()):
    """Returns the cases, of which one may be in the quick set and some in the full one.

    A kernel takes seconds here: all other cases are slow.
    """
    marks = {**dict.fromkeys(full, pytest.mark.full), quick: ()}
    return [pytest.param(*one, marks=marks.get(one, pytest.mark.slow)) for one in params]


@pytest.mark.parametrize(
    "name",
    some(
        [(name,) for name in EXAMPLES],
        quick=("tree",),
        full=[("decode",), ("window",), ("float32_over_bfloat16",)],
    ),
)
def test_attention_is_that_of_the_reference(name, has_races):
    example = fitted(EXAMPLES[name])
    arguments, options = make_inputs(example)
    expected = tree_attention(*widened(arguments), **options, implementation="reference")
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(
        out[:num_tokens].astype(jnp.float32),
        expected[:num_tokens],
        rtol=0,
        atol=TOLERANCE[example.dtype],
    )
    assert jnp.isfinite(out).all()  # padding too
    assert not has_races()


@pytest.mark.parametrize(
    ("page_size", "name", "page_dtype"),
    some(
        [
            *itertools.product(
                [64, 128, 256], ["trees_and_prompts", "ragged_long"], [None, "int8"]
            ),
            (256, "tree_window", None),
            (128, "tree_window", "float8_e4m3fn"),
            (128, "trees_and_prompts", "bfloat16"),
        ],
        full=[(128, "trees_and_prompts", "int8"), (64, "ragged_long", None)],
    ),
)
def test_attention_over_large_pages(page_size, name, page_dtype, has_races):
    """Rows that end in any part of a tile: before it is cut, where it is, and past that."""
    long = Example(lengths=(510, 511, 512, 766, 767, 790, 0), num_new=(1, 3, 1, 2, 3, 5, 2))
    example = {**EXAMPLES, "ragged_long": long}[name]
    kv_heads = 8 if page_size == 128 else 2  # several of these at once, in two steps
    example = dataclasses.replace(example, page_size=page_size, page_dtype=page_dtype)
    example = dataclasses.replace(example, kv_heads=kv_heads, heads=2 * kv_heads, head_dim=128)
    arguments, options = make_inputs(example)
    expected = tree_attention(*arguments, **options, implementation="reference")
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], rtol=0, atol=1e-5)
    assert not has_races()


@pytest.mark.parametrize(
    "name",
    some(
        [("window",), ("tree_window",), ("trees_and_prompts_window",)],
        full=[("window",), ("trees_and_prompts_window",)],
    ),
)
def test_what_lies_before_a_window_may_hold_nan(name, has_races):
    """Pages there may be another row's by now, or none."""
    example = fitted(EXAMPLES[name])
    (q, k, v, table, starts, lengths, *rest), options = make_inputs(example)
    arguments = (q, k, v, table, starts, lengths, *rest)
    expected = tree_attention(*arguments, **options, implementation="reference")
    num_passed = 0
    for row, length in enumerate(example.lengths):
        first_seen = max(length - example.window + 1, 0)
        page, num_before = divmod(first_seen, example.page_size)
        k, v = (pages.at[table[row, page], :, :num_before].set(jnp.nan) for pages in (k, v))
        table = table.at[row, :page].set(layout.NO_PAGE)
        num_passed += page
    assert num_passed > 0
    arguments = (q, k, v, table, starts, lengths, *rest)
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(
        out[:num_tokens].astype(jnp.float32),
        expected[:num_tokens],
        rtol=0,
        atol=TOLERANCE[example.dtype],
    )
    assert not has_races()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "causal"), [(5, ()), (50, ()), (150, ()), (50, (1, 3)), (150, (1, 3))]
)
def test_windows_of_several_blocks_per_row(window, causal, has_races):
    """Narrower than a page, than a tile, and wider than both, in rows of several blocks."""
    trees = {"parents": (-1, 0, 0, 1, 2, 2), "causal": causal} if causal else {}
    example = Example(
        lengths=(300, 0, 210, 60),
        num_new=(6, 35, 6, 40) if causal else (40, 35, 1, 20),
        window=window,
        page_size=8,
        kv_heads=1,
        heads=2,
        head_dim=128,
        **trees,
    )
    (q, k, v, table, *rest), options = make_inputs(example)
    expected = tree_attention(q, k, v, table, *rest, **options, implementation="reference")
    for row, length in enumerate(example.lengths):
        page, num_before = divmod(max(length - window + 1, 0), 8)
        k, v = (pages.at[table[row, page], :, :num_before].set(jnp.nan) for pages in (k, v))
        table = table.at[row, :page].set(layout.NO_PAGE)
    sizes = BlockSizes(8, 32)
    out = tree_attention_mosaic_tpu(
        q, k, v, table, *rest, **options, block_sizes=sizes, interpret=INTERPRET
    )
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], rtol=0, atol=1e-5)
    assert not has_races()


@pytest.mark.parametrize(("window", "first"), [(None, 0), (40, 8), (400, 0), (1, 11)])
def test_pages_before_the_window_of_a_block_are_not_copied(window, first, monkeypatch):
    """The second block of a row whose new tokens begin at position 150; pages of 16 tokens."""
    scalars = attention._Scalars(
        table=np.arange(20),
        row=np.array([0, 0]),
        first=np.array([0, 32]),
        count=np.array([32, 8]),
        lengths=np.array([150]),
        ends=np.array([190]),
        union=None,
        is_causal=None,
    )
    shape = attention._Shape(
        kv_heads=1,
        group=1,
        head_dim=128,
        page_size=16,
        pages_per_row=20,
        queries=32,
        num_blocks=2,
        pages_per_tile=4,
        words=0,
        slots=3,
        cores=1,
        dtype=jnp.dtype("float32"),
        page_dtype=jnp.dtype("float32"),
        window=window,
    )
    monkeypatch.setattr(attention.pl, "when", lambda flag: lambda act: act() if flag else None)
    monkeypatch.setattr(attention.pltpu, "make_async_copy", lambda source, *_: source)
    at = type("Ref", (), {"at": property(lambda self: self), "__getitem__": lambda self, i: i})()
    tiles = attention._Tiles(scalars, at, at, at, at, None, at, shape)
    copied = []
    first_tile, end, _ = tiles._extent(1)
    for tile in range(int(first_tile), int(end)):
        tiles._each_page(1, tile, 0, lambda page: copied.append(int(page)))
    assert copied[::2] == copied[1::2] == list(range(first, 12))  # keys and values


@pytest.mark.full
def test_no_bit_depends_on_how_many_tokens_are_drafted():
    """Two or four tokens at once, or all eight: tiles with masks and without, cut or not."""
    lengths = (253, 508, 764)
    example = Example(lengths=lengths, num_new=(8,) * 3, page_size=64, kv_heads=1, heads=2)
    (q, *pages, starts, _), options = make_inputs(dataclasses.replace(example, head_dim=128))
    # Scores are then multiplied by a power of two: CPUs multiply and subtract with one rounding
    # in code without masks, and with two in code with them.
    options["scale"] = 2.0**-4 / attention.LOG2_E

    @jax.jit
    def run(own, starts, lengths):
        call = functools.partial(tree_attention_mosaic_tpu, interpret=pltpu.InterpretParams())
        return call(own, *pages, starts, lengths, **options)

    def attend(count):
        """Returns f32[rows, 8, heads, head_dim], `count` tokens of each row in each call."""
        parts = []
        for first in range(0, 8, count):
            own = q.reshape(3, 8, 2, 128)[:, first : first + count].reshape(-1, 2, 128)
            own = jnp.pad(own, ((0, 24 - len(own)), (0, 0), (0, 0)))  # the same shapes
            out = run(own, starts * count // 8, jnp.array(lengths, jnp.int32) + first)
            parts.append(out[: 3 * count].reshape(3, count, 2, 128))
        return np.concatenate(parts, axis=1)

    together = attend(8)
    for count in (2, 4):
        np.testing.assert_array_equal(attend(count), together)


_SINKS, _WINDOW = (("has_sinks", True),), (("window", 45),)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "more"),
    some(
        [
            (1, "float32", ()),
            (2, "bfloat16", ()),
            (3, "float32", _WINDOW),
            (4, "bfloat16", _SINKS),
            (4, "float32", _WINDOW),
            (5, "float32", _SINKS),
        ],
        full=[(1, "float32", ()), (4, "bfloat16", _SINKS), (5, "float32", _SINKS)],
    ),
)
def test_scores_one_step_ahead(kv_heads, dtype, more, monkeypatch, has_races):
    """Blocks of more rows than are multiplied at once: an odd and an even number of steps.

    Three steps per key head, in pairs of which some are a turn of a loop. They have the bits of
    blocks that are multiplied at once, one head after the other.
    """
    example = Example(
        lengths=(70, 0, 30),
        num_new=(24, 20, 5),
        kv_heads=kv_heads,
        heads=4 * kv_heads,
        head_dim=128,
        page_size=SUBLANES[dtype],
        dtype=dtype,
        **dict(more),
    )
    arguments, options = make_inputs(example)
    options["scale"] = 2.0**-4 / attention.LOG2_E  # see the test of bits above
    expected = tree_attention(*widened(arguments), **options, implementation="reference")
    options["block_sizes"] = BlockSizes(24, 32)
    num_tokens = sum(example.num_new)
    found = []
    for most in (32, 96):
        monkeypatch.setattr(attention, "MOST_ROWS", most)
        monkeypatch.setattr(attention, "ROWS_OF_PART", most)
        out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
        found.append(np.asarray(out[:num_tokens].astype(jnp.float32)))
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(found[0], expected[:num_tokens], rtol=limit, atol=limit)
    np.testing.assert_array_equal(*found)
    assert not has_races()


@pytest.mark.slow
def test_prompts_that_no_bits_name_and_rows_longer_than_is_said(has_races):
    """Neither stops the rows behind them; of a row what lies past the bound means nothing."""
    example = fitted(EXAMPLES["trees_and_prompts"])
    arguments, options = make_inputs(example)
    expected = tree_attention(*arguments, **options, implementation="reference")
    options |= {"num_new_keys": jnp.array([6, 0, 6, 0], jnp.int32)}
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    options |= {"max_tokens_per_row": 6}
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    starts = np.cumsum([0, *example.num_new[:-1]])
    known = [start + token for start in starts for token in range(6)]
    np.testing.assert_allclose(
        np.asarray(out)[known], np.asarray(expected)[known], rtol=0, atol=1e-5
    )
    assert not has_races()


@pytest.mark.parametrize(
    ("kv_heads", "head_dim"),
    some([(4, 64), (1, 64), (2, 80), (4, 96)]),
)
def test_attention_of_heads_in_lanes(kv_heads, head_dim, has_races):
    """Keys and values are written by a kernel, too."""
    example = dataclasses.replace(
        EXAMPLES["trees_and_prompts"],
        kv_heads=kv_heads,
        heads=2 * kv_heads,
        head_dim=head_dim,
    )
    (q, k_pages, v_pages, *rest), options = make_inputs(example)
    expected = tree_attention(q, k_pages, v_pages, *rest, **options, implementation="reference")
    num_pages = layout.num_pages(k_pages)
    pages = layout.init_pages(num_pages, 16, kv_heads, head_dim, jnp.float32, in_lanes=True)
    slots = jnp.arange(layout.num_slots(k_pages), dtype=jnp.int32)
    new = [
        layout.to_lines(layout.read_slots(apart, slots), pages[0]) for apart in (k_pages, v_pages)
    ]
    lines = write_kv_mosaic_tpu(*pages, *new, slots, interpret=INTERPRET)
    out = tree_attention_mosaic_tpu(
        layout.queries_in_lines(q, kv_heads, pages[0]),
        *lines,
        *rest,
        **options,
        interpret=INTERPRET,
    )
    out = layout.from_lines(out, kv_heads, head_dim, pages[0])
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert not has_races()


def some_pages(rng, dtype, *, page_size=None, count=2):
    """Returns pages of some 16 stripes."""
    sublanes = SUBLANES[dtype]
    page_size = page_size or sublanes
    shape = layout.page_shape(max(16 * sublanes // page_size, 2), page_size, 2, 128)
    pages = [jnp.asarray(20 * rng.standard_normal(shape), dtype) for _ in range(count)]
    if dtype == "int8":
        return pages
    return [page.at[0, :, 3].set(jnp.nan) for page in pages]


def assert_equal_bits(arrays, others):
    for one, other in zip(arrays, others, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("num_tokens", "most_tokens", "dtype", "page_size"),
    some(
        [
            *itertools.product([1, 7, 21, 60], [8, 16, 512], SUBLANES, [None]),
            *itertools.product([60], [8, 512], SUBLANES, [32, 64, 128, 256]),
            (7, 512, "bfloat16", 128),
            (21, 8, "float32", 16),
            (9, 8, "int8", 64),
        ],
        full=[(7, 512, "bfloat16", 128), (21, 8, "float32", 16), (9, 8, "int8", 64)],
    ),
)
def test_writes(num_tokens, most_tokens, dtype, page_size, has_races, monkeypatch):
    """In any order, several to a stripe of a page, stripes of several chunks, more of them than
    are under way at once."""
    monkeypatch.setattr(page_updates, "MOST_TOKENS", most_tokens)
    monkeypatch.setattr(page_updates, "MOST_STRIPES_UNDER_WAY", 3)
    rng = np.random.default_rng(num_tokens)
    pages = some_pages(rng, dtype, page_size=page_size)
    num_slots = layout.num_slots(pages[0])
    slots = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    slots[num_tokens // 2] = num_slots  # dropped
    if num_tokens > 3:
        slots[:3] = -1, num_slots + 5, 10**6
    new = 20 * rng.standard_normal((2, num_tokens, 2, 128))
    new = [jnp.asarray(each, dtype) for each in new]
    if dtype != "int8":
        new[0] = new[0].at[-1].set(jnp.nan)  # its own slot alone has it
    arguments = *pages, *new, jnp.asarray(slots)
    assert_equal_bits(
        write_kv_mosaic_tpu(*arguments, interpret=INTERPRET), write_kv_xla(*arguments)
    )
    assert not has_races()


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_tokens", "most_tokens", "dtype", "page_size"),
    some(
        [
            *itertools.product([1, 5, 40], [8, 512], SUBLANES, [None]),
            *itertools.product([40], [8], SUBLANES, [64, 256]),
        ],
        quick=(40, 8, "bfloat16", 64),
    ),
)
def test_moves(num_tokens, most_tokens, dtype, page_size, has_races, monkeypatch):
    """All are read before any is written, of every layer; in chunks, and few layers at once."""
    monkeypatch.setattr(page_updates, "MOST_TOKENS", most_tokens)
    if most_tokens == 8:
        held = 2 * num_tokens * SUBLANES[dtype] * 128 * 4
        monkeypatch.setattr(moving, "HELD_BYTES", held)
    rng = np.random.default_rng(num_tokens)
    pages = some_pages(rng, dtype, page_size=page_size, count=5)
    num_slots = layout.num_slots(pages[0])
    source = rng.integers(0, num_slots, num_tokens).astype(np.int32)
    target = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    target[0] = num_slots  # dropped
    if num_tokens > 3:
        source[1] = target[1]  # stays
    source, target = jnp.asarray(source), jnp.asarray(target)
    moved = move_kv_mosaic_tpu(pages, source, target, interpret=INTERPRET)
    assert_equal_bits(moved, move_kv_xla(pages, source, target))
    assert not has_races()


@pytest.mark.slow
def test_less_memory_takes_fewer_queries_at_once(monkeypatch):
    example = fitted(EXAMPLES["trees_and_prompts"])
    arguments, options = make_inputs(example)
    whole = attention.vmem_bytes(*arguments[:2], *arguments[3:4], None, max_tokens_per_row=70)
    expected = tree_attention(*arguments, **options, implementation="reference")
    monkeypatch.setattr(attention, "vmem_budget", lambda _: whole // 2)
    out = tree_attention_mosaic_tpu(*arguments, **options, interpret=INTERPRET)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    monkeypatch.setattr(attention, "vmem_budget", lambda _: 1000)
    with pytest.raises(NotImplementedError, match="for one query and one page, and 1000 are"):
        tree_attention_mosaic_tpu(*arguments, **options)


def test_no_token_changes_no_page():
    pages = some_pages(np.random.default_rng(0), "float32")
    new, slots = jnp.zeros((0, 2, 128)), jnp.zeros(0, jnp.int32)
    assert_equal_bits(write_kv_mosaic_tpu(*pages, new, new, slots), pages)
    assert_equal_bits(move_kv_mosaic_tpu(pages, slots, slots), pages)


def test_pages_of_other_dtypes_are_refused():
    pages = layout.init_pages(2, 32, 1, 128, "float16")
    new, slots = jnp.zeros((1, 1, 128), "float16"), jnp.zeros(1, jnp.int32)
    for write in (
        lambda: write_kv_mosaic_tpu(*pages, new, new, slots),
        lambda: move_kv_mosaic_tpu(pages, slots, slots),
    ):
        with pytest.raises(NotImplementedError, match=r"float16.*must be bfloat16, flo"):
            write()


@pytest.mark.parametrize(("rows", "pages_per_row"), [(256, 1024), (32, 8192), (2000, 128)])
def test_a_block_table_that_does_not_fit_is_refused(rows, pages_per_row):
    example = dataclasses.replace(EXAMPLES["decode"], head_dim=128)
    (q, k_pages, v_pages, _, _, _), options = make_inputs(example)
    table = jnp.zeros((rows, pages_per_row), jnp.int32)
    starts, lengths = jnp.zeros(rows + 1, jnp.int32), jnp.zeros(rows, jnp.int32)
    with pytest.raises(NotImplementedError, match="bytes of SMEM"):
        tree_attention_mosaic_tpu(q, k_pages, v_pages, table, starts, lengths, **options)


@pytest.mark.parametrize(("rows", "pages_per_row"), [(32, 1024), (2000, 100)])
def test_long_contexts_fit_where_pages_are_large(rows, pages_per_row):
    """32 rows of 131,072 tokens in pages of 128; and rows take no whole lines of 128 entries."""
    example = dataclasses.replace(EXAMPLES["tree"], head_dim=128, page_size=128, kv_heads=8)
    (q, k_pages, *_), options = make_inputs(example)
    table = jnp.zeros((rows, pages_per_row), jnp.int32)
    sizes = {"max_tokens_per_row": options["max_tokens_per_row"]}
    assert attention.tiling(q, k_pages, table, options["ancestor_bits"], **sizes).slots > 1


def test_what_no_tile_fits_is_refused():
    arguments, options = make_inputs(EXAMPLES["head_80"])
    with pytest.raises(NotImplementedError, match="head_dim=80"):
        tree_attention_mosaic_tpu(*arguments, **options)
