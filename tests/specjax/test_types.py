"""Laying rows end to end, and the report of a step as a pytree."""

import jax
import jax.numpy as jnp
import pytest

from specjax import types
from specjax.config.rules import VERIFICATION_RULES
from specjax.types import BurstPlan, Proposal, lay_out

NUM_TOKENS = 12

compiled = jax.jit(lay_out, static_argnums=1)


def lay_out_by_loop(counts, num_tokens):
    starts, row_ids, offsets = [0], [], []
    for row, count in enumerate(counts):
        row_ids += [row] * count
        offsets += range(count)
        starts.append(starts[-1] + count)
    padding = num_tokens - len(row_ids)
    return starts, row_ids + [len(counts)] * padding, offsets


@pytest.mark.parametrize(
    "counts",
    [
        [3, 1, 4],
        [0, 0, 0],
        [12, 0, 0],
        [0, 0, 12],
        [0, 5, 0],
        [4, 4, 4],  # no padding
        [1, 0, 11],
        [*[0] * 150, 3, *[0] * 149, 2, *[0] * 50],  # too many to compare with all
    ],
)
def test_lay_out(counts):
    starts, row_ids, offsets = compiled(jnp.array(counts, jnp.int32), NUM_TOKENS)
    expected = lay_out_by_loop(counts, NUM_TOKENS)
    assert starts.tolist() == expected[0]
    assert row_ids.tolist() == expected[1]
    assert offsets[: sum(counts)].tolist() == expected[2]
    assert {leaf.dtype for leaf in (starts, row_ids, offsets)} == {jnp.dtype(jnp.int32)}


def test_rules_are_numbered_as_they_are_named():
    for number, name in enumerate(VERIFICATION_RULES):
        assert getattr(types, name.upper()) == number


def test_pytrees_keep_their_fields():
    proposal = Proposal(token_ids=jnp.zeros((2, 3)), num_tokens=jnp.ones(2))
    assert len(jax.tree.leaves(proposal)) == 2  # no probabilities, no leaf
    doubled = jax.tree.map(lambda leaf: 2 * leaf, proposal)
    assert doubled.num_tokens.tolist() == [2, 2]
    assert doubled.probs is None
    plan = BurstPlan(
        num_steps=3,
        stop_when_finished=True,
        activate=(False, True),
        keep=(True, True),
        block_table=(5, 6),
        draft_caps=(7, 8),
    )
    leaves, structure = jax.tree.flatten(plan)
    assert leaves == [3, True, False, True, True, True, 5, 6, 7, 8]
    assert jax.tree.unflatten(structure, leaves) == plan
