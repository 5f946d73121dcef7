"""N-gram drafting against an obviously right loop, and by example."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafters import ngram
from specjax.drafters.spec import NgramDrafter

ROWS, MAX_LENGTH = 3, 20


@functools.cache
def compiled_match(min_match: int, max_match: int):
    return jax.jit(
        functools.partial(ngram.match, min_match=min_match, max_match=max_match)
    )


def match_by_loop(text: list[int], min_match: int, max_match: int) -> int | None:
    """Returns where the continuation of the longest, then latest, match stands."""
    for size in range(min(max_match, len(text)), min_match - 1, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return start + size
    return None


def draft_by_loop(text: list[int], start: int, count: int) -> list[int]:
    """Reads on from start, in the draft itself past the text's end."""
    text = list(text)
    for ahead in range(count):
        text.append(text[start + ahead])
    return text[len(text) - count :]


def run_match(texts, min_match: int, max_match: int) -> list[int | None]:
    # What stands past a row's text must not matter: it is the text once more.
    history = np.array([np.resize(text, MAX_LENGTH) for text in texts], np.int32)
    num_tokens = jnp.array([len(text) for text in texts], jnp.int32)
    start, is_found = compiled_match(min_match, max_match)(history, num_tokens)
    found = zip(start.tolist(), is_found.tolist(), strict=True)
    return [place if is_there else None for place, is_there in found]


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_match_agrees_with_a_loop(min_match, max_match):
    text = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LENGTH)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(text, min_size=ROWS, max_size=ROWS))
    def agrees(texts):
        expected = [match_by_loop(text, min_match, max_match) for text in texts]
        assert run_match(texts, min_match, max_match) == expected

    agrees()


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("abcdab", (2, 4), 2),  # the module's example
        ("abxabyab", (2, 4), 5),  # the latest of equals
        ("cabxzabycab", (2, 4), 3),  # the longest before the latest
        ("cabxzabycab", (2, 2), 7),  # no longer than max_match
        ("xabyzab", (3, 4), None),  # no shorter than min_match
        ("aaaa", (1, 4), 3),  # overlaps itself, and still ends before the end
        ("a", (1, 4), None),
        ("ab", (1, 4), None),
        ("aa", (1, 4), 1),
        ("aa", (2, 4), None),
    ],
)
def test_match_by_example(text, sizes, expected):
    texts = [[ord(letter) for letter in text]] * ROWS
    assert run_match(texts, *sizes) == [expected] * ROWS
    assert match_by_loop(texts[0], *sizes) == expected


@functools.cache
def compiled_matches(min_match: int, max_match: int, num_matches: int):
    sizes = dict(min_match=min_match, max_match=max_match, num_matches=num_matches)
    return jax.jit(functools.partial(ngram.matches, **sizes))


def matches_by_loop(text: list[int], min_match: int, max_match: int) -> list[int]:
    """Returns where continuations stand, of the longest matches first, then the latest."""
    found = []
    for size in range(min(max_match, len(text)), min_match - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            agrees = text[start : start + size] == text[-size:]
            if agrees and start + size not in found:
                found.append(start + size)
    return found


def run_matches(texts, min_match: int, max_match: int, num_matches: int):
    history = np.array([np.resize(text, MAX_LENGTH) for text in texts], np.int32)
    num_tokens = jnp.array([len(text) for text in texts], jnp.int32)
    function = compiled_matches(min_match, max_match, num_matches)
    starts, is_found = map(np.asarray, function(history, num_tokens))
    assert (starts.dtype, is_found.dtype) == (np.int32, np.bool_)
    assert starts.shape == is_found.shape == (len(texts), num_matches)
    assert not starts[~is_found].any()
    # Whatever is found comes first.
    assert np.array_equal(is_found, -np.sort(-is_found.astype(int), axis=1))
    return [row[found].tolist() for row, found in zip(starts, is_found)]


@pytest.mark.parametrize(
    ("sizes", "num_matches"),
    [((1, 1), 3), ((1, 3), 1), ((2, 4), 4), ((1, 2), MAX_LENGTH + 2)],
)
def test_matches_agree_with_a_loop(sizes, num_matches):
    text = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LENGTH)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.lists(text, min_size=ROWS, max_size=ROWS))
    def agrees(texts):
        found = run_matches(texts, *sizes, num_matches)
        expected = [matches_by_loop(text, *sizes)[:num_matches] for text in texts]
        assert found == expected
        first = [row[0] if row else None for row in found]
        assert first == run_match(texts, *sizes)

    agrees()


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("abcdab", (2, 4), [2]),
        ("abxabyab", (2, 4), [5, 2]),  # the latest first
        ("cabxzabycab", (2, 4), [3, 7]),  # the longest before the latest
        ("cabxzabycab", (2, 2), [7, 3]),  # unless both are as long as counts
        ("axaybzaa", (1, 2), [7, 3, 1]),  # one that overlaps the end of the text
        ("aaaa", (1, 4), [3, 2, 1]),
        ("a", (1, 4), []),
        ("abcd", (1, 4), []),
    ],
)
def test_matches_by_example(text, sizes, expected):
    texts = [[ord(letter) for letter in text]] * ROWS
    assert matches_by_loop(texts[0], *sizes) == expected
    assert run_matches(texts, *sizes, 3) == [expected] * ROWS
    assert run_matches(texts, *sizes, 1) == [expected[:1]] * ROWS


def test_matches_refuse():
    history, num_tokens = jnp.zeros((1, MAX_LENGTH), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="num_matches=0 must be at least 1"):
        ngram.matches(history, num_tokens, min_match=1, max_match=2, num_matches=0)


@functools.cache
def compiled_draft(count: int, min_match: int, max_match: int):
    spec = NgramDrafter(min_match=min_match, max_match=max_match)
    drafter = spec.build(count, jnp.float32, False)

    def run(history, lengths, num_tokens):
        state = types.SimpleNamespace(
            history=history, cache=types.SimpleNamespace(lengths=lengths)
        )
        return drafter.draft((), (), state, num_tokens)

    return jax.jit(run)


def run_draft(texts, num_tokens, *, count=6, min_match=2, max_match=4):
    history = np.zeros((len(texts), MAX_LENGTH), np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = [ord(letter) for letter in text]
    lengths = jnp.array([len(text) - 1 for text in texts], jnp.int32)
    caps = jnp.array(num_tokens, jnp.int32)
    draft = compiled_draft(count, min_match, max_match)(history, lengths, caps)
    counts = draft.proposal.num_tokens.tolist()
    drafted = np.asarray(draft.proposal.token_ids)
    spoken = ["".join(map(chr, row[:n])) for row, n in zip(drafted, counts)]
    return spoken, draft


def test_draft_by_example():
    texts = ["abcdab", "xyxyxy", "aaaa", "abcd", "a"]
    spoken, draft = run_draft(texts, [6] * 5)
    assert spoken == ["cdabcd", "xyxyxy", "aaaaaa", "", ""]
    # It has no keys and values: it has seen all of the text, the root too.
    assert draft.written.tolist() == [len(text) for text in texts]
    assert draft.proposal.probs is None


def test_draft_is_cut_to_each_rows_cap():
    spoken, _ = run_draft(["abcdab"] * 5, [0, 1, 3, 5, 6])
    assert spoken == ["", "c", "cda", "cdabc", "cdabcd"]


def test_draft_of_a_history_that_is_full():
    text = "abcdefghijklmnopqrab"
    assert len(text) == MAX_LENGTH
    assert run_draft([text] * 5, [6] * 5)[0] == ["cdefgh"] * 5


def test_draft_extends_periodically():
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=5, max_size=5))
    def agrees(texts):
        spoken, _ = run_draft(texts, [6] * 5)
        for text, drafted in zip(texts, spoken, strict=True):
            ids = [ord(letter) for letter in text]
            start = match_by_loop(ids, 2, 4)
            expected = [] if start is None else draft_by_loop(ids, start, 6)
            assert drafted == "".join(map(chr, expected)), text

    agrees()


def test_drafting_stays_on_the_device():
    run = compiled_draft(6, 2, 4)
    ones = jnp.ones(5, jnp.int32)
    history = jnp.zeros((5, MAX_LENGTH), jnp.int32)
    assert "callback" not in str(jax.make_jaxpr(run)(history, ones, ones))
