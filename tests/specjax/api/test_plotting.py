"""Pictures of decisions: drawn, and said plainly where they cannot be."""

import sys

import pytest

from specjax.api import plots
from specjax.api.plots import draw_decisions, new_figure
from specjax.engine.metrics import BurstRecord

PNG = b"\x89PNG\r\n\x1a\n"


def record(place, **fields):
    known = {
        "num_speculative_tokens": place % 5,
        "reason": "probe" if place == 3 else "goodput",
        "num_rows": 8 - place // 3,
        "row_bucket": 8,
        "max_drafts": None,
        "num_steps": 32,
        "context_tokens": 100 * place,
        "predicted_step_s": 0.01,
        "measured_step_s": 0.011 + 0.0001 * place,
        "predicted_tokens": 9.0,
        "measured_tokens": 8.5,
    }
    return BurstRecord(**known | fields)


@pytest.mark.parametrize("fields", [{}, {"predicted_step_s": None, "predicted_tokens": None}])
def test_decisions_are_drawn(tmp_path, fields):
    path = tmp_path / "decisions.png"
    draw_decisions([record(place, **fields) for place in range(20)], path)
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 20_000


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn."""
    drawn = []

    def keep(*size):
        drawn.append(new_figure(*size))
        return drawn[-1]

    monkeypatch.setattr(plots, "new_figure", keep)
    return drawn


def test_a_tick_and_a_colour_for_each_k_that_was_chosen(figures, tmp_path):
    chosen = [0, 2, 7, 7]
    bursts = [record(i, num_speculative_tokens=k) for i, k in enumerate(chosen)]
    draw_decisions(bursts, tmp_path / "decisions.png")
    (bar,) = [axes for axes in figures[0].axes if axes.get_ylabel() == "K"][-1:]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "2", "7"]
    points = figures[0].axes[0].collections[0]
    assert points.cmap.N == 3


def test_k_is_drawn_in_steps_with_legends_beside_the_data(figures, tmp_path):
    draw_decisions([record(place) for place in range(20)], tmp_path / "decisions.png")
    (figure,) = figures
    lines = [line for axes in figure.axes for line in axes.lines]
    named = {line.get_label(): line.get_drawstyle() for line in lines}
    assert named["K"] == "steps-post"
    legends = [(axes, axes.get_legend()) for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 2
    for axes, legend in legends:
        assert not axes.get_window_extent().shrunk(0.98, 0.98).overlaps(legend.get_window_extent())


@pytest.mark.full
@pytest.mark.parametrize("depths", [[0], [3], [63, 0], [1] * 30])
def test_few_bursts_and_any_k(tmp_path, depths):
    bursts = [record(i, num_speculative_tokens=k) for i, k in enumerate(depths)]
    draw_decisions(bursts, tmp_path / "decisions.png")


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no burst was run"):
        draw_decisions([], "nowhere.png")


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotImplementedError, match="pip install matplotlib"):
        draw_decisions([record(0)], tmp_path / "nowhere.png")
