"""Converts text to token ids and back, with the files of a Hugging Face folder."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specjax.runtime.model_files import find_file, read_optional_json
from specjax.runtime.stack_level import of_the_caller
from specjax.text import chat_template as templates
from specjax.text import tokenizer_json
from specjax.text.added_tokens import (
    ADDED,
    SETTINGS,
    SPECIAL,
    add_missing,
    settings_that_do_not_hold,
)
from specjax.text.continuing import Continuing
from specjax.text.template_files import chat_template_of
from specjax.text.tokenizer_json import is_library_error

Message = Mapping[str, Any]
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FAILED = (
    "the tokenizer cannot {} ({!s:.300}); its tokenizer.json may be of another model, or broken."
)


class Tokenizer:
    """A `tokenizers.Tokenizer` with its folder's special tokens and chat template."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ):
        """Wraps a tokenizer.

        Args:
          tokenizer: modified: padding and truncation are turned off.
          special_tokens: maps "bos_token", "eos_token", ... to the token's text.
          chat_template: a jinja template over `messages`, several by name, or None.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.backend = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """Returns the tokenizer of a folder, None when it holds none.

        Tokens that only the files beside tokenizer.json name are added. Warns of what those say
        that does not hold.

        Raises:
          ValueError: a file is corrupt, or unsafe for the tokenizers library (see
            `specjax.text.tokenizer_json`); or there is a tokenizer, and no tokenizer.json.
        """
        folder = Path(path)
        tokenizer_path = find_file(folder, "tokenizer.json")
        if tokenizer_path is None:
            tokenizer_json.refuse_other_forms(folder)
            return None
        backend = tokenizer_json.load(tokenizer_path)
        files = {name: read_optional_json(folder, name) for name in (SETTINGS, SPECIAL, ADDED)}
        # A null says nothing: the other file's value holds.
        settings = {key: value for key, value in files[SETTINGS].items() if value is not None}
        config = files[SPECIAL] | settings
        special_tokens = {
            key: text for key in _SPECIAL_TOKENS if (text := _content(folder, key, config.get(key)))
        }
        notes = add_missing(backend, folder, files, special_tokens)
        model_type = read_optional_json(folder, "config.json").get("model_type")
        notes += settings_that_do_not_hold(
            backend, folder, files[SETTINGS], special_tokens, model_type
        )
        chat_template, more = chat_template_of(folder, settings, SETTINGS)
        for note in (*notes, *more):
            warnings.warn(note, stacklevel=of_the_caller())
        return cls(backend, special_tokens=special_tokens, chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the embedding may have more rows."""
        return self.backend.get_vocab_size()

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.token_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @functools.cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts, by id, of the tokens that decoding leaves out when it skips special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that are added to the vocabulary, special ones among them."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def has_byte_fallback(self) -> bool:
        """Whether tokens named <0x00> to <0xFF> stand for bytes (SentencePiece)."""
        decoder = self.backend.decoder
        return decoder is not None and b"ByteFallback" in decoder.__getstate__()

    def token_id(self, token: str) -> int | None:
        """Returns the id of one whole token, None when the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """Returns every token with its id, added ones included."""
        return self.backend.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of raw text, with the post-processor's special tokens.

        Raises:
          ValueError: the tokenizer has no tokens for it, or fails.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_more(self, text: str) -> list[int]:
        """Returns the ids of raw text that continues other text.

        They begin with no special token, and with no space that the text does not have.

        Raises:
          ValueError: the tokenizer fails.
        """
        _refuse_surrogates(text)
        with _library_errors("encode this text"):
            return self._continuing.encode(text)

    @functools.cached_property
    def _continuing(self) -> Continuing:
        return Continuing(self.backend)

    def encode_chat(
        self, messages: Sequence[Message], *, tokenize: bool = True, **arguments: Any
    ) -> list[int]:
        """Returns the ids of a conversation in the model's own chat format.

        The template writes its special tokens itself, so none are added.

        Args:
          messages: dicts with "role" and "content". Content that is a list of parts
            ({"type": "text", "text": ...}) is passed as it is where the template loops over it,
            else as one text, a line each.
          tokenize: True; `render_chat` returns text.
          **arguments: as of `render_chat`.

        Raises:
          ValueError: as of `render_chat`, or the tokenizer fails.
        """
        if tokenize is not True:
            raise ValueError("encode_chat returns ids; render_chat returns the text of a chat.")
        return self._encode(self.render_chat(messages, **arguments), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """Returns the text that `encode_chat` encodes.

        Args:
          tools: JSON schemas, or functions with type hints and docstrings.
          documents: dicts with "title" and "text".
          chat_template: the name of one of the tokenizer's templates, or the text of another. None:
            the template "tool_use" where there are tools and such a template, else "default".
          add_generation_prompt: whether the beginning of a reply follows; None: unless
            continue_final_message. (transformers has False, where this has True.)
          continue_final_message: whether the text ends within the final message, which the model
            goes on with; a field's name in place of True: within that field.
          tokenize: False; `encode_chat` returns ids.
          **variables: of the template; Qwen3 reads `enable_thinking`.

        Raises:
          ValueError: there is no such template, it fails on the messages, takes too much time or
            memory (docs/untrusted-files.md), or an argument of transformers' has no effect here.
          OSError: the process that renders it cannot be started.
        """
        if tokenize is not False:
            raise ValueError("render_chat returns text; encode_chat returns the ids of a chat.")
        return templates.render(
            templates.chosen(self.chat_template, chat_template, has_tools=tools is not None),
            messages,
            variables,
            special_tokens=self.special_tokens,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
          skip_special_tokens: leaves them out.
          spaces_between_special_tokens: False: no space where an added token follows another,
            whatever the decoder puts there (that of WordPiece does). Without effect where special
            tokens are left out.
        """
        ids = [int(i) for i in ids]
        with _library_errors("decode these token ids"):
            if skip_special_tokens or spaces_between_special_tokens:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            tokens = self._runs_joined(ids)
            decoder = self.backend.decoder
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def _runs_joined(self, ids: list[int]) -> list[str]:
        """Returns the tokens of ids, each run of added ones as one."""
        tokens: list[str] = []
        was_added = False
        for token_id in ids:
            token = self.backend.id_to_token(token_id)
            if token is None:
                continue
            is_added = token_id in self.added_ids
            if is_added and was_added:
                tokens[-1] += token
            else:
                tokens.append(token)
            was_added = is_added
        return tokens

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _refuse_surrogates(text)
        with _library_errors("encode this text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids


def _refuse_surrogates(text: str) -> None:
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half of a surrogate pair at {error.start} ({text[error.start]!r}), "
            "which is no character; remove it, or decode the text with errors='replace'."
        ) from None


@contextlib.contextmanager
def _library_errors(action: str) -> Iterator[None]:
    """Context that turns errors of the library, panics included, into ValueError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TypeError) or not is_library_error(error):
            raise
        raise ValueError(_FAILED.format(action, error)) from error


def _content(folder: Path, key: str, token: Any) -> str | None:
    """Returns the text of a special token, which is a string or an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"{key} in {folder} is {str(token)[:100]}, expected text or an object with "
            "its content; fetch tokenizer_config.json again."
        )
    return text
