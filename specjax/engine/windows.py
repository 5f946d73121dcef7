"""Which row writes its hidden states to which window, and what the windows hold. No jax.

A window is free, or a row writes to it, or it holds a text. At most half of them are written to at
a time, so that the others hold texts to learn from; the oldest text makes room for the next. A
window is known by host figures alone: tokens that were read back, and the position that it starts
at, which no work sent before touches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from specjax.engine.rows import Row
from specjax.engine.scheduler import Scheduler

LEAST_LEARNED = 2  # tokens of an output, in a text that is kept
LEAST_ROOM = 8  # tokens that a row can still gain, for it to be given a window


@dataclasses.dataclass(frozen=True)
class KeptText:
    """A text whose hidden states a window holds, each at the place of its token.

    Attributes:
      window: its number over all shards.
      first_learned: the place of the first token that the target wrote.
      temperature: of its request; 0 too where the target's likeliest token was taken.
      number: of the text, ascending by age.
    """

    window: int
    token_ids: Sequence[int]
    first_learned: int
    temperature: float
    rule: int
    number: int

    @property
    def num_learned(self) -> int:
        return len(self.token_ids) - max(self.first_learned, 1)


@dataclasses.dataclass(eq=False)
class _Writing:
    """A window that a row writes to, from a position on."""

    row: Row
    start: int


class Windows:
    """The windows of all shards.

    Args:
      num_windows: over all shards, a multiple of num_shards.
      length: tokens of a window.
      numbers: of texts, ascending; those of a run go on where an earlier one's ended.

    Attributes:
      num_kept: tokens of outputs that texts held so far.
    """

    def __init__(
        self,
        num_windows: int,
        length: int,
        num_shards: int = 1,
        numbers: Iterator[int] | None = None,
    ):
        self.length = length
        self._per_shard = num_windows // num_shards
        self._num_shards = num_shards
        self._writing: dict[int, _Writing] = {}
        self._texts: dict[int, KeptText] = {}  # by window, the oldest first
        self._has_changed = True  # since rows were last pointed at windows
        self._numbers = itertools.count() if numbers is None else numbers
        self.num_kept = 0

    @property
    def texts(self) -> list[KeptText]:
        """The texts that windows hold, the oldest first."""
        return list(self._texts.values())

    def forget(self) -> None:
        """Drops all texts and all that is being written, as under new weights of the target."""
        self._writing.clear()
        self._texts.clear()
        self._has_changed = True

    def collect(self, scheduler: Scheduler) -> None:
        """Turns windows that are full, or whose row has gone, into texts."""
        for window, writing in list(self._writing.items()):
            row = writing.row
            has_gone = scheduler.rows[row.index] is not row
            count = min(len(row.token_ids) - 1, row.num_prefilled) - writing.start
            if has_gone or count >= self.length:
                del self._writing[window]
                self._has_changed = True
                self._hold(window, row, writing.start, min(count, self.length))

    def _hold(self, window: int, row: Row, start: int, count: int) -> None:
        """Keeps `count` tokens of a row as a text, if the target wrote enough of them."""
        request = row.request
        if request.finish_reason == "error":
            return
        temperature = request.params.filled({}).temperature or 0.0
        text = KeptText(
            window=window,
            token_ids=tuple(row.token_ids[start : start + max(count, 0)]),
            first_learned=max(len(request.prompt_token_ids) - start, 0),
            temperature=float(temperature),
            rule=int(request.rule),
            number=next(self._numbers),
        )
        if text.num_learned >= LEAST_LEARNED:
            self._texts[window] = text
            self.num_kept += text.num_learned

    def assign(self, scheduler: Scheduler) -> tuple[np.ndarray, np.ndarray] | None:
        """Gives windows to rows that have none; call it before work is sent.

        Returns:
          For each row the window within its shard, as many as a shard has where it has none, and
          the position that it starts at, i32[rows] each; None if nothing has changed.
        """
        self._give_windows(scheduler)
        if not self._has_changed:
            return None
        self._has_changed = False
        windows = np.full(len(scheduler.rows), self._per_shard, np.int32)
        starts = np.zeros(len(scheduler.rows), np.int32)
        for window, writing in self._writing.items():
            windows[writing.row.index] = window % self._per_shard
            starts[writing.row.index] = writing.start
        return windows, starts

    def _give_windows(self, scheduler: Scheduler) -> None:
        """Gives windows to rows that have none, as long as shards have some to give."""
        has_room = [self._has_room(shard) for shard in range(self._num_shards)]
        if not any(has_room):
            return
        have = {writing.row for writing in self._writing.values()}
        most = scheduler.table.most
        for row in scheduler.occupied:
            start = self._start_of(row, int(most[row.index]))
            is_short = row.request.max_length - start < LEAST_ROOM
            if row in have or is_short or not self._has_room(row.shard):
                continue
            self._writing[self._take(row.shard)] = _Writing(row, start)
            self._has_changed = True

    def _start_of(self, row: Row, most: int) -> int:
        """Returns the first position that a window of a row may begin at.

        Of a prompt that is not fed yet, half a window is kept before the output. A row that
        decodes feeds this position after all work that was sent.

        Args:
          most: tokens that the row can have after that work.
        """
        if row.num_to_prefill:
            return max(row.num_prefilled, len(row.token_ids) - self.length // 2)
        return most - 1

    def _of_shard(self, shard: int) -> range:
        return range(shard * self._per_shard, (shard + 1) * self._per_shard)

    def _has_room(self, shard: int) -> bool:
        """Returns whether another window of a shard may be written to."""
        own = self._of_shard(shard)
        num_writing = sum(window in own for window in self._writing)
        return num_writing < max(self._per_shard // 2, 1)

    def _take(self, shard: int) -> int:
        """Returns a window of a shard to write to; the oldest text makes room for it."""
        own = self._of_shard(shard)
        taken = self._writing.keys() | self._texts.keys()
        free = next((window for window in own if window not in taken), None)
        if free is not None:
            return free
        oldest = next(window for window in self._texts if window in own)
        del self._texts[oldest]
        return oldest
