"""Loads a tokenizer.json after checks that the `tokenizers` library does not make.

The library is written in Rust. It reports most invalid content; some content makes it panic,
which Python sees as an exception outside Exception; and some exhausts memory or ends the
process. This module looks for the last kind before the library sees the file.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from specjax.runtime.model_files import MAX_JSON_BYTES, find_file, parse_object, read_bytes

# Most times that a pipeline may lengthen a text, after every stage. Published pipelines
# stay below 200 (NFKC writes one character as up to 18).
MAX_GROWTH = 2**14
_MAX_STAGES = 256
_MAX_DEPTH = 64  # of stages within stages
_MAX_SPECIAL_TOKENS = 1024  # that a post-processor adds to one text
_MAX_PREPENDED_CHARS = 256
_MIN_TRIE_BYTES = 1024  # of a precompiled_charsmap
# The class that a panic of Rust has in Python; no module exports it.
PANIC = "PanicException"

# Keys of the lists of a pipeline's stages, and the factor by which a type of stage may
# lengthen a text; stages of other types write about as much as they read.
_STAGE_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_GROWTH = {
    "NFKC": 18, "NFKD": 18, "NFC": 4, "NFD": 4, "Lowercase": 2, "BertNormalizer": 24,
    "ByteLevel": 4, "Metaspace": 2, "WordPiece": 2, "BPEDecoder": 2, "CTC": 2,
}  # fmt: skip
# Files of tokenizers in other forms, of each of which one is enough.
_OTHER_FORMS = (
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tekken.json",),
)
_PROBES = ("a", "Ab 1, \u4f60\n", "")


def load(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a file, without its padding and truncation.

    Raises:
      ValueError: the file is not one that the library can use safely.
    """
    text = read_bytes(path, MAX_JSON_BYTES)
    check(parse_object(text, str(path)), str(path))
    with errors_as_value_error(f"{path} cannot be read"):
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    for probe in _PROBES:
        _probe(tokenizer, probe, path)
    return tokenizer


def refuse_other_forms(folder: Path) -> None:
    """Raises ValueError for a folder whose tokenizer is in another form than tokenizer.json."""
    for names in _OTHER_FORMS:
        if all(find_file(folder, name) for name in names):
            raise ValueError(
                f"{folder} has a tokenizer as {' and '.join(names)}, and no tokenizer.json, which "
                "is what specjax reads. Write it with transformers (pip install transformers "
                f"sentencepiece protobuf): AutoTokenizer.from_pretrained({str(folder)!r})"
                f".save_pretrained({str(folder)!r}). Or move {names[0]} away, and give prompts as "
                "token ids."
            )


@contextlib.contextmanager
def errors_as_value_error(what: str) -> Iterator[None]:
    """Context that turns all errors of the library, panics included, into ValueError."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise ValueError(
            f"{what} ({type(error).__name__}: {str(error)[:300]}); fetch tokenizer.json again."
        ) from error


def is_library_error(error: BaseException) -> bool:
    """Returns whether this is an error or a panic, not a request to exit."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def check(document: dict[str, Any], source: str) -> None:
    """Raises ValueError for a tokenizer that would use up memory or end the process.

    Args:
      document: the contents of a tokenizer.json.
      source: what messages begin with.
    """
    encoding = [*_stages(document.get("normalizer"))]
    encoding += _stages(document.get("pre_tokenizer"))
    decoding = [*_stages(document.get("decoder"))]
    for name, stages in (("encoding", encoding), ("decoding", decoding)):
        try:
            growth = math.prod(map(_growth, stages))
        except ValueError as error:
            raise ValueError(f"{source}: {error}; fetch the file again.") from error
        if growth > MAX_GROWTH or len(stages) > _MAX_STAGES:
            raise ValueError(
                f"{source}: {name} has {len(stages)} stages that may make a text "
                f"{growth:.3g} times as long, and at most {_MAX_STAGES} and "
                f"{MAX_GROWTH} are allowed; the file is broken or hostile."
            )
    for stage in _stages(document.get("post_processor")):
        _check_template(stage, source)


def _stages(stage: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the stages of a pipeline in order, including those of nested pipelines."""
    if not isinstance(stage, dict):
        return  # the library says what it expects
    if depth > _MAX_DEPTH:
        raise ValueError("stages of tokenizer.json are nested too deep.")
    inner = [each for key in _STAGE_LISTS for each in _as_list(stage.get(key))]
    for each in inner:
        yield from _stages(each, depth + 1)
    if not inner:
        yield stage


def _growth(stage: dict[str, Any]) -> float:
    """Returns the factor by which a stage may lengthen a text."""
    kind = stage.get("type")
    # Old files name no types, and the library guesses.
    growth = _GROWTH.get(kind, 1) if isinstance(kind, str) else max(_GROWTH.values())
    content, pattern = stage.get("content"), stage.get("pattern")
    if isinstance(content, str) and isinstance(pattern, dict):
        found = pattern.get("String")
        if isinstance(found, str) and found:
            growth = max(growth, len(content) / len(found))
        elif content:
            # An expression may find nothing, before every character and at the end.
            growth = max(growth, len(content) + 1)
    prepended = stage.get("prepend")
    if isinstance(prepended, str) and len(prepended) > _MAX_PREPENDED_CHARS:
        raise ValueError(f"a normalizer prepends {len(prepended)} characters")
    if "precompiled_charsmap" in stage:
        growth = max(growth, _charsmap_growth(stage["precompiled_charsmap"]))
    return growth


def _charsmap_growth(charsmap: Any) -> int:
    """Returns the length of the longest replacement in a table of SentencePiece.

    It is the size of a trie in bytes, as 4 bytes little-endian, the trie in words of 4
    bytes, and the replacements, each ended by a zero.
    """
    try:
        table = base64.b64decode(charsmap, validate=True)
        size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or size % 4 or not _MIN_TRIE_BYTES <= size <= len(table) - 4:
            raise ValueError(f"a trie of {size} bytes in {len(table)}")
        replacements = table[4 + size :].decode("utf-8").split("\0")
    except (ValueError, TypeError) as error:
        raise ValueError(f"precompiled_charsmap is corrupt ({error})") from error
    return max(map(len, replacements))


def _check_template(stage: dict[str, Any], source: str) -> None:
    """Raises ValueError where a post-processor repeats the text, or adds too much to it."""
    pieces = _as_list(stage.get("single"))
    num_texts = sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)
    special = stage.get("special_tokens")
    values = special.values() if isinstance(special, dict) else ()
    longest = max(
        (len(_as_list(each.get("ids"))) for each in values if isinstance(each, dict)),
        default=1,
    )
    num_added = (len(pieces) - num_texts) * longest
    if num_texts > 1 or num_added > _MAX_SPECIAL_TOKENS:
        raise ValueError(
            f"{source}: the post-processor writes a text {num_texts} times and adds up "
            f"to {num_added} tokens to it, and at most 1 and {_MAX_SPECIAL_TOKENS} are "
            "allowed; the file is broken or hostile."
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _probe(tokenizer: tokenizers.Tokenizer, text: str, path: Path) -> None:
    """Raises ValueError where the tokenizer panics on any text.

    An ordinary error is accepted: a vocabulary need not cover the tried text.
    """
    try:
        tokenizer.decode(tokenizer.encode(text).ids)
    except Exception:
        return
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise ValueError(
            f"{path} cannot be used: the tokenizers library fails on {text!r} "
            f"({str(error)[:300]}); fetch the file again."
        ) from error
