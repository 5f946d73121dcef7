"""Acceptance probabilities of draft tokens, by row and position. No jax.

The survival of a row's draft token j is the probability that it and all before it are
accepted, the product of conditional acceptance rates

    rate(row, j) = rate of the row * profile of position j

both exponential averages. One rate per position over all rows would overrate deep positions:
only rows whose first tokens are accepted reach them. A position that was never tried takes
the rate of the one before it, a row with few trials that of the other rows.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PRIOR_RATE = 0.7  # acceptance rate before any trial
PRIOR_TRIALS = 4.0  # weight of the prior rate
PROFILE_TRIALS = 16.0  # weight of the previous position's profile in that of a position
ROW_TRIALS = 8.0  # weight of the mean rate of all rows in that of a row
# How much rates differ between rows: weight of what is thought at first, and how much averages
# remember, both in bursts of a row.
SPREAD_BURSTS, SPREAD_WINDOW = 4.0, 512.0
WINDOW = 1024.0  # trials that averages over all rows remember
ROW_WINDOW = 256.0  # trials that the averages of one row remember
MOST_RATE = 0.999
# A burst whose accepted tokens are SURPRISE standard deviations off the expectation means that
# the text changed; what was known before then counts for LEFT_TRIALS trials.
SURPRISE, LEFT_TRIALS = 4.0, 4.0
MOST_TRIALS, MOST_DEPTH = 1e9, 2**10  # limits of a record
# Weights of an earlier run's acceptance, and of how much it differed between rows.
KEPT_TRIALS, KEPT_PAIRS = 64.0, 64.0


class Survival:
    """Exponential averages of accepted draft tokens.

    Args:
      depth: most draft tokens on one path.
    """

    def __init__(self, depth: int):
        # By position: accepted tokens, and how many the rates of their rows predicted.
        self._stood, self._expected = np.zeros((2, depth))
        # By depth: steps that asked for a token, and steps for which one was proposed.
        self._asked, self._proposed = np.zeros((2, depth))
        # Trials weighted by profile, and accepted tokens: of all rows, and by request.
        self._all = np.zeros(2)
        # Of a row's rates in a burst and before it: the product of what each was above the mean of
        # all rows, and the weight of such pairs. Luck cancels, what is the row's own stays.
        self._pairs = np.zeros(2)
        self._by_request = _ByRequest()

    def to_record(self) -> dict[str, list[float]]:
        """Returns the averages over all rows, for JSON."""
        record = {name: getattr(self, f"_{name}").tolist() for name in (*_KEPT, "pairs")}
        tried, stood = record["all"]
        # Trials are weighted by profile, so accepted tokens may exceed them after a lucky burst.
        product, weight = record["pairs"]
        product = min(max(product, -weight), weight)
        return record | {"all": [tried, min(stood, tried)], "pairs": [product, weight]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any], depth: int) -> Survival:
        """Returns the averages of an earlier run's record, scaled down to KEPT_TRIALS trials.

        Raises:
          ValueError: a figure is missing or out of range.
        """
        survival = cls(depth)
        try:
            kept = {name: np.array(record[name], float) for name in _KEPT}
            # Records of before have none.
            product, weight = np.array(record.get("pairs", (0.0, 0.0)), float)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{reprlib.repr(record)} is no acceptance: {error!r}.") from None
        values = np.concatenate([each.ravel() for each in kept.values()])
        is_sound = bool(np.all((values >= 0) & (values < MOST_TRIALS)))
        is_sound &= max(each.size for each in kept.values()) <= MOST_DEPTH
        is_sound &= {kept[name].shape for name in _KEPT if name != "all"} == {(kept["asked"].size,)}
        is_sound &= bool(abs(product) <= weight < MOST_TRIALS)
        if not is_sound or kept["all"].shape != (2,) or kept["all"][1] > kept["all"][0]:
            raise ValueError(f"{reprlib.repr(record)} is no acceptance.")
        of_rates = min(KEPT_TRIALS / max(kept["all"][0], 1.0), 1.0)
        of_presence = min(KEPT_TRIALS / max(kept["asked"].max(initial=0.0), 1.0), 1.0)
        survival._all = kept.pop("all") * of_rates
        survival._pairs = np.array([product, weight]) * min(KEPT_PAIRS / max(weight, 1.0), 1.0)
        for name, figures in kept.items():
            own = getattr(survival, f"_{name}")
            size = min(len(own), figures.size)
            scale = of_presence if name in ("asked", "proposed") else of_rates
            own[:size] = figures.ravel()[:size] * scale
        return survival

    def observe(
        self,
        requests: Any,
        num_committed: Any,
        num_accepted: Any,
        draft_depth: Any,
        proposed_depth: Any,
        asked_depth: Any,
    ) -> None:
        """Adds a burst that drafted; arrays as in Outcome."""
        ran = num_committed > 0
        num_accepted = np.where(ran, np.minimum(num_accepted, draft_depth), 0)
        draft_depth = np.where(ran, draft_depth, 0)
        places = np.arange(len(self._stood))[:, None, None]
        sums = lambda flags: flags.sum(axis=1).astype(float)
        # [positions, rows]
        tried = sums((draft_depth > places) & (num_accepted >= places))
        stood = sums(num_accepted > places)
        asked = sums(ran & (asked_depth > places))
        proposed = sums(ran & (proposed_depth > places))

        self._notice_change(requests, tried, stood)
        trials = tried.T @ self.profile()
        self._observe_rows(requests, trials, stood.sum(axis=0), len(ran))
        kept = math.exp(-float(ran.sum()) / WINDOW)
        for average, new in (
            (self._stood, stood.sum(axis=1)),
            (self._expected, tried @ self.rates(requests)),
            (self._asked, asked.sum(axis=1)),
            (self._proposed, proposed.sum(axis=1)),
        ):
            average *= kept
            average += new

    def expect(self, survival: Sequence[float], num_trials: float = KEPT_TRIALS) -> None:
        """Replaces what was known of acceptance: the drafter is another one from now on.

        How often a drafter proposes tokens at all is kept, and how much texts differ.

        Args:
          survival: of the draft tokens of a path, from the first on; positions past them take the
            rate of the last. Numbers that are not finite change nothing.
          num_trials: weight of these rates beside those that are observed from now on.
        """
        kept = np.asarray(survival, float)[: len(self._stood)].clip(0.0, 1.0)
        if not kept.size or not np.all(np.isfinite(kept)):
            return
        before = np.concatenate([[1.0], kept[:-1]])
        rates = np.divide(kept, before, out=np.zeros_like(kept), where=before > 0).clip(0.0, 1.0)
        rates = np.pad(rates, (0, len(self._stood) - kept.size), mode="edge")
        first = max(float(rates[0]), 1e-3)
        self._all = np.array([num_trials, num_trials * rates[0]])
        # As much as makes PROFILE_TRIALS of the position before a tenth of what is known.
        self._expected = np.full(len(rates), 9 * PROFILE_TRIALS)
        self._stood = self._expected * np.minimum(rates / first, 1.0 / first)
        self._by_request = _ByRequest()

    def _notice_change(self, requests: Any, tried: Any, stood: Any) -> None:
        """Forgets most averages if a burst contradicts them: the text has changed.

        Args:
          tried, stood: f64[positions, rows].
        """
        likely = self.profile()[:, None] * self.rates(requests)
        likely = likely.clip(1 - MOST_RATE, MOST_RATE)
        surprise = (stood - tried * likely).sum()
        deviation = math.sqrt((tried * likely * (1 - likely)).sum())
        if abs(surprise) <= SURPRISE * deviation or not tried.sum():
            return
        self._all *= min(LEFT_TRIALS / max(self._all[0], 1.0), 1.0)
        self._by_request = _ByRequest()

    def profile(self) -> np.ndarray:
        """Returns each position's rate relative to that of its rows, f64[depth]."""
        profile, before = [], 1.0
        for stood, expected in zip(self._stood.tolist(), self._expected.tolist()):
            before = (stood + PROFILE_TRIALS * before) / (expected + PROFILE_TRIALS)
            profile.append(before)
        return np.array(profile)

    def rates(self, requests: Any) -> np.ndarray:
        """Returns the acceptance rate of each row, f64[rows]."""
        tried, stood = self._all
        mean = (stood + PRIOR_TRIALS * PRIOR_RATE) / (tried + PRIOR_TRIALS)
        tried, stood = self._by_request.get(requests).T
        return (stood + ROW_TRIALS * mean) / (tried + ROW_TRIALS)

    def doubts(self, requests: Any, rates: np.ndarray) -> np.ndarray:
        """Returns by how much the rates of rows may differ from `rates(requests)`, f64[rows]:
        standard deviations, which trials of a row lower."""
        rates = rates.clip(1 - MOST_RATE, MOST_RATE)
        of_trial = rates * (1 - rates)  # no more can rates of this mean differ
        product, weight = self._pairs
        at_first = SPREAD_BURSTS * of_trial / (ROW_TRIALS + 1)
        between_rows = (product + at_first) / (weight + SPREAD_BURSTS)
        between_rows = between_rows.clip(0.0, of_trial)
        tried, _ = self._by_request.get(requests).T
        return np.sqrt(between_rows / (1 + tried * between_rows / of_trial))

    def of_rates(self, rates: np.ndarray) -> np.ndarray:
        """Returns the survival of draft tokens for given row rates, f64[rows, depth]."""
        by_place = rates * self.profile()[:, None]
        return np.minimum(by_place, MOST_RATE).cumprod(axis=0).T

    @property
    def num_trials(self) -> float:
        """Draft tokens behind the mean rate of all rows, weighted by profile."""
        return float(self._all[0])

    @property
    def num_told(self) -> float:
        """`num_trials` plus steps without a proposal: both tell what a step gains."""
        in_vain = self._asked[0] - self._proposed[0] if len(self._asked) else 0.0
        return float(self._all[0] + max(in_vain, 0.0))

    def presence(self) -> np.ndarray:
        """Returns the fraction of steps asking for each depth that get a token, f64[depth]."""
        presence = (self._proposed + PRIOR_TRIALS) / (self._asked + PRIOR_TRIALS)
        return np.minimum.accumulate(np.minimum(presence, 1.0))

    def optimism(self, deviations: float = 2.0) -> np.ndarray:
        """Returns the factor by which accepted tokens may exceed the expected ones, f64[depth].

        Args:
          deviations: standard deviations added to the mean rate of all rows; below 0 they lower
            it, and the factor is below 1.
        """
        tried, stood = self._all
        trials = tried + PRIOR_TRIALS
        mean = min((stood + PRIOR_TRIALS * PRIOR_RATE) / trials, MOST_RATE)
        most = max(mean + deviations * math.sqrt(mean * (1 - mean) / trials), 0.0)
        thought, hoped = self.of_rates(np.array([mean, most])).cumsum(axis=1)
        return hoped / thought

    def forget_others(self, requests: Any) -> None:
        """Forgets finished requests once there are many of them."""
        if len(self._by_request) > 4 * len(requests) + 64:
            trials = self._by_request.get(requests)
            self._by_request = _ByRequest()
            self._by_request.set(requests, trials)

    def _observe_rows(self, requests: Any, tried: Any, stood: Any, num_steps: int) -> None:
        """Adds the weighted trials and accepted tokens of each row, f64[rows].

        The averages of a row that was not asked for drafts decay towards those of the others:
        otherwise a row that once did badly would never be asked again.
        """
        new = np.stack([tried, stood], axis=1)
        total = new.sum(axis=0)
        self._all = self._all * math.exp(-total[0] / WINDOW) + total
        forgets = np.where(tried > 0, tried, float(num_steps)) / ROW_WINDOW
        before = self._by_request.get(requests)
        self._observe_pairs(before, new)
        self._by_request.set(requests, before * np.exp(-forgets)[:, None] + new)

    def _observe_pairs(self, before: np.ndarray, new: np.ndarray) -> None:
        """Adds how much rows differed alike before and now; f64[rows, 2], trials and accepted."""
        is_pair = (before[:, 0] > 0) & (new[:, 0] > 0)
        if np.count_nonzero(is_pair) < 2:
            return
        # Few trials weigh little. The rows are part of the means that they are compared with, so
        # less than their own part is expected of them.
        tried, stood = np.stack([before[is_pair], new[is_pair]]).transpose(2, 0, 1)
        weights, kept = tried / (tried + ROW_TRIALS), stood / (tried + ROW_TRIALS)
        sums = weights.sum(axis=1, keepdims=True)
        above = kept - weights * (kept.sum(axis=1, keepdims=True) / sums)
        (one, other), own = weights / sums, weights.prod(axis=0)
        weight = float(own @ (1 - one - other + one @ other))
        self._pairs *= math.exp(-weight / SPREAD_WINDOW)
        self._pairs += float(above.prod(axis=0).sum()), weight


_KEPT = ("stood", "expected", "asked", "proposed", "all")


class _ByRequest:
    """Two figures per request, 0 for unknown ones; looked up for a whole batch at once."""

    def __init__(self):
        # Request numbers, ascending; the last is a sentinel above all of them.
        self._numbers = np.array([np.iinfo(np.int64).max])
        self._figures = np.zeros((1, 2))

    def __len__(self) -> int:
        return len(self._numbers) - 1

    def get(self, requests: Any) -> np.ndarray:
        """Returns the figures of requests by their numbers, f64[requests, 2]."""
        places = self._numbers.searchsorted(requests)
        is_known = self._numbers.take(places) == requests
        return self._figures.take(places, axis=0) * is_known[:, None]

    def set(self, requests: Any, figures: np.ndarray) -> None:
        """Sets the figures of some requests, f64[requests, 2]."""
        places = self._numbers.searchsorted(requests)
        is_known = self._numbers.take(places) == requests
        self._figures[places[is_known]] = figures[is_known]
        if is_known.all():
            return
        numbers = np.concatenate([self._numbers, requests[~is_known]])
        order = numbers.argsort()
        self._numbers = numbers[order]
        self._figures = np.concatenate([self._figures, figures[~is_known]])[order]
