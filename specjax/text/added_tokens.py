"""Tokens that the files beside tokenizer.json name, and what they say of it that does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from specjax.text.continuing import puts_space_before
from specjax.text.tokenizer_json import errors_as_value_error

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER = "added_tokens_decoder"
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _Named(NamedTuple):
    """A token that a file names."""

    token: tokenizers.AddedToken
    token_id: int | None  # None: no file says it
    source: str


def add_missing(
    backend: tokenizers.Tokenizer,
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    special_tokens: Mapping[str, str],
) -> list[str]:
    """Adds the tokens that a folder's files name and its tokenizer lacks, as transformers does.

    Tokens have the ids that added_tokens_decoder or added_tokens.json say. Others are numbered
    after the last token. A token of the model's vocabulary that the files name special becomes an
    added one, with its id. Of one that is added already the flags of added_tokens_decoder hold; it
    stays special, and a role makes it so.

    Args:
      backend: modified.
      files: contents of SETTINGS, SPECIAL and ADDED, empty where there is no file.
      special_tokens: the texts of "bos_token", ....

    Returns:
      What the files say that contradicts tokenizer.json, which holds then.

    Raises:
      ValueError: an entry of the files is no token, or the library refuses one.
    """
    roles = set(special_tokens.values())
    named = [*_with_ids(folder, files, roles)]
    named += _without_ids(folder, files, special_tokens.values())
    own = backend.get_added_tokens_decoder()
    last = max(backend.get_vocab_size(with_added_tokens=False) - 1, *own, 0)
    new: dict[str, tokenizers.AddedToken] = {}
    placed: dict[str, int] = {}  # ids of new ones
    names: dict[int, str] = {}  # new ones by id
    differ: dict[str, list[str]] = {}
    changed: list[str] = []
    for token, token_id, source in named:
        text = token.content
        here = placed.get(text, backend.token_to_id(text))
        if here is None:
            taken = None if token_id is None else names.get(token_id, backend.id_to_token(token_id))
            if token_id is None or (taken is None and token_id == last + 1):
                last += 1
                new[text], placed[text], names[last] = token, last, text
            else:
                what = f"follows {last}, the last" if taken is None else f"is {taken!r}"
                said = f"{text!r} has id {token_id}, which {what} of tokenizer.json"
                differ.setdefault(source, []).append(said)
        elif token_id not in (None, here):
            said = f"{text!r} has id {token_id}, and {here} elsewhere"
            differ.setdefault(source, []).append(said)
        elif here not in own:
            new.setdefault(text, token)
        else:
            have = own[here]
            # Of the files beside it added_tokens_decoder alone says flags.
            wanted = token if source == SETTINGS and token_id is not None else have
            if _flags(have)[:-1] != _flags(wanted)[:-1]:
                changed.append(text)
            flags = *_flags(wanted)[:-1], have.special or wanted.special or text in roles
            if _flags(have) != flags:
                new.setdefault(text, tokenizers.AddedToken(text, **dict(zip(_FLAGS, flags))))
    with errors_as_value_error(f"{folder}: its added tokens cannot be used"):
        backend.add_tokens([*new.values()])
    return _notes(folder, differ, changed)


def _notes(folder: Path, differ: Mapping[str, list[str]], changed: list[str]) -> list[str]:
    """Returns what there is to say of tokens whose ids differ, by file, and of changed flags."""
    notes = [
        f"{folder}/{source} and tokenizer.json differ: {_first(said)}. tokenizer.json is used; "
        "correct the other file, or fetch both again."
        for source, said in differ.items()
    ]
    if changed:
        notes.append(
            f"{folder}/{SETTINGS} and tokenizer.json say differently how {_first(changed)} are "
            f"found in text ({', '.join(_FLAGS[:-1])}). The former is used."
        )
    return notes


def _first(texts: list[str]) -> str:
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _with_ids(folder: Path, files: Mapping[str, Any], named: set[str]) -> Iterator[_Named]:
    """Yields the tokens whose ids files say, in their order."""
    decoder, added = files[SETTINGS].get(_DECODER) or {}, files[ADDED]
    if not isinstance(decoder, Mapping):
        raise _wrong(folder, SETTINGS, _DECODER, decoder, "an object from id to token")
    said, others = [], []
    for key, entry in decoder.items():
        if not (key.isascii() and key.isdigit()) or not isinstance(entry, Mapping):
            raise _wrong(folder, SETTINGS, _DECODER, {key: entry}, "an object from id to token")
        said.append(_Named(_token(folder, SETTINGS, entry, named), int(key), SETTINGS))
    named = named | {token.content for token in _extra(folder, files)}
    for text, token_id in added.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _wrong(folder, ADDED, text, token_id, "an id")
        entry = {"content": text, "special": text in named}
        others.append(_Named(_token(folder, ADDED, entry), token_id, ADDED))
    yield from sorted([*said, *others], key=lambda each: each.token_id or 0)


def _without_ids(folder: Path, files: Mapping[str, Any], texts: Iterable[str]) -> Iterator[_Named]:
    """Yields special tokens that have an id only if another file says it."""
    for text in texts:
        yield _Named(_token(folder, SETTINGS, {"content": text, "special": True}), None, SETTINGS)
    for token in _extra(folder, files):
        yield _Named(token, None, SETTINGS)


def _extra(folder: Path, files: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yields the special tokens beside those of a role."""
    for source in (SETTINGS, SPECIAL):
        for key in _EXTRA:
            given = files[source].get(key) or ()
            given = [*given.values()] if isinstance(given, Mapping) else given
            if not isinstance(given, list | tuple):
                raise _wrong(folder, source, key, given, "a list of tokens")
            for entry in given:
                entry = entry if isinstance(entry, Mapping) else {"content": entry}
                yield _token(folder, source, {**entry, "special": True})


def _token(
    folder: Path, source: str, entry: Mapping[str, Any], special: Iterable[str] = ()
) -> tokenizers.AddedToken:
    """Returns the token of an entry; special tokens are looked for in text as it is written."""
    text = entry.get("content")
    if not isinstance(text, str) or not text:
        raise _wrong(folder, source, "a token", dict(entry), "an object with its content, a text")
    flags = {name: entry[name] is True for name in _FLAGS if name in entry}
    flags["special"] = flags.get("special", False) or text in special
    flags.setdefault("normalized", not flags["special"])
    return tokenizers.AddedToken(text, **flags)


def _flags(token: tokenizers.AddedToken) -> tuple[bool, ...]:
    return tuple(getattr(token, name) for name in _FLAGS)


def _wrong(folder: Path, source: str, key: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{folder}/{source}: {key} is {str(value)[:100]}, expected {expected}; fetch the file "
        "again."
    )


def settings_that_do_not_hold(
    backend: tokenizers.Tokenizer,
    folder: Path,
    settings: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    model_type: Any,
) -> list[str]:
    """Returns what tokenizer_config.json says of encoding that tokenizer.json does not do.

    tokenizer.json holds, as in transformers 5.24 where that takes a tokenizer of no special class.

    Args:
      model_type: of config.json, None where there is none.
    """
    notes = []
    says = lambda key: f"says {key}: {str(settings[key]).lower()}"
    say = lambda said, does: notes.append(
        f"{folder}/{SETTINGS} {said}, and tokenizer.json {does}. tokenizer.json is used."
    )
    around = _around_a_text(backend)
    bos, eos = (special_tokens.get(name) for name in ("bos_token", "eos_token"))
    is_clear = bos != eos or bos is None
    for key, token, ids, where in (
        ("add_bos_token", bos, around[:1], "before"),
        ("add_eos_token", eos, around[-1:], "after"),
    ):
        does = token is not None and ids == [backend.token_to_id(token)]
        if isinstance(settings.get(key), bool) and is_clear and does != settings[key]:
            say(says(key), f"puts {repr(token) if does else 'no token'} {where} a text")
    scheme = puts_space_before(backend)
    if settings.get("add_prefix_space") is (scheme is None):
        say(says("add_prefix_space"), f"puts {'no' if scheme is None else 'a'} space before a text")
    is_llama = str(settings.get("tokenizer_class")).startswith("LlamaTokenizer")
    is_llama = is_llama and model_type in (None, "llama")
    if is_llama and scheme and bool(settings.get("legacy")) is (scheme == "first"):
        is_said = settings.get("legacy") is not None
        said = says("legacy") if is_said else "does not say legacy, false in LlamaTokenizer"
        other = "no" if scheme == "first" else "a"
        say(said, f"puts {other} space before text that follows a special token")
    if settings.get("clean_up_tokenization_spaces") is True and not isinstance(
        backend.model, tokenizers.models.BPE
    ):
        say(says("clean_up_tokenization_spaces"), "has no such step: spaces before . , ? ! stay")
    if settings.get("split_special_tokens") is True:
        say(says("split_special_tokens"), "makes one token of a special token's text")
    return notes


def _around_a_text(backend: tokenizers.Tokenizer) -> list[int]:
    """Returns the ids that the post-processor adds to an empty text."""
    with errors_as_value_error("an empty text cannot be encoded"):
        return backend.encode("", add_special_tokens=True).ids
