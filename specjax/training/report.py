"""A picture of a training run; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specjax.api.plots import new_figure
from specjax.training.run_store import Look


def draw(looks: Sequence[Look], path: str | os.PathLike[str]) -> None:
    """Draws the loss and the acceptance of each draft token over the steps, as PNG or SVG.

    Raises:
      ValueError: there are no looks.
      NotImplementedError: matplotlib is not installed.
    """
    if not looks:
        raise ValueError("no look at held-out text was taken, so there is nothing to draw.")
    figure = new_figure(11, 4)
    loss, accepted, length = figure.subplots(1, 3)
    steps = [look.step for look in looks]
    loss.plot(steps, [look.figures.mean_loss for look in looks], label="held-out")
    seen = [look for look in looks if look.training_loss is not None]
    loss.plot([look.step for look in seen], [look.training_loss for look in seen], label="training")
    loss.set(xlabel="step", ylabel="loss, nats", ylim=(0, None))
    for s in range(len(looks[0].figures.agreed)):
        accepted.plot(
            steps, [look.figures.agreed[s] for look in looks], label=f"draft token {s + 1}"
        )
    accepted.set(xlabel="step", ylabel="likeliest token agrees", ylim=(0, 1))
    length.plot(steps, [look.figures.greedy_length for look in looks], label="temperature 0")
    length.plot(steps, [look.figures.sampled_length for look in looks], label="sampled")
    length.set(xlabel="step", ylabel="mean acceptance length", ylim=(1, None))
    for axes in (loss, accepted, length):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def try_draw(looks: Sequence[Look], path: Path) -> Path | None:
    """Draws if matplotlib is installed; returns the path, or None."""
    try:
        draw(looks, path)
    except NotImplementedError:
        return None
    return path
