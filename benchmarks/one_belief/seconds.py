"""Seconds of a step: one Gaussian belief over all buckets, updated by each burst.

    seconds per step = (base + sum of coefficient * term) * own(bucket) * drift

base is the prediction from bytes and operations (`specjax.planning.step_prior`), or 1 where there
is none. The terms are computed tokens, draft forwards, rows that draft, context, context beside
drafts, a burst's fixed time and the drafter's catch-up. `own` is what the sum misses of a bucket,
`drift` how slow the machine is now.

The belief is over the logarithms of coefficients, `own` and `drift`, which are normal with a
covariance: an extended Kalman filter, where each measurement is linear in them about the mean. So
one bucket's seconds tell of another's, two buckets that ran in turn are compared whatever the
machine does to both, and every prediction says how sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
COEFFICIENT_SD, OWN_SD, DRIFT_SD, NOISE_SD, WANDER_SD = 1.2, 0.2, 5.0, 0.08, 0.03
GAP_SD = 0.15  # of the drift, added by a pause or between processes
FORGOTTEN_SD = 0.002  # of a bucket's own seconds, added by each burst of any other
MOST_OFF = 2.5  # standard deviations at which a measurement is cut off
TIMED_S = 2e-3  # error of a burst's seconds
# Bursts of a bucket that are kept to begin another belief with; MEMORY: most that `count` tells.
KEPT, MEMORY = 4, 16
USUAL_STEPS = 32  # of a burst where none is given

_NUM = len(COEFFICIENTS)
_DRIFT = _NUM  # its place in the belief; own factors follow


class Burst(NamedTuple):
    """One measurement."""

    bucket: Bucket
    context: float  # tokens of all rows
    seconds: float  # per step, of all that the burst took
    num_steps: int = USUAL_STEPS
    num_behind: int = 0  # tokens of catch-up, in the row with most of them


class Seconds:
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
        self.nodes_per_row = dict(nodes_per_row or {})
        self.prior, self.padding = prior, padding
        self._bursts: list[Burst] = []
        self._counts: dict[Bucket, int] = {}
        self._places: dict[Bucket, int] | None = None  # of own factors; None: to be built
        self._mean = self._covariance = np.zeros(0)
        self._unit: float | None = None
        self._terms_of: dict[Any, np.ndarray] = {}

    @property
    def measured(self) -> list[Bucket]:
        return list(self._counts)

    def count(self, bucket: Bucket) -> int:
        """Returns how many measurements of a bucket are remembered, at most MEMORY."""
        return self._counts.get(bucket, 0)

    def begin_run(self) -> None:
        """Marks a gap: the machine may be faster or slower afterwards."""
        if self._places is not None:
            self._covariance[_DRIFT, _DRIFT] += GAP_SD**2

    def observe(
        self,
        bucket: Bucket,
        context: float,
        seconds: float,
        num_steps: int = USUAL_STEPS,
        num_behind: int = 0,
    ) -> None:
        """Adds one burst: seconds per step, of all that it took.

        Raises:
          ValueError: the seconds are not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds=} of a step must be above 0 and finite.")
        self._build()
        burst = Burst(bucket, context, seconds, num_steps, num_behind)
        self._update(burst)
        self._keep(burst)

    def seconds(
        self, bucket: Bucket, context: float, num_steps: int = USUAL_STEPS, num_behind: int = 0
    ) -> float | None:
        """Returns the expected seconds of a step; None if nothing is known of any bucket."""
        if self.prior is None and not self._counts:
            return None
        logs, _ = self.estimates([bucket], [context], [num_steps], num_behind=num_behind)
        return math.exp(float(logs[0]))

    def estimates(
        self,
        buckets: Sequence[Bucket],
        contexts: Sequence[float],
        num_steps: Sequence[float],
        reference: int | None = None,
        num_behind: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log seconds of steps, and their standard deviations.

        Args:
          num_steps: of each one's burst, which share its fixed time.
          reference: the place of a bucket that deviations are relative to; by default those of
            the logarithms themselves, the drift aside.

        Returns:
          f64[buckets] each.
        """
        self._build()
        assert self._places is not None
        along = np.zeros((len(buckets), len(self._mean)))
        logs = np.empty(len(buckets))
        lacking = np.zeros(len(buckets))
        for at, (bucket, context, steps) in enumerate(zip(buckets, contexts, num_steps)):
            logs[at], along[at, :_NUM] = self._linear(
                Burst(bucket, context, 0.0, max(int(steps), 1), num_behind)
            )
            along[at, _DRIFT] = 1.0
            place = self._places.get(bucket)
            if place is None:
                lacking[at] = OWN_SD**2
            else:
                along[at, place] = 1.0
                logs[at] += self._mean[place]
        logs += self._mean[_DRIFT]
        apart = along - (along[reference] if reference is not None else 0.0)
        if reference is None:
            apart[:, _DRIFT] = 0.0
        variance = ((apart @ self._covariance) * apart).sum(axis=1) + lacking
        if reference is not None:
            variance += lacking[reference]
            variance[reference] = 0.0
        return logs, np.sqrt(np.maximum(variance, 0.0))

    def _keep(self, burst: Burst) -> None:
        self._bursts.append(burst)
        of_bucket = [b for b in self._bursts if b.bucket == burst.bucket]
        if len(of_bucket) > KEPT:
            self._bursts.remove(of_bucket[0])
        self._counts[burst.bucket] = min(self._counts.get(burst.bucket, 0) + 1, MEMORY)

    # The filter

    def _build(self) -> None:
        """Makes the belief of all kept bursts, if it is not there."""
        if self._places is not None:
            return
        self._places, self._unit, self._terms_of = {}, None, {}
        share = 1.0 if self.prior is None else PRIOR_SHARE
        shares = np.array([share] * 5 + [1.0] * 2)
        self._mean = np.append(np.log(COEFFICIENTS * shares), 0.0)
        drift_sd = DRIFT_SD if self.prior is None else 1.0
        self._covariance = np.diag([COEFFICIENT_SD**2] * _NUM + [drift_sd**2])
        for burst in self._bursts:
            self._update(burst)

    def _update(self, burst: Burst) -> None:
        """Takes one measurement into the belief."""
        assert self._places is not None
        place = self._places.get(burst.bucket)
        size = len(self._mean)
        if place is None:
            place = self._places[burst.bucket] = size
            self._mean = np.append(self._mean, 0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[place, place] = OWN_SD**2
            size += 1
        covariance = self._covariance
        covariance[_DRIFT, _DRIFT] += WANDER_SD**2
        own = np.arange(_DRIFT + 1, size)
        covariance[own, own] += FORGOTTEN_SD**2
        expected, slopes = self._linear(burst)
        along = np.zeros(size)
        along[:_NUM] = slopes
        along[[_DRIFT, place]] = 1.0
        expected += self._mean[_DRIFT] + self._mean[place]
        gained = covariance @ along
        noise = NOISE_SD**2 + (TIMED_S / (burst.seconds * burst.num_steps)) ** 2
        variance = float(along @ gained) + noise
        off = math.log(burst.seconds) - expected
        most = MOST_OFF * math.sqrt(variance)
        self._mean = self._mean + gained * (min(max(off, -most), most) / variance)
        self._covariance = covariance - np.outer(gained, gained) / variance

    def _linear(self, burst: Burst) -> tuple[float, np.ndarray]:
        """Returns the log of the sum of terms, and its derivatives by the log coefficients."""
        terms = self._terms(burst)
        parts = np.exp(self._mean[:_NUM]) * terms[1:]
        total = terms[0] + parts.sum()
        return math.log(total), parts / total

    def _terms(self, burst: Burst) -> np.ndarray:
        """Returns base and terms of a burst's step, in seconds or, without a prior, as shares."""
        bucket, rows = burst.bucket, burst.bucket.rows
        depth = bucket.num_speculative_tokens
        if self._unit is None:
            self._unit = 1.0 if self.prior is None else self.prior(Bucket(1, 0), 1.0)
        drafts = rows * (self.nodes_per_row.get(depth, 1 + depth) - 1)
        if bucket.max_drafts is not None:
            drafts = min(drafts, bucket.max_drafts)
        tokens = rows + drafts if self.padding is None else self.padding(rows + drafts)
        base = 1.0 if self.prior is None else self.prior(bucket, burst.context)
        unit, steps = self._unit, burst.num_steps
        context = burst.context
        of_unit = (tokens, depth, rows * depth, context, context * depth)
        behind = burst.num_behind if depth else 0
        return np.array([base, *(unit * each for each in (*of_unit, 1 / steps, behind / steps))])
