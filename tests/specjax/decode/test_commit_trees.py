"""Commit of a tree: accepted nodes move to where a chain's would stand, in both caches.

Rows have pages in an order of their own; every slot holds its own number, so that what
stands where after a step can be read off.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama_config

from pallas_kernels import layout
from specjax.config.engine import EngineConfig
from specjax.decode.commit import commit
from specjax.decode.state import DecodeState
from specjax.decode.verify import Verification
from specjax.drafters import none
from specjax.drafters.base import NOT_KEPT, Draft
from specjax.paged import kv_cache
from specjax.sampling import RowSampling
from specjax.trees.draft_tree import from_parents
from specjax.types import Acceptance, Proposal

#      0        the root, at position LENGTH
#    / | \
#   1  2  3     the drafter keeps nodes 1, 2, 5 and 6, at 3 to 6 slots past the root
#   |  |  |
#   4  5  6
PARENTS = [-1, 0, 0, 0, 1, 2, 3]
KEPT_AT = [0, 3, 4, NOT_KEPT, NOT_KEPT, 5, 6]
PAGE_SIZE, LENGTH, DEPTH = 4, 6, 2
PAGES = np.array([[3, 1, 5, 0], [2, 6, 4, 7], [8, 9, 10, 11], [15, 14, 13, 12], [16, 19, 18, 17]])
NUM_SLOTS = PAGES.size * PAGE_SIZE

# Accepted nodes, and which of them the drafter's cache then holds in order.
ROWS = {
    "the second child and its own": ((2, 5), 2),
    "the first child and its own": ((1, 4), 1),
    "one that was not fed": ((3,), 0),
    "one that was not fed and its own, which was": ((3, 6), 0),
    "nothing": ((), 0),
}


def slots_of(row, positions):
    positions = np.asarray(positions)
    return PAGES[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


@pytest.fixture(scope="module")
def outcome():
    """Returns the state after a step, arrays of numpy."""
    rows, config = len(ROWS), tiny_llama_config(num_layers=1)
    number = np.arange(NUM_SLOTS, dtype=np.float32).reshape(-1, 1, PAGE_SIZE, 1)
    cache = kv_cache.init(
        config,
        rows=rows,
        num_pages=PAGES.size,
        page_size=PAGE_SIZE,
        pages_per_row=PAGES.shape[1],
        dtype=jnp.float32,
    )
    numbered = jax.tree.map(lambda x: jnp.broadcast_to(number, x.shape), cache.pages)
    full = lambda value: jnp.full(rows, value, jnp.int32)
    state = DecodeState(
        cache=dataclasses.replace(
            cache,
            pages=numbered,
            block_table=jnp.asarray(PAGES, jnp.int32),
            lengths=full(LENGTH),
        ),
        drafter=jnp.arange(NUM_SLOTS),
        drafter_lengths=full(LENGTH),
        history=jnp.zeros((rows, PAGES.shape[1] * PAGE_SIZE), jnp.int32),
        sampling=RowSampling.empty(rows, EngineConfig()),
        max_lengths=full(PAGES.shape[1] * PAGE_SIZE),
        draft_caps=full(DEPTH),
        rules=full(0),
        is_active=jnp.ones(rows, bool),
    )
    num_drafts = len(PARENTS) - 1
    proposal = Proposal(
        token_ids=jnp.ones((rows, num_drafts), jnp.int32),
        num_tokens=full(num_drafts),
        tree=from_parents(jnp.array(PARENTS, jnp.int32), DEPTH, rows=rows),
    )
    nodes = np.zeros((rows, DEPTH), np.int32)
    counts = np.zeros(rows, np.int32)
    for row, (accepted, _) in enumerate(ROWS.values()):
        nodes[row, : len(accepted)] = accepted
        # What stands after them names the last one again, as rules do.
        nodes[row, len(accepted) :] = accepted[-1] if accepted else 0
        counts[row] = len(accepted)
    verification = Verification(
        Acceptance(jnp.ones((rows, DEPTH + 1), jnp.int32), counts, jnp.asarray(nodes)),
        jnp.zeros((rows, DEPTH + 1), bool),
        logprobs=(),
    )
    kept_at = jnp.tile(jnp.array(KEPT_AT, jnp.int32), (rows, 1))
    draft = Draft(proposal, state.drafter, full(LENGTH + 1), kept_at)

    def move(numbers, source, target):
        return numbers.at[target].set(numbers[source], mode="drop")

    drafter = none.drafter()._replace(move=move)
    after, info = jax.jit(lambda *given: commit(given[0], drafter, *given[1:]))(
        state, draft, verification
    )
    return jax.tree.map(np.asarray, (after, info))


@pytest.mark.parametrize("name", ROWS)
def test_the_accepted_path_stands_behind_the_root(outcome, name):
    after, info = outcome
    row = list(ROWS).index(name)
    accepted, num_held = ROWS[name]
    behind = LENGTH + 1 + np.arange(len(accepted))
    assert after.cache.lengths[row] == LENGTH + len(accepted) + 1
    assert info.draft_depth[row] == DEPTH
    (keys, values), *_ = after.cache.pages
    for pages in (keys, values):
        held = layout.read_slots(jnp.asarray(pages), jnp.asarray(slots_of(row, behind)))
        came_from = slots_of(row, LENGTH + np.array(accepted, int))
        assert np.asarray(held)[:, 0, 0].tolist() == came_from.tolist()
    # The drafter's, as far as it was fed all of the path.
    kept = np.array([KEPT_AT[node] for node in accepted[:num_held]], int)
    held = after.drafter[slots_of(row, behind[:num_held])]
    assert held.tolist() == slots_of(row, LENGTH + kept).tolist()
    assert after.drafter_lengths[row] == LENGTH + 1 + num_held


def test_what_stands_before_and_beside_stays(outcome):
    after, _ = outcome
    for row in range(len(ROWS)):
        before = slots_of(row, np.arange(LENGTH + 1))
        (keys, _), *_ = after.cache.pages
        held = layout.read_slots(jnp.asarray(keys), jnp.asarray(before))
        assert np.asarray(held)[:, 0, 0].tolist() == before.tolist()
        assert after.drafter[before].tolist() == before.tolist()
