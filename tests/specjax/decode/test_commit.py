"""Commit: what a stop rule cuts, how a row ends, and what the next step finds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama_config

from specjax.config.engine import EngineConfig
from specjax.decode.commit import commit
from specjax.decode.state import DecodeState
from specjax.decode.verify import Verification
from specjax.drafters import none
from specjax.drafters.base import Draft
from specjax.paged import kv_cache
from specjax.sampling import RowSampling
from specjax.types import (
    INVALID_LOGITS,
    OUT_OF_LENGTH,
    RUNNING,
    STOPPED,
    Acceptance,
    Proposal,
)

DEPTH, LENGTH, MAX_LENGTH = 3, 5, 32
STOP, OTHER_STOP = 90, 91

NO_DRAFTER = none.drafter()
compiled_commit = jax.jit(
    lambda state, draft, verification: commit(state, NO_DRAFTER, draft, verification)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: what the rule decided, and what must come of it."""

    tokens: tuple[int, ...] = (10, 11, 12, 13)
    num_accepted: int = DEPTH
    num_drafted: int = DEPTH
    invalid: tuple[int, ...] = ()  # nodes
    room: int = 20  # tokens the row may still emit
    is_active: bool = True
    written: int | None = None  # None: root and all drafts but the last
    committed: int
    finish: int = RUNNING


CASES = {
    "all accepted": Case(committed=4),
    "some accepted": Case(num_accepted=1, committed=2),
    "none accepted": Case(num_accepted=0, committed=1),
    "nothing drafted": Case(num_accepted=0, num_drafted=0, written=LENGTH, committed=1),
    "drafter that sees the text": Case(written=LENGTH + 1, committed=4),
    "stop inside the draft": Case(tokens=(10, STOP, 12, 13), committed=2, finish=STOPPED),
    "stop at the first draft token": Case(tokens=(STOP, 11, 12, 13), committed=1, finish=STOPPED),
    "stop at the bonus": Case(tokens=(10, 11, 12, STOP), committed=4, finish=STOPPED),
    "stop recovered": Case(tokens=(10, STOP, 12, 13), num_accepted=1, committed=2, finish=STOPPED),
    "stop past what was accepted": Case(tokens=(10, 11, STOP, STOP), num_accepted=1, committed=2),
    "two stops": Case(tokens=(10, OTHER_STOP, STOP, 13), committed=2, finish=STOPPED),
    "length at the end": Case(room=4, committed=4, finish=OUT_OF_LENGTH),
    "length inside the draft": Case(room=2, committed=2, finish=OUT_OF_LENGTH),
    "length of one": Case(room=1, committed=1, finish=OUT_OF_LENGTH),
    "length not reached": Case(room=3, num_accepted=1, committed=2),
    "stop at the last of its length": Case(
        tokens=(10, STOP, 12, 13), room=2, committed=2, finish=STOPPED
    ),
    "stop past its length": Case(
        tokens=(10, 11, STOP, 13), room=2, committed=2, finish=OUT_OF_LENGTH
    ),
    "NaN at the root": Case(invalid=(0,), committed=0, finish=INVALID_LOGITS),
    "NaN in the middle": Case(invalid=(2,), committed=2, finish=INVALID_LOGITS),
    "NaN at the last node": Case(invalid=(3,), committed=3, finish=INVALID_LOGITS),
    "NaN from the middle on": Case(invalid=(1, 2, 3), committed=1, finish=INVALID_LOGITS),
    "NaN at the node that rejects": Case(
        invalid=(1,), num_accepted=1, committed=1, finish=INVALID_LOGITS
    ),
    "NaN past what was accepted": Case(invalid=(2, 3), num_accepted=1, committed=2),
    "NaN after a stop": Case(tokens=(10, STOP, 12, 13), invalid=(2,), committed=2, finish=STOPPED),
    "NaN where a stop seems to be": Case(
        tokens=(10, STOP, 12, 13), invalid=(1,), committed=1, finish=INVALID_LOGITS
    ),
    "NaN before a stop": Case(
        tokens=(10, 11, STOP, 13), invalid=(1,), committed=1, finish=INVALID_LOGITS
    ),
    "NaN where the length ends": Case(invalid=(2,), room=2, committed=2, finish=OUT_OF_LENGTH),
    "NaN at the root of the last token": Case(
        invalid=(0,), room=1, committed=0, finish=INVALID_LOGITS
    ),
    "not active": Case(is_active=False, written=LENGTH, committed=0),
    "not active, stop, NaN, no room": Case(
        tokens=(STOP,) * 4,
        invalid=(0, 1),
        room=0,
        is_active=False,
        written=LENGTH,
        committed=0,
    ),
}


@pytest.fixture(scope="module")
def outcome():
    """Runs all cases as rows of one batch; returns state before, state after, info."""
    cases = list(CASES.values())
    rows = len(cases)
    column = lambda values, dtype=np.int32: jnp.asarray(np.array(values, dtype))
    cache = kv_cache.init(
        tiny_llama_config(),
        rows=rows,
        num_pages=2,
        page_size=8,
        pages_per_row=4,
        dtype=jnp.float32,
    )
    sampling = RowSampling.empty(rows, EngineConfig(max_stop_tokens=3))
    stops = jnp.tile(jnp.array([STOP, OTHER_STOP, -1], jnp.int32), (rows, 1))
    state = DecodeState(
        cache=dataclasses.replace(cache, lengths=jnp.full(rows, LENGTH, jnp.int32)),
        drafter=(),
        drafter_lengths=jnp.full(rows, LENGTH, jnp.int32),
        history=jnp.tile(jnp.arange(MAX_LENGTH, dtype=jnp.int32) + 100, (rows, 1)),
        sampling=dataclasses.replace(sampling, stop_token_ids=stops),
        max_lengths=column([LENGTH + 1 + case.room for case in cases]),
        draft_caps=jnp.full(rows, DEPTH, jnp.int32),
        rules=jnp.zeros(rows, jnp.int32),
        is_active=column([case.is_active for case in cases], bool),
    )
    proposal = Proposal(
        token_ids=column([case.tokens[:DEPTH] for case in cases]),
        num_tokens=column([case.num_drafted for case in cases]),
    )
    nodes = range(DEPTH + 1)
    verification = Verification(
        Acceptance(
            column([case.tokens for case in cases]),
            column([case.num_accepted for case in cases]),
        ),
        column([[node in case.invalid for node in nodes] for case in cases], bool),
        logprobs=(),
    )
    written = [
        LENGTH + case.num_drafted if case.written is None else case.written for case in cases
    ]
    draft = Draft(proposal, (), column(written))
    after, info = compiled_commit(state, draft, verification)
    return jax.tree.map(np.asarray, (state, after, info))


@pytest.mark.parametrize("name", CASES)
def test_commit(outcome, name):
    before, after, info = outcome
    case, row = CASES[name], list(CASES).index(name)
    count = case.committed
    assert info.num_committed[row] == count
    assert info.finish[row] == case.finish
    assert info.num_accepted[row] == min(case.num_accepted, count)
    assert info.num_drafted[row] == (case.num_drafted if case.is_active else 0)
    assert info.token_ids[row].tolist() == list(case.tokens)
    assert after.cache.lengths[row] == LENGTH + count
    assert after.is_active[row] == (case.is_active and case.finish == RUNNING)
    history = before.history[row].copy()
    history[LENGTH + 1 : LENGTH + 1 + count] = case.tokens[:count]
    assert after.history[row].tolist() == history.tolist()


def test_drafter_lengths_are_what_stands_of_what_was_written(outcome):
    lengths = {name: int(outcome[1].drafter_lengths[row]) for row, name in enumerate(CASES)}
    # The last draft token is proposed, not fed: one to catch up.
    assert lengths["all accepted"] == LENGTH + 3
    # A rejected draft's key is not the recovered token's.
    assert lengths["some accepted"] == LENGTH + 2
    assert lengths["none accepted"] == LENGTH + 1
    # A step that drafted nothing leaves its token to catch up.
    assert lengths["nothing drafted"] == LENGTH
    # A drafter without keys has always seen the text.
    assert lengths["drafter that sees the text"] == LENGTH + 1
    assert lengths["length inside the draft"] == LENGTH + 2
    assert lengths["stop inside the draft"] == LENGTH + 2
    assert lengths["NaN at the root"] == LENGTH
    assert lengths["not active"] == LENGTH


def test_what_commit_does_not_own_stays(outcome):
    before, after, _ = outcome
    for name in ("sampling", "max_lengths", "draft_caps", "rules", "drafter"):
        left, right = (getattr(state, name) for state in (before, after))
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(before.cache.block_table, after.cache.block_table)
