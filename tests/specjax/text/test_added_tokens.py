"""Tokens and settings of the files beside tokenizer.json."""

import json
import warnings
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specjax.text.tokenization import Tokenizer

END, START = "<|im_end|>", "<|im_start|>"


def entry(text, **flags):
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | flags
    return {"content": text, "special": True} | flags


def bytes_and_the() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are bytes, 256 to 258 parts of "the", 259 and 260 added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "th", "the", "unused"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|tool|>"])
    return backend


def written(folder, settings=(), backend=None, **files) -> Tokenizer:
    """Returns the tokenizer of a folder with these files beside tokenizer.json."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (backend or bytes_and_the()).save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": dict(settings), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def decoder(*tokens, first=261) -> dict:
    named = [entry(token) if isinstance(token, str) else token for token in tokens]
    return {"added_tokens_decoder": {str(first + i): each for i, each in enumerate(named)}}


def test_tokens_that_only_other_files_name_have_their_ids(tmp_path):
    special = {"additional_special_tokens": [START, entry(END)]}
    cases = {
        "added_tokens_decoder": dict(settings=decoder(START, END)),
        "in another order": dict(
            settings={"added_tokens_decoder": {"262": entry(END), "261": entry(START)}}
        ),
        "beside those of tokenizer.json": dict(
            settings={
                "added_tokens_decoder": {
                    "259": entry("<|endoftext|>"), "261": entry(START), "262": entry(END)
                }
            }
        ),
        "additional_special_tokens": dict(settings={"additional_special_tokens": [START, END]}),
        "extra_special_tokens": dict(settings={"extra_special_tokens": {"a": START, "b": END}}),
        "special_tokens_map.json": dict(special_tokens_map=special),
        "added_tokens.json": dict(added_tokens={END: 262, START: 261}, special_tokens_map=special),
        "both": dict(settings=decoder(START), added_tokens={END: 262}, special_tokens_map=special),
        "eos_token": dict(settings={"bos_token": START, "eos_token": END}),
    }  # fmt: skip
    for case, files in cases.items():
        tokenizer = written(tmp_path, **files)
        assert tokenizer.encode(f"{START}the{END}the") == [261, 257, 262, 257], case
        assert tokenizer.encode_more(f"the{END}") == [257, 262], case
        assert tokenizer.decode([261, 257, 262]) == "the", case
        assert tokenizer.decode([261, 257], skip_special_tokens=False) == f"{START}the", case


def test_what_is_special(tmp_path):
    tokenizer = written(tmp_path, added_tokens={"<tool>": 261})
    assert tokenizer.encode("the<tool>") == [257, 261]
    assert tokenizer.decode([257, 261]) == "the<tool>"
    plain = entry("<call>", special=False)
    tokenizer = written(tmp_path, decoder(plain))
    assert tokenizer.decode([257, 261]) == "the<call>"
    tokenizer = written(tmp_path, decoder(plain) | {"eos_token": "<call>"})
    assert (tokenizer.eos_token_id, tokenizer.decode([257, 261])) == (261, "the")
    # A token of the model's vocabulary that is named special is an added one, with its id.
    tokenizer = written(tmp_path, {"eos_token": "unused"})
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (258, 261)
    assert tokenizer.encode("theunused") == [257, 258]
    assert tokenizer.decode([257, 258]) == "the"


def test_files_that_disagree_are_warned_of_and_tokenizer_json_holds(tmp_path):
    cases = {
        "is 'the' of": decoder(END, first=257),
        "is '<|tool|>' of": decoder(END, first=260),
        "follows 260, the last of": decoder(END, first=265),
        "'<|tool|>' has id 261, and 260 elsewhere": decoder("<|tool|>"),
        "has id 300, and 257 elsewhere": decoder("the", first=300),
    }
    for match, settings in cases.items():
        with pytest.warns(UserWarning, match="tokenizer_config.json and tokenizer.json") as told:
            tokenizer = written(tmp_path, settings)
        assert match in str(told[0].message), match
        assert len(told) == 1, match
        assert tokenizer.vocab_size == 261, match
        assert tokenizer.encode("the<|tool|>") == [257, 260], match
        assert tokenizer.token_id(END) is None, match
    with pytest.warns(UserWarning, match="added_tokens.json and .* has id 262, and 261 elsewhere"):
        assert written(tmp_path, decoder(END), added_tokens={END: 262}).token_id(END) == 261
    with pytest.warns(
        UserWarning, match=f"{START!r} has id 261, which is {END!r}".replace("|", ".")
    ):
        written(tmp_path, decoder(END), added_tokens={START: 261})
    with pytest.warns(UserWarning, match=r"added_tokens.json and .*; and 2 more\. tokenizer"):
        written(tmp_path, added_tokens={f"<{i}>": i for i in range(100, 105)})


def test_flags_of_added_tokens(tmp_path):
    """Those of added_tokens_decoder hold; a role makes a token special, and nothing unmakes it."""
    said = {"content": "<|tool|>", "special": False, "lstrip": True, "rstrip": True}
    with pytest.warns(UserWarning, match=r"say differently how <\|tool\|> are found .*rstrip"):
        tokenizer = written(tmp_path, {"added_tokens_decoder": {"260": said}})
    assert tokenizer.encode("the  <|tool|>  the") == [257, 260, 257]
    assert tokenizer.decode([257, 260]) == "the"
    assert 260 in tokenizer.special_texts
    # added_tokens.json says ids, and no flags.
    flagged = bytes_and_the()
    flagged.add_tokens([tokenizers.AddedToken("<call>", rstrip=True, normalized=False)])
    same = {"content": "<call>", "rstrip": True, "normalized": False}
    for settings in ({}, {"added_tokens_decoder": {"261": same}}):
        tokenizer = written(tmp_path, settings, flagged, added_tokens={"<call>": 261})
        assert tokenizer.encode("<call>  the") == [261, 257]
    plain = bytes_and_the()
    plain.add_tokens(["<call>"])
    for settings, text in (
        ({}, "the<call>"),
        ({"eos_token": "<call>"}, "the"),
        ({"additional_special_tokens": ["<call>"]}, "the<call>"),
    ):
        tokenizer = written(tmp_path, settings, plain)
        assert tokenizer.decode([257, 261]) == text
        assert (261 in tokenizer.special_texts) == (text == "the")


def test_entries_that_are_no_tokens_are_refused(tmp_path):
    cases = {
        "added_tokens_decoder is": dict(settings={"added_tokens_decoder": ["a"]}),
        "'x'": dict(settings={"added_tokens_decoder": {"x": entry("a")}}),
        "'261': 'a'": dict(settings={"added_tokens_decoder": {"261": "a"}}),
        "its content": dict(settings=decoder({"content": ""})),
        "additional_special_tokens is": dict(settings={"additional_special_tokens": "ab"}),
        "a token is {'content': 3": dict(special_tokens_map={"additional_special_tokens": [3]}),
        "a is -1, expected an id": dict(added_tokens={"a": -1}),
        "a is True, expected an id": dict(added_tokens={"a": True}),
    }
    for match, files in cases.items():
        with pytest.raises(ValueError, match="fetch the file again") as error:
            written(tmp_path, **files)
        assert match in str(error.value), match


def sentence_piece(scheme=None) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("\u2581", "a")])
    backend = tokenizers.Tokenizer(model)
    if scheme is None:
        prepend = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(prepend)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
    backend.decoder = decoders.Metaspace()
    return backend


ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}


def test_settings_that_tokenizer_json_does_not_do_are_warned_of(tmp_path):
    right = [
        (sentence_piece, ROLES | {"add_bos_token": False}, "puts '<s>' before a text"),
        (sentence_piece, ROLES | {"add_eos_token": True}, "puts no token after a text"),
        (bytes_and_the, {"add_bos_token": True}, "puts no token before a text"),
        (sentence_piece, ROLES | {"add_prefix_space": False}, "puts a space before a text"),
        (bytes_and_the, {"add_prefix_space": True}, "puts no space before a text"),
        (sentence_piece, ROLES | LLAMA | {"legacy": False}, "puts a space before text that"),
        (sentence_piece, ROLES | LLAMA, "does not say legacy, false in .* puts a space"),
        (lambda: sentence_piece("first"), ROLES | LLAMA | {"legacy": True}, "no space before text"),
        (unigram, {"clean_up_tokenization_spaces": True}, "has no such step"),
        (bytes_and_the, {"split_special_tokens": True}, "makes one token"),
    ]  # fmt: skip
    for backend, settings, match in right:
        with pytest.warns(UserWarning, match=match) as told:
            written(tmp_path, settings, backend())
        assert len(told) == 1, settings


def test_settings_that_agree_are_not_warned_of(tmp_path):
    quiet = [
        (sentence_piece, ROLES | {"add_bos_token": True, "add_eos_token": False}),
        (sentence_piece, ROLES | LLAMA | {"legacy": True, "add_prefix_space": True}),
        (sentence_piece, ROLES | LLAMA | {"legacy": True, "add_prefix_space": None}),
        (sentence_piece, ROLES | {"legacy": False, "tokenizer_class": "TokenizersBackend"}),
        (sentence_piece, ROLES | LLAMA, {"model_type": "mistral"}),
        (lambda: sentence_piece("first"), ROLES | LLAMA | {"legacy": False}),
        (bytes_and_the, {"add_bos_token": False, "add_prefix_space": False}),
        # As transformers 5.24, which does not clean up the spaces of BPE.
        (bytes_and_the, {"clean_up_tokenization_spaces": True, "split_special_tokens": False}),
        # The end of one text is the beginning of the next.
        (bytes_and_the, {"bos_token": "the", "eos_token": "the", "add_bos_token": True}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend, settings, *config in quiet:
            files = {"config": config[0]} if config else {}
            written(tmp_path, settings, backend(), **files)


@pytest.mark.parametrize(
    "names",
    [["tokenizer.model"], ["spiece.model"], ["vocab.json", "merges.txt"], ["tekken.json"]],
    ids=" ".join,
)
def test_a_tokenizer_in_another_form_is_refused_by_name(tmp_path, names):
    for name in names:
        assert Tokenizer.from_folder(tmp_path) is None
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"{' and '.join(names)}, and no tokenizer.json") as error:
        Tokenizer.from_folder(tmp_path)
    assert "AutoTokenizer.from_pretrained" in str(error.value)
    bytes_and_the().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).vocab_size == 261


# Rows of the table in docs/two-places.md, with the tests of each.
_SETTING = (
    test_settings_that_tokenizer_json_does_not_do_are_warned_of,
    test_settings_that_agree_are_not_warned_of,
)
ROWS = {
    "added tokens": (
        test_tokens_that_only_other_files_name_have_their_ids,
        test_files_that_disagree_are_warned_of_and_tokenizer_json_holds,
    ),
    "tokens around a text": _SETTING,
    "a space before a text": _SETTING,
    "a space after a special token": _SETTING,
    "spaces before punctuation": _SETTING,
    "special tokens in a text": _SETTING,
    "flags of an added token": (test_flags_of_added_tokens,),
    "a role of a token that is not special": (test_flags_of_added_tokens,),
    "forms of a tokenizer": (test_a_tokenizer_in_another_form_is_refused_by_name,),
}


def test_the_table_has_these_rows():
    docs = Path(__file__).parents[3] / "docs" / "two-places.md"
    table = docs.read_text().partition("## Tokenizers")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    others = {row for row in rows if "template" in row}  # in test_chat_arguments
    assert sorted({*rows} - others) == sorted(["fact", *ROWS])
