"""Seconds of a step: measured by bucket, predicted where not yet measured. No jax.

    seconds = (base(bucket, about this context) + slope(K) * context tokens) * drift

base is what was measured of a bucket: medians, since what disturbs a burst only makes it
longer. Of one that was not measured it is the best fit, with no coefficient below 0, of

    c0 + c1 * verified tokens + c2 * drafted tokens + c3 * draft forwards

to those that were; of few it is what bytes and operations say (`step_prior`), times what was
measured of those like it over what they say of them. The slope is s0 + s1 * K, none below 0: each draft forward reads the
drafter's keys and values as verifying reads the target's.

The drift is how much slower everything runs just now than when it was measured: shared
machines and hot chips slow down all buckets alike, and without it the one that runs just
now would look worse than those that do not. Only what was measured often tells it: of
what was not, what was measured before is likelier to be wrong.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.bucket import Bucket

Prior = Callable[[Bucket, float], float]

# Chosen by the short generations of bench.scheduling, docs/benchmarks/scheduling.md.
MEMORY = 16  # measurements that are remembered, of a bucket at about one context
OF_BEFORE = 3  # measurements of an earlier run, of a bucket at about one context
DRIFT_MEMORY = 3  # measurements that tell the drift
TELLS_DRIFT = 3  # measurements at about one context, before the next tells of the drift
# Logarithm of how much longer or less a step takes than the one before of its bucket, where
# it is the machine; and how many measurements before are compared with.
JUMP, RECENT = 0.26, 4
NEAR = 2  # places apart, at which a measurement counts for half
REFIT_AFTER = 16  # measurements
NUM_FEATURES = 4
CATCH_UP_KNOWN = 256.0  # tokens that catching up, known beforehand, counts for
CATCH_UP_MEMORY = 8192.0  # tokens that it remembers
SLOPE_ROUNDS = 4  # of weighing what tells of the slope
# What is measured of a slope outweighs that it may be 0 once squares of contexts, relative
# to their mean and off it, add up to the square of this.
SLOPE_PRIOR = 0.5
SMALL_MISS = 0.05  # of a step's seconds: what misses the slope by more weighs less
FEW = 4  # measurements of a bucket, next to which what the fit says counts for one more
LEAST_SHARE = 0.25  # of what was measured, that a step is predicted to take
OUTLIER = 3.0  # a measurement counts as at most this many times what was expected


class Sample:
    """Measurements of one bucket at about one context; seconds without the drift."""

    def __init__(self):
        self.context = 0.0  # tokens of all rows, a mean
        self.seconds = 0.0  # their median
        self._latest: list[tuple[float, float]] = []  # context and seconds

    @property
    def count(self) -> int:
        return len(self._latest)

    def add(self, context: float, seconds: float) -> None:
        self._latest = [*self._latest[1 - MEMORY :], (context, seconds)]
        self.context += (context - self.context) / self.count
        self.seconds = _median([seconds for _, seconds in self._latest])

    def forget_latest(self) -> None:
        self._latest.pop()
        if self._latest:
            self.seconds = _median([seconds for _, seconds in self._latest])

    def at(self, context: float, slope: float) -> float:
        """Returns the median of what the measurements would be at one context of all."""
        return _median([s + slope * (context - own) for own, s in self._latest])


class _Fit(NamedTuple):
    # f64[2], seconds per context token: of K = 0, and more for each K.
    slopes: np.ndarray
    coefficients: np.ndarray  # f64[NUM_FEATURES]

    def predicted(self, features: np.ndarray) -> float:
        return float(features @ self.coefficients)

    def slope(self, bucket: Bucket) -> float:
        at_0, per_token = self.slopes
        return at_0 + per_token * bucket.num_speculative_tokens


class StepCosts:
    """What steps cost, as far as is known.

    Args:
      nodes_per_row: the nodes that a row verifies at each K, root included; None is
        1 + K, of chains.
      prior: predicts the seconds of a bucket at a context before any was measured; None is
        nothing.
    """

    def __init__(
        self,
        nodes_per_row: Mapping[int, int] | None = None,
        prior: Prior | None = None,
    ):
        # Logarithms of what the drift is the median of; one measurement tells of none.
        self._slower = [0.0] * DRIFT_MEMORY
        # The last measurements: buckets, contexts and seconds with the drift.
        self._recent: list[tuple[Bucket, float, float]] = []
        # Per token that the drafter has not seen, of the row with most; None: not known.
        self.catch_up_s: float | None = None
        self._caught_up = np.zeros(2)  # tokens, and the seconds that they took
        self.nodes_per_row = nodes_per_row or {}
        self.prior = prior
        self._samples: dict[Bucket, dict[int, Sample]] = {}
        self._fit: _Fit | None = None
        self._num_measured = self._num_since_fit = 0
        # What was asked for since: by bucket, and about which context.
        self._bases: dict[Bucket, dict[int, float]] = {}

    @property
    def measured(self) -> list[Bucket]:
        return list(self._samples)

    def count(self, bucket: Bucket) -> int:
        """Returns how many measurements of a bucket are remembered."""
        return sum(sample.count for sample in self._samples.get(bucket, {}).values())

    def evidence(self, bucket: Bucket, context: float) -> float:
        """Returns how many measurements at a context those of a bucket are as good as."""
        samples, place = self._samples.get(bucket, {}), _place(context)
        return sum(
            sample.count * _nearness(place, at) for at, sample in samples.items()
        )

    def observe(self, bucket: Bucket, context: float, seconds: float) -> None:
        """Takes in one measurement: seconds per step, context tokens of all rows.

        Raises:
          ValueError: the seconds are no positive number.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds=} of a step must be above 0 and finite.")
        self._notice_jump(bucket, context, seconds)
        self._recent = [*self._recent[1 - RECENT :], (bucket, context, seconds)]
        if bucket in self._samples:
            expected = self.seconds(bucket, context)
            assert expected is not None
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            before = self._samples[bucket].get(_place(context))
            if before is not None and before.count >= TELLS_DRIFT:
                usual = before.at(context, self._fitted().slope(bucket))
                slower = math.log(seconds / max(usual, LEAST_SHARE * before.seconds))
                self._slower = [*self._slower[1:], slower]
        self._add(bucket, context, seconds / self.drift)
        # Now, and not when the next burst is planned.
        self._fitted()

    def _notice_jump(self, bucket: Bucket, context: float, seconds: float) -> None:
        """Takes a step that suddenly takes far longer, or less, for the machine's doing.

        A bucket that ran just before at about this context tells of it at once. What other
        buckets took in between was measured before the jump or after it: nobody knows.
        """
        buckets = [recent for recent, _, _ in self._recent]
        if bucket not in buckets:
            return
        place = len(buckets) - 1 - buckets[::-1].index(bucket)
        _, before, last = self._recent[place]
        if abs(_place(context) - _place(before)) > 1:
            return
        usual = last + self._fitted().slope(bucket) * (context - before) * self.drift
        jump = math.log(seconds / max(usual, LEAST_SHARE * last))
        if abs(jump) < JUMP:
            return
        self._slower = [slower + jump for slower in self._slower]
        for other, at, _ in self._recent[place + 1 :]:
            self._forget_latest(other, at)
        self._recent = []

    def _forget_latest(self, bucket: Bucket, context: float) -> None:
        samples = self._samples[bucket]
        samples[_place(context)].forget_latest()
        if not samples[_place(context)].count:
            del samples[_place(context)]
        if not samples:
            del self._samples[bucket]
        self._fit = None
        self._bases.clear()

    @property
    def drift(self) -> float:
        return math.exp(_median(self._slower))

    def seconds(self, bucket: Bucket, context: float) -> float | None:
        """Returns the seconds of a step just now; None where nothing is known."""
        if not self._samples:
            return self.prior and self.prior(bucket, context)
        fit, place = self._fitted(), _place(context)
        bases = self._bases.setdefault(bucket, {})
        base = bases.get(place)
        if base is None:
            base = bases[place] = self._base(bucket, fit, place)
        return (base + fit.slope(bucket) * context) * self.drift

    def observe_catch_up(self, tokens: float, seconds: float) -> None:
        """Takes in what a burst took beyond its steps because the drafter had to catch up.

        Args:
          tokens: above 0.
          seconds: below 0 where the steps were faster than thought; many bursts make a mean.
        """
        if self.catch_up_s is not None and not self._caught_up.any():
            self._caught_up = CATCH_UP_KNOWN * np.array([1.0, self.catch_up_s])
        kept = math.exp(-tokens / CATCH_UP_MEMORY)
        self._caught_up = kept * self._caught_up + np.array([tokens, seconds])
        self.catch_up_s = max(float(self._caught_up[1] / self._caught_up[0]), 0.0)

    def fit_error(self) -> float:
        """Returns the largest relative error of the fit over what was measured; 0 of nothing."""
        if not self._samples:
            return 0.0
        fit = self._refitted()
        measured = fit._replace(coefficients=np.zeros(NUM_FEATURES))
        errors = [
            abs(
                fit.predicted(self._features(bucket)) / self._base(bucket, measured) - 1
            )
            for bucket in self._samples
        ]
        return max(errors)

    # Files

    def to_records(self) -> list[dict[str, Any]]:
        """Returns all that is known, for JSON; seconds as they are just now."""
        return [
            bucket._asdict()
            | {
                "context_tokens": round(sample.context, 1),
                "step_s": sample.seconds * self.drift,
                "num_measurements": sample.count,
            }
            for bucket, samples in sorted(self._samples.items(), key=str)
            for sample in samples.values()
        ]

    def add_records(
        self,
        records: Iterable[Mapping[str, Any]],
        most_measurements: int = OF_BEFORE,
    ) -> None:
        """Takes in what `to_records` returned, in this run or an earlier one.

        Args:
          most_measurements: that a record counts for; what is measured now counts for more.

        Raises:
          ValueError: a record that lacks something, or means nothing.
        """
        for record in records:
            try:
                most = record["max_drafts"]
                bucket = Bucket(
                    int(record["rows"]),
                    int(record["num_speculative_tokens"]),
                    None if most is None else int(most),
                )
                context, seconds = (
                    float(record[name]) for name in ("context_tokens", "step_s")
                )
                count = int(record["num_measurements"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{record!r} is no measured step: {error!r}."
                ) from None
            is_bucket = bucket.rows > 0 and bucket.num_speculative_tokens >= 0
            is_bucket &= bucket.max_drafts is None or bucket.max_drafts > 0
            is_measured = 0 < seconds < math.inf and 0 <= context < math.inf
            if not (is_bucket and is_measured and count > 0):
                raise ValueError(f"{record!r} is no measured step.")
            self._add(bucket, context, seconds, min(count, most_measurements))

    def _add(
        self, bucket: Bucket, context: float, seconds: float, count: int = 1
    ) -> None:
        is_new = bucket not in self._samples
        samples, place = self._samples.setdefault(bucket, {}), _place(context)
        if place not in samples:
            samples[place] = Sample()
        for _ in range(count):
            samples[place].add(context, seconds)
        self._num_since_fit += 1
        self._num_measured += 1
        if is_new or self._num_since_fit > min(self._num_measured / 8, REFIT_AFTER):
            self._fit = None
        self._bases.pop(bucket, None)

    def _features(self, bucket: Bucket) -> np.ndarray:
        depth, rows = bucket.num_speculative_tokens, bucket.rows
        drafts = rows * (self.nodes_per_row.get(depth, 1 + depth) - 1)
        if bucket.max_drafts is not None:
            drafts = min(drafts, bucket.max_drafts)
        return np.array([1.0, rows + drafts, rows * depth, depth])

    def _base(self, bucket: Bucket, fit: _Fit, place: int | None = None) -> float:
        """Returns the seconds of a bucket without context: measured, or as the fit has it.

        Args:
          place: next to which measurements count for more, as of `_place`; None: all alike.
        """
        samples = self._samples.get(bucket)
        if samples is None and self.prior is not None and len(self._samples) < FEW:
            return self._by_prior(bucket, fit, place)
        if samples is None:
            cheapest = min(
                s.seconds for o in self._samples.values() for s in o.values()
            )
            return max(fit.predicted(self._features(bucket)), LEAST_SHARE * cheapest)
        slope = fit.slope(bucket)
        near = {at: 1.0 if place is None else _nearness(place, at) for at in samples}
        weighed = [
            (sample.seconds - slope * sample.context, sample.count * near[at])
            for at, sample in samples.items()
        ]
        if self.count(bucket) < FEW and fit.coefficients.any():
            predicted = fit.predicted(self._features(bucket))
            weighed.append((predicted, max(near.values())))
        # A slope too steep must not make a step free.
        least = LEAST_SHARE * min(sample.seconds for sample in samples.values())
        return max(_weighted_median(weighed), least)

    def _by_prior(self, bucket: Bucket, fit: _Fit, place: int | None) -> float:
        """Returns what the prior says, as far off as it is of the buckets that were measured."""
        assert self.prior is not None
        off, weights = [], []
        for other, samples in self._samples.items():
            for sample in samples.values():
                said = self.prior(other, sample.context)
                off.append(math.log(sample.seconds / said))
                rows = abs(math.log2(other.rows / bucket.rows))
                depths = other.num_speculative_tokens, bucket.num_speculative_tokens
                apart = rows + abs(depths[0] - depths[1])
                weights.append(sample.count / (1 + apart) ** 2)
        scale = math.exp(float(np.average(off, weights=weights)))
        context = 0.0 if place is None else _context(place)
        said = scale * self.prior(bucket, context)
        return max(said - fit.slope(bucket) * context, LEAST_SHARE * said)

    def _fitted(self) -> _Fit:
        return self._refitted() if self._fit is None else self._fit

    def _refitted(self) -> _Fit:
        """Fits what was measured: predictions change with it, and what was measured does not."""
        slopes = _Fit(self._slopes(), np.zeros(NUM_FEATURES))
        bases = {bucket: self._base(bucket, slopes) for bucket in self._samples}
        features = np.stack(list(map(self._features, bases)))
        # Relative errors count: cheap steps matter as much as dear ones.
        values = np.array(list(bases.values()))
        relative = features / values[:, None]
        coefficients = fit_nonnegative(relative, np.ones_like(values))
        self._fit = slopes._replace(coefficients=coefficients)
        self._bases, self._num_since_fit = {}, 0
        return self._fit

    def _slopes(self) -> np.ndarray:
        """Returns what buckets gain with context, over all that were measured at several, f64[2]."""
        several = [
            (bucket, list(samples.values()))
            for bucket, samples in self._samples.items()
            if len(samples) > 1
        ]
        if not several:
            return np.zeros(2)
        contexts, seconds, counts = np.array(
            [(s.context, s.seconds, s.count) for _, samples in several for s in samples]
        ).T
        sizes = [len(samples) for _, samples in several]
        own = np.repeat(np.arange(len(sizes)), sizes)  # the bucket of each
        depths = np.array([bucket.num_speculative_tokens for bucket, _ in several])
        # Relative to the bucket's own cost: dear steps must not rule.
        seconds_of = np.bincount(own, seconds) / np.array(sizes)
        seconds = seconds / seconds_of[own]
        features = contexts[:, None] * np.stack([np.ones(len(depths)), depths], 1)[own]
        features = features / seconds_of[own, None]
        # Little is known at first, and a slope too steep misleads more than none.
        prior = SLOPE_PRIOR * np.diag(np.sqrt((features**2).mean(axis=0)))
        slopes, weights = np.zeros(2), counts
        for _ in range(SLOPE_ROUNDS):
            columns = np.stack([_off(column, own, weights) for column in features.T], 1)
            values, root = _off(seconds, own, weights), np.sqrt(weights)
            slopes = fit_nonnegative(
                np.concatenate([root[:, None] * columns, prior]),
                np.concatenate([root * values, np.zeros(2)]),
            )
            missed = np.abs(values - columns @ slopes)
            # Outliers count in part (Huber, "Robust Estimation of a Location Parameter").
            weights = counts / np.maximum(missed / SMALL_MISS, 1)
        return slopes


def fit_nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the coefficients, none below 0, of the least squared error.

    Every subset of the features is tried: for the handful there are that is exact, and
    as fast as anything. Among equals the subset of fewest features wins, and of those the
    first.

    Args:
      features: f64[num_values, num_features].
      values: f64[num_values].
    """
    num_features = features.shape[1]
    best, best_error = np.zeros(num_features), float(values @ values)
    tolerance = 1e-12 * best_error
    for size in range(1, min(num_features, len(values)) + 1):
        for subset in map(list, itertools.combinations(range(num_features), size)):
            own, *_ = np.linalg.lstsq(features[:, subset], values, rcond=None)
            if np.any(own < 0):
                continue
            error = float(np.sum((features[:, subset] @ own - values) ** 2))
            if error < best_error - tolerance:
                best, best_error = np.zeros(num_features), error
                best[subset] = own
    return best


def _nearness(place: int, other: int) -> float:
    """Returns what a measurement at one place counts for at another, 0 to 1."""
    return 1 / (1 + ((place - other) / NEAR) ** 2)


def _off(values: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns how far values are from the weighted mean of their group."""
    means = np.bincount(groups, weights * values) / np.bincount(groups, weights)
    return values - means[groups]


def _median(values: Sequence[float]) -> float:
    """Returns the median; of two in the middle the smaller."""
    return sorted(values)[(len(values) - 1) // 2]


def _weighted_median(weighed: Sequence[tuple[float, float]]) -> float:
    """Returns the median of (value, weight); of two in the middle the smaller."""
    weighed = sorted(weighed)
    weights = list(itertools.accumulate(weight for _, weight in weighed))
    return weighed[bisect.bisect_left(weights, weights[-1] / 2)][0]


def _context(place: int) -> float:
    """Returns a context that counts to a sample."""
    return max(1.25**place - 64, 0.0)


def _place(context: float) -> int:
    """Returns which sample a context counts to: contexts within a quarter of each other share one."""
    return round(math.log(context + 64) / math.log(1.25))
