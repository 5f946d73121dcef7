"""Seconds of a step: one Gaussian belief over all buckets, updated by each burst. No jax.

    seconds of a burst / its steps = (base + sum of coefficient * term) * own(bucket) * drift

base is the prediction from bytes and operations (`step_prior`), or 1 where there is none. The
terms are computed tokens, draft forwards, rows that draft, context, context beside drafts, a
burst's fixed time and the drafter's catch-up. `own` is what the sum misses of a bucket, `drift`
how slow the machine is now. Where a drafter may propose nothing, some steps of a burst are narrow:
they draft as the others do and verify no draft token. To the belief they are a bucket of their own,
`narrow_of`, and the burst's seconds are the mean of both by their share.

The belief is over the logarithms of coefficients, `own` and `drift`, which are normal with a
covariance: an extended Kalman filter, where each measurement is linear in them about the mean. So
one bucket's seconds tell of another's, two buckets that ran in turn are compared whatever the
machine does to both, and every prediction says how sure it is.
"""

from __future__ import annotations

import collections
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.decode.bucket import Bucket

Prior = Callable[[Bucket, float], float]
Padding = Callable[[int], int]

# Of the base, at first: what a computed token, a draft forward, a row that drafts, a token of
# context, the same per draft token, a burst, and a token of catch-up add. With a prior, which
# counts all but the last two, PRIOR_SHARE of it.
COEFFICIENTS = np.array([0.03, 0.1, 0.02, 1e-4, 2e-5, 0.3, 0.01])
PRIOR_SHARE = 0.1
# Standard deviations of logarithms: of the coefficients at first, of what the sum misses of a
# bucket, of the drift at first, of a measurement, and by how much the drift moves between bursts.
COEFFICIENT_SD, OWN_SD, DRIFT_SD, NOISE_SD, WANDER_SD = 1.2, 0.1, 5.0, 0.08, 0.03
GAP_SD = 0.15  # of the drift, added by a pause or between processes
FORGOTTEN_SD = 0.003  # of a bucket's own seconds, added by each burst
MOST_OFF = 1.5  # standard deviations beyond which a measurement counts for less
TIMED_S = 2e-3  # error of a burst's seconds
MEMORY, MOST_BUCKETS = 16, 512  # bursts of a bucket that are kept for later processes, and buckets
USUAL_STEPS = 32  # of a burst where none is given
LEAST_KNOWN, MOST_KNOWN = 1e-9, 10**6  # limits of a record; tokens: the square of MOST_KNOWN
MOST_ROWS, MOST_DEPTH = 2**16, 2**10

_NUM = len(COEFFICIENTS)
_DRIFT = _NUM  # its place in the belief; own factors follow


class Burst(NamedTuple):
    """One measurement."""

    bucket: Bucket
    context: float  # tokens of all rows
    seconds: float  # per step, of all that the burst took
    num_steps: int = USUAL_STEPS
    num_behind: int = 0  # tokens of catch-up, in the row with most of them
    wide_share: float = 1.0  # of its steps, those with a draft token; the others are narrow

    @property
    def kept_as(self) -> Bucket:
        """The bucket that it tells of: its own, or where no step had a draft token the narrow."""
        return self.bucket if self.wide_share else narrow_of(self.bucket)


def narrow_of(bucket: Bucket) -> Bucket:
    """Returns the bucket of a step that drafts and has nothing to verify."""
    return bucket._replace(max_drafts=0)


class Prediction(NamedTuple):
    """Expected seconds of several buckets' steps, and how sure they are.

    Attributes:
      seconds: f64[buckets].
      along: f64[buckets, belief], derivatives of their logarithms.
      lacking: f64[buckets], variance of what the belief does not hold.
      covariance: f64[belief, belief].
    """

    seconds: np.ndarray
    along: np.ndarray
    lacking: np.ndarray
    covariance: np.ndarray

    def deviations(self, at: int) -> np.ndarray:
        """Returns the standard deviations of log(seconds / seconds[at]), f64[buckets]."""
        apart = self.along - self.along[at]
        variance = ((apart @ self.covariance) * apart).sum(axis=1) + self.lacking
        variance += self.lacking[at]
        variance[at] = 0.0
        return np.sqrt(np.maximum(variance, 0.0))


class StepCosts:
    """A belief over the seconds of every bucket's step.

    Args:
      nodes_per_row: nodes that a row verifies at each K, root included; by default 1 + K,
        that of chains.
      prior: predicts the seconds of a bucket's step at a context of all rows.
      padding: returns how many tokens are computed where so many are verified.
    """

    def __init__(
        self,
        nodes_per_row: Mapping[int, int] | None = None,
        prior: Prior | None = None,
        padding: Padding | None = None,
    ):
        self._nodes_per_row = dict(nodes_per_row or {})
        self._prior, self._padding = prior, padding
        # By bucket, the one that ran last at the end: the latest bursts, each with whether it is of
        # this process, and its number.
        self._kept: dict[Bucket, collections.deque[tuple[bool, int, Burst]]] = {}
        self._num_kept = 0
        self._places: dict[Bucket, int] | None = None  # of own factors; None: to be built
        self._made_with: Any = None  # what of `describe` the belief depends on
        self._mean = self._covariance = np.zeros(0)
        self._unit: float | None = None
        self._surprises: dict[Bucket, float] = {}  # how far off, squared, each one's last burst was

    @property
    def measured(self) -> list[Bucket]:
        return list(self._kept)

    def count(self, bucket: Bucket) -> int:
        """Returns how many measurements of a bucket are remembered, those without a draft token
        among them: at most MEMORY of either."""
        return len(self._kept.get(bucket, ())) + len(self._kept.get(narrow_of(bucket), ()))

    def describe(
        self, nodes_per_row: Mapping[int, int], prior: Prior | None, padding: Padding | None
    ) -> None:
        """Replaces what the class was given. A prior predicts the same as the one before it."""
        self._nodes_per_row, self._prior, self._padding = dict(nodes_per_row), prior, padding
        if self._made_with != (self._nodes_per_row, padding, prior is None):
            self._places = None

    def copy(self) -> StepCosts:
        """Returns an independent copy without the prior, which may hold a model."""
        own = StepCosts(self._nodes_per_row, None, self._padding)
        own._made_with = self._made_with
        own._kept = {bucket: kept.copy() for bucket, kept in self._kept.items()}
        own._num_kept, own._unit = self._num_kept, self._unit
        own._surprises = {**self._surprises}
        own._places = None if self._places is None else {**self._places}
        own._mean, own._covariance = self._mean.copy(), self._covariance.copy()
        return own

    def take(self, other: StepCosts, *, is_newer: bool = False) -> None:
        """Takes another's bursts of every bucket that it measured more often than this one.

        Measurements of this process rank above those of earlier ones.

        Args:
          is_newer: whether bursts of earlier processes are the other's, as those of a file that was
            written since this one read it.
        """
        rank = lambda kept: (any(is_own for is_own, _, _ in kept), len(kept))
        bursts = lambda kept: [burst for _, _, burst in kept]
        for bucket, theirs in other._kept.items():
            mine = self._kept.get(bucket, ())
            is_better = rank(theirs) > rank(mine) or (is_newer and not rank(mine)[0])
            if is_better and bursts(theirs) != bursts(mine):
                self._kept[bucket], self._places = theirs.copy(), None
        self._num_kept = max(self._num_kept, other._num_kept)
        self._forget_oldest()

    def begin_run(self) -> None:
        """Marks a gap: the machine may be faster or slower afterwards."""
        self._build()
        self._covariance[_DRIFT, _DRIFT] += GAP_SD**2

    def observe(
        self,
        bucket: Bucket,
        context: float,
        seconds: float,
        num_steps: int = USUAL_STEPS,
        num_behind: int = 0,
        wide_share: float = 1.0,
    ) -> None:
        """Adds one burst: seconds per step, of all that it took.

        Raises:
          ValueError: the seconds are not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds=} of a step must be above 0 and finite.")
        self._build()
        burst = Burst(bucket, context, seconds, num_steps, num_behind, wide_share)
        self._update(burst)
        if _is_sound(burst):
            self._keep(burst, is_own=True)

    def seconds(
        self, bucket: Bucket, context: float, num_steps: float = USUAL_STEPS, num_behind: int = 0
    ) -> float | None:
        """Returns the expected seconds of a step; None if nothing is known of any bucket."""
        if self._prior is None and not self._kept:
            return None
        return float(self.predict([bucket], [context], [num_steps], num_behind).seconds[0])

    def predict(
        self,
        buckets: Sequence[Bucket],
        contexts: Sequence[float],
        num_steps: Sequence[float],
        num_behind: int = 0,
        wide_shares: Sequence[float] | None = None,
    ) -> Prediction:
        """Returns the expected seconds of each bucket's step, in a burst of some steps.

        Args:
          num_behind: tokens of catch-up in each burst.
          wide_shares: of its steps, those with a draft token; by default all.
        """
        self._build()
        behind = [num_behind] * len(buckets)
        logs, along, lacking = self._expected(buckets, contexts, num_steps, behind, wide_shares)
        return Prediction(np.exp(logs), along, lacking, self._covariance)

    # Records

    def to_records(self) -> list[dict[str, Any]]:
        """Returns the kept bursts, for JSON, the oldest first."""
        names = ("context_tokens", "step_s", "num_steps", "num_behind", "wide_share")
        return [
            dict(zip(Bucket._fields, burst.bucket)) | dict(zip(names, burst[1:]))
            for _, _, burst in self._all_kept()
        ]

    def add_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds `to_records` of an earlier process.

        Raises:
          ValueError: a record is invalid; nothing was added.
        """
        records = list(records)
        if len(records) > MOST_BUCKETS * MEMORY:
            raise ValueError(f"{len(records)} records are more than a run keeps.")
        bursts = [_burst_of(record) for record in records]
        if len({burst.bucket for burst in bursts}) > MOST_BUCKETS:
            raise ValueError(f"more than {MOST_BUCKETS} buckets are more than a run keeps.")
        for burst in bursts:
            self._keep(burst, is_own=False)
        self._places = None

    def _all_kept(self) -> list[tuple[bool, int, Burst]]:
        """Returns the kept bursts, the oldest first."""
        return sorted(itertools.chain(*self._kept.values()), key=lambda kept: kept[:2])

    def _keep(self, burst: Burst, *, is_own: bool) -> None:
        kept = self._kept.pop(burst.kept_as, None) or collections.deque(maxlen=MEMORY)
        kept.append((is_own, self._num_kept, burst))
        self._kept[burst.kept_as] = kept
        self._num_kept += 1
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forgets the buckets that ran longest ago, beyond MOST_BUCKETS."""
        while len(self._kept) > MOST_BUCKETS:
            bucket = next(iter(self._kept))
            del self._kept[bucket]
            gone = {bucket, narrow_of(bucket)} - self._kept.keys()
            for bucket in gone & (self._places or {}).keys():
                assert self._places is not None
                # What a normal belief says of the others does not hang on it.
                place = self._places.pop(bucket)
                self._places = {other: at - (at > place) for other, at in self._places.items()}
                self._mean = np.delete(self._mean, place)
                self._covariance = np.delete(np.delete(self._covariance, place, 0), place, 1)

    # The filter

    def _build(self) -> None:
        """Makes the belief of all kept bursts, if it is not there."""
        if self._places is not None:
            return
        self._places, self._unit, self._surprises = {}, None, {}
        self._made_with = self._nodes_per_row, self._padding, self._prior is None
        share = 1.0 if self._prior is None else PRIOR_SHARE
        shares = np.array([share] * 5 + [1.0] * 2)
        self._mean = np.append(np.log(COEFFICIENTS * shares), 0.0)
        drift_sd = DRIFT_SD if self._prior is None else 1.0
        self._covariance = np.diag([COEFFICIENT_SD**2] * _NUM + [drift_sd**2])
        before, own = ([b for is_own, _, b in self._all_kept() if is_own == of] for of in (0, 1))
        for burst in before:
            self._update(burst)
        if before:
            self._covariance[_DRIFT, _DRIFT] += GAP_SD**2
            # What was measured there may have been disturbed, whatever its bursts say.
            places = [*self._places.values()]
            self._covariance[places, places] += (OWN_SD / 2) ** 2
        for burst in own:
            self._update(burst)

    def _update(self, burst: Burst) -> None:
        """Takes one measurement into the belief."""
        assert self._places is not None
        narrow = [narrow_of(burst.bucket)] * (burst.wide_share < 1)
        for bucket in {*narrow, burst.kept_as} - self._places.keys():
            place = self._places[bucket] = len(self._mean)
            self._mean = np.append(self._mean, 0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[place, place] = OWN_SD**2
        covariance, size, place = self._covariance, len(self._mean), self._places[burst.kept_as]
        covariance[_DRIFT, _DRIFT] += WANDER_SD**2
        own = np.arange(_DRIFT + 1, size)
        own = own[covariance[own, own] < OWN_SD**2]
        covariance[own, own] += FORGOTTEN_SD**2
        (expected,), (along,), _ = self._expected(
            [burst.bucket],
            [burst.context],
            [burst.num_steps],
            [burst.num_behind],
            [burst.wide_share],
        )
        gained = covariance @ along
        noise = NOISE_SD**2 + (TIMED_S / (burst.seconds * burst.num_steps)) ** 2
        variance = float(along @ gained) + noise
        off = math.log(burst.seconds) - expected
        beyond = max(off**2 - MOST_OFF**2 * variance, 0.0)
        # One burst was disturbed, or all that follow are: it tells little, the next one more.
        variance += beyond
        self._mean = self._mean + gained * (off / variance)
        self._covariance = covariance - np.outer(gained, gained) / variance
        self._covariance[_DRIFT, _DRIFT] += beyond / 2
        # The same bucket twice in a row, in one direction: it takes another time than before.
        surprise = math.copysign(beyond, off)
        if surprise * self._surprises.get(burst.kept_as, 0.0) > 0:
            self._covariance[place, place] += beyond / 2
        self._surprises[burst.kept_as] = surprise

    def _expected(
        self,
        buckets: Sequence[Bucket],
        contexts: Sequence[float],
        num_steps: Sequence[float],
        num_behind: Sequence[int],
        wide_shares: Sequence[float] | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the logarithms of the expected seconds, f64[buckets], and the other figures of
        `Prediction`: along and lacking."""
        assert self._places is not None
        logs, slopes = self._linear(buckets, contexts, num_steps, num_behind)
        along = np.zeros((len(buckets), len(self._mean)))
        along[:, :_NUM], along[:, _DRIFT] = slopes, 1.0
        lacking = np.zeros(len(buckets))
        for at, bucket in enumerate(buckets):
            place = self._places.get(bucket)
            if place is None:
                lacking[at] = OWN_SD**2
            else:
                along[at, place] = 1.0
        logs += along[:, _NUM:] @ self._mean[_NUM:]
        if wide_shares is None or min(wide_shares, default=1.0) >= 1.0:
            return logs, along, lacking
        narrow = [*map(narrow_of, buckets)]
        of_narrow = self._expected(narrow, contexts, num_steps, num_behind, None)
        wide = np.array(wide_shares)
        seconds = np.array([wide * np.exp(logs), (1 - wide) * np.exp(of_narrow[0])])
        share, other = seconds / seconds.sum(axis=0)
        along = share[:, None] * along + other[:, None] * of_narrow[1]
        return np.log(seconds.sum(axis=0)), along, share**2 * lacking + other**2 * of_narrow[2]

    def _linear(
        self,
        buckets: Sequence[Bucket],
        contexts: Sequence[float],
        num_steps: Sequence[float],
        num_behind: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logarithms of the sums of terms, f64[buckets], and their derivatives by the
        log coefficients, f64[buckets, coefficients]."""
        unit = self._unit = self._unit or (self._prior(Bucket(1, 0), 1.0) if self._prior else 1.0)
        tokens, context = [*map(self._num_tokens, buckets)], np.array(contexts, float)
        depth = np.array([bucket.num_speculative_tokens for bucket in buckets])
        rows, steps = np.array([bucket.rows for bucket in buckets]), np.array(num_steps, float)
        behind = np.where(depth > 0, num_behind, 0)
        terms = (tokens, depth, rows * depth, context, context * depth, 1 / steps, behind / steps)
        base = 1.0 if self._prior is None else [*map(self._prior, buckets, contexts)]
        parts = unit * np.exp(self._mean[:_NUM]) * np.array(terms).T
        total = base + parts.sum(axis=1)
        return np.log(total), parts / total[:, None]

    def _num_tokens(self, bucket: Bucket) -> int:
        """Returns how many tokens a step computes."""
        rows, depth, most = bucket
        drafts = rows * (self._nodes_per_row.get(depth, 1 + depth) - 1)
        tokens = rows + (drafts if most is None else min(drafts, most))
        return tokens if self._padding is None else self._padding(tokens)


def _burst_of(record: Mapping[str, Any]) -> Burst:
    """Returns a burst of `StepCosts.to_records`.

    Raises:
      ValueError: a figure is missing or out of range.
    """
    try:
        rows, depth, most = (record[name] for name in Bucket._fields)
        bucket = Bucket(int(rows), int(depth), None if most is None else int(most))
        steps = int(record.get("num_steps", USUAL_STEPS))
        behind = int(record.get("num_behind", 0))
        share = float(record.get("wide_share", 1.0))
        context, seconds = float(record["context_tokens"]), float(record["step_s"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{reprlib.repr(record)} is no measured step: {error!r}.") from None
    burst = Burst(bucket, context, seconds, steps, behind, share)
    if not _is_sound(burst):
        raise ValueError(f"{reprlib.repr(record)} is no measured step.")
    return burst


def _is_sound(burst: Burst) -> bool:
    """Returns whether a burst's figures are within the limits of a record."""
    rows, depth, most = burst.bucket
    is_sound = 0 < rows <= MOST_ROWS and 0 <= depth <= MOST_DEPTH
    is_sound &= most is None or 0 < most <= MOST_ROWS * MOST_DEPTH
    is_sound &= 0 <= burst.wide_share <= 1
    is_sound &= LEAST_KNOWN < burst.seconds < MOST_KNOWN and 0 < burst.num_steps < MOST_KNOWN
    return is_sound and all(0 <= n < MOST_KNOWN**2 for n in (burst.context, burst.num_behind))
