"""Draws the rooms of specjax and who imports whom, with a dark twin: `python docs/draw_house.py`.

The rows are the layers of [tool.importlinter] in pyproject.toml, which the linter holds. The
arrows are the imports that stand in the sources; one that follows from others is left out.
"""

from __future__ import annotations

import ast
import html
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from drawing import Pen, write

ROOT = Path(__file__).resolve().parents[1]
# specjax/configs is a link, which `rglob` does not follow.
PACKAGES = ("specjax", "specjax/configs", "pallas_kernels", "benchmarks", "tools")

# Colours of a room's band, from what users call down to what touches the device.
GROUPS = {
    "not installed": ("#8d6e63", {"benchmarks", "tools"}),
    "what you call": (
        "#5c6bc0",
        {"__main__", "cli", "integrations", "testing", "api", "rl", "training"},
    ),
    "on the host": ("#00897b", {"engine", "policy", "planning"}),
    "on the device": ("#ef6c00", {"decode", "heads", "drafters", "paged", "sampling", "trees"}),
    "models and text": ("#8e24aa", {"models", "checkpoints", "text", "demo"}),
    "settings and helpers": ("#546e7a", {"configs", "config", "runtime", "types"}),
    "kernels": ("#c62828", {"pallas_kernels"}),
}
WIDTH, MARGIN, BOX_HEIGHT, ROW, GAP = 800, 20, 32, 68, 18


def layers() -> list[list[str]]:
    """Returns the rooms of each layer of the contract, the highest first, as full module names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    rows = next(each for each in contracts if each["type"] == "layers")["layers"]
    return [[room.strip(" ()") for room in row.replace(":", "|").split("|")] for row in rows]


def imports(rooms: Iterable[str]) -> set[tuple[str, str]]:
    """Returns the pairs of rooms of which the first imports the second."""
    rooms = sorted(rooms, key=len, reverse=True)
    found = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            room = _room(module, rooms)
            for name in _imported(path, module):
                other = _room(name, rooms)
                if room and other and room != other:
                    found.add((room, other))
    return found


def _room(module: str, rooms: Iterable[str]) -> str | None:
    """Returns the room that a module is in."""
    return next((room for room in rooms if f"{module}.".startswith(f"{room}.")), None)


def _imported(path: Path, module: str) -> Iterator[str]:
    """Yields the modules and names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def shown(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns the arrows that do not follow from a way over others."""
    after: dict[str, set[str]] = {}
    for room, other in arrows:
        after.setdefault(room, set()).add(other)

    def reached(room: str) -> set[str]:
        seen: set[str] = set()
        left = [room]
        while left:
            for other in after.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    return {
        (room, other)
        for room, other in arrows
        if not any(other in reached(third) for third in after[room] - {other})
    }


def draw(pen: Pen) -> str:
    """Returns the picture, in the colours of a pen."""
    colours = pen.colours
    rows = layers()
    boxes = {}
    for index, row in enumerate(rows):
        # Uneven rows lean aside, so that arrows past a room do not run behind it.
        # Widths are integers: Python 3.12 adds floats up otherwise than 3.11.
        widths = [max(round(8.2 * len(_label(room))) + 26, 74) for room in row]
        total = sum(widths) + GAP * (len(row) - 1)
        lean = (index % 3 - 1) * 110 if total < WIDTH / 2 else 0
        x = (WIDTH - total) // 2 + lean
        for room, width in zip(row, widths, strict=True):
            boxes[room] = (x, MARGIN + index * ROW, width)
            x += width + GAP
    arrows = shown({pair for pair in imports(boxes) if set(pair) <= set(boxes)})
    parts = [_arrow(boxes[room], boxes[other], colours["faint"]) for room, other in sorted(arrows)]
    parts += [_box(room, *place) for room, place in boxes.items()]
    below = MARGIN + len(rows) * ROW
    parts += _legend(below, colours["ink"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {below + 46}" '
        'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" font-size="14">'
        "<title>The rooms of specjax; an arrow means imports</title>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colours["faint"]}"/></marker></defs>'
        f'<rect width="100%" height="100%" rx="8" fill="{colours["paper"]}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _label(room: str) -> str:
    return room.removeprefix("specjax.")


def _colour(room: str) -> str:
    top = _label(room).partition(".")[0]
    found = (colour for colour, rooms in GROUPS.values() if top in rooms)
    return next(found, "#546e7a")


def _box(room: str, x: int, y: int, width: int) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6" '
        f'fill="{_colour(room)}"/><text x="{x + width / 2:.0f}" y="{y + 22:.0f}" fill="#fff" '
        f'text-anchor="middle">{html.escape(_label(room))}</text>'
    )


def _arrow(start: tuple[int, int, int], end: tuple[int, int, int], colour: str) -> str:
    x0, y0 = start[0] + start[2] / 2, start[1] + BOX_HEIGHT
    x1, y1 = end[0] + end[2] / 2, end[1] - 2
    bend = min((y1 - y0) / 2, 60)
    return (
        f'<path d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} '
        f'{x1:.0f} {y1:.0f}" fill="none" stroke="{colour}" stroke-width="1.4" '
        'marker-end="url(#tip)"/>'
    )


def _legend(y: float, ink: str) -> list[str]:
    parts, x = [], float(MARGIN)
    for text, (colour, _) in GROUPS.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="14" height="14" rx="3" fill="{colour}"/>'
            f'<text x="{x + 20:.0f}" y="{y + 12:.0f}" fill="{ink}" font-size="13">{text}</text>'
        )
        x += 46 + 6.6 * len(text)
    return parts


if __name__ == "__main__":
    write({"house": draw})
