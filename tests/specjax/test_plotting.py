"""Pictures of decisions: drawn, and said plainly where they cannot be."""

import sys

import pytest

from specjax.engine.metrics import BurstRecord
from specjax.plotting import draw_decisions

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


@pytest.mark.parametrize(
    "fields", [{}, {"predicted_step_s": None, "predicted_tokens": None}]
)
def test_decisions_are_drawn(tmp_path, fields):
    path = tmp_path / "decisions.png"
    draw_decisions([record(place, **fields) for place in range(20)], path)
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 20_000


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no burst was run"):
        draw_decisions([], "nowhere.png")


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotImplementedError, match=r"specjax\[plot\]"):
        draw_decisions([record(0)], tmp_path / "nowhere.png")
