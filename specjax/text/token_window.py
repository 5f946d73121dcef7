"""Decodes the tokens of a growing sequence, a few at a time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from specjax.text.tokenization import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens kept for context once their text is final. A token is at least one byte, and a decoder
# that starts inside a character is in step again after three, so four suffice.
_CONTEXT = 4
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenWindow:
    """The last tokens of a prompt and of the output after it, and how much of their text is final.

    The settled texts joined are what decoding prompt and output at once gives, less what
    decoding the prompt gives. A character that the prompt's last tokens leave unfinished belongs
    to the output, if the output finishes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """Begins after a prompt, of which it keeps the last tokens that have text."""
        self.tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._ids: list[int] = []
        self._num_settled = 0  # characters of their text that are final
        self._num_run = 0  # byte tokens at the end
        self._of_prompt = ""  # the prompt's own text that its next tokens may change
        self.append(self._last_with_text(prompt_token_ids))
        self.settle()
        self._of_prompt = self.open_text()

    def append(self, token_ids: Iterable[int]) -> None:
        """Adds tokens, except those that decoding leaves out."""
        for token_id in map(int, token_ids):
            kind = self._kind(token_id)
            if kind is not None:
                self._ids.append(token_id)
                self._num_run = self._num_run + 1 if kind == "byte" else 0

    def settle(self) -> str:
        """Returns the text that became final, and drops tokens that are not needed any more."""
        # With byte fallback a run of byte tokens is text or, whole, U+FFFD: open
        # until it ends.
        text = self._decode(self._ids[: len(self._ids) - self._num_run])
        num_settled = len(text)
        # Bytes of an unfinished character decode to one U+FFFD, always the last.
        if text.endswith(_REPLACEMENT) and not self.tokenizer.has_byte_fallback:
            num_settled -= 1
        settled = text[self._num_settled : num_settled]
        self._num_settled = max(self._num_settled, num_settled)
        self._shorten(text)
        if settled:
            settled, self._of_prompt = self._without_prompt(settled), ""
        return settled

    def open_text(self) -> str:
        """Returns the text that is not final, as if nothing followed."""
        return self._without_prompt(self._decode(self._ids)[self._num_settled :])

    def open_run(self) -> str:
        """Returns the text of a run of byte tokens that is open and valid so far, else ""."""
        run = self.open_text() if self._num_run else ""
        return "" if run.endswith(_REPLACEMENT) else run

    def _without_prompt(self, text: str) -> str:
        """Returns a text without what it has in common with the end of the prompt's."""
        is_same = (own == other for own, other in zip(self._of_prompt, text))
        return text[sum(itertools.takewhile(bool, is_same)) :]

    def _kind(self, token_id: int) -> str | None:
        """Returns "text" or "byte", None for a token that decoding leaves out."""
        token = self.tokenizer.backend.id_to_token(token_id)
        if token is None or (
            self._skip_special_tokens and token_id in self.tokenizer.special_texts
        ):
            return None
        is_byte = self.tokenizer.has_byte_fallback and _BYTE_TOKEN.fullmatch(token)
        return "byte" if is_byte else "text"

    def _last_with_text(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the last tokens that have text: a run of byte tokens, and _CONTEXT before it."""
        last: list[int] = []
        num_context = 0
        for token_id in map(int, reversed(token_ids)):
            kind = self._kind(token_id)
            if kind is not None:
                num_context += kind == "text" or num_context > 0
                last.append(token_id)
            if num_context == _CONTEXT:
                break
        return last[::-1]

    def _shorten(self, text: str) -> None:
        """Drops tokens whose text is final, once enough are worth a decode."""
        num_kept = _CONTEXT + self._num_run
        if len(self._ids) < 2 * _CONTEXT + self._num_run:
            return
        ids = self._ids[-num_kept:]
        context = self._decode(ids[: len(ids) - self._num_run])
        # Counted from the end: the first character may be cut, or lose a leading space.
        num_settled = len(context) - (len(text) - self._num_settled)
        if num_settled > 0:
            self._ids, self._num_settled = ids, num_settled

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces,
        )
