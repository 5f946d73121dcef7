"""N-gram matching against an obviously right loop, and by example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import match_by_loop
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ngram_match import ngram_match

ROWS, MAX_LENGTH = 3, 20


@functools.cache
def compiled_match(min_match: int, max_match: int):
    sizes = dict(min_match=min_match, max_match=max_match)
    return jax.jit(functools.partial(ngram_match, **sizes))


def run_match(texts, min_match: int, max_match: int) -> list[int | None]:
    # What stands past a row's text must not matter: it is the text once more.
    history = np.array([np.resize(text, MAX_LENGTH) for text in texts], np.int32)
    num_tokens = jnp.array([len(text) for text in texts], jnp.int32)
    starts, lengths, _ = compiled_match(min_match, max_match)(history, num_tokens)
    found = zip(starts[:, 0].tolist(), lengths[:, 0].tolist(), strict=True)
    return [place if length else None for place, length in found]


@pytest.mark.full
@pytest.mark.parametrize("sizes", quick([(1, 1), (1, 3), (2, 4), (3, 3)], (2, 4)), ids=str)
def test_match_agrees_with_a_loop(sizes):
    min_match, max_match = sizes
    text = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LENGTH)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(text, min_size=ROWS, max_size=ROWS))
    def agrees(texts):
        expected = [match_by_loop(text, min_match, max_match) for text in texts]
        assert run_match(texts, min_match, max_match) == expected

    agrees()


@pytest.mark.full
def test_it_runs_in_programs_of_64_bits_and_of_strict_promotion():
    history = jnp.asarray([[1, 2, 3, 1, 2]], jnp.int32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = ngram_match(history, jnp.asarray([5], jnp.int32), min_match=1, max_match=3)
    assert [each.tolist() for each in found] == [[[2]], [[2]], [[False]]]
    assert [each.dtype for each in found] == [jnp.int32, jnp.int32, jnp.bool_]


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
    return jax.jit(functools.partial(ngram_match, **sizes))


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
    starts, lengths, in_corpus = map(np.asarray, function(history, num_tokens))
    is_found = lengths > 0
    assert starts.dtype == lengths.dtype == np.int32
    assert not in_corpus.any()
    assert ((lengths >= min_match) & (lengths <= max_match))[is_found].all()
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


def of_corpus_by_loop(text, corpus, min_match: int, max_match: int):
    """Returns length, whether of the corpus, and place of every match, best first."""
    found = {}
    for is_other, other in ((False, text), (True, corpus)):
        for size in range(min_match, min(max_match, len(text)) + 1):
            for end in range(size, len(other)):
                if other[end - size : end] == text[-size:] and min(text[-size:]) >= 0:
                    found[is_other, end] = size
    order = [(size, not is_other, end) for (is_other, end), size in found.items()]
    return [(end, size, not is_own) for size, is_own, end in sorted(order, reverse=True)]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("sizes", "num_matches"), [((1, 3), 4), pytest.param((2, 2), 1, marks=pytest.mark.full)]
)
def test_matches_of_a_corpus_agree_with_a_loop(sizes, num_matches, implementation):
    function = jax.jit(
        functools.partial(
            ngram_match,
            min_match=sizes[0],
            max_match=sizes[1],
            num_matches=num_matches,
            implementation=implementation,
        )
    )
    text = st.lists(st.integers(-1, 2), min_size=1, max_size=MAX_LENGTH)
    # -1 stands between sequences of the corpus.
    others = st.lists(st.integers(-1, 2), max_size=30)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(text, min_size=ROWS, max_size=ROWS), others)
    def agrees(texts, corpus):
        history = np.array([np.resize(text, MAX_LENGTH) for text in texts], np.int32)
        found = function(
            history,
            jnp.array([len(text) for text in texts], jnp.int32),
            corpus=jnp.asarray(np.resize(corpus or [0], 30), jnp.int32),
            num_corpus_tokens=jnp.int32(len(corpus)),
        )
        for row, text in enumerate(texts):
            expected = of_corpus_by_loop(text, corpus, *sizes)[:num_matches]
            expected += [(0, 0, False)] * (num_matches - len(expected))
            actual = zip(*(np.asarray(each)[row].tolist() for each in found))
            assert list(actual) == expected

    agrees()


def test_matches_refuse():
    history, num_tokens = jnp.zeros((1, MAX_LENGTH), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="num_matches=0 must be at least 1"):
        ngram_match(history, num_tokens, min_match=1, max_match=2, num_matches=0)
    with pytest.raises(ValueError, match="1 <= min_match=3 <= max_match=2"):
        ngram_match(history, num_tokens, min_match=3, max_match=2)
    with pytest.raises(ValueError, match="go together"):
        ngram_match(history, num_tokens, corpus=history[0], min_match=1, max_match=2)
    with pytest.raises(ValueError, match=r"must be \[corpus_length\] and \[\]"):
        ngram_match(
            history,
            num_tokens,
            corpus=history[0],
            num_corpus_tokens=num_tokens,
            min_match=1,
            max_match=2,
        )
    with pytest.raises(ValueError, match="more than int32 counts"):
        jax.eval_shape(
            functools.partial(ngram_match, min_match=1, max_match=7),
            jax.ShapeDtypeStruct((1, 2**28), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        )
