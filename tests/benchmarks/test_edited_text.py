"""Edited texts: the versions, the target that is forced to write them, and what is counted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_gpt2, tiny_llama, uncached_logits

from benchmarks import edited_text, edits, forced_text
from benchmarks.drafters import Contender, compare
from benchmarks.edited_text import APART, DIALOGUE, Sessions, Turn, part_of, session
from benchmarks.forced_text import forced, with_text
from specjax.models.families import family_of

pytestmark = pytest.mark.full  # of benchmarks/, which nobody installs

TEXT = """def total(rows):
    # one by one
    found = 0
    for row in rows:
        found += row
    return found


def mean(rows):
    return total(rows) / len(rows)
"""


class ByCharacter:
    """A tokenizer with a token per character."""

    def encode_more(self, text):
        return [ord(letter) for letter in text]


def test_each_version_is_the_one_before_with_one_kind_of_edit():
    written = edits.versions(TEXT, 5)
    assert [each.request for each in written[1:]] == [
        "rename total to total_now",
        "log where it is",
        "give total_now a timeout",
        "drop what is not needed",
        "mark the comments",
    ]
    assert written[0].lines == TEXT.splitlines()
    assert written[1].lines == TEXT.replace("total", "total_now").splitlines()
    changed = [set(new.lines) ^ set(old.lines) for old, new in itertools.pairwise(written[1:])]
    assert changed == [
        {'    log.debug("at 5")'},
        {
            "def total_now(rows):",
            "def total_now(rows, timeout=None):",
            "    return total_now(rows) / len(rows)",
            "    return total_now(rows, timeout=timeout) / len(rows)",
        },
        {"    found = 0"},
        {"    # one by one", "    # Note: one by one"},
    ]


@pytest.mark.parametrize("num_lines", [1, 59, 61, 400])
def test_places_are_one_in_every_so_many_lines(num_lines):
    lines = ["pass"] * num_lines
    places = edits._places(lines, 0.5, lambda index: index % 7 == 0)
    assert len(places) == max(round(num_lines / edits.EVERY), 1)
    assert all(b - a <= 2 * edits.EVERY for a, b in itertools.pairwise(places))
    assert all(place % 7 == 0 for place in places) or num_lines == 1


def test_a_text_that_cannot_be_edited_is_refused():
    with pytest.raises(ValueError, match="defines no function and no class"):
        edits.versions("x = 1\n", 1)
    with pytest.raises(ValueError, match="argument changes nothing"):
        edits.versions("class Empty:\n    pass\n" * 3, 3)
    for text in ("x = 1\n", "def a_name_that_is_too_long():\n"):
        with pytest.raises(ValueError, match="no function or class within 20 tokens"):
            part_of(text, ByCharacter(), 20)


def test_a_part_is_of_whole_lines_from_the_first_definition_on():
    assert (
        part_of("import os\n" + TEXT, ByCharacter(), 40) == "def total(rows):\n    # one by one\n"
    )


@pytest.mark.parametrize("kind", [DIALOGUE, APART])
def test_the_versions_are_the_answers_of_a_session(kind):
    turns = session(TEXT, ByCharacter(), 3, kind)
    texts = ["\n".join(each.lines) + "\n" for each in edits.versions(TEXT, 3)]
    said = ["".join(map(chr, turn.answer)) for turn in turns]
    assert said[1:] == texts[1:]
    assert [turn.is_counted for turn in turns] == [False, True, True, True]
    wholes = {"".join(map(chr, t.prompt + t.answer + t.following)) for t in turns}
    if kind == APART:
        assert said[0] == texts[0]
        assert all(len(turn.prompt) < 40 and not turn.following for turn in turns)
        return
    # One text, which holds all versions in order; a prompt is all of it up to the answer.
    (whole,) = wholes
    assert whole.startswith(edited_text.HEADING + texts[0] + "\n# rename")
    assert whole.endswith(texts[3])
    for turn, text in zip(turns[1:], texts):
        assert text in "".join(map(chr, turn.prompt))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_forced_model_says_the_text_and_then_what_it_says_itself(make):
    model = make(0)
    target = forced(model, 12)
    text = [3, 1, 4, 1, 5, 9]
    ids = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    own = uncached_logits(model.params, model.config, ids)
    made = uncached_logits(with_text(target.params, text), target.config, ids)
    assert made[0, :5].argmax(axis=-1).tolist() == text[1:]
    np.testing.assert_array_equal(made[0, 5:], own[0, 5:])
    # All other logits are the model's: it was run.
    np.testing.assert_array_equal(made[0, :5, 10:], own[0, :5, 10:])
    assert jax.tree.structure(target.config.param_shapes()) == jax.tree.structure(target.params)


def test_a_token_survives_beside_hidden_states_of_few_digits():
    tokens = jnp.asarray([forced_text.OWN, 0, 127, 128, 151_935, 2**21 - 2])
    hidden = jnp.ones((6, 4), jnp.bfloat16)
    back, found = forced_text._parted(forced_text._with_token(hidden, tokens))
    assert back.shape == hidden.shape
    assert found.tolist() == tokens.tolist()


def test_a_text_longer_than_its_script_is_refused():
    params = forced(tiny_llama(0), 4).params
    assert with_text(params, [1, 2, 3, 4, 5])["script"].tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="6 tokens does not fit a script of 4 positions"):
        with_text(params, [1, 2, 3, 4, 5, 6])


def sessions():
    """Two answers of 24 tokens that differ in one, and no prompt that holds them."""
    answer = np.random.default_rng(0).permutation(60)[:24].tolist()
    edited = [*answer[:12], 60, *answer[13:]]
    return [[Turn([1, 2], answer, [], False), Turn([3, 2], edited, [], True)]]


@pytest.mark.full
def test_history_drafts_what_an_earlier_request_said():
    work = Sessions.of(tiny_llama(0), sessions(), most=8)
    contenders = {name: Contender(name, {}) for name in ("history", "ngram")}
    rows = compare(work, contenders, [8], rounds=1, has_shares=False)
    history, ngram = (row["mean_acceptance_length"] for row in rows)
    # Steps of 9 tokens, but one that ends in the edit and those that find the text again.
    assert history > 3
    assert ngram == 1.0
    assert all(row["share_of_step"] is None for row in rows)


@pytest.mark.full
def test_another_text_than_the_forced_one_ends_the_measurement(monkeypatch):
    work = Sessions.of(tiny_llama(0), sessions(), most=8)
    monkeypatch.setattr(edited_text, "with_text", lambda params, text: params)
    with pytest.raises(RuntimeError, match="did not write its text"):
        work.call(None, None)


def test_a_mesh_is_refused():
    target = forced(tiny_llama(0), 4)
    family = family_of(target.config)
    zeros = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="one device"):
        family.forward(target.params, target.config, zeros, zeros, None, (), "tensor")
