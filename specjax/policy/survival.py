"""How likely draft tokens are to stand: by row and position. No jax.

The survival of a row's draft token j is the probability that it and all before it are
accepted, the product of conditional acceptance rates

    rate(row, j) = rate of the row * profile of position j

both averages that forget. Taken from all rows alike, deep positions would look better
than they are for a row: only rows whose first tokens stand get there. A position that was
never tried is like the one before it, a row that was little tried like the others.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

PRIOR_RATE = 0.7  # before anything is known
PRIOR_TRIALS = 4.0  # that the prior rate counts for
PROFILE_TRIALS = 16.0  # that a position's likeness to the one before it counts for
ROW_TRIALS = 8.0  # that a row's likeness to the others counts for
WINDOW = 1024.0  # trials that averages over all rows remember
ROW_WINDOW = 256.0  # likewise of a row
MOST_RATE = 0.999
# A burst of which so many standard deviations more or less stood than was likely tells of
# other text; what was known before counts for so many trials then.
SURPRISE, LEFT_TRIALS = 4.0, 4.0
MOST_TRIALS, MOST_DEPTH = 1e9, 2**10  # that a record may hold
KEPT_TRIALS = 64.0  # that what was learned in an earlier run counts for


class Survival:
    """Exponential averages of what was accepted.

    Args:
      depth: most draft tokens on one path.
    """

    def __init__(self, depth: int):
        # By position: tokens that stood, and as many as the rates of their rows say.
        self._stood, self._expected = np.zeros((2, depth))
        # Steps that asked for a token at each depth, and those to which one was proposed.
        self._asked, self._proposed = np.zeros((2, depth))
        # Of all rows, and of each: trials, weighted by profile, and those that stood.
        self._all = np.zeros(2)
        self._by_request = _ByRequest()

    def to_record(self) -> dict[str, list[float]]:
        """Returns what is known of all rows, for JSON."""
        record = {name: getattr(self, f"_{name}").tolist() for name in _KEPT}
        tried, stood = record["all"]
        # Trials are weighted by profile: a lucky burst may leave fewer of them.
        return record | {"all": [tried, min(stood, tried)]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any], depth: int) -> Survival:
        """Returns what `to_record` said of an earlier run; what is seen now counts for more.

        Raises:
          ValueError: figures that mean nothing.
        """
        survival = cls(depth)
        try:
            kept = {name: np.array(record[name], float) for name in _KEPT}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{reprlib.repr(record)} is no acceptance: {error!r}.") from None
        values = np.concatenate([each.ravel() for each in kept.values()])
        is_sound = bool(np.all((values >= 0) & (values < MOST_TRIALS)))
        is_sound &= max(each.size for each in kept.values()) <= MOST_DEPTH
        if not is_sound or kept["all"].shape != (2,) or kept["all"][1] > kept["all"][0]:
            raise ValueError(f"{reprlib.repr(record)} is no acceptance.")
        of_rates = min(KEPT_TRIALS / max(kept["all"][0], 1.0), 1.0)
        of_presence = min(KEPT_TRIALS / max(kept["asked"].max(initial=0.0), 1.0), 1.0)
        survival._all = kept.pop("all") * of_rates
        for name, figures in kept.items():
            own = getattr(survival, f"_{name}")
            count = min(len(own), figures.size)
            scale = of_presence if name in ("asked", "proposed") else of_rates
            own[:count] = figures.ravel()[:count] * scale
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
        """Takes in a burst that drafted; arrays as of Outcome."""
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

    def _notice_change(self, requests: Any, tried: Any, stood: Any) -> None:
        """Forgets most of what is known where a burst is too unlike it: the text has changed.

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
        """Returns how each position's rate compares with that of its rows, f64[depth]."""
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

    def of_rates(self, rates: np.ndarray) -> np.ndarray:
        """Returns the survival of draft tokens of rows with such acceptance rates."""
        by_place = rates * self.profile()[:, None]
        return np.minimum(by_place, MOST_RATE).cumprod(axis=0).T

    @property
    def num_trials(self) -> float:
        """Drafts that tell the mean rate of all rows, weighted by profile."""
        return float(self._all[0])

    @property
    def num_told(self) -> float:
        """Drafts, and steps for which the drafter had none: both tell what a step gains."""
        in_vain = self._asked[0] - self._proposed[0] if len(self._asked) else 0.0
        return float(self._all[0] + max(in_vain, 0.0))

    def presence(self) -> np.ndarray:
        """Returns how often a token is proposed at each depth that is asked for, f64[depth]."""
        presence = (self._proposed + PRIOR_TRIALS) / (self._asked + PRIOR_TRIALS)
        return np.minimum.accumulate(np.minimum(presence, 1.0))

    def optimism(self, deviations: float = 2.0) -> np.ndarray:
        """Returns how many times more draft tokens may stand than is thought, f64[depth].

        Args:
          deviations: by so many standard deviations of the mean rate of all rows; below 0 it is
            how many times as few.
        """
        tried, stood = self._all
        trials = tried + PRIOR_TRIALS
        mean = min((stood + PRIOR_TRIALS * PRIOR_RATE) / trials, MOST_RATE)
        most = max(mean + deviations * math.sqrt(mean * (1 - mean) / trials), 0.0)
        thought, hoped = self.of_rates(np.array([mean, most])).cumsum(axis=1)
        return hoped / thought

    def forget_others(self, requests: Any) -> None:
        """Forgets the requests that are over, once there are many of them."""
        if len(self._by_request) > 4 * len(requests) + 64:
            trials = self._by_request.get(requests)
            self._by_request = _ByRequest()
            self._by_request.set(requests, trials)

    def _observe_rows(self, requests: Any, tried: Any, stood: Any, num_steps: int) -> None:
        """Takes in the weighted trials of each row, f64[rows], and those that stood.

        A row that was not asked becomes like the others again: or one that once did badly
        would never be asked again.
        """
        new = np.stack([tried, stood], axis=1)
        total = new.sum(axis=0)
        self._all = self._all * math.exp(-total[0] / WINDOW) + total
        forgets = np.where(tried > 0, tried, float(num_steps)) / ROW_WINDOW
        before = self._by_request.get(requests)
        self._by_request.set(requests, before * np.exp(-forgets)[:, None] + new)


_KEPT = ("stood", "expected", "asked", "proposed", "all")


class _ByRequest:
    """Two figures of each request, 0 where there are none; all of a batch are looked up at once."""

    def __init__(self):
        # Ascending; the last is above all numbers of requests.
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
        """Takes over the figures of some requests, f64[requests, 2]."""
        others = ~np.isin(self._numbers, requests)
        numbers = np.concatenate([self._numbers[others], requests])
        order = numbers.argsort()
        self._numbers = numbers[order]
        self._figures = np.concatenate([self._figures[others], figures])[order]
