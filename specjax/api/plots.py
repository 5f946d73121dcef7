"""Plots of a call's decisions; needs matplotlib."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.engine.metrics import BurstRecord


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib Figure, inches wide and high, that needs no display.

    Raises:
      NotImplementedError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise NotImplementedError(
            "drawing needs matplotlib; install it: pip install matplotlib."
        ) from None
    return figures.Figure(figsize=(width, height), layout="constrained")


def draw_decisions(decisions: Sequence[BurstRecord], path: str | os.PathLike[str]) -> None:
    """Draws K against batch and context, and tokens per second predicted against measured.

    Raises:
      ValueError: there are no decisions.
      NotImplementedError: matplotlib is not installed.
    """
    if not decisions:
        raise ValueError("no burst was run, so there is nothing to draw.")
    figure = new_figure(11, 7.5)
    axes = figure.subplot_mosaic([["load", "speed"], ["bursts", "bursts"]])
    _draw_load(figure, axes["load"], decisions)
    _draw_measured(axes["speed"], decisions)
    _draw_timeline(axes["bursts"], decisions)
    figure.savefig(path, dpi=120)


def draw_comparison(rows: Sequence[Any], path: str | os.PathLike[str] | None) -> Any:
    """Draws tokens per second of `ComparedDrafter`s as bars; returns the figure.

    Raises:
      NotImplementedError: matplotlib is not installed.
    """
    figure = new_figure(7, 0.6 + 0.5 * len(rows))
    axes = figure.subplots()
    bars = axes.barh([row.drafter for row in rows], [row.tokens_per_second for row in rows])
    axes.bar_label(bars, [f"{row.speedup:.2f} times" for row in rows], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("tokens per second")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def whole_ticks(axis: Any) -> None:
    """Sets an axis to ticks at whole numbers only, as for K."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _colors(decisions: Sequence[BurstRecord]) -> dict[int, Any]:
    """Returns a colour for each K that was chosen, lighter the larger; as RGBA."""
    chosen = sorted({d.num_speculative_tokens for d in decisions})
    colormap = importlib.import_module("matplotlib").colormaps["viridis"]
    return dict(zip(chosen, colormap(np.linspace(0, 0.95, len(chosen)))))


def _draw_load(figure: Any, axes: Any, decisions: Sequence[BurstRecord]) -> None:
    rows, context, depth = _columns(
        decisions, "num_rows", "context_tokens", "num_speculative_tokens"
    )
    colors = _colors(decisions)
    module = importlib.import_module("matplotlib.colors")
    chosen = list(colors)
    # One band of colour for each K that was chosen: there is nothing between them.
    places = np.searchsorted(chosen, depth)
    drawn = axes.scatter(
        rows,
        context / np.maximum(rows, 1),
        c=places,
        cmap=module.ListedColormap(list(colors.values())),
        norm=module.BoundaryNorm(np.arange(len(chosen) + 1) - 0.5, len(chosen)),
        s=22,
        alpha=0.8,
    )
    bar = figure.colorbar(drawn, ax=axes, label="K", ticks=range(len(chosen)))
    bar.ax.set_yticklabels(list(map(str, chosen)))
    bar.ax.minorticks_off()
    axes.set(title="K by load", xlabel="rows that decode", ylabel="tokens of context per row")
    whole_ticks(axes.xaxis)


def _draw_measured(axes: Any, decisions: Sequence[BurstRecord]) -> None:
    known = [d for d in decisions if d.predicted_step_s]
    axes.set(
        title="tokens per second",
        xlabel="predicted",
        ylabel="measured",
    )
    if not known:
        axes.text(
            0.5,
            0.5,
            "no burst was predicted",
            ha="center",
            va="center",
            transform=axes.transAxes,
        )
        return
    predicted, tokens, step_s, measured_step_s = _columns(
        known,
        "predicted_tokens",
        "measured_tokens",
        "predicted_step_s",
        "measured_step_s",
    )
    predicted, measured = predicted / step_s, tokens / measured_step_s
    depths = np.array([d.num_speculative_tokens for d in known])
    colors = _colors(decisions)
    for depth in np.unique(depths).tolist():
        own = depths == depth
        axes.scatter(
            predicted[own],
            measured[own],
            s=16,
            alpha=0.7,
            color=colors[depth],
            label=f"K = {depth}",
        )
    most = 1.05 * max(*predicted, *measured)
    axes.plot([0, most], [0, most], color="gray", linewidth=0.8)
    axes.set(xlim=(0, most), ylim=(0, most))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _draw_timeline(axes: Any, decisions: Sequence[BurstRecord]) -> None:
    depth, rows = _columns(decisions, "num_speculative_tokens", "num_rows")
    # A step lasts until the next burst, the last one too.
    place, lasting = np.arange(len(decisions)), np.arange(len(decisions) + 1)
    until = lambda values: np.append(values, values[-1])
    axes.step(lasting, until(depth), where="post", color="tab:blue", label="K")
    axes.set_xlabel("burst")
    axes.set_ylabel("K", color="tab:blue")
    axes.set_title("K and rows, burst by burst")
    axes.set_ylim(bottom=-0.2)
    whole_ticks(axes.yaxis)
    whole_ticks(axes.xaxis)
    probes = [i for i, d in enumerate(decisions) if d.reason == "probe"]
    if probes:
        axes.plot(place[probes], depth[probes], "x", color="tab:red", label="probe")
    other = axes.twinx()
    other.step(lasting, until(rows), where="post", color="tab:gray", linewidth=0.9)
    other.set_ylabel("rows that decode", color="tab:gray")
    other.set_ylim(bottom=0)
    whole_ticks(other.yaxis)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _columns(decisions: Sequence[BurstRecord], *names: str) -> list[np.ndarray]:
    return [np.array([getattr(d, name) for d in decisions], float) for name in names]
