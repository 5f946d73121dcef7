"""How the steps of buckets compare, from bursts that follow one another. No jax.

    log seconds(burst) = base(bucket) + machine(now) + noise
    base(bucket)       = log(features(bucket) @ coefficients) + what is special about it

A machine that others share changes its speed from one second to the next: what a bucket
took a minute ago compares with nothing that runs now. Two bursts near each other do: their
difference is free of the machine's part. One least-squares problem holds all that is known:
these differences, what each bucket took whatever ran beside it, and that what a step costs
is near a sum of parts that buckets share. What is far off weighs less (Huber 1964, "Robust
Estimation of a Location Parameter").

    bursts       A  A  X  A  A          X is compared with three on either side; where two as
                 |  +--+--+  |          far from it, before and after, are of one bucket and
                 +-----+-----+          differ by more than JUMP, neither of them is
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

NEIGHBOURS = 3  # bursts on either side, with which one is compared
MOST_BURSTS = 256  # that are remembered; those with another bucket near them
# Standard deviation of a burst's logarithm before it is known, and differences that it counts for.
USUAL_SPREAD, SPREAD_TRIALS = 0.1, 8.0
# Standard deviations in a median of absolute values, of a normal distribution.
OF_MEDIAN = 1.4826
LEAST_SPREAD = 0.01
# Standard deviation, besides, of the only burst of a bucket: it may have been disturbed.
DISTURBED = 0.4
LEAST_NEAR = 1e-3  # what a measurement counts for at the least, however far its context
OUTWEIGHED = 12.0  # differences, that halve what records of earlier runs count for
# Standard deviations: of a bucket's base beside what the parts that buckets share add up to,
# and of what may have changed since earlier runs.
SPECIAL, SINCE_THEN = 0.1, 0.04
ROUNDS = 4  # of weighing what is far off, at most
SETTLED = 1e-4  # logarithm, by which no base changes in the last of them
LEAST_SUM = 0.25  # of its base, that the parts of a bucket add up to
MOST_CHANGE = 4.0  # times, of a coefficient from one round to the next
# Logarithm of how much longer or less a bucket takes than just before, where it is the
# machine's doing; and of contexts that are near each other.
JUMP, NEAR_CONTEXTS = 0.26, 0.4


class Burst(NamedTuple):
    """One measurement."""

    bucket: Bucket
    context: float  # tokens of all rows, midway
    seconds: float  # of a step
    slower: float = 1.0  # the machine's part, as it was thought then


class Columns(NamedTuple):
    """Bursts, one array per field."""

    depths: np.ndarray  # K
    contexts: np.ndarray
    seconds: np.ndarray
    slower: np.ndarray


class Bases(NamedTuple):
    """What buckets take, the machine's part and that of their context left out."""

    logs: dict[Bucket, float]  # of seconds
    index: dict[Bucket, int]
    covariance: np.ndarray  # f64[buckets, buckets]
    coefficients: np.ndarray  # f64[features], seconds, none below 0
    spread: float  # standard deviation of a burst's logarithm

    def deviation(self, bucket: Bucket, other: Bucket) -> float:
        """Returns the standard deviation of what one takes beside the other, a logarithm."""
        if bucket == other:
            return 0.0
        i, j, own = self.index[bucket], self.index[other], self.covariance
        return math.sqrt(max(own[i, i] + own[j, j] - 2 * own[i, j], 0.0))


class StepRatios:
    """Bursts that had others near them, and the bases that explain them.

    Attributes:
      spread: standard deviation of a burst's logarithm, as far as is known.
    """

    def __init__(self):
        self.spread = USUAL_SPREAD
        self._bursts: list[tuple[int, Burst]] = []  # with their places, which rise
        self._next = 0  # place
        self._paired: _Paired | None = None  # what `_pairs` says of them, until they change
        # Of an earlier run, and how often each was measured there.
        self._records: list[tuple[Burst, int]] = []

    def copy(self) -> StepRatios:
        """Returns one that learns apart from this."""
        own = copy.copy(self)
        own._bursts, own._records = list(self._bursts), list(self._records)
        return own

    @property
    def is_alone(self) -> bool:
        """Whether the last burst is compared with nothing, so far."""
        near = self._bursts[-1 - NEIGHBOURS :]
        first = self._next - 1 - NEIGHBOURS
        return len({burst.bucket for place, burst in near if place >= first}) == 1

    def begin_run(self) -> None:
        """Says that the next burst does not follow those before."""
        for place in range(self._next - NEIGHBOURS, self._next):
            self._forget_alone(place)
        self._next += NEIGHBOURS

    def take(self, other: StepRatios, slower: float, buckets: Collection[Bucket]) -> None:
        """Takes over what another remembered and this does not, as from before all of its own.

        Args:
          slower: times that the machine's part is more, as this has it.
          buckets: whose records are taken; this one knew none of them.
        """
        # Written ones are rounded but for their seconds.
        own = {(burst.bucket, burst.seconds) for _, burst in self._bursts}
        found = [
            (place, burst._replace(slower=burst.slower * slower))
            for place, burst in other._bursts
            if (burst.bucket, burst.seconds) not in own
        ]
        # Those compare with one another alone.
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
        """Takes in what was measured so many times in an earlier run, beside all else of that
        run."""
        self._records.append((burst, count))

    def add(self, burst: Burst) -> None:
        """Takes in what was measured right after what came before it in this run."""
        self._paired = None
        self._bursts.append((self._next, burst))
        self._next += 1
        self._forget_alone(self._next - 1 - NEIGHBOURS)
        if len(self._bursts) > MOST_BURSTS:
            del self._bursts[0]

    def bursts(self) -> list[tuple[int, Burst]]:
        """Returns what is remembered, the first at place 0; `add_bursts` takes it."""
        found, place, last = [], 0, None
        for at, burst in self._bursts:
            place += 0 if last is None else min(at - last, 1 + NEIGHBOURS)
            last = at
            found.append((place, burst))
        return found

    def add_bursts(self, bursts: Sequence[tuple[int, Burst]]) -> None:
        """Takes in what an earlier run remembered; their places rise."""
        self._paired = None
        first = self._next
        for place, burst in bursts[-MOST_BURSTS:]:
            self._bursts.append((first + place, burst))
            self._next = first + place + 1
        self._bursts = self._bursts[-MOST_BURSTS:]
        self._next += NEIGHBOURS

    def _forget_alone(self, place: int) -> None:
        """Forgets the burst at a place if those near it are of its bucket: nothing compares with
        it."""
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
        """Returns the logarithm of what each bucket takes.

        Args:
          log: of bursts' seconds, without what their contexts take.
          usual: likewise of each bucket that is asked for, by what it took whatever ran beside
            it; bursts of others are left out.
          wander: standard deviation of the machine's part, by which that may be off.
          nearness: by contexts, what was measured there counts for, 0 to 1.
          features: f64[buckets, features], in the order of `usual`; what their steps do.
          counts: i64[buckets], how often each was measured altogether.

        Returns:
          Figures of every bucket of `usual`.
        """
        index = {bucket: place for place, bucket in enumerate(usual)}
        if self._paired is None:
            self._paired = self._pairs()
        buckets, own, columns, before, after, share = self._paired
        own = np.array([index.get(bucket, -1) for bucket in buckets], int)[own]
        is_asked = (own[before] >= 0) & (own[after] >= 0)
        before, after, share = before[is_asked], after[is_asked], share[is_asked]
        num_compared = np.bincount(np.concatenate([own[before], own[after]]), minlength=len(index))
        lone = DISTURBED**2 * (counts == 1)  # variance, besides
        # Bursts of other buckets are in no pair.
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
        """Returns what records tell; the less, the more differences tell since."""
        records = [found for found in self._records if found[0].bucket in index]
        columns = _columns([burst for burst, _ in records])
        places = np.array([index[burst.bucket] for burst, _ in records], int)
        counts = np.array([count for _, count in records], float)
        # What has changed since is common to all contexts.
        contexts = np.bincount(places, minlength=len(index))[places]
        variances = contexts * (self.spread**2 / counts + SINCE_THEN**2)
        fade = 1 + num_pairs / OUTWEIGHED
        variances = fade * variances / _at_least(nearness(columns.contexts))
        return _Known(places, log(columns), variances)

    def _pairs(self) -> _Paired:
        """Returns which bursts to compare."""
        index = {bucket: place for place, bucket in enumerate({b.bucket for _, b in self._bursts})}
        own = np.array([index[burst.bucket] for _, burst in self._bursts], int)
        columns = _columns([burst for _, burst in self._bursts])
        places = np.array([place for place, _ in self._bursts], int)
        logs, contexts = np.log(columns.seconds), np.log(columns.contexts + 64)
        num, num_near = len(places), np.zeros(len(places))
        pairs: list[np.ndarray] = []
        for lag in range(1, NEIGHBOURS + 1):
            # The index of the burst that came so many after each; num where there is none.
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
            tells &= ~np.isin(first, np.concatenate([a[jumps], b[jumps]]))
            pairs.append(np.stack([first[tells], second[tells]]))
        before, after = np.concatenate(pairs, axis=1)
        # All differences between m bursts tell as much as the m bursts.
        share = 1 + (num_near[before] + num_near[after]) / 2
        return _Paired(list(index), own, columns, before, after, share)


class _Paired(NamedTuple):
    """The bursts that are remembered, and which of them to compare."""

    buckets: list[Bucket]
    own: np.ndarray  # i64[bursts], the place of each one's bucket
    columns: Columns
    before: np.ndarray  # i64[pairs], the earlier burst
    after: np.ndarray  # i64[pairs], the later one
    share: np.ndarray  # f64[pairs], variances of a burst in that of a difference


class _Known(NamedTuple):
    """What is known of buckets by themselves; first of every bucket, in order."""

    places: np.ndarray  # of the bucket
    aims: np.ndarray
    variances: np.ndarray


class _Apart(NamedTuple):
    """What is known of two buckets beside each other, arrays of as many."""

    before: np.ndarray  # places of the two
    after: np.ndarray
    aims: np.ndarray  # of the second less the first
    variances: np.ndarray


class _Solution(NamedTuple):
    logs: np.ndarray  # f64[buckets]
    covariance: np.ndarray  # f64[buckets, buckets]
    coefficients: np.ndarray  # f64[features]
    missed: np.ndarray  # f64[pairs], by how much each is missed


def _solve(features: np.ndarray, known: _Known, apart: _Apart) -> _Solution:
    """Returns the robust least-squares solution.

    The unknowns are the buckets' logarithms, and by what share each coefficient differs from
    where the sum of parts is made linear, which is done anew in each round; a coefficient changes
    by MOST_CHANGE at most from one to the next. Sums by place, and no product of large matrices:
    threads of a BLAS would spin beside the device's.

    Args:
      features: f64[buckets, features], none below 0.
      known: every bucket at least once, so that the problem has one solution.
    """
    count, size = len(features), sum(features.shape)
    ends = (apart.before, apart.after), (apart.after, apart.before)
    of_known, of_apart, of_shared = (
        np.ones(len(each)) for each in (known.aims, apart.aims, features)
    )
    logs, diagonal = known.aims[:count], np.arange(count)
    coefficients = np.zeros(features.shape[1])
    for number in range(ROUNDS):
        if number % 2 == 0:  # which parts are 0 may change
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
        normal[count:, count:] += np.eye(size - count)  # no part of nothing changes
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
    """Returns the standard deviation of a burst's logarithm, told by what differences miss."""
    trials = len(missed) / (1 + NEIGHBOURS)  # differences of one burst are missed alike
    told = float(np.median(missed)) * OF_MEDIAN / math.sqrt(2) if trials else 0.0
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
