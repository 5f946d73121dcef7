"""Tree attention against its definition, and the laws the engine relies on."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from pallas_kernels import layout
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.example_inputs import (
    EXAMPLES,
    TOLERANCE,
    Example,
    make_inputs,
    pack_ancestors,
    widened,
)

compiled = jax.jit(
    tree_attention,
    static_argnames=(
        "scale",
        "softcap",
        "window",
        "first_key",
        "max_tokens_per_row",
        "implementation",
    ),
)


def attend(example: Example, implementation: str | None = None, seed: int = 0):
    arguments, options = make_inputs(example, seed)
    out = compiled(*arguments, **options, implementation=implementation)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize(
    "name",
    quick(
        EXAMPLES,
        "first_key_of_trees_and_prompts",
        "trees_and_prompts_window",
        "tree_of_70_nodes",
        "sinks_tree_bfloat16",
        "int8",
    ),
)
def test_xla_agrees_with_reference(name):
    example = EXAMPLES[name]
    actual = attend(example, "xla")
    arguments, options = make_inputs(example)
    expected = compiled(*widened(arguments), **options, implementation="reference")
    assert np.isfinite(actual).all()
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(
        actual[:num_tokens], expected[:num_tokens], 0, TOLERANCE[example.dtype]
    )


@pytest.mark.full
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_reference_agrees_with_a_softmax_written_out(softcap, has_sinks):
    example = dataclasses.replace(
        EXAMPLES["ragged"], window=7, softcap=softcap, has_sinks=has_sinks
    )
    (q, k_pages, v_pages, table, starts, lengths), options = make_inputs(example)
    actual = attend(example, "reference")
    size = example.page_size
    for row in range(len(lengths)):
        at = np.arange(lengths[row] + example.num_new[row])
        k, v = (
            np.asarray(pages)[np.asarray(table)[row, at // size], :, at % size]
            for pages in (k_pages, v_pages)
        )
        for token in range(starts[row], starts[row + 1]):
            last = lengths[row] + token - starts[row]
            seen = slice(max(0, last - 6), last + 1)
            for head in range(example.heads):
                kv_head = head // (example.heads // example.kv_heads)
                scores = k[seen, kv_head] @ q[token, head] * example.head_dim**-0.5
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                total = np.exp(scores).sum()
                if has_sinks:
                    total += np.exp(options["sinks"][head])
                expected = np.exp(scores) @ v[seen, kv_head] / total
                np.testing.assert_allclose(actual[token, head], expected, 1e-5, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_each_path_of_a_tree_equals_the_chain(implementation):
    parents = (-1, 0, 0, 1, 2, 2, 4)
    lengths = (61, 0)
    tree = Example(lengths=lengths, num_new=(7, 7), parents=parents)
    (q, k_pages, v_pages, table, _, _), options = make_inputs(tree)
    in_tree = attend(tree, implementation)
    for leaf in (3, 5, 6):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        k, v = np.array(k_pages), np.array(v_pages)
        for row, length in enumerate(lengths):
            at = length + np.asarray(path)
            page, offset = np.asarray(table)[row, at // 16], at % 16
            to = length + np.arange(len(path))
            to_page, to_offset = np.asarray(table)[row, to // 16], to % 16
            for pages in (k, v):
                pages[to_page, :, to_offset] = pages[page, :, offset]
        chain = compiled(
            jnp.concatenate([q[jnp.array(path)], q[7 + jnp.array(path)]]),
            jnp.asarray(k),
            jnp.asarray(v),
            table,
            jnp.array([0, len(path), 2 * len(path)], jnp.int32),
            jnp.array(lengths, jnp.int32),
            scale=options["scale"],
            max_tokens_per_row=len(path),
            implementation=implementation,
        ).reshape(2, len(path), 8, 64)
        expected = in_tree.reshape(2, 7, 8, 64)[:, path]
        np.testing.assert_allclose(chain, expected, 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_one_level_of_a_tree_equals_the_whole(implementation):
    example = EXAMPLES["tree"]  # 6 nodes in each of the first three rows
    (q, *pages, table, _, lengths), options = make_inputs(example)
    level = np.array([3, 4, 5])  # the deepest nodes
    tokens = (6 * np.arange(3)[:, None] + level).reshape(-1)
    bits, _ = options.pop("ancestor_bits"), options.pop("num_new_keys")
    options["max_tokens_per_row"] = 3
    out = compiled(
        q[tokens],
        *pages,
        table,
        jnp.array([0, 3, 6, 9, 9], jnp.int32),
        lengths,
        ancestor_bits=bits[tokens],
        num_new_keys=jnp.array([6, 6, 6, 0], jnp.int32),
        implementation=implementation,
        **options,
    )
    whole = attend(example, implementation)
    np.testing.assert_allclose(out, whole[tokens], 1e-5, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_what_lies_before_the_first_key_may_hold_nan(implementation):
    example = EXAMPLES["first_key_of_trees_and_prompts"]
    (q, k, v, table, *rest), options = make_inputs(example)
    expected = tree_attention(q, k, v, table, *rest, **options, implementation="reference")
    options["implementation"] = implementation
    for row in range(len(example.lengths)):
        for position in range(example.first_key):
            page, offset = divmod(position, example.page_size)
            k, v = (pages.at[table[row, page], :, offset].set(jnp.nan) for pages in (k, v))
    out = tree_attention(q, k, v, table, *rest, **options)
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], rtol=0, atol=1e-5)
    # Row 1 begins before the first key: these tokens see nothing.
    np.testing.assert_array_equal(out[6:19], 0.0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nodes_that_no_bit_names_may_hold_nan(implementation):
    example = EXAMPLES["tree"]
    (q, *pages, table, _, lengths), options = make_inputs(example)
    bits, _ = options.pop("ancestor_bits"), options.pop("num_new_keys")
    options["max_tokens_per_row"] = 1
    tokens = jnp.array([3, 9, 15])  # node 3 of three rows, which follows 0 and 1
    rows = np.arange(3)[:, None]
    at = np.asarray(lengths)[:3, None] + np.array([2, 4, 5])
    page, offset = np.asarray(table)[rows, at // 16], at % 16
    out = compiled(
        q[tokens],
        *(each.at[page, :, offset].set(jnp.nan) for each in pages),
        table,
        jnp.array([0, 1, 2, 3, 3], jnp.int32),
        lengths,
        ancestor_bits=bits[tokens],
        num_new_keys=jnp.array([6, 6, 6, 0], jnp.int32),
        implementation=implementation,
        **options,
    )
    np.testing.assert_allclose(out, attend(example, implementation)[tokens], 1e-5, 1e-5)


def test_a_chain_as_a_tree_is_the_chain():
    chain = EXAMPLES["chain"]
    tree = dataclasses.replace(chain, parents=(-1, 0, 1, 2, 3))
    np.testing.assert_allclose(attend(tree), attend(chain), 1e-6, 1e-6)


@pytest.mark.full
def test_a_chain_as_a_tree_has_the_chains_window():
    chain = dataclasses.replace(EXAMPLES["chain"], window=34)
    tree = dataclasses.replace(chain, parents=(-1, 0, 1, 2, 3))
    for implementation in ("xla", "reference"):
        np.testing.assert_allclose(
            attend(tree, implementation), attend(chain, "reference"), 1e-5, 1e-5
        )


def test_equal_bits_when_run_twice():
    np.testing.assert_array_equal(attend(EXAMPLES["mixed"]), attend(EXAMPLES["mixed"]))


@pytest.mark.parametrize("num_new", [1, 5])
def test_other_rows_and_the_width_of_the_table_change_no_bits(num_new):
    example = Example(lengths=(70, 33, 5), num_new=(num_new,) * 3)
    (q, k_pages, v_pages, table, starts, lengths), options = make_inputs(example)
    call = jax.jit(functools.partial(tree_attention, **options))
    expected = call(q, k_pages, v_pages, table, starts, lengths)
    wider = jnp.pad(table, ((0, 0), (0, 40)), constant_values=layout.NO_PAGE)
    np.testing.assert_array_equal(call(q, k_pages, v_pages, wider, starts, lengths), expected)
    other = q.at[num_new:].multiply(2.0)
    moved = call(other, k_pages, v_pages, table, starts, lengths.at[1:].set(0))
    np.testing.assert_array_equal(moved[:num_new], expected[:num_new])


@pytest.mark.parametrize("page_size", [8, 32, 64])
def test_page_size_changes_no_bits(page_size):
    example = Example(lengths=(70, 33, 129), num_new=(3, 3, 3), page_size=16)
    (q, k_pages, v_pages, table, starts, lengths), options = make_inputs(example)
    slots = np.asarray(table)[:, np.arange(192) // 16 % table.shape[1]]
    slots = jnp.asarray(slots * 16 + np.arange(192) % 16)
    per_row = 192 // page_size

    def repage(pages):
        tokens = layout.read_slots(pages, slots)  # [rows, 192, kv_heads, head_dim]
        empty, _ = layout.init_pages(3 * per_row, page_size, 4, 64, pages.dtype)
        flat = jnp.arange(3 * 192)
        return empty.at[flat // page_size, :, flat % page_size].set(tokens.reshape(3 * 192, 4, 64))

    new_table = jnp.arange(3 * per_row, dtype=jnp.int32).reshape(3, per_row)
    np.testing.assert_array_equal(
        compiled(q, repage(k_pages), repage(v_pages), new_table, starts, lengths, **options),
        compiled(q, k_pages, v_pages, table, starts, lengths, **options),
    )


def test_new_tokens_after_it_hardly_change_a_token():
    """Not bit for bit: the number of rows of a matmul may change its inner order."""
    example = Example(lengths=(70, 33), num_new=(8, 8))
    (q, *pages, table, starts, lengths), options = make_inputs(example)
    all_new = compiled(q, *pages, table, starts, lengths, **options)
    options["max_tokens_per_row"] = 1
    first = compiled(q[::8], *pages, table, jnp.arange(3, dtype=jnp.int32), lengths, **options)
    np.testing.assert_allclose(first, all_new[::8], 2e-6, 2e-6)


@pytest.mark.parametrize("name", ["trees_and_prompts", "trees_and_prompts_window"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_trees_and_prompts_in_one_call_are_those_of_two(name, implementation):
    example = EXAMPLES[name]
    together = attend(example, implementation)
    arguments, options = make_inputs(example)
    options |= {"implementation": implementation, "is_causal": None}
    trees = np.asarray(compiled(*arguments, **options))
    prompts = np.asarray(compiled(*arguments, **options | {"ancestor_bits": None}))
    starts = np.cumsum([0, *example.num_new])
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        expected = prompts if row in example.causal else trees
        np.testing.assert_allclose(together[start:end], expected[start:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_keys_that_bits_may_name_are_not_those_of_prompts(implementation):
    """A prompt's keys are its own tokens', whatever is said of those that bits name."""
    example = EXAMPLES["trees_and_prompts"]
    expected = attend(example, implementation)
    arguments, options = make_inputs(example)
    named = jnp.array([6, 0, 6, 0], jnp.int32)
    options |= {"num_new_keys": named, "implementation": implementation}
    np.testing.assert_allclose(compiled(*arguments, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_sink_far_above_all_keys_takes_all_weight(implementation):
    arguments, options = make_inputs(EXAMPLES["sinks"])
    options |= {"implementation": implementation}
    far = compiled(*arguments, **options | {"sinks": jnp.full(8, 80.0)})
    np.testing.assert_allclose(far, 0.0, atol=1e-5)
    none = compiled(*arguments, **options | {"sinks": jnp.full(8, -80.0)})
    without = compiled(*arguments, **options | {"sinks": None})
    np.testing.assert_allclose(none, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["int8", "fp8_tree_bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_quantized_pages_are_those_multiplied_out(name, implementation):
    """To 1e-5 for float32 queries and 8e-3 for bfloat16, as without scales."""
    example = EXAMPLES[name]
    (q, k_pages, v_pages, *rest), options = make_inputs(example)
    k, v = (
        pages.astype(jnp.float32) * scale[None, :, None, None]
        for pages, scale in (
            (k_pages, options.pop("k_scale")),
            (v_pages, options.pop("v_scale")),
        )
    )
    q = q.astype(jnp.float32)
    expected = compiled(q, k, v, *rest, **options, implementation="reference")
    actual = attend(example, implementation)
    np.testing.assert_allclose(actual, expected, 0, TOLERANCE[example.dtype])


def test_quantized_pages_need_scales_and_others_have_none():
    arguments, options = make_inputs(EXAMPLES["int8"])
    for wrong in ({"k_scale": None}, {"v_scale": None}):
        with pytest.raises(ValueError, match="need both scales"):
            tree_attention(*arguments, **options | wrong)
    with pytest.raises(ValueError, match=r"one float of each key head, \(4,\)"):
        tree_attention(*arguments, **options | {"k_scale": jnp.ones(8)})
    scales = {name: options[name] for name in ("k_scale", "v_scale")}
    arguments, options = make_inputs(EXAMPLES["decode"])
    with pytest.raises(ValueError, match="with pages of float32"):
        tree_attention(*arguments, **options | scales)


def test_more_bits_than_one_word():
    bits = pack_ancestors((-1, *range(40)))
    assert bits.shape == (41, 2)
    assert bits[40].tolist() == [2**32 - 1, 2**9 - 1]


def test_refusals():
    arguments, options = make_inputs(EXAMPLES["tree"])
    with pytest.raises(NotImplementedError, match="window=4"):
        tree_attention(*arguments, **options | {"window": 4})
    with pytest.raises(ValueError, match="implementation='cuda'"):
        tree_attention(*arguments, **options, implementation="cuda")
    with pytest.raises(ValueError, match="max_tokens_per_row=0"):
        tree_attention(*arguments, **options | {"max_tokens_per_row": 0})
    with pytest.raises(ValueError, match="needs ancestor_bits"):
        tree_attention(
            *arguments,
            **options | {"ancestor_bits": None, "num_new_keys": jnp.zeros(4, jnp.int32)},
        )
    with pytest.raises(ValueError, match="softcap=0"):
        tree_attention(*arguments, **options | {"softcap": 0.0})
    with pytest.raises(ValueError, match="one of each head"):
        tree_attention(*arguments, **options | {"sinks": jnp.zeros(3)})
    for causal in (jnp.zeros(3, bool), jnp.zeros(4, jnp.int32)):
        with pytest.raises(ValueError, match=r"must be bool\(4,\)"):
            tree_attention(*arguments, **options | {"is_causal": causal})
    with pytest.raises(ValueError, match="head_dim=64"):
        tree_attention(arguments[0][..., :32], *arguments[1:], **options)
    with pytest.raises(ValueError, match="heads must be a multiple"):
        tree_attention(arguments[0][:, :6], *arguments[1:], **options)
    with pytest.raises(ValueError, match="pages_per_row"):
        tree_attention(*arguments[:4], arguments[4][1:], arguments[5], **options)
    with pytest.raises(ValueError, match="must agree"):
        tree_attention(*arguments[:2], arguments[2][1:], *arguments[3:], **options)


def in_lanes(pages, kv_heads, head_dim):
    """Returns pages as `init_pages(in_lanes=True)` lays them out, with the same content."""
    count = layout.heads_per_line(kv_heads, head_dim)
    num_pages, _, size, _ = pages.shape
    pages = pages.reshape(num_pages, kv_heads // count, count, size, head_dim)
    lines = pages.transpose(0, 1, 3, 2, 4).reshape(num_pages, kv_heads // count, size, -1)
    return jnp.pad(lines, [(0, 0)] * 3 + [(0, -lines.shape[3] % layout.LANES)])


HEADS = [(4, 64), (2, 64), (1, 64), (3, 64), (4, 32), (4, 80)]
HEADS_OF_EXAMPLES = [
    pytest.param(name, *heads, marks=pytest.mark.full if (i + j) % 3 == 0 else pytest.mark.slow)
    for i, name in enumerate(["tree", "ragged", "head_80", "sinks", "int8"])
    for j, heads in enumerate(HEADS)
]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("name", "kv_heads", "head_dim"), HEADS_OF_EXAMPLES)
def test_heads_in_lanes_are_those_apart(implementation, name, kv_heads, head_dim):
    example = dataclasses.replace(
        EXAMPLES[name], kv_heads=kv_heads, heads=2 * kv_heads, head_dim=head_dim
    )
    (q, k_pages, v_pages, *rest), options = make_inputs(example)
    expected = attend(example, implementation)
    lines = [in_lanes(pages, kv_heads, head_dim) for pages in (k_pages, v_pages)]
    size = example.page_size
    shape = layout.page_shape(*k_pages.shape[:1], size, kv_heads, head_dim, in_lanes=True)
    assert lines[0].shape == shape
    assert shape[3] % layout.LANES == 0
    out = tree_attention(
        q,
        *lines,
        *rest,
        num_kv_heads=kv_heads,
        **options,
        implementation=implementation,
    )
    assert out.shape == q.shape
    num_tokens = sum(example.num_new)
    np.testing.assert_allclose(
        np.asarray(out)[:num_tokens], expected[:num_tokens], rtol=1e-5, atol=1e-5
    )


def test_heads_that_do_not_lie_in_the_pages_are_refused():
    arguments, options = make_inputs(EXAMPLES["decode"])
    for num_kv_heads in (3, 8):
        with pytest.raises(ValueError, match="do not lie in pages of 4 of 64"):
            tree_attention(*arguments, **options, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("num_kv_heads", [None, 4])
def test_no_token_and_no_row(num_kv_heads):
    (q, *pages, table, starts, lengths), options = make_inputs(EXAMPLES["decode"])
    options["num_kv_heads"] = num_kv_heads
    if num_kv_heads:
        pages = [in_lanes(each, 4, 64) for each in pages]
    none = tree_attention(q[:0], *pages, table, 0 * starts, lengths, **options)
    assert none.shape == (0, *q.shape[1:])
    rows = table[:0], starts[:1], lengths[:0]
    padding = tree_attention(q[:2], *pages, *rows, **options)
    assert padding.shape == (2, *q.shape[1:])
    assert not padding.any()
