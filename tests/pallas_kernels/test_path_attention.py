"""Path attention against its definition and tree attention, and that bits follow from a token
alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from pallas_kernels import layout
from pallas_kernels.path_attention import path_attention
from pallas_kernels.path_attention.example_inputs import by_token, is_covered
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.example_inputs import (
    EXAMPLES,
    TOLERANCE,
    make_inputs,
    widened,
)

COVERED = [name for name, example in EXAMPLES.items() if is_covered(example)]


def test_pages_with_scales_are_refused():
    (q, *pages, table, _, lengths), _ = make_inputs(EXAMPLES["int8"])
    places = jnp.zeros(q.shape[0], jnp.int32)
    with pytest.raises(NotImplementedError, match="pages of int8"):
        path_attention(q, *pages, table, places, lengths, places, scale=1.0)


def attend(example, implementation=None, turn=lambda arguments: arguments):
    arguments, options = make_inputs(example)
    arguments = turn(arguments)
    q, k_pages, v_pages, table, _, lengths = arguments
    row_ids, positions, offsets = by_token(example, arguments[0].shape[0])
    call = functools.partial(
        path_attention,
        path_offsets=offsets,
        scale=options["scale"],
        softcap=options["softcap"],
        window=options["window"],
        implementation=implementation,
    )
    # An argument: what is known would be computed while compiling.
    run = jax.jit(lambda sinks, *arguments: call(*arguments, sinks=sinks))
    out = run(options["sinks"], q, k_pages, v_pages, table, row_ids, lengths, positions)
    return np.asarray(out, np.float32)


# An example compiles for a second. Those of neither are nightly.
QUICK = ("tree_window", "sinks_tree_bfloat16")
GATE = (*QUICK, "mixed", "chain", "nothing_new", "bfloat16", "wide_tree", "softcap")


@pytest.mark.parametrize(
    "name", quick(COVERED, *QUICK, slow=[name for name in COVERED if name not in GATE])
)
def test_agrees_with_its_definition_and_with_tree_attention(name):
    example = EXAMPLES[name]
    arguments, options = make_inputs(example)
    actual = attend(example, "xla")
    assert np.isfinite(actual).all()
    num_tokens = sum(example.num_new)
    assert (actual[num_tokens:] == 0).all()
    exact = widened(arguments)
    rowwise = jax.jit(functools.partial(tree_attention, **options))(*exact)
    for expected in (attend(example, "reference", widened), rowwise):
        np.testing.assert_allclose(
            actual[:num_tokens], expected[:num_tokens], 0, TOLERANCE[example.dtype]
        )


@functools.partial(jax.jit, static_argnames="window")
def compiled(q, k_pages, v_pages, table, row_ids, lengths, positions, offsets, window):
    return path_attention(
        q,
        k_pages,
        v_pages,
        table,
        row_ids,
        lengths,
        positions,
        path_offsets=offsets,
        scale=0.3,
        window=window,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", quick([None, 30], 30))
def test_bits_do_not_depend_on_place_pages_or_neighbours(dtype, window):
    """One token rolled through every flat position, among other rows each time.

    The same prefix lies in other pages, its path in other slots of a tree, and its
    neighbours have prefixes up to thrice as long.
    """
    rng = np.random.default_rng(0)
    num_tokens, page_size, kv_heads, head_dim, length = 16, 8, 2, 16, 75
    own_q = rng.standard_normal((4, head_dim))
    keys = rng.standard_normal((2, length + 4, kv_heads, head_dim))
    seen = set()
    for place in range(num_tokens):
        pages = [
            rng.standard_normal(layout.page_shape(128, page_size, kv_heads, head_dim))
            for _ in range(2)
        ]
        table = rng.permutation(128)[:120].reshape(4, 30)
        row = place % 4
        # The path: root, then nodes anywhere behind it.
        path = [0, *sorted(rng.choice(np.arange(1, 20), 3, replace=False).tolist())]
        at = [*range(length), *(length + offset for offset in path)]
        for side, values in zip(pages, keys):
            for position, value in zip(at, values):
                page = table[row, position // page_size]
                side[page, :, position % page_size] = value
        lengths = rng.integers(0, 200, 4)
        lengths[row] = length
        row_ids = rng.integers(0, 5, num_tokens)  # 4 is padding
        row_ids[place] = row
        depths = rng.integers(0, 4, num_tokens)
        depths[place] = 3
        offsets = np.tile(path, (num_tokens, 1))
        q = rng.standard_normal((num_tokens, 4, head_dim))
        q[place] = own_q
        positions = lengths[np.minimum(row_ids, 3)] + depths
        out = compiled(
            jnp.asarray(q, dtype),
            *(jnp.asarray(side, dtype) for side in pages),
            *(
                jnp.asarray(values, jnp.int32)
                for values in (table, row_ids, lengths, positions, offsets)
            ),
            window=window,
        )
        seen.add(np.asarray(out[place].astype(jnp.float32)).tobytes())
    assert len(seen) == 1


def test_refusals():
    pages = layout.init_pages(4, 8, 2, 16, jnp.float32)
    q = jnp.zeros((3, 4, 16))
    table, ids = jnp.zeros((2, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    lengths = jnp.zeros(2, jnp.int32)
    call = functools.partial(path_attention, scale=1.0)
    with pytest.raises(ValueError, match="must be \\(3,\\)"):
        call(q, *pages, table, ids[:2], lengths, ids)
    with pytest.raises(ValueError, match="positions is float32"):
        call(q, *pages, table, ids, lengths, ids.astype(jnp.float32))
    with pytest.raises(ValueError, match="path_offsets"):
        call(q, *pages, table, ids, lengths, ids, path_offsets=ids)
    with pytest.raises(ValueError, match="multiple"):
        call(q[:, :3], *pages, table, ids, lengths, ids)
    with pytest.raises(ValueError, match="window"):
        call(q, *pages, table, ids, lengths, ids, window=0)
    with pytest.raises(ValueError, match="softcap=0"):
        call(q, *pages, table, ids, lengths, ids, softcap=0.0)
    with pytest.raises(ValueError, match="one of each head, \\(4,\\)"):
        call(q, *pages, table, ids, lengths, ids, sinks=jnp.zeros(2))
