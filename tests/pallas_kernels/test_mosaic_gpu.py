"""The GPU kernel, with none at hand: compiled for H100, and interpreted on CPU.

The interpreter of jax 0.11 and 0.12 knows no `run_state`, nor wgmma with its left side in
registers: of the kernel's two products the second is replaced here by one in plain numbers.
It runs a block's two threads on XLA's pool, which must have as many (conftest.py: four).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layout
from pallas_kernels.implementations import lowered_for
from pallas_kernels.tree_attention import mosaic_gpu, tree_attention
from pallas_kernels.tree_attention.example_inputs import (
    EXAMPLES,
    Example,
    make_inputs,
    pack_ancestors,
    widened,
)
from pallas_kernels.tree_attention.mosaic_gpu import tree_attention_mosaic_gpu
from tools.check_kernels import check_gpu

# On jax 0.10 it imports absl, without which the kernels' package works too.
plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

full, slow = pytest.mark.full, pytest.mark.slow
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"),
    reason="this jax interprets no Mosaic GPU kernels; 0.11 and later do",
)
# Weights are rounded to 8 bits, a part in 512 each, and results again.
TOLERANCE = dict(rtol=2**-8, atol=8e-3)
FAST = ("ragged", "sinks_tree_bfloat16")
COVERED = [name for name in EXAMPLES if EXAMPLES[name].page_dtype is None]


@pytest.mark.parametrize(
    "shape",
    [
        "Llama-3.2-1B, 64 rows, trees of 8, ",
        pytest.param("Llama-3.1-8B, 1 row, ", marks=full),
        pytest.param("Llama-3.1-8B, 8 rows, trees of 64, ", marks=full),
        pytest.param("Phi-2, 64 rows, 1 chip", marks=full),
        pytest.param("Gemma-2-2B, 8 rows, prompts beside trees of 8, ", marks=full),
        pytest.param("with sinks, 1 prompt, 512 tokens, ", marks=full),
        pytest.param("", marks=slow),
    ],
)
def test_it_compiles_for_an_h100(shape):
    """Or lowers alone, where jax has no CUDA plugin."""
    results = list(check_gpu("h100", [shape]))
    assert results
    assert [result for result in results if not result.ok] == []
    # 120 at most were seen (docs/benchmarks/kernels.md); where sums do not fit, 500 and more.
    assert [result for result in results if (result.spill_bytes or 0) > 250] == []


@pytest.fixture
def interpret(monkeypatch):
    """Returns a function that runs the kernel on CPU and fails where it has races."""
    callbacks = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")

    def add_product(acc, weights, values):
        added = weights.astype(jnp.float32) @ values[...].astype(jnp.float32)
        plgpu.commit_smem()  # plain reads, not wgmma's, before the next copy
        return acc + added

    monkeypatch.setattr(mosaic_gpu, "_add_product", add_product)

    def run(*arguments, **options):
        callbacks.reset_gpu_interpret_mode_state()
        params = plgpu.InterpretGPUParams(detect_races=True)
        with plgpu.force_gpu_interpret_mode(params):
            out = tree_attention_mosaic_gpu(*arguments, **options)
            out = np.asarray(out, np.float32)
        assert not callbacks.get_races().races_found
        assert np.isfinite(out).all()  # padding too
        return out

    return run


def fitted(name, **changes):
    """Returns an example in bfloat16, of heads that the kernel covers."""
    example = EXAMPLES[name]
    head_dim = 128 if example.head_dim == 128 else 64
    changes = dict(head_dim=head_dim) | changes
    return dataclasses.replace(example, dtype="bfloat16", **changes)


def exactly(arguments, options):
    """Returns what the reference makes of the same numbers in float32."""
    arguments = widened(arguments)
    return np.asarray(tree_attention(*arguments, **options, implementation="reference"))


def assert_attends(interpret, example, seed=0):
    arguments, options = make_inputs(example, seed)
    out = interpret(*arguments, **options)
    num_tokens = sum(example.num_new)
    expected = exactly(arguments, options)[:num_tokens]
    np.testing.assert_allclose(out[:num_tokens], expected, **TOLERANCE)


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=slow) for name in COVERED],
)
def test_attention_is_that_of_the_reference(name, interpret):
    assert_attends(interpret, fitted(name))


@needs_interpreter
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=slow)])
def test_two_warpgroups_of_two_matrices(head_dim, interpret):
    """64 tokens of 4 heads in a block, trees beside them in others."""
    example = fitted("trees_and_prompts_window", kv_heads=2, head_dim=head_dim)
    assert_attends(interpret, example)


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [
        "sinks_tree_bfloat16",
        *(
            pytest.param(name, marks=slow)
            for name in ("decode", "trees_and_prompts_window", "nothing_new", "softcap")
        ),
    ],
)
def test_parts_of_the_context_add_up(name, interpret, monkeypatch):
    """Parts of one tile each, of which some rows have fewer than there are parts."""
    monkeypatch.setattr(mosaic_gpu, "TILES_PER_SPLIT", 1)
    example = fitted(name, kv_heads=2)
    arguments, options = make_inputs(example)
    shape = mosaic_gpu._shape_of(
        arguments[0], arguments[1], arguments[3], None, options["max_tokens_per_row"]
    )
    assert shape.splits > 1 or name == "nothing_new"
    assert_attends(interpret, example)


@needs_interpreter
def test_tiles_between_the_ends_of_a_window(interpret):
    """They are not masked; those at its ends are, at other tiles in each block."""
    example = Example(
        lengths=(300, 215, 20),
        num_new=(3, 70, 1),
        heads=2,
        kv_heads=1,
        head_dim=64,
        window=200,
        dtype="bfloat16",
    )
    assert_attends(interpret, example)


@needs_interpreter
def test_what_lies_before_a_window_may_hold_nan(interpret):
    """Pages there may be another row's by now, or none."""
    example = Example(lengths=(150,), num_new=(5,), window=40, dtype="bfloat16")
    (q, k, v, table, *rest), options = make_inputs(example)
    first_seen = 150 - 40 + 1  # the last position of page 6
    page = np.asarray(table)[0, first_seen // 16]
    k, v = (pages.at[page, :, : first_seen % 16].set(jnp.nan) for pages in (k, v))
    k, v = (pages.at[table[0, 5]].set(jnp.nan) for pages in (k, v))
    table = table.at[0, :5].set(layout.NO_PAGE)
    arguments = (q, k, v, table, *rest)
    expected = exactly(arguments, options)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(interpret(*arguments, **options), expected, **TOLERANCE)


@slow
@needs_interpreter
def test_more_tiles_than_buffers(interpret, monkeypatch):
    """Two warpgroups share 16 tiles; four buffers are used over and over."""
    monkeypatch.setattr(mosaic_gpu, "TILES_PER_SPLIT", 100)
    example = Example(
        lengths=(960, 10),
        num_new=(40, 33),
        heads=2,
        kv_heads=1,
        page_size=32,
        dtype="bfloat16",
    )
    assert_attends(interpret, example)


@slow
@needs_interpreter
@pytest.mark.parametrize("page_size", [16, 128])
def test_heads_of_256(page_size, interpret):
    assert_attends(interpret, fitted("wide_tree", head_dim=256, heads=4, page_size=page_size))


@needs_interpreter
def test_nodes_that_no_bits_name_may_hold_nan(interpret):
    """A level of a tree, attended after others: its bits name nodes in several words."""
    parents = (-1, *(node // 3 for node in range(69)))
    level = slice(40, 46)
    bits = pack_ancestors(parents)[level]
    named = np.flatnonzero(
        [any(bits[:, node // 32] >> node % 32 & 1) for node in range(len(parents))]
    )
    example = Example(lengths=(21,), num_new=(len(parents),), kv_heads=2, heads=4)
    (q, k, v, *rest), options = make_inputs(example)
    table, _, lengths = rest
    position = 21 + np.setdiff1d(np.arange(len(parents)), named)
    page, offset = np.asarray(table)[0, position // 16], position % 16
    k, v = (pages.at[page, :, offset].set(jnp.nan).astype(jnp.bfloat16) for pages in (k, v))
    starts = jnp.array([0, len(bits)], jnp.int32)
    arguments = (q[level].astype(jnp.bfloat16), k, v, table, starts, lengths)
    options |= dict(
        ancestor_bits=jnp.asarray(bits),
        num_new_keys=jnp.array([len(parents)], jnp.int32),
        max_tokens_per_row=len(bits),
    )
    out = interpret(*arguments, **options)
    np.testing.assert_allclose(out, exactly(arguments, options), **TOLERANCE)


@needs_interpreter
def test_rows_longer_than_is_said(interpret):
    """What lies past the bound means nothing, and stops no row behind it."""
    example = fitted("chain")
    arguments, options = make_inputs(example)
    expected = exactly(arguments, options)
    out = interpret(*arguments, **options | {"max_tokens_per_row": 3})
    known = [5 * row + token for row in range(4) for token in range(3)]
    np.testing.assert_allclose(out[known], expected[known], **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_dim=80), "head_dim=80 must be one of"),
        (dict(dtype="float32"), "must be bfloat16"),
        (dict(page_dtype="int8"), "must be bfloat16"),
        (dict(page_size=48), "page_size=48 must be"),
        (dict(page_size=4), "page_size=4 must be"),
        (dict(heads=512, kv_heads=1), "group=512 exceeds 256"),
        (dict(window=20, parents=(-1, 0, 0)), "window=20 together with ancestor_bits"),
    ],
)
def test_what_it_does_not_cover_is_refused(changes, reason):
    example = dataclasses.replace(
        EXAMPLES["decode"], **dict(dtype="bfloat16", num_new=(3,) * 5) | changes
    )
    arguments, options = make_inputs(example)
    with lowered_for("gpu"), pytest.raises(NotImplementedError, match=reason):
        tree_attention(*arguments, **options, implementation="mosaic_gpu")


def test_it_is_taken_where_it_is_asked_for_by_name_alone():
    arguments, options = make_inputs(fitted("decode"))
    with lowered_for("gpu"):
        text = str(jax.make_jaxpr(lambda *x: tree_attention(*x, **options))(*arguments))
        named = options | {"implementation": "mosaic_gpu"}
        asked = str(jax.make_jaxpr(lambda *x: tree_attention(*x, **named))(*arguments))
    assert "mosaic_gpu" not in text
    assert "mosaic_gpu" in asked or "mpmd_map" in asked
    with pytest.raises(NotImplementedError, match="runs on gpu, and this is cpu"):
        tree_attention(*arguments, **named)


def test_a_gpu_of_another_generation_is_refused(monkeypatch):
    arguments, options = make_inputs(fitted("decode"))
    device = type("Device", (), {"compute_capability": "8.0"})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(NotImplementedError, match=r"capability='8.0'.* must be 9"):
        tree_attention_mosaic_gpu(*arguments, **options)


def test_pages_in_lanes_of_the_kernel():
    """Heads of 80 are covered where they lie in lanes."""
    pages = layout.page_shape(8, 16, 4, 80, in_lanes=True)
    assert pages[3] in mosaic_gpu.MOST_MATRICES
