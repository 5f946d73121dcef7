"""History drafting against a search by brute force, and what it keeps from step to step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import base, history
from specjax.drafters.history import (
    LONGEST_MATCH,
    NO_GROUP,
    PIECE_TOKENS,
    SEPARATOR,
    WINDOW,
    Pieces,
)

CAPACITY, MAX_LENGTH, DEPTH = 200, 48, 4
NOBODY = dict(has_entered=np.zeros(2, bool), row_groups=np.full(2, NO_GROUP, np.int32))
DRAFTER = history.drafter(num_speculative_tokens=DEPTH, capacity=CAPACITY, min_match=2)
remember = jax.jit(history.remember)
catch_up = jax.jit(history.catch_up)
find = jax.jit(history.find, static_argnums=(2, 3, 4))


def rows_of(*texts):
    """Returns what a drafter sees of rows with these tokens."""
    ids = np.full((len(texts), MAX_LENGTH), 99, np.int32)  # what stands past the text
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    lengths = np.array([len(text) - 1 for text in texts], np.int32)
    cache = SimpleNamespace(lengths=jnp.asarray(lengths))
    return SimpleNamespace(history=jnp.asarray(ids), cache=cache, rows=len(texts))


def pieces_of(*texts, groups=None, **rows):
    ids = np.zeros((len(texts), PIECE_TOKENS), np.int32)
    for place, text in enumerate(texts):
        ids[place, : len(text)] = text
    return Pieces(
        token_ids=ids,
        counts=np.array([len(text) for text in texts], np.int32),
        groups=np.array(groups or [NO_GROUP] * len(texts), np.int32),
        **(NOBODY | rows),
    )


def everybody(state, rows):
    num_rows = rows.history.shape[0]
    traced = jax.jit(
        lambda state, tokens, lengths: history.catch_up(
            state,
            SimpleNamespace(history=tokens, cache=SimpleNamespace(lengths=lengths)),
            jnp.ones(num_rows, bool),
        )
    )
    return traced(state, rows.history, rows.cache.lengths)


def found(state, rows, min_match=1, num_matches=1):
    traced = jax.jit(
        lambda state, tokens, lengths: history.find(
            state,
            SimpleNamespace(history=tokens, cache=SimpleNamespace(lengths=lengths)),
            min_match,
            num_matches,
            DEPTH,
        )
    )
    return jax.tree.map(np.asarray, traced(state, rows.history, rows.cache.lengths))


def read(result, row=0, match=0):
    """Returns the tokens that follow a match."""
    return result.token_ids[row, match, : result.counts[row, match]].tolist()


def longest_by_search(text, sources):
    """Returns the most tokens at the end of a text that stand in one of the sources."""
    best = 0
    for source in sources:
        for end in range(1, len(source)):
            count = 0
            while (
                count < min(end, len(text), WINDOW) and source[end - 1 - count] == text[-1 - count]
            ):
                count += 1
            best = max(best, count)
    return best


def stands(part, source):
    return any(source[at : at + len(part)] == part for at in range(len(source)))


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@pytest.mark.full
@hypothesis.given(tokens, tokens, st.lists(tokens, min_size=1, max_size=3))
@hypothesis.settings(max_examples=40, deadline=None)
def test_it_reads_on_from_the_longest_match(first, second, texts):
    rows = rows_of(first, second)
    state = history.init(2, MAX_LENGTH, CAPACITY)
    padded = [*texts, *[[]] * (3 - len(texts))]
    state = everybody(remember(state, pieces_of(*padded)), rows)
    result = found(state, rows)
    for row, text in enumerate((first, second)):
        # Own text may be read on to its end; a piece has to go on.
        expected = max(longest_by_search(text, texts), longest_by_search(text, [[*text[:-1], 7]]))
        # A match at the very end of a piece is as long, and nothing follows it.
        assert result.lengths[row, 0] >= expected
        if result.counts[row, 0] == 0:
            continue
        drafted, known = read(result, row), result.lengths[row, 0]
        whole = [*text[len(text) - known :], *drafted]
        # Own text reads on in itself; the newest tokens are no match of theirs.
        assert any(stands(whole, source) for source in (*texts, (text + drafted)[1:])) or (
            stands(whole, (text + drafted)[:-1])
        )


def test_own_text_reads_on_in_itself():
    rows = rows_of([1, 2, 3, 1, 2], [5, 5])
    state = everybody(history.init(2, MAX_LENGTH, CAPACITY), rows)
    result = found(state, rows)
    assert result.lengths[:, 0].tolist() == [2, 1]
    assert read(result) == [3, 1, 2, 3]
    assert read(result, row=1) == [5, 5, 5, 5]


def test_nothing_is_found_in_nothing():
    rows = rows_of([1, 2, 3, 4], [0])
    state = everybody(history.init(2, MAX_LENGTH, CAPACITY), rows)
    result = found(state, rows)
    assert not result.lengths.any()
    assert not result.counts.any()


def test_of_equals_own_text_wins_then_the_own_prompt_then_the_latest():
    text = [8, 1, 2]
    state = history.init(2, MAX_LENGTH, CAPACITY)
    laid = pieces_of(
        [1, 2, 30],
        [1, 2, 31],
        [1, 2, 32],
        groups=[4, 5, 6],
        row_groups=np.array([4, NO_GROUP], np.int32),
        has_entered=np.ones(2, bool),
    )
    rows = rows_of(text, text)
    state = everybody(remember(state, laid), rows)
    result = found(state, rows, num_matches=3)
    firsts = [[read(result, row, match)[0] for match in range(3)] for row in (0, 1)]
    assert firsts == [[30, 32, 31], [32, 31, 30]]
    rows = rows_of([1, 2, 9, *text], text)
    result = found(everybody(state, rows), rows)
    assert read(result)[:2] == [9, 8]


def test_a_longer_match_wins_over_own_text():
    state = remember(history.init(1, MAX_LENGTH, CAPACITY), one_row([3, 1, 2, 40]))
    rows = rows_of([1, 2, 9, 3, 1, 2])
    assert read(found(everybody(state, rows), rows)) == [40]


def one_row(*texts, groups=None, has_entered=False):
    return pieces_of(
        *texts,
        groups=groups,
        has_entered=np.array([has_entered]),
        row_groups=np.full(1, NO_GROUP, np.int32),
    )


def test_no_match_runs_from_one_piece_into_the_next():
    state = remember(history.init(1, MAX_LENGTH, CAPACITY), one_row([7, 1], [2, 8]))
    rows = rows_of([1, 2])
    result = found(everybody(state, rows), rows)
    assert result.lengths[0, 0] == 1
    assert read(result) == [8]
    assert np.asarray(state.corpus)[:6].tolist() == [7, 1, SEPARATOR, 2, 8, SEPARATOR]


def test_the_oldest_piece_is_overwritten_first():
    state = history.init(1, MAX_LENGTH, 2 * (PIECE_TOKENS + 1))
    whole = lambda token: [token] * (PIECE_TOKENS - 1) + [token + 50]
    rows = lambda token: rows_of([token] * 3)
    for token in (1, 2, 3):
        state = remember(state, one_row(whole(token), has_entered=True))
    kept = {
        token: read(found(everybody(enter(state), rows(token)), rows(token), 3))
        for token in (1, 2, 3)
    }
    # Of its own text a row of equal tokens always finds two that agree, no third.
    assert kept[1] == []
    assert (kept[2], kept[3]) == ([52], [53])


def test_a_short_piece_needs_the_room_of_a_long_one():
    """What is laid is as wide as the longest piece: near the end of the ring it would move."""
    state = history.init(1, MAX_LENGTH, CAPACITY)
    state = remember(state, one_row([1] * PIECE_TOKENS, [2] * PIECE_TOKENS, [3] * 5))
    assert int(state.head) + 4 < CAPACITY < int(state.head) + PIECE_TOKENS + 1
    after = remember(state, one_row([6, 7, 8]))
    assert int(after.head) == 4
    corpus = np.asarray(state.corpus).copy()
    corpus[:4], corpus[4 : PIECE_TOKENS + 1] = [6, 7, 8, SEPARATOR], SEPARATOR
    np.testing.assert_array_equal(after.corpus, corpus)


def enter(state):
    return remember(state, one_row([], has_entered=True))


def test_what_is_kept_from_step_to_step_is_what_a_row_that_enters_finds():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, MAX_LENGTH).tolist()
    pieces = one_row(*rng.integers(0, 3, (3, 50)).tolist(), has_entered=True)
    state = remember(history.init(1, MAX_LENGTH, CAPACITY), pieces)
    for length in (20, 21, 24, 25, 40):
        state = everybody(state, rows_of(text[:length]))
        anew = everybody(enter(state), rows_of(text[:length]))
        # One that enters looks WINDOW tokens back, no further.
        for name in ("own_match", "corpus_match"):
            kept, fresh = (np.asarray(getattr(s, name)) for s in (state, anew))
            width = length - 1 if name == "own_match" else CAPACITY
            np.testing.assert_array_equal(np.minimum(kept, WINDOW)[:, :width], fresh[:, :width])


def test_a_short_text_that_enters_a_row_has_nothing_of_the_one_before():
    rng = np.random.default_rng(0)
    pieces = one_row(*rng.integers(0, 3, (3, 50)).tolist(), has_entered=True)
    begun = remember(history.init(1, MAX_LENGTH, CAPACITY), pieces)
    left = everybody(begun, rows_of(rng.integers(0, 3, MAX_LENGTH).tolist()))
    text = rows_of([1, 2, 1])
    for name in ("own_match", "corpus_match"):
        expected = getattr(everybody(begun, text), name)
        entered = getattr(everybody(enter(left), text), name)
        np.testing.assert_array_equal(entered, expected)


def test_a_row_that_fell_far_behind_is_matched_anew():
    text = np.random.default_rng(1).integers(0, 3, MAX_LENGTH).tolist()
    begun = history.init(1, MAX_LENGTH, CAPACITY)
    state = everybody(everybody(begun, rows_of(text[:5])), rows_of(text[:40]))
    fresh = everybody(begun, rows_of(text[:40]))
    np.testing.assert_array_equal(state.own_match, fresh.own_match)
    assert state.num_matched.tolist() == [40]


@pytest.mark.full
def test_matches_have_a_longest_length():
    rows = rows_of([1] * MAX_LENGTH)
    state = history.init(1, MAX_LENGTH, CAPACITY)
    for length in range(2, MAX_LENGTH + 1):
        state = everybody(state, rows_of([1] * length))
    piece = one_row([1] * PIECE_TOKENS)
    for _ in range(2):
        state = remember(state, piece)
    assert int(jnp.max(state.own_match)) <= LONGEST_MATCH
    assert found(everybody(state, rows), rows).lengths[0, 0] <= LONGEST_MATCH


def test_rows_that_take_no_part_are_left_alone():
    rows = rows_of([1, 2, 1], [1, 2, 1])
    state = history.init(2, MAX_LENGTH, CAPACITY)
    after = history.catch_up(state, rows, jnp.array([True, False]))
    assert after.num_matched.tolist() == [3, 0]
    assert not np.asarray(after.own_match[1]).any()


def test_rows_are_taken_and_put_back():
    state = everybody(history.init(3, MAX_LENGTH, CAPACITY), rows_of([1, 1], [2, 2], [3, 3]))
    part = base.take_rows(DRAFTER, state, jnp.array([2, 0]))
    part = dataclasses.replace(part, row_groups=jnp.array([7, 8]))
    whole = base.put_rows(DRAFTER, state, jnp.array([2, 3]), part)  # row 3 is none
    assert whole.row_groups.tolist() == [NO_GROUP, NO_GROUP, 7]
    chex.assert_trees_all_equal(whole.own_match, state.own_match)


@pytest.mark.parametrize("capacity", [PIECE_TOKENS, 2**24])
def test_a_corpus_that_cannot_be(capacity):
    said = f"^corpus_tokens={capacity} must be from 65 to "
    with pytest.raises(
        ValueError, match=f"{said}{2**24 - MAX_LENGTH}, beside rows of {MAX_LENGTH};"
    ):
        history.init(1, MAX_LENGTH, capacity)
    history.check_capacity(2**24)  # no rows are known yet
    with pytest.raises(ValueError, match=f"^corpus_tokens=64 must be from 65 to {2**24}; change"):
        history.check_capacity(64)
    with pytest.raises(ValueError, match=r"rows of 16777216 tokens .* lower max_context"):
        history.check_capacity(100, 2**24)
