"""Text that continues a text: its ids begin with no space that nobody wrote."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specjax.text.tokenization import Tokenizer

MARK = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [MARK, "a", "b", "c", MARK + "a", "ab", MARK + "ab", MARK + "b"]
MERGES = [(MARK, "a"), ("a", "b"), (MARK + "a", "b"), (MARK, "b")]
FUSED = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA = decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 0)])


def _bpe(normalizer=None, pre_tokenizer=None, decoder=LLAMA) -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    model = models.BPE(vocab, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return _finished(model, normalizer, pre_tokenizer, decoder)


def _unigram(normalizer=None, pre_tokenizer=None) -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -5.0) for piece in "abc\n")]
    pieces += [(MARK, -4.0), (MARK + "a", -3.0), (MARK + "ab", -3.5), (MARK + "b", -3.0)]
    decoder = decoders.Metaspace(prepend_scheme="always")
    return _finished(models.Unigram(pieces, 0, False), normalizer, pre_tokenizer, decoder)


def _finished(model, normalizer, pre_tokenizer, decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    backend.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def _byte_level(add_prefix_space: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({"<s>": 0, **{piece: 1 + i for i, piece in enumerate(alphabet)}}, [])
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return _finished(model, None, bytes_, decoders.ByteLevel())


def _metaspace(scheme: str, **options):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, **options)


DUMMY_PREFIX = [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
KINDS = {
    "Prepend": lambda: _bpe(normalizers.Sequence(DUMMY_PREFIX)),
    "Prepend alone": lambda: _bpe(normalizers.Prepend(MARK), _metaspace("never", split=False)),
    "Metaspace first": lambda: _bpe(pre_tokenizer=_metaspace("first", split=False)),
    "Metaspace always": lambda: _bpe(pre_tokenizer=_metaspace("always", split=False)),
    "Metaspace, splitting": lambda: _unigram(pre_tokenizer=_metaspace("always")),
    "behind NFKC": lambda: _unigram(normalizers.NFKC(), _metaspace("first")),
    "ByteLevel": lambda: _byte_level(add_prefix_space=True),
    "no prefix": lambda: _byte_level(add_prefix_space=False),
    "no prefix, Metaspace": lambda: _bpe(
        pre_tokenizer=_metaspace("never", split=False), decoder=decoders.Sequence(FUSED)
    ),
}
TEXTS = [
    "\nab",
    "ab",
    "a b",
    " ab",
    "  ab",
    "b\n",
    "c",
    " ",
    "",
    "\n\n a",
    "</s>",
    "a</s>b",
    " </s> a",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_and_more_of_it_are_one_text(kind):
    tokenizer = KINDS[kind]()
    for before in ("ab", "ab ", "a\n"):
        for more in TEXTS:
            ids = [*tokenizer.encode(before), *tokenizer.encode_more(more)]
            whole = tokenizer.encode(before + more)
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert text == tokenizer.decode(whole, skip_special_tokens=False), (before, more)


def test_ids_of_what_continues():
    tokenizer = KINDS["Prepend"]()
    tokens = lambda text: [tokenizer.backend.id_to_token(i) for i in tokenizer.encode_more(text)]
    assert tokens("ab") == ["ab"]
    assert tokens(" ab") == [MARK + "ab"]
    assert tokens("\na") == ["<0x0A>", "a"]
    # As within one text, there is a space after a special token.
    assert tokens("a</s>a") == ["a", "</s>", MARK + "a"]
    assert tokens("</s>a") == ["</s>", MARK + "a"]
    first = KINDS["Metaspace first"]()
    assert first.encode_more("a</s>a") == [first.token_id(piece) for piece in ("a", "</s>", "a")]


def test_words_that_are_split_at_whitespace_keep_their_spaces():
    """As T5: only the space before each word says that it is one."""
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace("always")])
    tokenizer = _unigram(pre_tokenizer=words)
    for before, more, text in (
        ("ab", " a b", "ab a b"),
        ("ab", "a b", "aba b"),
        ("ab", "b \n a ", "abb a"),
        ("ab", "\n", "ab"),
        ("ab", "", "ab"),
    ):
        ids = [*tokenizer.encode(before), *tokenizer.encode_more(more)]
        assert tokenizer.decode(ids) == text


def test_an_unknown_word_is_no_added_token():
    """Nor is the space before a text, where the vocabulary has none."""
    pieces = [("<unk>", 0.0), *((piece, -5.0) for piece in "ab"), ("<s>", 0.0)]
    model = models.Unigram(pieces, 0, False)
    tokenizer = _finished(model, None, _metaspace("always"), decoders.Metaspace())
    tokenizer.backend.add_special_tokens(["<unk>"])
    ids = tokenizer.encode_more("a?b")
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["a", "<unk>", "b"]


def test_errors_are_those_of_every_text():
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        KINDS["Prepend"]().encode_more("a\ud800")
