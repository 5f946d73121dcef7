"""Texts from files, cut into pieces and put into batches."""

import json

import numpy as np
import pytest

from specjax.training import data


class _Letters:
    """A tokenizer whose tokens are the letters of a text, after a first token 1."""

    def encode(self, text):
        return [1, *self.encode_more(text)]

    def encode_more(self, text):
        return [ord(letter) for letter in text]


def test_pieces_of_a_text_share_a_token():
    text = data.from_token_ids([(list(range(1, 8)), 0)], length=4)
    assert text.token_ids.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert text.lengths.tolist() == [4, 4]
    assert text.is_learned.all()


def test_a_piece_that_is_too_short_is_left_out():
    text = data.from_token_ids([(list(range(1, 6)), 0), ([9], 0), ([], 0)], length=4)
    assert text.token_ids.tolist() == [[1, 2, 3, 4]]


def test_a_prompt_is_not_learned():
    text = data.from_token_ids([(list(range(1, 7)), 5)], length=6)
    assert text.is_learned.tolist() == [[False] * 5 + [True]]
    # The first piece lies in the prompt.
    text = data.from_token_ids([(list(range(1, 8)), 5)], length=4)
    assert text.token_ids.tolist() == [[4, 5, 6, 7]]
    assert text.is_learned.tolist() == [[False, False, True, True]]


def test_padding_is_neither_learned_nor_counted():
    text = data.from_token_ids([([5, 6, 7], 0)], length=5)
    assert text.token_ids.tolist() == [[5, 6, 7, 0, 0]]
    assert text.is_learned.tolist() == [[True] * 3 + [False] * 2]
    assert text.counts(10).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0]
    assert text.num_tokens == 3


def test_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="holds no text of 3 tokens"):
        data.from_token_ids([([1, 2, 3], 3)], length=8)
    with pytest.raises(ValueError, match="must be at least 3"):
        data.from_token_ids([([1, 2, 3], 0)], length=2)


@pytest.mark.parametrize(
    "wrong", ["hello", ([1.5, 2, 3], 0), ([1, 2, 3], -1), ([[1]], 0), [1, 2, 3]]
)
def test_what_is_no_text_is_refused(wrong):
    with pytest.raises(TypeError, match="expected a pair of token ids"):
        data.from_token_ids([wrong], length=8)


def _numbered(count):
    return data.from_token_ids([([i, i, i + 1], 0) for i in range(count)], length=3)


def test_an_epoch_visits_each_text_once_and_orders_differ():
    text = _numbered(10)
    epochs = [
        [int(t) for step in range(start, start + 5) for t in text.batch(step, 2, 7).token_ids[:, 0]]
        for start in (0, 5)
    ]
    assert all(sorted(each) == list(range(10)) for each in epochs)
    assert epochs[0] != epochs[1]
    again = text.batch(6, 2, 7).token_ids
    assert np.array_equal(again, text.batch(6, 2, 7).token_ids)
    assert not np.array_equal(
        np.concatenate([text.batch(s, 2, 7).token_ids for s in range(5)]),
        np.concatenate([text.batch(s, 2, 8).token_ids for s in range(5)]),
    )


def test_fewer_texts_than_rows():
    batch = _numbered(2).batch(0, 5)
    assert batch.token_ids.shape == (5, 3)
    assert set(batch.token_ids[:, 0]) == {0, 1}


def test_all_texts_in_order_with_empty_ones_at_the_end():
    batches = list(_numbered(5).in_order(2))
    assert [b.token_ids[:, 0].tolist() for b in batches] == [[0, 1], [2, 3], [4, 0]]
    assert [b.lengths.tolist() for b in batches] == [[3, 3], [3, 3], [3, 0]]
    assert not batches[-1].is_learned[1].any()


def test_held_out_text_is_at_least_one_and_not_all():
    first, last = _numbered(10).split(0.01)
    assert (len(first), len(last)) == (9, 1)
    assert last.token_ids[0, 0] == 9
    for count, fraction in ((1, 0.5), (4, 1.0), (4, 0.0), (4, 0.99)):
        with pytest.raises(ValueError, match="leaves none"):
            _numbered(count).split(fraction)


def test_the_fingerprint_changes_with_any_token():
    one, other = _numbered(4), _numbered(4)
    assert one.fingerprint == other.fingerprint
    other.token_ids[2, 1] += 1
    assert one.fingerprint != other.fingerprint


def test_files_lines_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    lines = [{"text": "de"}, {"prompt": "x", "completion": "yz"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("  \n")
    text = data.from_files([tmp_path], _Letters(), length=6)
    rows = ["".join(map(chr, row[:n][1:])) for row, n in zip(text.token_ids, text.lengths)]
    assert rows == ["abc", "de", "xyz"]
    assert text.is_learned[2].tolist() == [False, False, True, True, False, False]
    assert str(tmp_path) in text.source


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": 3}', 'line 1: expected an object with "text"'),
        ("a.jsonl", b'{"text": "ok"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b'["text"]', "expected an object"),
        ("a.txt", b"\xff\xfe", "is not text in UTF-8"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.from_files([tmp_path / name], _Letters(), length=6)


def test_one_path_and_lines_with_other_separators(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    for given in (path, str(path), [path]):
        text = data.from_files(given, _Letters(), length=8)
        assert text.lengths.tolist() == [6]


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        data.from_files([tmp_path / "absent"], _Letters())


def test_a_target_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TypeError, match="token ids to from_token_ids"):
        data.from_files(tmp_path, None)
