"""tokenizer.json files: what is refused before the library reads them, and what is read."""

import base64
import copy
import json
from unittest import mock

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
LOWER = {"type": "Lowercase"}
PREPEND = {"type": "Prepend", "prepend": "xxx"}
THRICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaa"}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
WITH_ONE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "a", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"a": {"id": "a", "ids": [0, 1], "tokens": ["a", "b"]}},
}


def _table(num_bytes, replacement):
    """A table of SentencePiece with a trie of zeros."""
    table = num_bytes.to_bytes(4, "little") + bytes(num_bytes) + replacement + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


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
    ("limit", "most", "parts", "message"),
    [
        ("MAX_GROWTH", 8, {"normalizer": _sequence("normalizers", [THRICE] * 2)}, "9 times"),
        ("MAX_GROWTH", 8, {"decoder": _sequence("decoders", [THRICE] * 2)}, "decoding has 2"),
        ("MAX_GROWTH", 8, {"pre_tokenizer": _sequence("pretokenizers", [BYTES] * 2)}, "16 times"),
        ("MAX_GROWTH", 8, {"normalizer": {"type": "NFKC"}}, "18 times"),
        ("MAX_GROWTH", 8, {"normalizer": {"normalizers": [{}]}}, "24 times"),
        ("MAX_GROWTH", 3, {"normalizer": _table(1024, b"xxxx")}, "4 times"),
        ("_MAX_STAGES", 2, {"normalizer": _sequence("normalizers", [LOWER] * 3)}, "has 3 stages"),
        ("_MAX_DEPTH", 2, {"normalizer": _deep(3)}, "nested too deep"),
        ("_MAX_PREPENDED_CHARS", 2, {"normalizer": PREPEND}, "prepends 3"),
        ("_MIN_TRIE_BYTES", 2048, {"normalizer": _table(1024, b"")}, "charsmap is corrupt"),
        ("_MAX_SPECIAL_TOKENS", 1, {"post_processor": WITH_ONE}, "adds up to 2 tokens"),
    ],
)  # fmt: skip
def test_what_grows_past_a_limit_is_refused(tmp_path, monkeypatch, limit, most, parts, message):
    """The library has no such limits: pipelines can be written that take all memory (0.23)."""
    if "{}" not in str(parts):  # which the library refuses
        assert _load(tmp_path, **parts).encode("a").ids
    monkeypatch.setattr(tokenizer_json, limit, most)
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, **parts)


def test_a_post_processor_that_repeats_the_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="writes a text 2 times"):
        _load(tmp_path, post_processor=TWICE)


@pytest.mark.parametrize("table", ["no base64!", "AAAA", 5])
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ValueError, match="precompiled_charsmap is corrupt"):
        tokenizer_json._charsmap_growth(table)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"merges": [["a", "c"]]}}, "Token `c` out of vocabulary"),
        ({"model": {"vocab": {"a": -1}}}, "cannot be read"),
        ({"model": {"type": "X"}}, "cannot be read"),
        ({"version": 5}, "cannot be read"),
    ],
)
def test_errors_of_the_library_are_explained(tmp_path, parts, message):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, **parts)


Panic = type(tokenizer_json.PANIC, (BaseException,), {})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("from_buffer", "cannot be read"),
        ("encode", "cannot be used: the tokenizers library fails on 'a' "),
        ("decode", "cannot be used: the tokenizers library fails on 'a' "),
    ],
)
@pytest.mark.parametrize("error", [Panic, KeyboardInterrupt])
def test_a_panic_of_the_library_is_an_error(tmp_path, monkeypatch, method, message, error):
    """It is no Exception in Python and would end a server; what the user interrupts ends."""

    def fails(*_, **__):
        raise error("at line 1")

    library = mock.MagicMock()
    backend = library.Tokenizer.from_buffer.return_value
    monkeypatch.setattr(tokenizer_json, "tokenizers", library)
    monkeypatch.setattr(library.Tokenizer if method == "from_buffer" else backend, method, fails)
    expected = pytest.raises(ValueError, match=rf"{message}.*at line 1")
    with expected if error is Panic else pytest.raises(KeyboardInterrupt):
        _load(tmp_path)


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
    padding = {"strategy": {"Fixed": 5}, "direction": "Right", "pad_id": 0}
    padding |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst"}
    tokenizer = _load(tmp_path, padding=padding, truncation=truncation | {"stride": 0})
    assert tokenizer.encode("ab").ids == [2]
