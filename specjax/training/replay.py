"""A ring of the newest texts, on the host: what a drafter goes on learning from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specjax.training.texts import TextBatch


class Replay(NamedTuple):
    """The newest texts. Each function returns another ring, and changes none.

    Attributes:
      texts: arrays of [capacity, width].
      num_seen: texts that were ever added.
    """

    texts: TextBatch
    num_seen: int

    @property
    def capacity(self) -> int:
        return len(self.texts.lengths)

    @property
    def num_texts(self) -> int:
        """Texts that it holds."""
        return min(int(self.num_seen), self.capacity)

    def added(self, more: TextBatch) -> Replay:
        """Returns the ring with more texts, of its width, in place of the oldest."""
        more = TextBatch(*(each[-self.capacity :] for each in more))
        seen = int(self.num_seen)
        places = (seen + np.arange(len(more.lengths))) % self.capacity

        def put(old: Any, new: np.ndarray) -> np.ndarray:
            old = np.array(old)  # which a checkpoint may have made an array of jax
            old[places] = new
            return old

        texts = TextBatch(*map(put, self.texts, more))
        return Replay(texts, seen + len(places))

    def drawn(self, count: int, rows: int, seed: int) -> TextBatch:
        """Returns count batches of texts, [count, rows, ...], each text as likely as any other.

        A batch holds no text twice, unless the ring holds fewer than `rows`.
        """
        rng = np.random.default_rng([seed, int(self.num_seen)])
        is_few = self.num_texts < rows
        chosen = [rng.choice(self.num_texts, rows, replace=is_few) for _ in range(count)]
        return TextBatch(*(np.asarray(each)[np.stack(chosen)] for each in self.texts))


def empty(capacity: int, width: int) -> Replay:
    """Returns a ring without texts."""
    texts = TextBatch(
        np.zeros((capacity, width), np.int32),
        np.zeros(capacity, np.int32),
        np.zeros((capacity, width), bool),
    )
    return Replay(texts, 0)


def texts_of(
    token_ids: np.ndarray, mask: np.ndarray, is_learned: np.ndarray, width: int
) -> TextBatch:
    """Returns texts without padding in them, of each the last `width` tokens, without those in
    which nothing is learned.

    Args:
      token_ids: i32[rows, length].
      mask: bool[rows, length], True for text.
      is_learned: bool[rows, length].
    """
    length = token_ids.shape[1]
    whole = mask.sum(axis=1)
    first = np.maximum(whole - width, 0)[:, None]  # token that a text begins with
    order = np.argsort(~mask, axis=1, kind="stable")
    places = np.minimum(first + np.arange(min(width, length)), length - 1)
    order = np.take_along_axis(order, places, axis=1)
    take = lambda x: np.take_along_axis(x, order, axis=1)
    fit = lambda x: np.pad(x, ((0, 0), (0, max(width - length, 0))))
    lengths = np.minimum(whole, width).astype(np.int32)
    is_text = np.arange(width) < lengths[:, None]
    ids = np.where(is_text, fit(take(token_ids)), 0).astype(np.int32)
    learned = fit(take(is_learned & mask)) & is_text
    kept = learned[:, 1:].any(axis=1)
    return TextBatch(ids[kept], lengths[kept], learned[kept])
