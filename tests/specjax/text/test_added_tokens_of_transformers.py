"""What transformers does with each row of the table of tokenizers in docs/two-places.md."""

import contextlib
import json
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from test_added_tokens import (
    END,
    ROLES,
    START,
    bytes_and_the,
    decoder,
    entry,
    sentence_piece,
)
from tokenizers import models, pre_tokenizers

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]  # theirs
DOCS = Path(__file__).parents[3] / "docs" / "two-places.md"
TOOL = "<|tool|>"  # token 260, the last of bytes_and_the


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


@pytest.fixture
def made(tmp_path):
    """Returns a function of settings, other files and the model's type that gives a tokenizer.

    One of a model of Granite is of no special class.
    """
    from transformers import AutoTokenizer

    def make(settings=(), files=(), backend=bytes_and_the, model="granite"):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if backend is not None:
            backend().save(str(folder / "tokenizer.json"))
        own = {"config.json": {"model_type": model}, "tokenizer_config.json": dict(settings)}
        for name, content in {**own, **dict(files)}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return AutoTokenizer.from_pretrained(folder)

    return make


def test_every_row_is_tested(transformers):
    table = DOCS.read_text().partition("## Tokenizers")[2].partition("\n## ")[0]
    facts = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(facts) == sorted(["fact", *ROWS, *ENCODED, *TEMPLATES])


# Texts and the tokens that they become.

THE, SPACE_THE = ["the"], ["Ġ", "the"]
LLAMA = ROLES | {"tokenizer_class": "LlamaTokenizer"}
NO_SPACE, SPACE = {"add_prefix_space": False}, {"add_prefix_space": True}
SAYS_NO, SAYS_YES = LLAMA | {"legacy": False}, LLAMA | {"legacy": True}
FIRST = partial(sentence_piece, "first")
SPACE_AFTER, NONE_AFTER = ["▁a", "<s>", "▁a"], ["▁a", "<s>", "a"]
ENCODED = {
    "tokens around a text": [
        (sentence_piece, "granite", ROLES | {"add_bos_token": False}, "a", ["<s>", "▁a"]),
        (sentence_piece, "granite", ROLES | {"add_eos_token": True}, "a", ["<s>", "▁a"]),
        (bytes_and_the, "granite", {"bos_token": TOOL, "add_bos_token": True}, "the", THE),
    ],
    "a space before a text": [
        (sentence_piece, "granite", ROLES | NO_SPACE, "a", ["<s>", "▁a"]),
        (sentence_piece, "llama", ROLES | NO_SPACE, "a", ["<s>", "▁a"]),
        (sentence_piece, "llama", LLAMA | NO_SPACE, "a", ["<s>", "a"]),
        (sentence_piece, "granite", SAYS_YES, " a", ["<s>", "▁", "▁a"]),
        (sentence_piece, "llama", SAYS_YES, " a", ["<s>", "▁a"]),
        (bytes_and_the, "granite", SPACE, "the", THE),
        (bytes_and_the, "gpt2", SPACE, "the", SPACE_THE),
        (bytes_and_the, "qwen2", SPACE, "the", SPACE_THE),
    ],
    "a space after a special token": [
        (sentence_piece, "llama", SAYS_NO, "a<s>a", ["<s>", *NONE_AFTER]),
        (sentence_piece, "llama", LLAMA, "a<s>a", ["<s>", *NONE_AFTER]),
        (sentence_piece, "llama", ROLES, "a<s>a", ["<s>", *SPACE_AFTER]),
        (sentence_piece, "mistral", SAYS_NO, "a<s>a", ["<s>", *SPACE_AFTER]),
        (FIRST, "llama", SAYS_YES, "a<s>a", ["<s>", *SPACE_AFTER]),
        (FIRST, "mistral", SAYS_YES, "a<s>a", ["<s>", *NONE_AFTER]),
    ],
    "special tokens in a text": [
        (bytes_and_the, "granite", {}, TOOL, [TOOL]),
        (bytes_and_the, "granite", {"split_special_tokens": True}, TOOL, [*TOOL]),
    ],
}


@pytest.mark.parametrize("fact", ENCODED)
def test_tokens(made, fact):
    for backend, model, settings, text, expected in ENCODED[fact]:
        found = made(settings, backend=backend, model=model)
        assert found.convert_ids_to_tokens(found.encode(text)) == expected


def test_spaces_before_punctuation(made):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, ".": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    clean = {"clean_up_tokenization_spaces": True}
    assert made({}, backend=lambda: words).decode([0, 1]) == "a ."
    assert made(clean, backend=lambda: words).decode([0, 1]) == "a."
    found = made(clean)
    assert found.decode(found.encode("the .")) == "the ."


def test_forms_of_a_tokenizer(made):
    files = {"vocab.json": {"b": 0, "a": 1}, "merges.txt": "#version: 0.2\n"}
    for model in ("granite", "gpt2"):
        assert made({}, files, model=model).encode("the") == [257]
    assert made({}, files, backend=None, model="gpt2").encode("ab") == [1, 0]


def test_added_tokens(made):
    both = {"additional_special_tokens": [START, END]}
    old = {"added_tokens.json": {"<z>": 90}, "special_tokens_map.json": both}
    for settings, files, expected in (
        *((decoder(START, END, first=first), {}, [START, END]) for first in (261, 300, 256)),
        (both, {}, [START, END]),
        ({"extra_special_tokens": [START, END]}, {}, [START, END]),
        ({"extra_special_tokens": {"a_token": START, "b_token": END}}, {}, [START, END]),
        ({"bos_token": START, "pad_token": END}, {}, [START, END]),
        ({}, old, ["<z>", START, END]),
        (decoder(START), old, [START]),
    ):
        found = made(settings, files).get_added_vocab()
        assert [text for text, i in found.items() if i > 260] == expected
        assert [*found.values()] == [*range(259, 261 + len(expected))]
    assert made(decoder("the", first=300)).get_added_vocab()["the"] == 257


def test_flags_of_an_added_token(made):
    token = lambda settings: made(settings).added_tokens_decoder[260]
    for flag in ("lstrip", "rstrip", "normalized", "single_word"):
        said = entry(TOOL, **{flag: True})
        assert getattr(token(decoder(said, first=260)), flag)
        assert getattr(token(decoder(said, first=300)), flag)
        assert not getattr(token({"eos_token": said | {"__type": "AddedToken"}}), flag)
    plain = made(decoder(entry(TOOL, special=False), first=260))
    assert not plain.added_tokens_decoder[260].special
    # Left out all the same, as the tokenizers library keeps a list of special tokens beside it.
    assert plain.decode([257, 260], skip_special_tokens=True) == "the"


def call():
    """Returns bytes_and_the with token 261, which is not special."""
    backend = bytes_and_the()
    backend.add_tokens(["<call>"])
    return backend


def test_a_role_of_a_token_that_is_not_special(made):
    plain = entry("<call>", special=False, normalized=True)
    for more in ({}, decoder(plain, first=261)):
        found = made({"eos_token": "<call>"} | more, backend=call)
        assert found.added_tokens_decoder[261].special
        assert found.decode([257, 261], skip_special_tokens=True) == "the"
    for settings in ({}, {"additional_special_tokens": ["<call>"]}):
        found = made(settings, backend=call)
        assert found.decode([257, 261], skip_special_tokens=True) == "the<call>"


# Chat templates: settings, files, and what is used without tools and with. None: it is refused.

JINJA, JSON = {"chat_template.jinja": "file"}, {"chat_template.json": {"chat_template": "json"}}
MORE = "additional_chat_templates/{}.jinja".format
OF_TOOLS = {MORE("tool_use"): "t"}
NAMED = {"default": "d", "tool_use": "t"}
LIST = [{"name": name, "template": text} for name, text in NAMED.items()]
ONE, LISTED, NULL = ({"chat_template": said} for said in ("one", LIST, None))
TWICE = {"chat_template": [*LIST, {"name": "default", "template": "again"}]}
TEMPLATES = {
    "a chat template": [
        *((settings, JINJA, ("file", "file")) for settings in (ONE, LISTED, NULL)),
        (NULL, {}, (None, None)),
    ],
    "chat_template.json": [
        (ONE, JSON, ("one", "one")),
        (NULL, JSON, (None, None)),
        ({}, JSON, (None, None)),
        ({}, JINJA | JSON, ("file", "file")),
    ],
    "chat templates by name": [
        (LISTED, {}, ("d", "t")),
        ({"chat_template": NAMED}, {}, ("d", "t")),
        (TWICE, {}, ("again", "t")),
        ({"chat_template": LIST[1:]}, {}, (None, "t")),
    ],
    "files of chat templates by name": [
        *((settings, OF_TOOLS, (None, "t")) for settings in ({}, ONE, LISTED)),
        *((settings, OF_TOOLS | JINJA, ("file", "t")) for settings in ({}, ONE, LISTED)),
        (LISTED, {MORE("rag"): "r"}, (None, None)),
        (ONE, {MORE("default"): "more"} | JINJA, ("more", "more")),
    ],
}


@pytest.mark.parametrize("fact", TEMPLATES)
def test_templates(made, fact):
    for settings, files, expected in TEMPLATES[fact]:
        found = made(settings, files)
        for tools, template in zip((None, [{"name": "f"}]), expected, strict=True):
            refused = pytest.raises(ValueError, match=r"no default specified|is not set")
            with contextlib.nullcontext() if template else refused:
                assert found.get_chat_template(tools=tools) == template


# Rows of the table that have a test of their own.
ROWS = {
    "added tokens": test_added_tokens,
    "flags of an added token": test_flags_of_an_added_token,
    "a role of a token that is not special": test_a_role_of_a_token_that_is_not_special,
    "spaces before punctuation": test_spaces_before_punctuation,
    "forms of a tokenizer": test_forms_of_a_tokenizer,
}
