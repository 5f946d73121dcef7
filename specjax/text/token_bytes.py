"""The bytes that tokens stand for, by which the tokens of two tokenizers are compared."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from specjax.text.tokenization import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space


class Meaning(NamedTuple):
    """What a token stands for; of two tokenizers, tokens of one meaning are the same."""

    text: bytes
    is_special: bool = False  # text that marks something, such as the end of a turn


def meanings(tokenizer: Tokenizer) -> dict[int, Meaning]:
    """Returns what each token of a tokenizer stands for, by its id.

    Tokens of byte-level BPE (GPT-2) and of SentencePiece with bytes as a fallback are spelt
    differently in their files; both become bytes. Where tokens are spelt in neither way, their
    spelling counts.
    """
    spelling = _spelling(tokenizer)
    added = tokenizer.backend.get_added_tokens_decoder()
    found = {}
    for token, token_id in tokenizer.vocabulary().items():
        if (special := added.get(token_id)) is not None:
            found[token_id] = Meaning(_utf8(token), special.special)
        else:
            found[token_id] = Meaning(spelling(token))
    return found


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Returns the function from a token, as the file spells it, to its bytes."""
    decoder = tokenizer.backend.decoder
    kinds = b"" if decoder is None else decoder.__getstate__()
    if b"ByteLevel" in kinds:
        return _byte_level
    if tokenizer.has_byte_fallback or b"Metaspace" in kinds:
        return _sentence_piece
    return _utf8


def _utf8(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _byte_level(token: str) -> bytes:
    of_character = _bytes_of_characters()
    if any(character not in of_character for character in token):
        return _utf8(token)
    return bytes(of_character[character] for character in token)


def _sentence_piece(token: str) -> bytes:
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    return _utf8(token.replace(_SPACE, " "))


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character that byte-level BPE writes for one (GPT-2, section 2.2).

    Printable bytes are written as themselves, the others as the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
