"""Hands the draft slots of a batch to the tokens that are likeliest to be accepted."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.policy.survival import Survival

MOST_RANKED = 32  # rows sampled from larger batches where only sums are needed


def _expected_maximum(count: np.ndarray) -> np.ndarray:
    """Returns the expected maximum of `count` standard normal draws."""
    known = np.array([0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594, 2.822])
    return np.interp(np.log2(np.maximum(count, 1)), np.arange(len(known)), known)


class RankedSlots:
    """The draft slots of all rows, ranked by the probability that their tokens are accepted.

    Sums over more than MOST_RANKED rows are estimated from a sample of them.

    Args:
      requests: i64[rows], request numbers.
      caps: i64[rows], most tokens that each may draft.
      depths: values of K for which slots are ranked.
      left: i64[rows], most tokens that each may gain; empty if rows that end are refilled.
      urgency: f64[rows], factor on a row's probabilities in the ranking; empty for all 1.
    """

    def __init__(
        self,
        survival: Survival,
        requests: Any,
        caps: Any,
        depths: Sequence[int],
        left: Any,
        urgency: Any = (),
    ):
        self._urgency = np.asarray(urgency) if len(urgency) else np.ones(len(requests))
        self._of_rates, self._presence = survival.of_rates, survival.presence()
        self._rates, self._caps, self._left = survival.rates(requests), caps, left
        self._doubts_of = functools.partial(survival.doubts, requests)
        self._depths = list(depths)
        some = slice(None)
        if len(self._rates) > MOST_RANKED:
            # The middle row of each of MOST_RANKED equal parts, ordered by acceptance rate.
            middles = np.arange(MOST_RANKED) + 0.5
            places = (middles * (len(self._rates) / MOST_RANKED)).astype(int)
            some = self._rates.argsort()[places]
        self._survival, self._mass = self._slots(self._rates[some], some)
        self._order_of = self._survival * self._urgency[some][:, None]
        self._share = len(self._survival) / len(self._rates)
        gained = (self._survival * self._mass).sum(axis=0).cumsum() / self._share
        self._by_depth = [0.0, *gained.tolist()]

    def _slots(self, rates: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the survival of each token of some rows of given rates, and how often it takes a
        slot.

        f64[rows, depth] each.
        """
        by_place = self._of_rates(rates)
        is_allowed = np.arange(by_place.shape[1]) < self._caps[rows][:, None]
        # A token that is not proposed takes no slot.
        return by_place * is_allowed, is_allowed * self._presence

    def expected(self, bucket: Bucket) -> float:
        """Returns the expected accepted draft tokens of a step."""
        return self.all_expected([bucket])[0]

    def all_expected(self, buckets: Sequence[Bucket]) -> list[float]:
        """Returns `expected` of several buckets."""
        ranked = collections.defaultdict(list)
        for bucket in buckets:
            if bucket.max_drafts is not None:
                ranked[bucket.num_speculative_tokens].append(bucket.max_drafts * self._share)
        gained = {depth: iter(self._gains(depth, slots)) for depth, slots in ranked.items()}
        return [
            self._by_depth[bucket.num_speculative_tokens]
            if bucket.max_drafts is None
            else next(gained[bucket.num_speculative_tokens])
            for bucket in buckets
        ]

    def _gains(self, depth: int, slots: Sequence[float]) -> list[float]:
        """Returns the expected accepted tokens in the likeliest `slots`, interpolated."""
        at = self._depths.index(depth)
        _, masses, gains = self._ranked
        return (np.interp(slots, masses[at], gains[at]) / self._share).tolist()

    def together(self, bucket: Bucket) -> float:
        """Returns the factor, 0 to 1, by which uneven rows slow a batch that is not refilled.

        Rows that draft end at different steps, by luck and because some are harder than others,
        which shows late. A step costs as much as before while only the last row runs. For slots
        by rank, luck alone counts: they go where the end is far. That rates them too high where
        texts differ much.
        """
        depth = bucket.num_speculative_tokens
        if not depth or not len(self._left):
            return 1.0
        alike, differing = self._togetherness
        return (differing if bucket.max_drafts is None else alike)[depth - 1]

    def steps_saved(self, bucket: Bucket, num_steps: int) -> float:
        """Returns by how many steps of plain decoding a few steps bring the end of a batch nearer
        that is not refilled, and decodes plainly after them.

        The last row counts, not the sum of all: what another row gained is lost. Of slots by rank
        every row is taken to have its part.
        """
        assert len(self._left), "a batch that is refilled has no last row"
        at = bucket.num_speculative_tokens - 1
        tokens, variance, less = (of[:, at] for of in self._of_steps)
        part = bucket.num_slots / (bucket.rows * bucket.num_speculative_tokens)
        left = self._left - num_steps * (1 + part * (tokens - 1))
        spread = part * np.sqrt(num_steps * variance + (num_steps * less) ** 2)
        last = left.argmax()
        is_close = left > left[last] - spread[last]
        end = left[last] + _expected_maximum(is_close.sum()) * spread[last]
        # A step commits a token of every row at least, and none beyond its end.
        most = float(self._left.max())
        return min(max(most - float(end), num_steps), most)

    @functools.cached_property
    def _of_steps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By row and K from 1: expected tokens of a step, their variance from step to step, and
        by how much a row's expected tokens may be less; f64[rows, depth] each."""
        every, lower = slice(None), self._rates - self._doubts_of(self._rates)
        stand, less = (
            np.multiply(*self._slots(rates, every)) for rates in (self._rates, lower.clip(0.0))
        )
        tokens = 1 + stand.cumsum(axis=1)
        odd = 1 + 2 * np.arange(stand.shape[1])
        variance = (stand * odd).cumsum(axis=1) - (tokens - 1) ** 2
        return tokens, variance, (stand - less).cumsum(axis=1)

    @functools.cached_property
    def _togetherness(self) -> tuple[list[float], list[float]]:
        """By K from 1, largest expected steps of a row over expected steps of the last row: of rows
        as they are expected to be, and of rows that may differ from that."""
        tokens, variance, less = self._of_steps
        steps = self._left[:, None] / tokens
        luck = steps * variance / tokens**2
        harder = steps * less / tokens
        most = steps.argmax(axis=0), np.arange(tokens.shape[1])
        # The last step of a row may commit more tokens than it needed.
        needless = (variance / tokens**2 + 1 - 1 / tokens)[most] / 2

        def of_last(spread: np.ndarray) -> list[float]:
            is_close = steps > steps[most] - spread[most]
            late = _expected_maximum(is_close.sum(axis=0)) * spread[most] + needless
            return (steps[most] / (steps[most] + late)).tolist()

        return of_last(np.sqrt(luck)), of_last(np.sqrt(luck + harder**2))

    def likeliest(self, bucket: Bucket) -> np.ndarray:
        """Returns the number of a bucket's slots that each row gets, i64[rows]."""
        assert bucket.max_drafts is not None
        depth = bucket.num_speculative_tokens
        values, masses, _ = self._ranked
        own = masses[self._depths.index(depth), 1:]
        edge = int(own.searchsorted(bucket.max_drafts * self._share))
        least = values[min(edge, len(values) - 1)]
        by_place = self._of_rates(self._rates)[:, :depth] * self._urgency[:, None]
        return (by_place >= least).sum(axis=1)

    @functools.cached_property
    def _ranked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots ranked by survival times urgency, the largest first.

        Returns:
          The value by which each is ranked, f64[slots]; and two cumulative sums over the first
          0, 1, ... slots, f64[depths, slots + 1]: slots taken and tokens gained. Slots beyond a
          depth add nothing.
        """
        order = (-self._order_of).ravel().argsort()
        survival, mass = self._survival.ravel()[order], self._mass.ravel()[order]
        place = order % self._survival.shape[1]
        own = mass * (place < np.array(self._depths)[:, None])
        sums = np.zeros((2, len(self._depths), 1 + len(order)))
        own.cumsum(axis=1, out=sums[0, :, 1:])
        (own * survival).cumsum(axis=1, out=sums[1, :, 1:])
        masses, gains = sums
        return self._order_of.ravel()[order], masses, gains
