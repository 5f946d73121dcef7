"""How the steps of buckets compare, from bursts that follow one another. No jax.

    log seconds(burst) = base(bucket) + machine(now) + noise

A machine that others share changes its speed from one second to the next: what a bucket
took a minute ago compares with nothing that runs now. Two bursts near each other do: their
difference is free of the machine's part. The bases are the least squares solution of these
differences, in which those far off weigh less (Huber 1964, "Robust Estimation of a Location
Parameter"), and of what each bucket took whatever ran beside it, which counts for less the
more the machine wanders.

    bursts       A  A  X  A  A          X is compared with three on either side; where two as
                 |  +--+--+  |          far from it, before and after, are of one bucket and
                 +-----+-----+          differ too much, neither of them is
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from specjax.bucket import Bucket

NEIGHBOURS = 3  # bursts on either side, with which one is compared
# Differences that are remembered, of two buckets; and pairs of buckets, the latest.
PAIR_MEMORY, MOST_PAIRS = 24, 32
# Standard deviation of a burst's logarithm before it is known, differences that it counts
# for, and the most that one of them tells of it.
USUAL_SPREAD, SPREAD_TRIALS, MOST_SPREAD = 0.1, 8.0, 0.4
OF_MEAN_DEVIATION = 1.25  # standard deviations, of a normal distribution
SINCE_THEN = 0.04  # standard deviation of what may have changed since earlier runs
LEAST_NEAR = 0.05  # nearness of what is compared
ROUNDS = 4  # of weighing what is far off
# Logarithm of how much longer or less a bucket takes than just before, where it is the
# machine's doing.
JUMP, NEAR_CONTEXTS = 0.26, 0.4  # at contexts whose logarithms are as near as that


class Burst(NamedTuple):
    """One measurement."""

    bucket: Bucket
    context: float  # tokens of all rows, midway
    seconds: float  # of a step
    slower: float = 1.0  # the machine's part, as it was thought then


class _Difference(NamedTuple):
    """Two bursts near each other, of two buckets."""

    before: Burst
    after: Burst


class Bases(NamedTuple):
    """What buckets take, the machine's part and that of their context left out."""

    logs: dict[Bucket, float]  # of seconds
    index: dict[Bucket, int]
    covariance: np.ndarray  # f64[buckets, buckets]

    def deviation(self, bucket: Bucket, other: Bucket) -> float:
        """Returns the standard deviation of what one takes beside the other, a logarithm."""
        if bucket == other:
            return 0.0
        i, j, own = self.index[bucket], self.index[other], self.covariance
        return math.sqrt(max(own[i, i] + own[j, j] - 2 * own[i, j], 0.0))


class StepRatios:
    """Differences between neighbours, and the bases that explain them."""

    def __init__(self):
        self._differences: dict[frozenset[Bucket], collections.deque[_Difference]] = {}
        # Of an earlier run, and how often each was measured there.
        self._records: list[tuple[Burst, int]] = []
        self._recorded = collections.Counter[Bucket]()  # contexts of each
        self._recent: list[Burst] = []  # of this run
        self._spread = USUAL_SPREAD

    def begin_run(self) -> None:
        """Forgets the bursts before: the next one does not follow them."""
        self._recent = []

    def add_record(self, burst: Burst, count: int) -> None:
        """Takes in what was measured so many times in an earlier run, beside all else of that run."""
        self._records.append((burst, count))
        self._recorded[burst.bucket] += 1

    def add(self, burst: Burst) -> None:
        """Takes in what was measured right after what came before it in this run."""
        recent = self._recent = [*self._recent[-2 * NEIGHBOURS :], burst]
        for place in range(max(len(recent) - 1 - NEIGHBOURS, 0), len(recent) - 1):
            before = recent[place]
            if before.bucket == burst.bucket:
                continue
            pair = frozenset((before.bucket, burst.bucket))
            empty = collections.deque[_Difference](maxlen=PAIR_MEMORY)
            own = self._differences.pop(pair, empty)
            self._differences[pair] = own  # the last one
            if len(self._differences) > MOST_PAIRS:
                del self._differences[next(iter(self._differences))]
            opposite = 2 * place - (len(recent) - 1)  # as far on the other side
            if opposite >= 0 and _jumps(recent[opposite], burst):
                other = _Difference(recent[opposite], before)
                if other in own:
                    own.remove(other)
            else:
                own.append(_Difference(before, burst))

    def _record_variance(self, burst: Burst, count: int) -> float:
        """Returns the variance of a record's logarithm, before anything was measured in this run."""
        # What has changed since is common to all contexts.
        return self._recorded[burst.bucket] * (self._spread**2 / count + SINCE_THEN**2)

    def bases(
        self,
        log: Callable[[Burst], float],
        usual: Mapping[Bucket, float],
        wander: float,
        nearness: Callable[[float], float],
    ) -> Bases:
        """Returns the logarithm of what each bucket takes.

        Args:
          log: of a burst's seconds, without what its context takes.
          usual: likewise of each bucket, by what it took whatever ran beside it.
          wander: standard deviation of the machine's part, by which that may be off.
          nearness: by a context, what was measured there counts for, 0 to 1.
        """
        index = {bucket: place for place, bucket in enumerate(usual)}
        differences = [
            each
            for own in self._differences.values()
            for each in own
            if nearness(each.after.context) > LEAST_NEAR
        ]
        records = [
            (index[burst.bucket], log(burst), self._record_variance(burst, count))
            for burst, count in self._records
        ]
        fade = 1 + len(differences) / PAIR_MEMORY
        near = [nearness(burst.context) for burst, _ in self._records]
        count = len(usual)
        # Known apart: [place, aim, variance] of each.
        places = np.array([*range(count), *(place for place, _, _ in records)])
        aims = np.array([*usual.values(), *(aim for _, aim, _ in records)])
        variances = np.array(
            [wander**2 + self._spread**2] * count
            + [own * fade / at for (_, _, own), at in zip(records, near, strict=True)]
        )
        before = np.array([index[d.before.bucket] for d in differences], int)
        after = np.array([index[d.after.bucket] for d in differences], int)
        apart = np.array([log(d.after) - log(d.before) for d in differences])
        near = np.array([nearness(d.after.context) for d in differences])
        # Of two bursts; the differences of one, to three on a side, tell no more than one.
        between = 2 * NEIGHBOURS * self._spread**2 / near
        known = _Known(places, aims, variances)
        differences = _Apart(before, after, apart, between)
        solution, covariance, missed = _solve(count, known, differences)
        told = np.minimum(missed, MOST_SPREAD) / math.sqrt(2)
        usually = SPREAD_TRIALS * USUAL_SPREAD / OF_MEAN_DEVIATION
        mean = (usually + told.sum()) / (SPREAD_TRIALS + len(told))
        self._spread = OF_MEAN_DEVIATION * float(mean)
        logs = dict(zip(index, solution.tolist(), strict=True))
        return Bases(logs, index, covariance)


class _Known(NamedTuple):
    """What is known of buckets by themselves, arrays of as many."""

    places: np.ndarray  # of the bucket
    aims: np.ndarray
    variances: np.ndarray


class _Apart(NamedTuple):
    """What is known of two buckets beside each other, arrays of as many."""

    before: np.ndarray  # places of the two
    after: np.ndarray
    aims: np.ndarray  # of the second less the first
    variances: np.ndarray


def _solve(
    count: int, known: _Known, apart: _Apart
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the robust least squares solution, its covariance, and by how much pairs miss it.

    f64[count], f64[count, count] and f64[pairs]. Sums by place, and no product of matrices:
    threads of a BLAS would spin beside the device's.
    """
    both = (apart.before, apart.after, -1.0), (apart.after, apart.before, 1.0)
    far_off, far_apart = np.ones(len(known.aims)), np.ones(len(apart.aims))
    for _ in range(ROUNDS):
        alone, pairs = (
            1 / (known.variances * far_off),
            1 / (apart.variances * far_apart),
        )
        normal, right = np.zeros((count, count)), np.zeros(count)
        np.add.at(normal, (known.places, known.places), alone)
        np.add.at(right, known.places, alone * known.aims)
        for one, other, sign in both:
            np.add.at(normal, (one, one), pairs)
            np.add.at(normal, (one, other), -pairs)
            np.add.at(right, one, sign * pairs * apart.aims)
        solution = np.linalg.solve(normal, right)
        off = np.abs(solution[known.places] - known.aims)
        missed = np.abs(solution[apart.after] - solution[apart.before] - apart.aims)
        far_off = np.maximum(off / np.sqrt(known.variances), 1.0)
        far_apart = np.maximum(missed / np.sqrt(apart.variances), 1.0)
    return solution, np.linalg.inv(normal), missed


def _jumps(before: Burst, after: Burst) -> bool:
    """Returns whether the machine changed its speed in between, as far as one bucket tells."""
    contexts = math.log((after.context + 64) / (before.context + 64))
    is_same = before.bucket == after.bucket and abs(contexts) < NEAR_CONTEXTS
    return is_same and abs(math.log(after.seconds / before.seconds)) > JUMP
