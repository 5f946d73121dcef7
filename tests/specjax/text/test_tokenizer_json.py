"""tokenizer.json files that take memory, or the process, and those that only look so."""

import base64
import copy
import json

import pytest

from specjax.text import tokenizer_json

BASE = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    },
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": "b"}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 32}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
ABSENT = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def _table(size, words, replacements=b"\0"):
    """A table of SentencePiece whose trie claims `size` bytes."""
    table = size.to_bytes(4, "little") + bytes(words) + replacements
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(table).decode(),
    }


def _sequence(key, stages):
    return {"type": "Sequence", key: stages}


def _load(tmp_path, **parts):
    document = copy.deepcopy(BASE) | parts
    document["model"] = BASE["model"] | parts.get("model", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return tokenizer_json.load(tmp_path / "tokenizer.json")


def _deep(depth):
    stage = {"type": "Lowercase"}
    for _ in range(depth):
        stage = _sequence("normalizers", [stage])
    return stage


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        # These take the memory, or the process, as soon as they are used.
        ({"normalizer": _sequence("normalizers", [GROWING] * 6)}, "1.07e.09 times"),
        ({"decoder": _sequence("decoders", [GROWING] * 6)}, "decoding has 6 stages"),
        ({"normalizer": {"normalizers": [{}] * 9}}, "encoding has 9 stages"),
        (
            {"pre_tokenizer": _sequence("pretokenizers", [{"type": "ByteLevel"}] * 30)},
            "encoding has 30 stages",
        ),
        ({"normalizer": _sequence("normalizers", [{"type": "NFC"}] * 300)}, "at most"),
        (
            {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
            "prepends 1000000",
        ),
        ({"normalizer": _table(2**32 - 1, 0)}, "precompiled_charsmap is corrupt"),
        ({"normalizer": _table(1024, 1020)}, "precompiled_charsmap is corrupt"),
        ({"normalizer": _table(1024, 1024, b"x" * 99_999)}, "1e.05 times as long"),
        ({"post_processor": TWICE}, "writes a text 2 times"),
        ({"post_processor": _sequence("processors", [TWICE] * 30)}, "2 times"),
        ({"normalizer": _deep(70)}, "nested too deep"),
        # These panic: while they are read, or at the first text.
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
            "corrupt",
        ),
        ({"normalizer": _table(1024, b"\xff" * 1024)}, "cannot be used"),
        (
            {"normalizer": EMPTY, "pre_tokenizer": BYTES},
            "cannot be used.*index out of bounds",
        ),
        ({"post_processor": ABSENT}, "cannot be used|cannot be read"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot be used"),
        ({"model": {"continuing_subword_prefix": "##"}}, "PanicException"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}}, "used"),
        # These are errors of the library.
        ({"model": {"merges": [["a", "c"]]}}, "Token `c` out of vocabulary"),
        ({"model": {"vocab": {"a": 2**32}}}, "expected u32"),
        ({"model": {"vocab": {"a": -1}}}, "cannot be read"),
        ({"model": {"type": "X"}}, "cannot be read"),
        ({"version": 5}, "cannot be read"),
    ],
)
def test_what_is_refused(tmp_path, parts, message, capfd):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, **parts)
    capfd.readouterr()  # the library writes where it panicked


@pytest.mark.parametrize(
    "normalizer",
    [
        _sequence(
            "normalizers",
            [
                {"type": "NFKC"},
                {"type": "Lowercase"},
                {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        ),
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
         "strip_accents": None, "lowercase": True},
        _deep(40),
    ],
)  # fmt: skip
def test_what_is_published_is_read(tmp_path, normalizer):
    tokenizer = _load(tmp_path, normalizer=normalizer)
    assert tokenizer.encode("ab").ids == [2]


def test_a_vocabulary_need_not_cover_every_text(tmp_path):
    model = {"type": "WordLevel", "unk_token": "nothing", "vocab": {"a": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | {"model": model}))
    assert tokenizer_json.load(tmp_path / "tokenizer.json").encode("a").ids == [0]


def test_padding_and_truncation_are_switched_off_before_a_text_is_tried(tmp_path):
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0}
    padding |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst"}
    tokenizer = _load(tmp_path, padding=padding, truncation=truncation | {"stride": 9})
    assert tokenizer.encode("ab").ids == [2]
