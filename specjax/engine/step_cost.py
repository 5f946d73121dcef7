"""Seconds of a step: measured by bucket, predicted where not yet measured. No jax.

    seconds = base(bucket) + context_s * context tokens, all of it times the drift

base is what was measured of a bucket. Of one that was not it is the best fit, with
no coefficient below 0, of

    c0 + c1 * verified tokens + c2 * drafted tokens + c3 * draft forwards

to those that were. The drift is how much slower everything runs just now than when
it was measured: shared machines and hot chips slow down all buckets alike, and without it
the one that runs just now would look worse than those that do not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.bucket import Bucket

MEMORY = 16  # measurements that a mean remembers
FIRST = 3  # that the first one counts for: what comes next may be the drift
DRIFT_RATE = 0.3  # how far one measurement moves the drift
REFIT_AFTER = 16  # measurements
NUM_FEATURES = 4
CATCH_UP_KNOWN = 256.0  # tokens that catching up, known beforehand, counts for
CATCH_UP_MEMORY = 8192.0  # tokens that it remembers
OUTLIER = 3.0  # a measurement counts as at most this many times what was expected


@dataclasses.dataclass
class Sample:
    """Measurements of one bucket at about one context; seconds without the drift."""

    context: float  # tokens of all rows
    seconds: float
    count: int = FIRST

    def add(self, context: float, seconds: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.context += (context - self.context) / self.count
        self.seconds += (seconds - self.seconds) / self.count


class _Fit(NamedTuple):
    slope: float  # seconds per context token
    coefficients: np.ndarray  # f64[NUM_FEATURES]

    def predicted(self, features: np.ndarray) -> float:
        return float(features @ self.coefficients)


class StepCosts:
    """What steps cost, as far as is known.

    Args:
      nodes_per_row: the nodes that a row verifies at each K, root included; None is
        1 + K, of chains.
    """

    def __init__(self, nodes_per_row: Mapping[int, int] | None = None):
        self.drift = 1.0
        # Per token that the drafter has not seen, of the row with most; None: not known.
        self.catch_up_s: float | None = None
        self._caught_up = np.zeros(2)  # tokens, and the seconds that they took
        self._nodes_per_row = nodes_per_row or {}
        self._samples: dict[Bucket, dict[int, Sample]] = {}
        self._fit: _Fit | None = None
        self._num_since_fit = 0  # measurements
        self._bases: dict[Bucket, float] = {}  # that were asked for since

    @property
    def measured(self) -> list[Bucket]:
        return list(self._samples)

    def count(self, bucket: Bucket) -> int:
        """Returns how many measurements of a bucket are remembered."""
        return sum(sample.count for sample in self._samples.get(bucket, {}).values())

    def observe(self, bucket: Bucket, context: float, seconds: float) -> None:
        """Takes in one measurement: seconds per step, context tokens of all rows.

        Raises:
          ValueError: the seconds are no positive number.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds=} of a step must be above 0 and finite.")
        if bucket in self._samples:
            expected = self.seconds(bucket, context)
            assert expected is not None
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            if _place(context) in self._samples[bucket]:
                self.drift *= (seconds / expected) ** DRIFT_RATE
        self._add(bucket, context, seconds / self.drift)

    def seconds(self, bucket: Bucket, context: float) -> float | None:
        """Returns the seconds of a step just now; None where nothing was measured."""
        if not self._samples:
            return None
        fit = self._fitted()
        base = self._bases.get(bucket)
        if base is None:
            base = self._base(bucket, fit)
            self._bases[bucket] = base
        return (base + fit.slope * context) * self.drift

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

    @property
    def context_s(self) -> float:
        """Seconds per token of context, without the drift."""
        return self._refitted().slope if self._samples else 0.0

    def fit_error(self) -> float:
        """Returns the largest relative error of the fit over what was measured; 0 of nothing."""
        if not self._samples:
            return 0.0
        fit = self._refitted()
        errors = [
            abs(fit.predicted(self._features(bucket)) / self._base(bucket, fit) - 1)
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

    def add_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes in what `to_records` returned, in this run or an earlier one.

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
            self._add(bucket, context, seconds)
            self._samples[bucket][_place(context)].count = min(count, MEMORY)

    def _add(self, bucket: Bucket, context: float, seconds: float) -> None:
        is_new = bucket not in self._samples
        samples, place = self._samples.setdefault(bucket, {}), _place(context)
        if place in samples:
            samples[place].add(context, seconds)
        else:
            samples[place] = Sample(context, seconds)
        self._num_since_fit += 1
        if is_new or self._num_since_fit >= REFIT_AFTER:
            self._fit = None
        self._bases.pop(bucket, None)

    def _features(self, bucket: Bucket) -> np.ndarray:
        depth, rows = bucket.num_speculative_tokens, bucket.rows
        drafts = rows * (self._nodes_per_row.get(depth, 1 + depth) - 1)
        if bucket.max_drafts is not None:
            drafts = min(drafts, bucket.max_drafts)
        return np.array([1.0, rows + drafts, rows * depth, depth])

    def _base(self, bucket: Bucket, fit: _Fit) -> float:
        """Returns the seconds of a bucket without context: measured, or as the fit has it."""
        samples = self._samples.get(bucket)
        if samples is None:
            return fit.predicted(self._features(bucket))
        parts = [(s.seconds - fit.slope * s.context, s.count) for s in samples.values()]
        mean = sum(part * count for part, count in parts) / sum(c for _, c in parts)
        # A slope too steep must not make a step free.
        return max(mean, 0.25 * min(s.seconds for s in samples.values()))

    def _fitted(self) -> _Fit:
        return self._refitted() if self._fit is None else self._fit

    def _refitted(self) -> _Fit:
        """Fits what was measured: predictions change with it, and what was measured does not."""
        slope = _Fit(self._slope(), np.zeros(NUM_FEATURES))
        bases = {bucket: self._base(bucket, slope) for bucket in self._samples}
        features = np.stack(list(map(self._features, bases)))
        # Relative errors count: cheap steps matter as much as dear ones.
        values = np.array(list(bases.values()))
        relative = features / values[:, None]
        coefficients = fit_nonnegative(relative, np.ones_like(values))
        self._fit = slope._replace(coefficients=coefficients)
        self._bases, self._num_since_fit = {}, 0
        return self._fit

    def _slope(self) -> float:
        """Returns seconds per context token: what buckets gain with context, over all of them."""
        gained = spread = 0.0
        for samples in self._samples.values():
            if len(samples) < 2:
                continue
            contexts = np.array([s.context for s in samples.values()])
            seconds = np.array([s.seconds for s in samples.values()])
            # Relative to the bucket's own cost: one outlier of a dear step must not rule.
            weights = (
                np.array([s.count for s in samples.values()]) / seconds.mean() ** 2
            )
            off = contexts - (weights * contexts).sum() / weights.sum()
            gained += float((weights * off * seconds).sum())
            spread += float((weights * off * off).sum())
        return max(gained / spread, 0.0) if spread else 0.0


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


def _place(context: float) -> int:
    """Returns which sample a context counts to: contexts within a quarter of each other share one."""
    return round(math.log(context + 64) / math.log(1.25))
