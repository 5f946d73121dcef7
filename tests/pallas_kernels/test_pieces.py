"""Rows of one prompt batch cut into pieces: work follows the tokens in use."""

import dataclasses

import jax
import numpy as np
import pytest
from test_tree_attention import compiled

from pallas_kernels.tree_attention import pieces
from pallas_kernels.tree_attention.example_inputs import EXAMPLES, make_inputs, widened
from pallas_kernels.tree_attention.xla import tree_attention_xla

SHARED = EXAMPLES["shared_bucket"]


def changed(**fields):
    return dataclasses.replace(SHARED, **fields)


@pytest.mark.parametrize(
    "example",
    [
        SHARED,
        changed(lengths=(63, 64, 65, 200, 0), num_new=(129, 0, 2, 3, 1), padding=121),
        changed(num_new=(0, 0, 0, 0, 256), padding=0),  # one prompt has the whole bucket
        changed(num_new=(0, 0, 0, 0, 0), padding=256),
        changed(num_new=(64, 64, 64, 63, 1), padding=0),
        changed(num_new=(1, 0, 65, 0, 0), padding=190),
        *(
            pytest.param(changed(**fields), marks=pytest.mark.full)
            for fields in (
                {"window": 50},
                {"softcap": 2.0, "has_sinks": True},
                {"page_dtype": "int8", "page_size": 32},
            )
        ),
    ],
    ids=["mixed", "edges", "whole", "empty", "full", "over", "window", "sinks", "int8"],
)
def test_pieces_agree_with_the_reference(example):
    """Unwritten slots and padding hold NaN: a piece must read no key past its own tokens."""
    arguments, options = make_inputs(example)
    assert pieces.pays(len(example.lengths), options["max_tokens_per_row"])
    actual = np.asarray(compiled(*arguments, **options, implementation="xla"))
    expected = compiled(*widened(arguments), **options, implementation="reference")
    assert np.isfinite(actual).all()
    used = sum(example.num_new)
    np.testing.assert_allclose(actual[:used], expected[:used], 0, 1e-5)


@pytest.mark.parametrize("counts", [(256, 0, 0, 0, 0), (20, 20, 20, 20, 20), (1, 1, 1, 1, 252)])
def test_only_pieces_in_use_are_computed(counts):
    """Counts the groups of pieces that run."""
    num_run = []
    attend = tree_attention_xla

    def counted(*arguments, width, **options):
        jax.debug.callback(lambda: num_run.append(width))
        return attend(*arguments, max_tokens_per_row=width, **options)

    example = changed(num_new=counts, padding=256 - sum(counts))
    (q, k_pages, v_pages, table, starts, lengths), _ = make_inputs(example)

    def whole(*rows, width):
        return counted(rows[0], k_pages, v_pages, *rows[1:], width=width, scale=0.125)

    jax.block_until_ready(jax.jit(lambda: pieces.in_pieces(whole, q, table, starts, lengths))())
    jax.effects_barrier()
    used = sum(-(-count // pieces.PIECE_TOKENS) for count in counts)
    assert num_run == [pieces.PIECE_TOKENS] * -(-used // pieces.PIECES_AT_ONCE)
