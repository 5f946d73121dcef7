"""What held-out text says of a drafter: how many of its tokens would be accepted, by depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from specjax.training.objective import Chains, Sums
from specjax.types import BY_LAW, GREEDY, SEEDED

LEAST_STEPS = 8  # with a draft token, of whose acceptance a policy of K is told


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over the draft tokens along some text. Tuples hold one number per depth, from 1 on.

    Attributes:
      loss: nats.
      agreed: fraction whose likeliest token is the target's: accepted at temperature 0, where all
        before it are the text's.
      overlap: mean of sum min(p, q): accepted by rejection sampling.
      accepted: mean chance of acceptance under the rule `seeded`, if the target wrote the text.
      greedy_survival, sampled_survival, law_survival: chance that a draft token and all before it
        are accepted in a step, at temperature 0, under `seeded`, and, as an approximation, under
        rules that compare distributions; see `objective.Chains`.
      num_drafts: draft tokens.
    """

    loss: tuple[float, ...]
    agreed: tuple[float, ...]
    overlap: tuple[float, ...]
    accepted: tuple[float, ...]
    greedy_survival: tuple[float, ...]
    sampled_survival: tuple[float, ...]
    law_survival: tuple[float, ...]
    num_drafts: int

    @property
    def greedy_length(self) -> float:
        """Mean acceptance length at temperature 0: 1 + accepted tokens of a chain."""
        return 1.0 + sum(self.greedy_survival)

    @property
    def sampled_length(self) -> float:
        """Mean acceptance length under `seeded`, at the objective's temperature."""
        return 1.0 + sum(self.sampled_survival)

    @property
    def mean_loss(self) -> float:
        return float(np.mean(self.loss))

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as a JSON-like dict."""
        lengths = {"greedy_length": self.greedy_length, "sampled_length": self.sampled_length}
        return dataclasses.asdict(self) | lengths


def add(total: Sums | None, more: Sums) -> Sums:
    """Returns sums over two batches; None is an empty one."""
    more = _on_host(more)
    return more if total is None else jax.tree.map(np.add, total, more)


def _on_host(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(sums))


def figures_of(sums: Sums) -> Figures:
    """Returns the means; 0 where there was nothing to draft."""
    sums = _on_host(sums)
    mean = lambda of: tuple((of / np.maximum(sums.count, 1.0)).tolist())
    return Figures(
        loss=mean(sums.loss),
        agreed=mean(sums.agreed),
        overlap=mean(sums.overlap),
        accepted=mean(sums.accepted),
        greedy_survival=tuple(_rates(sums.greedy).tolist()),
        sampled_survival=tuple(_rates(sums.sampled).tolist()),
        law_survival=tuple(_rates(sums.by_law).tolist()),
        num_drafts=int(sums.count.sum()),
    )


def survival(sums: Sums, ways: Iterable[tuple[int, float]]) -> tuple[float, ...]:
    """Returns how likely a draft token and all before it are accepted, by draft token; () where
    that is not known.

    Args:
      ways: (rule of verification, temperature) of the texts, over which the mean is taken; rules
        of another acceptance are left out.
    """
    sums = _on_host(sums)
    found = [_chains_by(sums, *way) for way in ways]
    known = [each for each in found if each is not None]
    if not known:
        return ()
    count = min(int(np.sum(each.steps >= LEAST_STEPS)) for each in known)
    return tuple(np.mean([_rates(each) for each in known], axis=0)[:count].tolist())


def _chains_by(sums: Sums, rule: int, temperature: float) -> Chains | None:
    if temperature == 0 or rule == GREEDY:
        return sums.greedy
    if rule == SEEDED:
        return sums.sampled
    return sums.by_law if rule in BY_LAW else None


def _rates(chains: Chains) -> np.ndarray:
    return chains.survived / np.where(chains.steps > 0, chains.steps, 1.0)


def table(figures: Figures) -> str:
    """Returns the figures as lines of text, a column per depth."""
    rows = {
        "loss": figures.loss,
        "likeliest agrees": figures.agreed,
        "overlap": figures.overlap,
        "accepted, seeded": figures.accepted,
    }
    width = max(map(len, rows))
    head = f"{'draft token':{width}}" + "".join(f"{s:>8}" for s in range(1, len(figures.loss) + 1))
    lines = [f"{name:{width}}" + "".join(f"{x:8.3f}" for x in row) for name, row in rows.items()]
    lengths = (
        f"mean acceptance length {figures.greedy_length:.2f} at temperature 0, "
        f"{figures.sampled_length:.2f} sampled; {figures.num_drafts:,} draft tokens"
    )
    return "\n".join([head, *lines, lengths])
