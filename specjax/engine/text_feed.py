"""What the host tells a drafter that reads on in text: what rows have written, in pieces."""

from __future__ import annotations

import collections
import weakref
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.drafters.history import NO_GROUP, PIECE_TOKENS, WINDOW, Pieces
from specjax.engine.request import Request
from specjax.engine.rows import Row

NEW_TOKENS = PIECE_TOKENS - WINDOW  # of a piece; the others stand before them in the text
MOST_PIECES = 32  # of one call
MOST_WAITING = 4096  # the oldest are dropped


class FedTokens(NamedTuple):
    """A run of tokens that the drafter is told of at once."""

    token_ids: Sequence[int]
    group: int


def group_of(prompt_token_ids: Sequence[int]) -> int:
    """Returns the number by which samples of one prompt find each other, at least 0."""
    return zlib.crc32(np.asarray(prompt_token_ids, np.int64).tobytes()) & 0x7FFFFFFF


class TextFeed:
    """Cuts the output of requests into pieces, and knows which rows the drafter thinks of.

    A piece begins WINDOW tokens before what is new in it, so that a match runs on from one
    piece to the next, and from the prompt into the answer.
    """

    def __init__(self, num_rows: int):
        self._rows: list[Row | None] = [None] * num_rows
        self._groups = np.full(num_rows, NO_GROUP, np.int32)
        self._waiting: collections.deque[FedTokens] = collections.deque(maxlen=MOST_WAITING)
        # Output tokens of each request that stand in a piece.
        self._num_cut: weakref.WeakKeyDictionary[Request, int]
        self._num_cut = weakref.WeakKeyDictionary()

    @property
    def num_waiting(self) -> int:
        """Pieces that the drafter was not told."""
        return len(self._waiting)

    def note(self, request: Request, *, is_over: bool = False) -> None:
        """Cuts what a request has written, to its end if it has ended or is over for now."""
        self._num_cut[request] = self.cut(
            request.prompt_token_ids,
            request.output_token_ids,
            self._num_cut.get(request, request.num_resumed),
            is_over=is_over or request.is_finished,
        )

    def cut(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        num_cut: int = 0,
        *,
        is_over: bool = True,
    ) -> int:
        """Cuts an answer from its token num_cut on into pieces, whole ones unless it is over.

        Returns:
          How many of its tokens stand in pieces now.
        """
        while True:
            count = min(len(output) - num_cut, NEW_TOKENS)
            if count == 0 or (count < NEW_TOKENS and not is_over):
                return num_cut
            before = output[max(num_cut - WINDOW, 0) : num_cut]
            if (missing := WINDOW - len(before)) > 0:
                before = [*prompt[-missing:], *before]
            text = [*before, *output[num_cut : num_cut + count]]
            self._waiting.append(FedTokens(text, group_of(prompt)))
            num_cut += count

    def next_pieces(self, rows: Sequence[Row | None]) -> Pieces | None:
        """Returns what the drafter is to know before it drafts for these rows; None: nothing
        new."""
        has_entered = np.array(
            [own is not None and own is not old for own, old in zip(rows, self._rows)]
        )
        if not len(self._waiting) and not has_entered.any():
            return None
        for index in np.flatnonzero(has_entered).tolist():
            row = rows[index]
            assert row is not None
            self._groups[index] = group_of(row.request.prompt_token_ids)
        self._rows = list(rows)
        count = min(len(self._waiting), MOST_PIECES)
        # Few sizes, because each is an executable of its own.
        places = 4 if count <= 4 else MOST_PIECES
        token_ids = np.zeros((places, PIECE_TOKENS), np.int32)
        counts, groups = np.zeros((2, places), np.int32)
        for place in range(count):
            piece = self._waiting.popleft()
            token_ids[place, : len(piece.token_ids)] = piece.token_ids
            counts[place], groups[place] = len(piece.token_ids), piece.group
        return Pieces(
            token_ids=token_ids,
            counts=counts,
            groups=groups,
            has_entered=has_entered,
            row_groups=self._groups.copy(),
        )
