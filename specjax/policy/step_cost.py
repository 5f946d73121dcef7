"""Seconds of a step: measured by bucket, predicted for buckets not yet measured. No jax.

    seconds = (base(bucket, about this context) + slope(K) * context tokens) * drift

base comes from measurements of the bucket, compared with those right before and after it. It
is drawn towards

    c0 + c1 * computed tokens + c2 * drafted tokens + c3 * draft forwards

whose coefficients, none below 0, all buckets share (`step_ratios`): the fewer measurements a
bucket has, the more this sum counts. While few buckets were measured, the others are predicted
from bytes and operations (`step_prior`), times the ratio of measured to predicted seconds of
similar buckets. The slope is s0 + s1 * K, neither below 0: each draft forward reads the
drafter's keys and values as verification reads the target's.

The drift is how much slower every bucket runs now than when it was measured: shared machines
and hot chips slow down all buckets alike. It scales predictions to the present and cancels
when two buckets are compared. Only contexts with several measurements update it: elsewhere
the context itself may explain the difference.
"""

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import functools
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.least_squares import fit_nonnegative
from specjax.policy.step_ratios import (
    MOST_BURSTS,
    Bases,
    Burst,
    Columns,
    StepRatios,
)

Prior = Callable[[Bucket, float], float]
Padding = Callable[[int], int]

# Chosen by the short generations of bench.scheduling, docs/benchmarks/scheduling.md.
MEMORY = 16  # latest measurements kept per sample: one bucket at about one context
OF_BEFORE = 3  # most measurements of an earlier run that count per sample
DRIFT_MEMORY = 3  # latest measurements whose median is the drift
# DRIFT_LEAK: fraction of the log drift that is put down to the steps; otherwise a drift and
# equally overrated steps could cancel. MOST_DRIFT: largest factor, either way.
DRIFT_LEAK, MOST_DRIFT = 0.02, 50.0
TELLS_DRIFT = 3  # measurements of a sample before the next one updates the drift
NEAR = 2  # distance in places at which a measurement has half its weight
PLACE_WIDTH = math.log(1.25)  # of log contexts that share a sample
# Relative standard deviation of a burst's predicted steps, which blurs its catch-up; and the
# factor by which earlier weights decay with each burst that measures catch-up.
CATCH_UP_DOUBT, CATCH_UP_MEMORY = 0.4, 0.9
BURST_MEMORY = 16  # latest pairs of bursts that tell the fixed seconds of a burst
# Measurements after which the bases are fitted again, as a fraction of the bucket's own, and the
# most of them.
FIT_AFTER, MOST_UNFITTED = 0.25, 4
SLOPES_AFTER = 16  # most measurements between two fits of the slopes
SLOPE_ROUNDS = 4  # rounds of reweighting in the fit of the slopes
# Weight of the prior's slopes: measurements outweigh them once the squared deviations of
# contexts from their mean, relative to it, sum to more than the square of this.
SLOPE_PRIOR = 0.5
SMALL_MISS = 0.05  # residual of the slope, relative to a step, above which weights fall
# MOST_FITTED: buckets in one least-squares problem, the nearest in rows. MOST_BUCKETS: buckets
# remembered; beyond it the least recently used one is forgotten.
MOST_FITTED, MOST_BUCKETS = 64, 512
FEW = 4  # with fewer measured buckets the prior predicts the others
# Doubt: fraction by which a step may take less than predicted. That of a measured bucket is
# DOUBT_ERRORS standard errors, at least LEAST_DOUBT. MUCH_DOUBT is that of an unmeasured bucket,
# PRIOR_DOUBT that before any measurement.
DOUBT_ERRORS, LEAST_DOUBT = 2.0, 0.04
MUCH_DOUBT, PRIOR_DOUBT = 0.2, 0.5
# Mean absolute deviation of the log drift: its prior, the prior's weight in measurements, the
# decay of earlier measurements with each new one, and the largest deviation that counts.
USUAL_WANDER, WANDER_TRIALS, WANDER_MEMORY, MOST_WANDER = 0.2, 8.0, 0.99, 0.7
# Limits of a valid record: seconds and drift, rows and K; and the most records of a bucket.
LEAST_KNOWN, MOST_KNOWN = 1e-9, 10**6
MOST_ROWS, MOST_DEPTH, MOST_RECORDS = 2**16, 2**10, 128
LEAST_SHARE = 0.25  # least prediction, as a fraction of the seconds it is derived from
OUTLIER = 3.0  # measurements are clipped to within this factor of the expected seconds


class Sample:
    """Measurements of one bucket at about one context; seconds without the drift."""

    def __init__(self):
        self.context = 0.0  # context tokens of all rows, a mean
        self.seconds = 0.0  # median seconds per step
        self._latest: list[tuple[float, float]] = []  # context and seconds
        self.is_own = False  # whether any was measured in this process

    @property
    def count(self) -> int:
        return len(self._latest)

    @property
    def weight(self) -> tuple[bool, int]:
        """Sort key by which the better measured of two samples is the larger."""
        return self.is_own, self.count

    def times(self, factor: float) -> Sample:
        """Returns a copy with its seconds multiplied by a factor."""
        scaled = copy.copy(self)
        scaled._latest = [(context, factor * seconds) for context, seconds in self._latest]
        scaled.seconds = factor * self.seconds
        return scaled

    def add(self, context: float, seconds: float) -> None:
        self._latest = [*self._latest[1 - MEMORY :], (context, seconds)]
        self.context += (context - self.context) / self.count
        self.seconds = _median([seconds for _, seconds in self._latest])


@dataclasses.dataclass
class _Fit:
    """Fitted step costs at about one context."""

    # Seconds per context token: at K = 0, and extra per draft token.
    slopes: tuple[float, float]
    bases: dict[Bucket, float]  # seconds without context, of measured buckets
    compared: Bases
    # Caches of unmeasured buckets: predicted bases, and measured over prior seconds.
    guessed: dict[Bucket, float] = dataclasses.field(default_factory=dict)
    off: dict[Bucket, float] = dataclasses.field(default_factory=dict)

    def predicted(self, features: np.ndarray) -> float:
        return float((features * self.compared.coefficients).sum())

    def slope(self, bucket: Bucket) -> float:
        at_0, per_token = self.slopes
        return at_0 + per_token * bucket.num_speculative_tokens


class StepCosts:
    """Step costs, learned from measurements and predicted for unmeasured buckets.

    Args:
      nodes_per_row: nodes that a row verifies at each K, root included; by default 1 + K,
        that of chains.
      prior: predicts the seconds of a bucket at a context while few buckets were measured.
      padding: returns how many tokens are computed where so many are verified.
    """

    def __init__(
        self,
        nodes_per_row: Mapping[int, int] | None = None,
        prior: Prior | None = None,
        padding: Padding | None = None,
    ):
        # Seconds per token that the drafter has not seen, counted in the row with most of them;
        # None before any measurement.
        self.catch_up_s: float | None = None
        self.num_caught_up = 0  # bursts that measured catch_up_s in this process
        self.burst_s = 0.0  # fixed seconds of a burst beside those of its steps
        self._burst_told = [0.0] * (BURST_MEMORY // 4)  # burst_s is their median; begins at 0
        self._num_told_burst = 0  # pairs of bursts that told it in this process
        self._caught_up = np.zeros(2)  # of catch_up_s: sum of weights, sum of weighted values
        self._nodes_per_row = dict(nodes_per_row or {})
        self.prior = prior
        self._padding = padding
        self.drift = 1.0
        self._last: Burst | None = None
        # Latest log drifts, whose median is the drift: a single measurement cannot change it.
        self._slower = [0.0] * DRIFT_MEMORY
        # Decaying sums: measurements, log drift, and its absolute deviation from its mean.
        self._wandered = WANDER_TRIALS, 0.0, WANDER_TRIALS * USUAL_WANDER
        self._samples: dict[Bucket, dict[int, Sample]] = {}
        self._counts: dict[Bucket, int] = {}
        self._used_at: dict[Bucket, int] = {}  # number of each bucket's last measurement
        self._ratios = StepRatios()
        # By place, and by rows if there are too many buckets for one fit; cleared by
        # measurements.
        self._fits: dict[tuple[int, int], _Fit] = {}
        self._known_slopes: tuple[float, float] | None = None
        self._num_measured = self._num_since_slopes = self._num_unfitted = 0

    @property
    def nodes_per_row(self) -> Mapping[int, int]:
        return self._nodes_per_row

    @nodes_per_row.setter
    def nodes_per_row(self, nodes_per_row: Mapping[int, int]) -> None:
        if nodes_per_row != self._nodes_per_row:
            self._nodes_per_row, self._fits = dict(nodes_per_row), {}

    @property
    def padding(self) -> Padding | None:
        return self._padding

    @padding.setter
    def padding(self, padding: Padding | None) -> None:
        if padding is not self._padding:
            self._padding, self._fits = padding, {}

    @property
    def measured(self) -> list[Bucket]:
        return list(self._samples)

    def count(self, bucket: Bucket) -> int:
        """Returns the number of remembered measurements of a bucket."""
        return self._counts.get(bucket, 0)

    def copy(self) -> StepCosts:
        """Returns an independent copy without the prior."""
        own = copy.copy(self)
        own.prior, own._fits, own._counts = None, dict(self._fits), dict(self._counts)
        own._used_at = dict(self._used_at)
        own._caught_up, own._ratios = self._caught_up.copy(), self._ratios.copy()
        own._samples = {
            bucket: {place: copy.copy(sample) for place, sample in samples.items()}
            for bucket, samples in self._samples.items()
        }
        return own

    def take(self, other: StepCosts) -> None:
        """Adds the samples of another that this one lacks or has fewer measurements of.

        Measurements of this process rank above those read from a file.
        """
        new = other._samples.keys() - self._samples.keys()
        for bucket, samples in other._samples.items():
            for place, sample in samples.items():
                own = self._samples.get(bucket, {}).get(place)
                if own is None or sample.weight > own.weight:
                    # Rescaled from the other's drift to this one's.
                    taken = sample.times(other.drift / self.drift)
                    self._samples.setdefault(bucket, {})[place] = taken
                    self._counted(bucket)
                    self._fits, self._known_slopes = {}, None
        if new:
            self._ratios.take(other._ratios, self.drift / other.drift, new)
        if self.catch_up_s is None or other.num_caught_up > self.num_caught_up:
            self.catch_up_s, self.num_caught_up = other.catch_up_s, other.num_caught_up
            self._caught_up = other._caught_up.copy()
        if other._num_told_burst > self._num_told_burst or not self._num_told_burst:
            self.burst_s, self._burst_told = other.burst_s, other._burst_told
            self._num_told_burst = other._num_told_burst

    def begin_run(self) -> None:
        """Marks a gap: the next measurement is not compared with earlier ones."""
        self._ratios.begin_run()

    def estimate(
        self, bucket: Bucket, context: float, about: float | None = None
    ) -> tuple[float | None, float]:
        """Returns `seconds` and `doubt` of a bucket.

        Args:
          about: context near which measurements count most; by default `context`. Buckets that
            are compared with each other are estimated about one context: by the same fit.
        """
        if not self._samples:
            return self.prior and self.prior(bucket, context), PRIOR_DOUBT
        fit = self._fit(context if about is None else about, bucket.rows)
        return self._seconds(bucket, context, fit), self._doubt(bucket, fit)

    def doubt(self, bucket: Bucket, context: float) -> float:
        """Returns the fraction by which a bucket may take less than predicted, relative to the
        bucket that ran last or, if that does not compare, to plain decoding of as many rows."""
        return self.estimate(bucket, context)[1]

    def _doubt(self, bucket: Bucket, fit: _Fit) -> float:
        if bucket not in self._samples:
            return MUCH_DOUBT
        other = Bucket(bucket.rows, 0) if self._last is None else self._last.bucket
        if other not in fit.bases:
            # The last bucket has far fewer or more rows and is not part of this fit.
            other = Bucket(bucket.rows, 0)
        if other not in fit.bases:
            return MUCH_DOUBT
        deviation = fit.compared.deviation(bucket, other)
        return max(1 - math.exp(-DOUBT_ERRORS * deviation), LEAST_DOUBT)

    def observe(self, bucket: Bucket, context: float, seconds: float) -> None:
        """Adds one measurement: seconds per step, context tokens of all rows.

        Raises:
          ValueError: the seconds are not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds=} of a step must be above 0 and finite.")
        expected = self.seconds(bucket, context) or seconds
        if bucket in self._samples:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        burst = Burst(bucket, context, seconds, self.drift)
        self._ratios.add(burst)
        self._last = burst
        before = self._samples.get(bucket, {}).get(_place(context))
        count = 0 if before is None else before.count
        if count >= TELLS_DRIFT:
            slower = math.log(seconds / expected * self.drift)
            self._slower = [*self._slower[1:], slower]
            drift = math.exp((1 - DRIFT_LEAK) * _median(self._slower))
            self.drift = min(max(drift, 1 / MOST_DRIFT), MOST_DRIFT)
        # A fit takes the host a millisecond, and one more measurement of many changes it little.
        # With no other bucket near it, a measurement tells of the machine and hardly of the
        # bucket: fits are kept until its measurements have doubled.
        if count < TELLS_DRIFT:
            most = 0
        elif self._ratios.is_alone:
            most = count
        else:
            most = min(int(FIT_AFTER * self.count(bucket)), MOST_UNFITTED)
        is_kept = self._num_unfitted < most
        self._num_unfitted = self._num_unfitted + 1 if is_kept else 0
        fits = self._fits if is_kept else {}
        self._add(bucket, context, seconds / self.drift)
        self._samples[bucket][_place(context)].is_own = True
        self._fits = fits
        slower = math.log(self.drift)
        count, total, off = (WANDER_MEMORY * each for each in self._wandered)
        missed = min(abs(slower - total / count), MOST_WANDER)
        self._wandered = count + 1, total + slower, off + missed
        # Fitted now rather than while the next burst is planned.
        self._ratios.spread = self._fit(context, bucket.rows).compared.spread

    def seconds(self, bucket: Bucket, context: float) -> float | None:
        """Returns the seconds of a step at the present drift; None if nothing is known."""
        if not self._samples:
            return self.prior and self.prior(bucket, context)
        return self._seconds(bucket, context, self._fit(context, bucket.rows))

    def _seconds(self, bucket: Bucket, context: float, fit: _Fit) -> float:
        base = self._base(bucket, fit, context)
        return (base + fit.slope(bucket) * context) * self.drift

    def start_burst(self, seconds: float) -> None:
        """Sets the fixed seconds of a burst as an earlier run learned them."""
        self.burst_s, self._burst_told = seconds, [seconds] * (BURST_MEMORY // 4)

    def observe_burst(self, few: tuple[int, float], many: tuple[int, float]) -> None:
        """Learns burst_s from two bursts of one bucket near each other, the second of more steps.

        Sending a burst and reading it back takes the host's time, and a device that shares its
        processors is slower meanwhile: the same steps take longer in short bursts.

        Args:
          few, many: number of steps, and seconds of the burst.
        """
        extra = few[1] / few[0] - many[1] / many[0]
        told = extra / (1 / few[0] - 1 / many[0])
        self._burst_told = [*self._burst_told, min(max(told, -few[1]), few[1])][-BURST_MEMORY:]
        self._num_told_burst += 1
        self.burst_s = max(_median(self._burst_told), 0.0)

    def observe_catch_up(
        self, tokens: float, seconds: float, *, steps_s: float, usual_s: float
    ) -> None:
        """Learns catch_up_s from a burst in which the drafter had to catch up.

        Args:
          tokens: tokens that the drafter had not seen; above 0.
          seconds: of the burst beyond its predicted steps; below 0 if the steps were faster.
          steps_s: predicted seconds of the steps; their error blurs the measurement.
          usual_s: seconds per token as predicted before; above 0.
        """
        if not self._caught_up.any():
            self._caught_up = np.array([1.0, usual_s]) / usual_s**2
        weight = (tokens / (CATCH_UP_DOUBT * steps_s)) ** 2
        self._caught_up = CATCH_UP_MEMORY * self._caught_up
        self._caught_up += weight * np.array([1.0, seconds / tokens])
        self.catch_up_s = max(float(self._caught_up[1] / self._caught_up[0]), 0.0)
        self.num_caught_up += 1

    def fit_error(self) -> float:
        """Returns the largest relative error of the shared sum over measured buckets, or 0."""
        if not self._samples:
            return 0.0
        context = 0.0 if self._last is None else self._last.context
        errors = []
        for bucket in self._samples:
            fit = self._fit(context, bucket.rows)
            errors.append(abs(fit.predicted(self._features(bucket)) / fit.bases[bucket] - 1))
        return max(errors)

    # Files

    def to_records(self) -> list[dict[str, Any]]:
        """Returns all samples for JSON, their seconds at the present drift."""
        if not self._samples:
            return []
        # One context for all: a fit at each would take long.
        context = 0.0 if self._last is None else self._last.context

        def seconds(bucket: Bucket, sample: Sample) -> float:
            fit = self._fit(context, bucket.rows)
            return self.drift * (fit.bases[bucket] + fit.slope(bucket) * sample.context)

        return [
            bucket._asdict()
            | {
                "context_tokens": round(sample.context, 1),
                "step_s": float(seconds(bucket, sample)),
                "num_measurements": sample.count,
            }
            for bucket, samples in sorted(self._samples.items(), key=str)
            for sample in samples.values()
        ]

    def to_bursts(self) -> list[list[Any]]:
        """Returns the bursts by which buckets are compared, for JSON.

        Each is [place in the run, rows, num_speculative_tokens, max_drafts, context tokens,
        seconds of a step, the machine's part].
        """
        return [
            [
                *(place, *burst.bucket, round(burst.context, 1), burst.seconds),
                burst.slower / self.drift,  # relative to the present drift, as in `to_records`
            ]
            for place, burst in self._ratios.bursts()
        ]

    def add_records(
        self,
        records: Iterable[Mapping[str, Any]],
        most_measurements: int = OF_BEFORE,
        *,
        bursts: Iterable[Sequence[Any]] = (),
    ) -> None:
        """Adds what `to_records` and `to_bursts` returned, in this run or an earlier one.

        Args:
          most_measurements: most that a record counts for, so that new measurements outweigh it.

        Raises:
          ValueError: a record or burst has missing or invalid fields, or there are too many.
        """
        remembered = [_burst_of(burst) for burst in bursts]
        places = [place for place, _ in remembered]
        if len(places) > MOST_BURSTS or places != sorted(set(places)):
            raise ValueError(f"{len(places)} bursts are no record of a run.")
        in_bursts = {burst.bucket for _, burst in remembered}
        records = list(records)
        if len(records) > MOST_BUCKETS * MOST_RECORDS:
            raise ValueError(f"{len(records)} records are more than a run keeps.")
        found = []
        for record in records:
            try:
                names = (*Bucket._fields, "context_tokens", "step_s")
                figures = [record[name] for name in names]
                count = int(record["num_measurements"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{reprlib.repr(record)} is no measured step: {error!r}."
                ) from None
            burst = _measured(record, figures)
            if count <= 0:
                raise ValueError(f"{reprlib.repr(record)} is no measured step.")
            found.append((burst, count))
        per_bucket = collections.Counter(burst.bucket for burst, _ in found)
        if len(per_bucket) > MOST_BUCKETS or max(per_bucket.values(), default=0) > MOST_RECORDS:
            raise ValueError(f"{len(per_bucket)} buckets, or records of one, are too many.")
        for burst, count in found:
            most = min(count, most_measurements)
            self._add(burst.bucket, burst.context, burst.seconds, most)
            # The bursts contain these measurements a second time.
            most = OF_BEFORE if burst.bucket in in_bursts else MEMORY
            self._ratios.add_record(burst, min(count, most))
        remembered = [found for found in remembered if found[1].bucket in self._samples]
        self._ratios.add_bursts(remembered)
        self._known_slopes = None
        self._fits = {}
        if remembered:
            last = remembered[-1][1]
            self._ratios.spread = self._fit(last.context, last.bucket.rows).compared.spread

    def _add(self, bucket: Bucket, context: float, seconds: float, count: int = 1) -> None:
        samples, place = self._samples.setdefault(bucket, {}), _place(context)
        if place not in samples:
            samples[place] = Sample()
        for _ in range(count):
            samples[place].add(context, seconds)
        self._counted(bucket)
        self._fits = {}
        self._num_since_slopes += 1
        if self._num_since_slopes > min(self._num_measured / 8, SLOPES_AFTER):
            self._known_slopes, self._num_since_slopes = None, 0

    def _counted(self, bucket: Bucket) -> None:
        """Updates a bucket's count; forgets the least recently used of too many buckets."""
        self._counts[bucket] = sum(sample.count for sample in self._samples[bucket].values())
        self._num_measured += 1
        self._used_at[bucket] = self._num_measured
        if len(self._samples) > MOST_BUCKETS:
            self._forget(min(self._samples, key=self._used_at.__getitem__))

    def _forget(self, bucket: Bucket) -> None:
        del self._samples[bucket], self._counts[bucket], self._used_at[bucket]
        self._ratios.forget(bucket)

    def _features(self, bucket: Bucket) -> np.ndarray:
        depth, rows = bucket.num_speculative_tokens, bucket.rows
        drafts = rows * (self._nodes_per_row.get(depth, 1 + depth) - 1)
        if bucket.max_drafts is not None:
            drafts = min(drafts, bucket.max_drafts)
        tokens = rows + drafts if self._padding is None else self._padding(rows + drafts)
        return np.array([1.0, tokens, rows * depth, depth])

    def _base(self, bucket: Bucket, fit: _Fit, context: float) -> float:
        """Returns the seconds of a bucket without context, measured or predicted."""
        measured = fit.bases.get(bucket)
        if measured is not None:
            return measured
        if self.prior is not None and len(fit.bases) < FEW:
            return self._by_prior(bucket, fit, context)
        if bucket not in fit.guessed:
            least = LEAST_SHARE * min(fit.bases.values())
            fit.guessed[bucket] = max(fit.predicted(self._features(bucket)), least)
        return fit.guessed[bucket]

    def _by_prior(self, bucket: Bucket, fit: _Fit, context: float) -> float:
        """Returns the prior's seconds without context, corrected by measured buckets."""
        assert self.prior is not None
        if bucket not in fit.off:
            fit.off[bucket] = self._off_prior(bucket, fit, context)
        said = fit.off[bucket] * self.prior(bucket, context)
        return max(said - fit.slope(bucket) * context, LEAST_SHARE * said)

    def _off_prior(self, bucket: Bucket, fit: _Fit, context: float) -> float:
        """Returns the mean ratio of measured to prior seconds, weighted by similarity."""
        assert self.prior is not None
        off, weights = 0.0, 0.0
        for other, base in fit.bases.items():
            took = base + fit.slope(other) * context
            rows = abs(math.log2(other.rows / bucket.rows))
            depths = other.num_speculative_tokens, bucket.num_speculative_tokens
            apart = rows + abs(depths[0] - depths[1])
            weight = self.count(other) / (1 + apart) ** 2
            off += weight * math.log(took / self.prior(other, context))
            weights += weight
        return math.exp(off / weights)

    def _fit(self, context: float, rows: int) -> _Fit:
        """Returns the fit at about a context, of buckets with about so many rows."""
        # Places are rounded to a fixed grid: the result does not depend on earlier calls.
        place = NEAR * round(_place(context) / NEAR)
        key = place, rows if len(self._samples) > MOST_FITTED else 0
        if key not in self._fits:
            self._fits[key] = self._new_fit(*key)
        return self._fits[key]

    def _fitted(self, rows: int) -> Iterable[Bucket]:
        """Returns the buckets to fit for a number of rows: those with these rows and the nearest.

        All buckets if `rows` is 0.
        """
        if not rows:
            return self._samples
        apart = {bucket: abs(math.log2(bucket.rows / rows)) for bucket in self._samples}
        num_own = sum(not distance for distance in apart.values())
        return sorted(apart, key=apart.__getitem__)[: max(MOST_FITTED, num_own)]

    def _new_fit(self, place: int, rows: int) -> _Fit:
        if self._known_slopes is None:
            at_0, per_token = self._slopes().tolist()
            self._known_slopes = at_0, per_token
        slopes = self._known_slopes
        log = functools.partial(_log, slopes=slopes)
        usual = {
            bucket: _usual(bucket, self._samples[bucket], place, log)
            for bucket in self._fitted(rows)
        }
        compared = self._ratios.bases(
            log,
            usual,
            self._wandered[2] / self._wandered[0],
            lambda contexts: _nearness(place, _places(contexts)),
            np.stack([self._features(bucket) for bucket in usual]),
            np.array([self.count(bucket) for bucket in usual]),
        )
        bases = {bucket: math.exp(base) for bucket, base in compared.logs.items()}
        return _Fit(slopes, bases, compared)

    def _slopes(self) -> np.ndarray:
        """Returns the slopes s0 and s1, f64[2], fitted to buckets measured at several contexts.

        They are drawn towards those of the prior times a common factor: where K was measured at
        several contexts and plain decoding at one, the prior tells how the two differ.
        """
        several = [
            (bucket, list(samples.values()))
            for bucket, samples in self._samples.items()
            if len(samples) > 1
        ]
        said = self._said_slopes()
        if not several:
            return said
        contexts, seconds, counts = np.array(
            [(s.context, s.seconds, s.count) for _, samples in several for s in samples]
        ).T
        sizes = [len(samples) for _, samples in several]
        own = np.repeat(np.arange(len(sizes)), sizes)  # the bucket of each
        depths = np.array([bucket.num_speculative_tokens for bucket, _ in several])
        # Relative to the bucket's own cost: expensive steps must not dominate.
        seconds_of = np.bincount(own, seconds) / np.array(sizes)
        seconds = seconds / seconds_of[own]
        per_token = np.stack([np.ones(len(depths)), depths], 1)[own]
        per_token = per_token / seconds_of[own, None]
        features = contexts[:, None] * per_token
        # A slope too steep misleads more than none, and measurements at contexts close to each
        # other tell little of contexts far away: hence the weight of the prior.
        reach = np.sqrt((contexts**2).mean())
        prior = SLOPE_PRIOR * np.diag(reach * np.sqrt((per_token**2).mean(axis=0)))
        slopes, weights = np.zeros(2), counts
        for _ in range(SLOPE_ROUNDS):
            columns = np.stack([_off(column, own, weights) for column in features.T], 1)
            values, root = _off(seconds, own, weights), np.sqrt(weights)
            told, aims = root[:, None] * columns, root * values
            if said.any():
                # The factor is drawn to 1.
                along = np.concatenate([told, prior]) @ said
                off = np.concatenate([aims, prior @ said])
                factor = max(float(along @ off) / float(along @ along), 0.0)
            else:
                factor = 0.0
            slopes = fit_nonnegative(
                np.concatenate([told, prior]),
                np.concatenate([aims, prior @ (factor * said)]),
            )
            missed = np.abs(values - (columns * slopes).sum(axis=1))
            # Outliers count in part (Huber, "Robust Estimation of a Location Parameter").
            weights = counts / np.maximum(missed / SMALL_MISS, 1)
        return slopes

    def _said_slopes(self) -> np.ndarray:
        """Returns the slopes of the prior, f64[2], times measured over predicted seconds of the
        deepest bucket: one alone, so that the work does not grow with all that was measured."""
        if self.prior is None:
            return np.zeros(2)
        deepest = max(self._samples, key=lambda bucket: bucket.num_speculative_tokens)
        rows, depth = deepest.rows, max(deepest.num_speculative_tokens, 1)
        context = max(sample.context for sample in self._samples[deepest].values()) + 1.0
        per_token = [
            (self.prior(Bucket(rows, k), 2 * context) - self.prior(Bucket(rows, k), context))
            / context
            for k in (0, depth)
        ]
        slower = [
            sample.seconds / self.prior(deepest, sample.context)
            for sample in self._samples[deepest].values()
        ]
        at_0 = max(per_token[0], 0.0)
        return _median(slower) * np.array([at_0, max(per_token[1] - at_0, 0.0) / depth])


def _burst_of(kept: Sequence[Any]) -> tuple[int, Burst]:
    """Returns a burst of `StepCosts.to_bursts`, and its place."""
    try:
        place, *figures = kept
        place, burst = int(place), _measured(kept, figures)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{reprlib.repr(kept)} is no burst: {error!r}.") from None
    if not (0 <= place < MOST_KNOWN and len(kept) == 2 + len(Bucket._fields) + 2):
        raise ValueError(f"{reprlib.repr(kept)} is no burst.")
    return place, burst


def _measured(kept: Any, figures: Sequence[Any]) -> Burst:
    """Returns one measurement of a file: the fields of a bucket, then those of a burst.

    Raises:
      ValueError: a figure is invalid; the message shows `kept`.
    """
    try:
        rows, depth, most, context, seconds, *slower = figures
        most = None if most is None else int(most)
        bucket = Bucket(int(rows), int(depth), most)
        burst = Burst(bucket, float(context), float(seconds), *map(float, slower))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{reprlib.repr(kept)} is no measured step: {error!r}.") from None
    is_bucket = 0 < bucket.rows <= MOST_ROWS
    is_bucket &= 0 <= bucket.num_speculative_tokens <= MOST_DEPTH
    is_bucket &= most is None or 0 < most <= MOST_ROWS * MOST_DEPTH
    is_measured = LEAST_KNOWN < burst.seconds < MOST_KNOWN
    is_measured &= LEAST_KNOWN < burst.slower < MOST_KNOWN
    is_measured &= 0 <= burst.context < MOST_KNOWN**2
    if not (is_bucket and is_measured):
        raise ValueError(f"{reprlib.repr(kept)} is no measured step.")
    return burst


def _log(columns: Columns, slopes: tuple[float, float]) -> np.ndarray:
    """Returns log seconds of bursts' steps without the cost of their contexts."""
    usual = columns.seconds / columns.slower
    own = usual - (slopes[0] + slopes[1] * columns.depths) * columns.contexts
    # A slope too steep must not make a step free.
    return np.log(np.maximum(own, LEAST_SHARE * usual) * columns.slower)


def _usual(
    bucket: Bucket,
    samples: Mapping[int, Sample],
    place: int,
    log: Callable[[Columns], np.ndarray],
) -> float:
    """Returns the median log seconds of a bucket about a place, whatever ran near it."""
    own = list(samples.values())
    contexts, seconds, counts = np.array(
        [(sample.context, sample.seconds, sample.count) for sample in own]
    ).T
    ones = np.ones(len(own))
    logs = log(Columns(bucket.num_speculative_tokens * ones, contexts, seconds, ones))
    near = _nearness(place, np.array(list(samples)))
    return _weighted_median(list(zip(logs.tolist(), (counts * near).tolist())))


def _nearness(place: int, other: np.ndarray) -> np.ndarray:
    """Returns the weight at one place of measurements at others, 0 to 1."""
    return 1 / (1 + ((place - other) / NEAR) ** 2)


def _off(values: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the deviations of values from the weighted mean of their group."""
    means = np.bincount(groups, weights * values) / np.bincount(groups, weights)
    return values - means[groups]


def _median(values: Sequence[float]) -> float:
    """Returns the median; the smaller of two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _weighted_median(weighed: Sequence[tuple[float, float]]) -> float:
    """Returns the weighted median of (value, weight); the smaller of two in the middle."""
    weighed = sorted(weighed)
    weights = list(itertools.accumulate(weight for _, weight in weighed))
    return weighed[bisect.bisect_left(weights, weights[-1] / 2)][0]


def _place(context: float) -> int:
    """Returns the sample that a context belongs to; those within about 25 % share one."""
    return round(math.log(context + 64) / PLACE_WIDTH)


def _places(contexts: np.ndarray) -> np.ndarray:
    """Returns `_place` of each, f64."""
    return np.rint(np.log(contexts + 64) / PLACE_WIDTH)
