"""Pens for the pictures of the guides and of the benchmarks: each picture has a dark twin."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent
COLOURS = {
    "light": {
        "paper": "#fafafa",
        "ink": "#263238",
        "faint": "#78909c",
        "rule": "#cfd8dc",
        "room": "#eceff1",
        "on": "#ffffff",
        "blue": "#3f51b5",
        "green": "#2e7d32",
        "orange": "#d84315",
        "purple": "#8e24aa",
        "teal": "#00838f",
        "grey": "#78909c",
    },
    "dark": {
        "paper": "#1e2129",
        "ink": "#e3e7ee",
        "faint": "#98a2b3",
        "rule": "#3b4252",
        "room": "#2a2f3a",
        "on": "#14161b",
        "blue": "#8c9eff",
        "green": "#81c784",
        "orange": "#ff8a65",
        "purple": "#ce93d8",
        "teal": "#4dd0e1",
        "grey": "#90a4ae",
    },
}
SERIES = ("blue", "orange", "green", "purple", "teal", "grey")


class Pen:
    """Draws into one picture, by the colours of one theme."""

    def __init__(self, theme: str):
        self.colours = COLOURS[theme]
        self._parts: list[str] = []

    def text(self, x, y, text, *, anchor="start", size=14, colour="ink", bold=False, mono=False):
        style = ' font-weight="600"' if bold else ""
        style += ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{self.colours[colour]}" font-size="{size}" '
            f'text-anchor="{anchor}"{style} xml:space="preserve">{html.escape(text)}</text>'
        )

    def box(self, x, y, width, height, fill="room", *, edge=None, radius=6, opacity=1.0):
        edge = f' stroke="{self.colours[edge]}" stroke-width="1.5"' if edge else ""
        fill = self.colours[fill] if fill else "none"
        faint = f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'fill="{fill}"{faint}{edge}/>'
        )

    def line(self, points, colour="faint", *, width=1.5, tip=False, dashed=False):
        path = "M" + "L".join(f"{x:.5g} {y:.5g}" for x, y in points)
        style = ' marker-end="url(#tip)"' if tip else ""
        style += ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{self.colours[colour]}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"{style}/>'
        )

    def dot(self, x, y, radius, fill):
        self._parts.append(
            f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" fill="{self.colours[fill]}"/>'
        )

    def svg(self, width, height, title):
        """Returns the picture."""
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{self.colours["faint"]}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">'
            f"<title>{html.escape(title)}</title>{tip}"
            f'<rect width="100%" height="100%" rx="8" fill="{self.colours["paper"]}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


Draw = Callable[[Pen], str]


def pictures(drawn: dict[str, Draw]) -> dict[Path, str]:
    """Returns the files of pictures, by path: of each name one, and its dark twin."""
    return {
        DOCS / f"{name}{suffix}.svg": draw(Pen(theme))
        for name, draw in drawn.items()
        for theme, suffix in (("light", ""), ("dark", "-dark"))
    }


def write(drawn: dict[str, Draw]) -> None:
    """Writes pictures, and prints how a page shows each, on the site and on GitHub alike."""
    for path, text in pictures(drawn).items():
        path.write_text(text, encoding="utf-8")
        mode = "dark" if path.stem.endswith("-dark") else "light"
        print(f"![...]({path.relative_to(DOCS).as_posix()}#gh-{mode}-mode-only)")


def axes(pen, left, top, width, height, *, most, ticks: Sequence[float], unit="", least=0.0):
    """Draws horizontal rules with numbers; returns the function from a value to its y."""
    at = lambda value: top + height * (1 - (value - least) / (most - least))
    for tick in ticks:
        pen.line([(left, at(tick)), (left + width, at(tick))], "rule", width=1)
        pen.text(left - 8, at(tick) + 4, f"{tick:g}{unit}", anchor="end", size=12, colour="faint")
    return at


def legend(pen, x, y, names: Sequence[str]):
    """Draws a row of names in the colours of their series."""
    for name, colour in zip(names, SERIES, strict=False):
        pen.box(x, y - 10, 12, 12, colour, radius=3)
        pen.text(x + 18, y, name, size=13)
        x += 40 + 7.2 * len(name)


def table(page: str, header: str, which: int = 0) -> list[list[str]]:
    """Returns the cells of a table of a page of benchmarks, without its first line.

    Args:
      header: how the first line begins; of several such tables the one of number `which`.
    """
    lines = (DOCS / f"benchmarks/{page}.md").read_text(encoding="utf-8").splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith(header)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[heads[which] + 2 :])
    return [[cell.strip().replace("*", "") for cell in row.strip("|").split("|")] for row in rows]
