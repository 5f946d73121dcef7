"""Converts token ids to text as they arrive, showing only text that later tokens cannot change.

    tokens   "Hel"  "lo, "  E4  BD  A0  " ST"  "OP"     with stop string "STOP"
    shown     Hel    lo,_   -   -   你   _     - and stopped; "OP" is the last used

Shown pieces joined are what decoding the prompt and all ids at once gives, less what decoding the
prompt gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specjax.text.token_window import TokenWindow
from specjax.text.tokenization import Tokenizer


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

    Where the text leaves special tokens out, a stop string that holds the text of one is looked
    for in the text with them: "<|im_end|>" completes at that token, and the text ends before it.

    The cost per token does not grow with the sequence: only the last few tokens are
    decoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """Starts an empty sequence.

        Args:
          tokenizer: of the model that makes the tokens.
          stop_strings: not empty; looked for in the text, whatever the tokens.
          prompt_token_ids: the tokens before the sequence: context, not text. A character that
            they leave unfinished is of the text, if the sequence finishes it.
          include_stop_str: ends the text after the stop string instead of before it.
          skip_special_tokens, spaces_between_special_tokens: as in `Tokenizer.decode`.

        Raises:
          ValueError: a stop string is empty.
        """
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ValueError(f"{stop_strings=} must be a sequence of strings that are not empty.")
        self.stopped_by: str | None = None
        self._is_over = False
        self._include_stop_str = include_stop_str
        self._special_texts = tokenizer.special_texts
        window = lambda skips: TokenWindow(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skips,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        left_out = self._special_texts.values() if skip_special_tokens else ()
        with_special = [stop for stop in stop_strings if any(text in stop for text in left_out)]
        plain = [stop for stop in stop_strings if stop not in with_special]
        self._shown = _Searched(window(skip_special_tokens), plain)
        self._whole = _Searched(window(False), with_special) if with_special else None
        self._marks: list[_Mark] = []  # of special tokens in `_whole`, in order

    def feed(self, token_ids: int | Iterable[int], *, may_stop: bool = True) -> Fed:
        """Takes the next tokens and returns the text that they make final.

        After a stop string or `finish`, tokens are ignored.

        Args:
          may_stop: whether a stop string that one of these tokens completes ends the
            output; one that they only begin ends it later in either case.
        """
        if self._is_over:
            return Fed("", 0, self.stopped_by)
        ids = list(token_ids) if isinstance(token_ids, Iterable) else [token_ids]
        if not self._shown.stop_strings and self._whole is None:
            self._shown.window.append(ids)
            return Fed(self._shown.window.settle(), len(ids), None)
        pieces = []
        for num_used, token_id in enumerate(ids, start=1):
            pieces.append(self._take(int(token_id), may_stop))
            if self._is_over:
                return Fed("".join(pieces), num_used, self.stopped_by)
        return Fed("".join(pieces), len(ids), None)

    def finish(self) -> str:
        """Returns the text held back, once; an unfinished character becomes U+FFFD."""
        if self._is_over:
            return ""
        self._is_over = True
        return self._shown.text + self._shown.window.open_text()

    def _take(self, token_id: int, may_stop: bool) -> str:
        """Takes a token and returns the text that may be shown; detects stop strings."""
        found = self._shown.take(token_id, may_stop)
        is_special = False
        if self._whole is not None:
            other = self._whole.take(token_id, may_stop)
            if token_id in self._special_texts:
                self._mark(token_id)
            if other is not None and (found is None or other > found):
                found, is_special = other, True
        if found is not None:
            self.stopped_by, self._is_over = found.stop, True
            num_after = found.num_after + (0 if self._include_stop_str else len(found.stop))
            return self._before(num_after) if is_special else _less(self._shown.seen, num_after)
        return self._let_go()

    def _mark(self, token_id: int) -> None:
        """Notes where a special token stands, which `_whole` has just taken."""
        assert self._whole is not None
        end, shown = len(self._whole.text), self._shown
        begin = max(end - len(self._special_texts[token_id]), 0)
        for place in (begin, end):
            self._marks.append(_Mark(place, len(shown.text), shown.window.open_text()))

    def _before(self, num_after: int) -> str:
        """Returns the shown text before the last num_after characters of the whole one."""
        assert self._whole is not None
        place = len(self._whole.seen) - num_after
        for mark in self._marks:
            if mark.place >= place:
                return _less(self._shown.text[: mark.num_shown] + mark.open, mark.place - place)
        return _less(self._shown.seen, num_after)

    def _let_go(self) -> str:
        """Returns the text that begins no stop string."""
        shown, whole = self._shown, self._whole
        num_shown = len(shown.text) - shown.num_held()
        if whole is not None:
            place = len(whole.text) - whole.num_held()
            num_shown = max(min(num_shown, len(shown.text) - whole.num_held()), 0)
            whole.let_go(place)
            self._marks = [
                mark._replace(place=mark.place - place, num_shown=mark.num_shown - num_shown)
                for mark in self._marks
                if mark.place >= place
            ]
        return shown.let_go(num_shown)


class _Mark(NamedTuple):
    """An end of a special token in the whole text, and what is shown of the text before it."""

    place: int  # in `text` of the whole
    num_shown: int  # characters of `text` of the shown
    open: str  # follows them if nothing else does


class _Found(NamedTuple):
    """A stop string in a text; of two, the greater one ends first, or is longer."""

    num_after: int  # characters of the text after it
    size: int
    stop: str


class _Searched:
    """A growing text in which stop strings are looked for.

    Attributes:
      text: what is final, and not let go because a stop string may begin in it.
      seen: the same, with an open run of byte tokens that is text so far. Nothing follows a stop
        string, so that it may end in such a run.
    """

    def __init__(self, window: TokenWindow, stop_strings: Sequence[str]):
        self.window, self.stop_strings = window, stop_strings
        self.text = self.seen = ""
        self._num_exempt = 0  # characters of the text that end no stop string

    def take(self, token_id: int, may_stop: bool) -> _Found | None:
        """Adds a token and returns the first stop string that it completes."""
        self.window.append([token_id])
        self.text += self.window.settle()
        self.seen = self.text + self.window.open_run()
        if not may_stop:
            self._num_exempt = len(self.seen)
        found = []
        for stop in self.stop_strings:
            begin = self.seen.find(stop, max(self._num_exempt - len(stop) + 1, 0))
            if begin >= 0:
                found.append(_Found(len(self.seen) - begin - len(stop), len(stop), stop))
        return max(found, default=None)

    def num_held(self) -> int:
        """Returns the length of the longest suffix of the text that begins a stop string."""
        text = self.text
        return max(
            (
                size
                for stop in self.stop_strings
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )

    def let_go(self, count: int) -> str:
        """Returns the first characters of the text, which are not looked at again."""
        gone, self.text = self.text[:count], self.text[count:]
        self._num_exempt = max(self._num_exempt - count, 0)
        return gone


def _less(text: str, count: int) -> str:
    """Returns text without its last characters."""
    return text[: max(len(text) - count, 0)]
