"""The picture of the house and the folder map are those of today's sources."""

from __future__ import annotations

import re

import draw_house
import drawing
from pages import DOCS, ROOT

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_of_these_imports():
    """Where it fails: python docs/draw_house.py."""
    for path, text in drawing.pictures({"house": draw_house.draw}).items():
        assert path.read_text(encoding="utf-8") == text, path


def test_arrows_go_down_and_none_follows_from_others():
    place = {room: i for i, row in enumerate(draw_house.layers()) for room in row}
    arrows = draw_house.imports(place)
    assert arrows
    assert all(place[room] < place[other] for room, other in arrows)
    assert draw_house.shown({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}


def test_the_map_names_every_room_and_only_files_that_are_there():
    named = set(
        re.findall(
            r"`((?:specjax|pallas_kernels|configs|benchmarks|examples|tools)/[\w/.]*)`", PAGE
        )
    )
    for room in (ROOT / "specjax").iterdir():
        if (room / "__init__.py").exists():
            assert f"specjax/{room.name}/" in named | {"specjax/configs/"}, room.name
    for path in named:
        assert (ROOT / path).exists(), path
