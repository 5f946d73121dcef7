"""N-gram drafting against an obviously right loop, and by example."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from helpers import match_by_loop, tiny_llama_config
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafters.base import DrafterContext
from specjax.drafters.spec import NgramDrafter

ROWS, MAX_LENGTH = 3, 20


def draft_by_loop(text: list[int], start: int, count: int) -> list[int]:
    """Reads on from start, in the draft itself past the text's end."""
    text = list(text)
    for ahead in range(count):
        text.append(text[start + ahead])
    return text[len(text) - count :]


@functools.cache
def compiled_draft(count: int, min_match: int, max_match: int):
    spec = NgramDrafter(min_match=min_match, max_match=max_match)
    context = DrafterContext(
        target=tiny_llama_config(), num_speculative_tokens=count, dtype=jnp.float32
    )
    drafter = spec.build(context)

    def run(history, lengths, num_tokens):
        state = types.SimpleNamespace(history=history, cache=types.SimpleNamespace(lengths=lengths))
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
