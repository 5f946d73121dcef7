"""Feeds the output of rows, in pieces, to a drafter that matches text."""

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

NEW_TOKENS = PIECE_TOKENS - WINDOW  # new tokens of a piece; the rest repeat those before them
MOST_PIECES = 32  # most pieces per call
MOST_WAITING = 4096  # most pieces in the queue; the oldest are dropped


class FedTokens(NamedTuple):
    """A piece: tokens that the drafter gets at once, and the group of their prompt."""

    token_ids: Sequence[int]
    group: int


def group_of(prompt_token_ids: Sequence[int]) -> int:
    """Returns the number, at least 0, that samples of one prompt share."""
    return zlib.crc32(np.asarray(prompt_token_ids, np.int64).tobytes()) & 0x7FFFFFFF


def _group(request: Request) -> int:
    if request.group is None:
        request.group = group_of(request.prompt_token_ids)
    return request.group


class TextFeed:
    """Cuts the output of requests into pieces, and tracks the rows known to the drafter.

    A piece begins WINDOW tokens before its new tokens, so that a match can continue from one
    piece to the next, and from the prompt into the answer.
    """

    def __init__(self, num_rows: int):
        self._rows: list[Row | None] = [None] * num_rows
        self._groups = np.full(num_rows, NO_GROUP, np.int32)
        self._waiting: collections.deque[FedTokens] = collections.deque(maxlen=MOST_WAITING)
        # Number of output tokens of each request that are already in pieces.
        self._num_cut: weakref.WeakKeyDictionary[Request, int]
        self._num_cut = weakref.WeakKeyDictionary()

    @property
    def num_waiting(self) -> int:
        """Number of pieces that the drafter has not been given."""
        return len(self._waiting)

    def note(self, request: Request, *, is_over: bool = False) -> None:
        """Cuts a request's new output into pieces, to its end if it has ended or `is_over`."""
        self._num_cut[request] = self.cut(
            request.prompt_token_ids,
            request.output_token_ids,
            self._num_cut.get(request, request.num_resumed),
            is_over=is_over or request.is_finished,
            group=_group(request),
        )

    def cut(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        num_cut: int = 0,
        *,
        is_over: bool = True,
        group: int | None = None,
    ) -> int:
        """Cuts an answer from its token num_cut on into pieces, only full ones unless `is_over`.

        Args:
          group: number of the text's group; None: that of its prompt.

        Returns:
          The number of its tokens that are in pieces now.
        """
        group = group_of(prompt) if group is None else group
        while True:
            count = min(len(output) - num_cut, NEW_TOKENS)
            if count == 0 or (count < NEW_TOKENS and not is_over):
                return num_cut
            before = output[max(num_cut - WINDOW, 0) : num_cut]
            if (missing := WINDOW - len(before)) > 0:
                before = [*prompt[-missing:], *before]
            text = [*before, *output[num_cut : num_cut + count]]
            self._waiting.append(FedTokens(text, group))
            num_cut += count

    def next_pieces(self, rows: Sequence[Row | None]) -> Pieces | None:
        """Returns the drafter's input before it drafts for these rows; None if there is nothing
        new."""
        has_entered = np.array(
            [own is not None and own is not old for own, old in zip(rows, self._rows)]
        )
        if not len(self._waiting) and not has_entered.any():
            return None
        for index in np.flatnonzero(has_entered).tolist():
            row = rows[index]
            assert row is not None
            self._groups[index] = _group(row.request)
        self._rows = list(rows)
        count = min(len(self._waiting), MOST_PIECES)
        # Only two sizes, because each needs its own executable.
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
