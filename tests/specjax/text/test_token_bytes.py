"""What tokens stand for, in each way in which tokenizer.json spells them."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specjax.text.token_bytes import Meaning, meanings
from specjax.text.tokenization import Tokenizer


def tokenizer(tokens, decoder=None, special=(), added=()):
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token) for token in special])
    backend.add_tokens([AddedToken(token) for token in added])
    return Tokenizer(backend)


def texts(*arguments):
    return [meaning.text for _, meaning in sorted(meanings(tokenizer(*arguments)).items())]


def test_byte_level_tokens_are_bytes():
    everything = pre_tokenizers.ByteLevel.alphabet()
    assert len(everything) == 256
    found = texts(sorted(everything), decoders.ByteLevel())
    assert sorted(found) == [bytes([byte]) for byte in range(256)]
    assert texts(["Ġthe", "Ċ", "Ã¤"], decoders.ByteLevel()) == [b" the", b"\n", "ä".encode()]


def test_byte_level_spells_what_the_library_decodes():
    every = tokenizer(["Ġthe", "Ċ", "Ã¤", "!"], decoders.ByteLevel())
    decoded = [every.decode([i]).encode() for i in range(4)]
    assert decoded == [meaning.text for _, meaning in sorted(meanings(every).items())]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(),
    ],
    ids=["fallback", "metaspace"],
)
def test_sentence_piece_writes_spaces_and_bytes_in_its_own_way(decoder):
    tokens = ["▁the", "<0x0A>", "<0xe4>", "ä", "<0x0A>x"]
    assert texts(tokens, decoder) == [b" the", b"\n", b"\xe4", "ä".encode(), b"<0x0A>x"]


def test_other_tokens_are_their_spelling():
    assert texts(["Ġthe", "▁the", "<0x0A>"]) == ["Ġthe".encode(), "▁the".encode(), b"<0x0A>"]


def test_added_tokens_are_spelt_plainly_and_special_ones_are_apart():
    found = meanings(tokenizer(["Ġa"], decoders.ByteLevel(), special=["<|Ġend|>"], added=["Ġb"]))
    assert found == {
        0: Meaning(b" a"),
        1: Meaning("<|Ġend|>".encode(), is_special=True),
        2: Meaning("Ġb".encode()),
    }
