"""Converts token ids to text as they arrive, showing only text that later tokens cannot change.

    tokens   "Hel"  "lo, "  E4  BD  A0  " ST"  "OP"     with stop string "STOP"
    shown     Hel    lo,_   -   -   你   _     - and stopped; "OP" is the last used

Shown pieces joined are exactly what decoding all ids at once gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specjax.text.tokenization import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens kept for context once shown. A token is at least one byte, and a decoder
# that starts inside a character is in step again after three, so four suffice.
_CONTEXT = 4
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Fed(NamedTuple):
    """The result of one call of `feed`."""

    text: str  # may be shown now
    num_tokens_used: int  # how many of the given tokens belong to the output
    stopped_by: str | None  # the stop string that ended the output


class IncrementalText:
    """The text of one growing sequence, ended by the first stop string that completes.

    It holds back bytes of an unfinished character, and a suffix that may be the
    beginning of a stop string. Among stop strings that complete at the same character
    the longest counts. The text ends before the stop string, and the tokens end with
    the one that completed it; the grouping of tokens into calls does not matter.

    The cost per token does not grow with the sequence: only the last few tokens are
    decoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ):
        """Starts an empty sequence.

        Args:
          tokenizer: of the model that makes the tokens.
          stop_strings: not empty; looked for in the text, whatever the tokens.
          include_stop_str: ends the text after the stop string instead of before it.
          skip_special_tokens: as in `Tokenizer.decode`.

        Raises:
          ValueError: a stop string is empty.
        """
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ValueError(f"{stop_strings=} must be a sequence of strings that are not empty.")
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._include_stop_str = include_stop_str
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens that have text
        self._num_settled = 0  # characters of the window's text that are final
        self._num_run = 0  # byte tokens at the window's end
        self._held = ""  # final, but perhaps the beginning of a stop string
        self._num_exempt = 0  # characters, from `_held` on, that end no stop string

    def feed(self, token_ids: int | Iterable[int], *, may_stop: bool = True) -> Fed:
        """Takes the next tokens and returns the text that they make final.

        After a stop string, tokens are ignored.

        Args:
          may_stop: whether a stop string that one of these tokens completes ends the
            output; one that they only begin ends it later in either case.
        """
        if self.stopped_by is not None:
            return Fed("", 0, self.stopped_by)
        ids = list(token_ids) if isinstance(token_ids, Iterable) else [token_ids]
        if not self._stop_strings:
            self._append(ids)
            return Fed(self._settle(), len(ids), None)
        pieces = []
        for num_used, token_id in enumerate(ids, start=1):
            self._append([token_id])
            pieces.append(self._match(self._settle(), may_stop))
            if self.stopped_by is not None:
                return Fed("".join(pieces), num_used, self.stopped_by)
        return Fed("".join(pieces), len(ids), None)

    def finish(self) -> str:
        """Returns the text held back; an unfinished character becomes U+FFFD."""
        if self.stopped_by is not None:
            return ""
        rest = self._held + self._decode(self._window)[self._num_settled :]
        self._window, self._num_settled, self._num_run, self._held = [], 0, 0, ""
        return rest

    def _append(self, ids: Sequence[int]) -> None:
        """Adds the tokens, except those that decoding leaves out."""
        special = self._tokenizer.special_ids if self._skip_special_tokens else ()
        for token_id in map(int, ids):
            token = self._tokenizer.backend.id_to_token(token_id)
            if token is None or token_id in special:
                continue
            self._window.append(token_id)
            is_byte = self._tokenizer.has_byte_fallback and _BYTE_TOKEN.fullmatch(token)
            self._num_run = self._num_run + 1 if is_byte else 0

    def _settle(self) -> str:
        """Returns the text that became final, and shortens the window."""
        # With byte fallback a run of byte tokens is text or, whole, U+FFFD: open
        # until it ends.
        text = self._decode(self._window[: len(self._window) - self._num_run])
        num_settled = len(text)
        # Bytes of an unfinished character decode to one U+FFFD, always the last.
        if text.endswith(_REPLACEMENT) and not self._tokenizer.has_byte_fallback:
            num_settled -= 1
        settled = text[self._num_settled : num_settled]
        self._num_settled = max(self._num_settled, num_settled)
        self._shorten(text)
        return settled

    def _shorten(self, text: str) -> None:
        """Drops tokens whose text is final, once enough are worth a decode."""
        num_kept = _CONTEXT + self._num_run
        if len(self._window) < 2 * _CONTEXT + self._num_run:
            return
        window = self._window[-num_kept:]
        context = self._decode(window[: len(window) - self._num_run])
        # Counted from the end: the first character may be cut, or lose a leading space.
        num_settled = len(context) - (len(text) - self._num_settled)
        if num_settled > 0:
            self._window, self._num_settled = window, num_settled

    def _match(self, settled: str, may_stop: bool) -> str:
        """Returns the part of held and new text that may be shown; detects stop strings."""
        text = self._held + settled
        # An open run of byte tokens that is text so far can complete a stop string:
        # nothing follows it then that could make the run invalid.
        run = self._decode(self._window)[self._num_settled :] if self._num_run else ""
        seen = text if run.endswith(_REPLACEMENT) else text + run
        if not may_stop:
            self._num_exempt = len(seen)
        found = _first_stop(seen, self._stop_strings, self._num_exempt)
        if found is not None:
            begin, self.stopped_by = found
            end = begin + len(self.stopped_by)
            return seen[: end if self._include_stop_str else begin]
        num_held = _num_held(text, self._stop_strings)
        num_shown = len(text) - num_held
        self._held = text[num_shown:]
        self._num_exempt = max(self._num_exempt - num_shown, 0)
        return text[:num_shown]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _first_stop(text: str, stop_strings: Sequence[str], num_exempt: int) -> tuple[int, str] | None:
    """Returns the stop string that ends first, the longest on ties, and where it begins.

    Stop strings that end within the first num_exempt characters do not count.
    """
    found = [
        (begin + len(stop), begin, stop)
        for stop in stop_strings
        if (begin := text.find(stop, max(num_exempt - len(stop) + 1, 0))) >= 0
    ]
    return min(found)[1:] if found else None


def _num_held(text: str, stop_strings: Sequence[str]) -> int:
    """Returns the length of the longest suffix of text that begins a stop string."""
    return max(
        (
            size
            for stop in stop_strings
            for size in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        ),
        default=0,
    )
