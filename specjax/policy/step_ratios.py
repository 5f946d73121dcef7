"""Relative step costs of buckets, from bursts close to each other in time. No jax.

    log seconds(burst) = base(bucket) + machine(now) + noise
    base(bucket)       = log(features(bucket) @ coefficients) + the bucket's own residual

A shared machine changes its speed from one second to the next, so seconds measured a minute
apart do not compare. Two bursts near each other do: their difference is free of the machine's
part. One least-squares problem holds these differences, the usual seconds of each bucket, and
the assumption that a step's cost is near a sum of parts that buckets share. Outliers weigh less
(Huber 1964, "Robust Estimation of a Location Parameter").

    bursts       A  A  X  A  A          X is compared with three on either side; if the two at
                 |  +--+--+  |          one distance before and after it are of one bucket and
                 +-----+-----+          differ by more than JUMP, neither is compared with X
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.decode.bucket import Bucket
from specjax.least_squares import fit_nonnegative

NEIGHBOURS = 3  # bursts on either side with which a burst is compared
MOST_BURSTS = 256  # bursts remembered: those near a burst of another bucket
# Prior standard deviation of a burst's log seconds, and its weight in differences.
USUAL_SPREAD, SPREAD_TRIALS = 0.1, 8.0
# Standard deviation of a normal distribution over its median absolute value.
OF_MEDIAN = 1.4826
LEAST_SPREAD = 0.01
# Extra standard deviation of a bucket's only burst: it may have been disturbed.
DISTURBED = 0.4
LEAST_NEAR = 1e-3  # least weight of a measurement, however far its context
OUTWEIGHED = 12.0  # differences that halve the weight of earlier runs' records
# SPECIAL: standard deviation of a bucket's base from the sum of its shared parts.
# SINCE_THEN: standard deviation of changes since earlier runs.
SPECIAL, SINCE_THEN = 0.1, 0.04
ROUNDS = 4  # most rounds of reweighting
SETTLED = 1e-4  # change of log seconds below which the rounds end
LEAST_SUM = 0.25  # least sum of a bucket's parts, as a fraction of its base
MOST_CHANGE = 4.0  # largest factor by which a coefficient changes in one round
# JUMP: change in log seconds of one bucket that is put down to the machine.
# NEAR_CONTEXTS: difference of log contexts up to which a change counts as a jump.
JUMP, NEAR_CONTEXTS = 0.26, 0.4


class Burst(NamedTuple):
    """One measured burst."""

    bucket: Bucket
    context: float  # context tokens of all rows, midway
    seconds: float  # per step
    slower: float = 1.0  # the machine's part, as estimated at that time


class Columns(NamedTuple):
    """Bursts, one array per field."""

    depths: np.ndarray  # K
    contexts: np.ndarray
    seconds: np.ndarray
    slower: np.ndarray


class Bases(NamedTuple):
    """Base costs of buckets, without the machine's part and that of the context."""

    logs: dict[Bucket, float]  # log seconds
    index: dict[Bucket, int]  # place in `covariance`
    covariance: np.ndarray  # f64[buckets, buckets]
    coefficients: np.ndarray  # f64[features], seconds, none below 0
    spread: float  # standard deviation of a burst's log seconds

    def deviation(self, bucket: Bucket, other: Bucket) -> float:
        """Returns the standard deviation of the log ratio of two buckets' seconds."""
        if bucket == other:
            return 0.0
        i, j, own = self.index[bucket], self.index[other], self.covariance
        return math.sqrt(max(own[i, i] + own[j, j] - 2 * own[i, j], 0.0))


class StepRatios:
    """Bursts near bursts of other buckets, and the base costs that explain them.

    Attributes:
      spread: estimated standard deviation of a burst's log seconds.
    """

    def __init__(self):
        self.spread = USUAL_SPREAD
        self._bursts: list[tuple[int, Burst]] = []  # with their places, which rise
        self._next = 0  # place of the next burst
        self._paired: _Paired | None = None  # cached `_pairs`; None after a change
        # Records of an earlier run, and the number of measurements behind each.
        self._records: list[tuple[Burst, int]] = []

    def copy(self) -> StepRatios:
        """Returns an independent copy."""
        own = copy.copy(self)
        own._bursts, own._records = list(self._bursts), list(self._records)
        return own

    @property
    def is_alone(self) -> bool:
        """Whether the last burst has no burst of another bucket near it so far."""
        near = self._bursts[-1 - NEIGHBOURS :]
        first = self._next - 1 - NEIGHBOURS
        return len({burst.bucket for place, burst in near if place >= first}) == 1

    def begin_run(self) -> None:
        """Marks a gap: the next burst is not compared with earlier ones."""
        for place in range(self._next - NEIGHBOURS, self._next):
            self._forget_alone(place)
        self._next += NEIGHBOURS

    def take(self, other: StepRatios, slower: float, buckets: Collection[Bucket]) -> None:
        """Adds the bursts and records of another, placed before its own bursts.

        Args:
          slower: factor from the other's estimate of the machine's part to this one's.
          buckets: buckets new to this one, whose records are added.
        """
        # Bursts read from a file are rounded, except for their seconds.
        own = {(burst.bucket, burst.seconds) for _, burst in self._bursts}
        found = [
            (place, burst._replace(slower=burst.slower * slower))
            for place, burst in other._bursts
            if (burst.bucket, burst.seconds) not in own
        ]
        # The gap keeps them from being compared with this one's bursts.
        gap = self._bursts[0][0] if self._bursts else self._next
        shift = gap - NEIGHBOURS - 1 - (found[-1][0] if found else 0)
        before = [(place + shift, burst) for place, burst in found]
        self._bursts = (before + self._bursts)[-MOST_BURSTS:]
        self._records += [found for found in other._records if found[0].bucket in buckets]
        self._paired = None

    def forget(self, bucket: Bucket) -> None:
        """Forgets all bursts and records of a bucket."""
        self._bursts = [found for found in self._bursts if found[1].bucket != bucket]
        self._records = [found for found in self._records if found[0].bucket != bucket]
        self._paired = None

    def add_record(self, burst: Burst, count: int) -> None:
        """Adds a record of an earlier run: one measurement that counts `count` times."""
        self._records.append((burst, count))

    def add(self, burst: Burst) -> None:
        """Adds a burst that ran right after the last one added."""
        self._paired = None
        self._bursts.append((self._next, burst))
        self._next += 1
        self._forget_alone(self._next - 1 - NEIGHBOURS)
        if len(self._bursts) > MOST_BURSTS:
            del self._bursts[0]

    def bursts(self) -> list[tuple[int, Burst]]:
        """Returns the remembered bursts with places from 0, as `add_bursts` takes them."""
        found, place, last = [], 0, None
        for at, burst in self._bursts:
            place += 0 if last is None else min(at - last, 1 + NEIGHBOURS)
            last = at
            found.append((place, burst))
        return found

    def add_bursts(self, bursts: Sequence[tuple[int, Burst]]) -> None:
        """Adds the bursts of an earlier run, in ascending order of their places."""
        self._paired = None
        first = self._next
        for place, burst in bursts[-MOST_BURSTS:]:
            self._bursts.append((first + place, burst))
            self._next = first + place + 1
        self._bursts = self._bursts[-MOST_BURSTS:]
        self._next += NEIGHBOURS

    def _forget_alone(self, place: int) -> None:
        """Forgets the burst at a place if all bursts near it are of the same bucket."""
        at = bisect.bisect_left(self._bursts, place, key=lambda found: found[0])
        if at == len(self._bursts) or self._bursts[at][0] != place:
            return
        near = self._bursts[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1]
        others = {b.bucket for where, b in near if abs(where - place) <= NEIGHBOURS}
        if len(others) == 1:
            del self._bursts[at]
            self._paired = None

    def bases(
        self,
        log: Callable[[Columns], np.ndarray],
        usual: Mapping[Bucket, float],
        wander: float,
        nearness: Callable[[np.ndarray], np.ndarray],
        features: np.ndarray,
        counts: np.ndarray,
    ) -> Bases:
        """Returns the base cost of each bucket of `usual`, in log seconds.

        Args:
          log: maps bursts to log seconds without the cost of their contexts.
          usual: the same of each bucket to solve for, over all its measurements and whatever ran
            near them; bursts of other buckets are left out.
          wander: standard deviation of the machine's part, which `usual` contains.
          nearness: maps contexts to the weight of measurements there, 0 to 1.
          features: f64[buckets, features], in the order of `usual`; the work of a step.
          counts: i64[buckets], number of measurements of each.
        """
        index = {bucket: place for place, bucket in enumerate(usual)}
        if self._paired is None:
            self._paired = self._pairs()
        buckets, own, columns, before, after, share = self._paired
        own = np.array([index.get(bucket, -1) for bucket in buckets], int)[own]
        is_asked = (own[before] >= 0) & (own[after] >= 0)
        before, after, share = before[is_asked], after[is_asked], share[is_asked]
        num_compared = np.bincount(np.concatenate([own[before], own[after]]), minlength=len(index))
        lone = DISTURBED**2 * (counts == 1)  # extra variance
        # Index -1 stands for other buckets, whose bursts are in no pair.
        in_pairs = (lone * num_compared)[own]
        logs, near = log(columns), nearness(columns.contexts)
        apart = _Apart(
            own[before],
            own[after],
            logs[after] - logs[before],
            (share * self.spread**2 + in_pairs[before] + in_pairs[after])
            / _at_least(np.minimum(near[before], near[after])),
        )
        known = [
            _Known(
                np.arange(len(index)),
                np.array(list(usual.values())),
                wander**2 + self.spread**2 + lone,
            ),
            self._recorded(index, log, nearness, len(before)),
        ]
        found = _solve(features, _Known(*map(np.concatenate, zip(*known))), apart)
        return Bases(
            dict(zip(index, found.logs.tolist(), strict=True)),
            index,
            found.covariance,
            found.coefficients,
            _spread_of(found.missed),
        )

    def _recorded(
        self,
        index: Mapping[Bucket, int],
        log: Callable[[Columns], np.ndarray],
        nearness: Callable[[np.ndarray], np.ndarray],
        num_pairs: int,
    ) -> _Known:
        """Returns the terms of records; their weight falls with the number of differences."""
        records = [found for found in self._records if found[0].bucket in index]
        columns = _columns([burst for burst, _ in records])
        places = np.array([index[burst.bucket] for burst, _ in records], int)
        counts = np.array([count for _, count in records], float)
        # Changes since that run are common to all contexts of a bucket.
        contexts = np.bincount(places, minlength=len(index))[places]
        variances = contexts * (self.spread**2 / counts + SINCE_THEN**2)
        fade = 1 + num_pairs / OUTWEIGHED
        variances = fade * variances / _at_least(nearness(columns.contexts))
        return _Known(places, log(columns), variances)

    def _pairs(self) -> _Paired:
        """Returns the pairs of bursts to compare."""
        index = {bucket: place for place, bucket in enumerate({b.bucket for _, b in self._bursts})}
        own = np.array([index[burst.bucket] for _, burst in self._bursts], int)
        columns = _columns([burst for _, burst in self._bursts])
        places = np.array([place for place, _ in self._bursts], int)
        logs, contexts = np.log(columns.seconds), np.log(columns.contexts + 64)
        num, num_near = len(places), np.zeros(len(places))
        pairs: list[np.ndarray] = []
        for lag in range(1, NEIGHBOURS + 1):
            # The index of the burst `lag` places after each; `num` if there is none.
            later = np.searchsorted(places, places + lag)
            later[np.append(places, -1)[later] != places + lag] = num
            first = np.flatnonzero(later < num)
            second, third = later[first], np.append(later, num)[later[first]]
            num_near[first] += 1
            num_near[second] += 1
            both = third < num
            a, b, c = first[both], second[both], third[both]
            jumps = (own[a] == own[c]) & (abs(logs[c] - logs[a]) > JUMP)
            jumps &= abs(contexts[c] - contexts[a]) < NEAR_CONTEXTS
            tells = own[first] != own[second]
            is_spoilt = np.zeros(num, bool)
            is_spoilt[a[jumps]] = is_spoilt[b[jumps]] = True
            tells &= ~is_spoilt[first]
            pairs.append(np.stack([first[tells], second[tells]]))
        before, after = np.concatenate(pairs, axis=1)
        # All differences between m bursts hold no more information than the m bursts.
        share = 1 + (num_near[before] + num_near[after]) / 2
        return _Paired(list(index), own, columns, before, after, share)


class _Paired(NamedTuple):
    """The remembered bursts, and the pairs of them to compare."""

    buckets: list[Bucket]
    own: np.ndarray  # i64[bursts], place of each burst's bucket in `buckets`
    columns: Columns
    before: np.ndarray  # i64[pairs], the earlier burst
    after: np.ndarray  # i64[pairs], the later one
    share: np.ndarray  # f64[pairs], variance of a difference over that of a burst


class _Known(NamedTuple):
    """Terms of single buckets; the first ones are of every bucket, in order."""

    places: np.ndarray  # of the bucket
    aims: np.ndarray  # log seconds
    variances: np.ndarray


class _Apart(NamedTuple):
    """Terms of pairs of buckets, arrays of one length."""

    before: np.ndarray  # place of the first bucket
    after: np.ndarray  # place of the second
    aims: np.ndarray  # log seconds of the second less those of the first
    variances: np.ndarray


class _Solution(NamedTuple):
    logs: np.ndarray  # f64[buckets]
    covariance: np.ndarray  # f64[buckets, buckets]
    coefficients: np.ndarray  # f64[features]
    missed: np.ndarray  # f64[pairs], absolute residuals


def _solve(features: np.ndarray, known: _Known, apart: _Apart) -> _Solution:
    """Returns the robust least-squares solution.

    The unknowns are the buckets' log seconds and the relative change of each coefficient. Every
    round linearises the sum of parts anew; a coefficient changes by a factor of MOST_CHANGE at
    most per round. The normal equations are summed by place, without products of large matrices:
    BLAS threads would spin beside the device's.

    Args:
      features: f64[buckets, features], none below 0.
      known: has every bucket at least once, so that the solution is unique.
    """
    count, size = len(features), sum(features.shape)
    ends = (apart.before, apart.after), (apart.after, apart.before)
    of_known, of_apart, of_shared = (
        np.ones(len(each)) for each in (known.aims, apart.aims, features)
    )
    logs, diagonal = known.aims[:count], np.arange(count)
    coefficients = np.zeros(features.shape[1])
    for number in range(ROUNDS):
        if number % 2 == 0:  # refit: the set of zero coefficients may change
            relative = features / np.exp(logs)[:, None]
            coefficients = fit_nonnegative(relative, np.ones(count))
        parts = features * coefficients
        total = np.maximum(parts.sum(axis=1), LEAST_SUM * np.exp(logs))
        shares, aims = parts / total[:, None], np.log(total)
        normal, right = np.zeros((size, size)), np.zeros(size)
        weights = of_known / known.variances
        np.add.at(normal, (known.places, known.places), weights)
        np.add.at(right, known.places, weights * known.aims)
        weights = of_apart / apart.variances
        for (one, other), sign in zip(ends, (-1.0, 1.0), strict=True):
            np.add.at(normal, (one, one), weights)
            np.add.at(normal, (one, other), -weights)
            np.add.at(right, one, sign * weights * apart.aims)
        weights = of_shared / SPECIAL**2
        normal[diagonal, diagonal] += weights
        right[:count] += weights * aims
        weighed = weights[:, None] * shares
        normal[:count, count:], normal[count:, :count] = -weighed, -weighed.T
        right[count:] -= (weighed * aims[:, None]).sum(axis=0)
        normal[count:, count:] = (shares[:, :, None] * weighed[:, None]).sum(axis=0)
        normal[count:, count:] += np.eye(size - count)  # keeps coefficients of 0 determined
        found = np.linalg.solve(normal, right)
        moved = abs(found[:count] - logs).max()
        logs, change = found[:count], found[count:]
        coefficients = coefficients * np.clip(1 + change, 1 / MOST_CHANGE, MOST_CHANGE)
        missed = abs(logs[apart.after] - logs[apart.before] - apart.aims)
        if number % 2 and moved < SETTLED:
            break
        special = logs - aims - (shares * change).sum(axis=1)
        off = abs(logs[known.places] - known.aims)
        of_known = 1 / np.maximum(off / np.sqrt(known.variances), 1.0)
        of_apart = 1 / np.maximum(missed / np.sqrt(apart.variances), 1.0)
        of_shared = 1 / np.maximum(abs(special) / SPECIAL, 1.0)
    covariance = np.linalg.inv(normal)[:count, :count]
    return _Solution(logs, covariance, coefficients, missed)


def _spread_of(missed: np.ndarray) -> float:
    """Returns the standard deviation of a burst's log seconds, from residuals of differences."""
    trials = len(missed) / (1 + NEIGHBOURS)  # residuals of one burst are correlated
    told = 0.0
    if trials:
        ordered = np.sort(missed)  # np.median takes ten times as long on a few
        median = (ordered[(len(missed) - 1) // 2] + ordered[len(missed) // 2]) / 2
        told = float(median) * OF_MEDIAN / math.sqrt(2)
    told = (SPREAD_TRIALS * USUAL_SPREAD + trials * told) / (SPREAD_TRIALS + trials)
    return max(told, LEAST_SPREAD)


def _at_least(nearness: np.ndarray) -> np.ndarray:
    return np.maximum(nearness, LEAST_NEAR)


def _columns(bursts: list[Burst]) -> Columns:
    return Columns(
        np.array([burst.bucket.num_speculative_tokens for burst in bursts], float),
        *(
            np.array([burst[place] for burst in bursts], float)
            for place in range(1, len(Burst._fields))
        ),
    )
