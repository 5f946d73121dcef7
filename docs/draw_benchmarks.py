"""Draws a plot for pages of benchmarks, of a table there: `python docs/draw_benchmarks.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from drawing import SERIES, Pen, legend, table, write

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LEFT, WIDTH, BAR = 330, 440, 13


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bars of a table: a line of the table is a group, a column is a series."""

    title: str
    header: str  # how the table's first line begins
    columns: dict[
        str, int | tuple[int, int]
    ]  # name of a series -> column, or column and number in it
    label: Callable[[list[str]], str] = lambda cells: cells[0]
    keep: Callable[[list[str]], bool] = lambda cells: True
    unit: str = ""
    least: float = 0.0  # where bars begin
    mark: float | None = None  # a value to compare with

    def __call__(self, page: str) -> Callable[[Pen], str]:
        """Returns the function that draws the plot of a page."""
        return lambda pen: self._drawn(pen, [c for c in table(page, self.header) if self.keep(c)])

    def _drawn(self, pen: Pen, lines: list[list[str]]) -> str:
        values = [[self._value(line, column) for column in self.columns.values()] for line in lines]
        most = max(value for group in values for value in group if value is not None)
        step = step_of(most - self.least)
        top = self.least + step * math.ceil((most - self.least) / step)
        group = BAR * len(self.columns) + 10
        y0 = 84 if len(self.columns) > 1 else 60
        height = group * len(lines)
        at = lambda value: LEFT + WIDTH * (value - self.least) / (top - self.least)
        pen.text(24, 34, self.title, bold=True, size=16)
        if len(self.columns) > 1:
            legend(pen, 24, 60, list(self.columns))
        for tick in range(round((top - self.least) / step) + 1):
            value = self.least + tick * step
            pen.line([(at(value), y0), (at(value), y0 + height)], "rule", width=1)
            number = f"{value:g}{self.unit}"
            pen.text(at(value), y0 + height + 18, number, anchor="middle", size=12, colour="faint")
        for index, (line, group_values) in enumerate(zip(lines, values, strict=True)):
            y = y0 + index * group + 4
            pen.text(LEFT - 10, y + (group - 10) / 2 + 5, self.label(line), anchor="end", size=13)
            for place, value in enumerate(group_values):
                if value is not None:
                    length = at(value) - LEFT
                    pen.box(LEFT, y + place * BAR, length, BAR - 2, SERIES[place], radius=2)
        if self.mark is not None:
            pen.line([(at(self.mark), y0), (at(self.mark), y0 + height)], "ink", dashed=True)
        return pen.svg(LEFT + WIDTH + 40, y0 + height + 34, self.title)

    def _value(self, cells: list[str], column: int | tuple[int, int]) -> float | None:
        place, number = column if isinstance(column, tuple) else (column, 0)
        numbers = NUMBER.findall(cells[place])
        return float(numbers[number].replace(",", "")) if len(numbers) > number else None


def step_of(most: float) -> float:
    """Returns a round number, of which four to eight reach `most`."""
    rough = most / 5
    power = 10 ** math.floor(math.log10(rough))
    return power * next(each for each in (1, 2, 2.5, 5, 10) if each * power >= rough)


PLOTS = {
    "calls": Bars(
        "times plain decoding, embedded pair, default policy",
        "| drafter | batch | temperature",
        {"calls 2 to 6": 3, "from the 7th on": 5},
        label=lambda c: f"{c[0].strip(' *')}, batch {c[1]}, temperature {c[2]}",
        mark=1,
    ),
    "self-drafting": Bars(
        "share of drafts accepted, K = 4",
        "| drafter | bytes | accepted",
        {"temperature 0": 2, "temperature 1": 4},
        unit=" %",
    ),
    "edited-text": Bars(
        "times plain decoding, a text written again with edits",
        "| drafter | K | mean",
        {"times plain": 3},
        label=lambda c: f"{c[0]}, {c[1] if c[1] == 'goodput' else 'K = ' + c[1]}",
        mark=1,
    ),
    "drafters": Bars(
        "times plain decoding by K, temperature 0, batch 1",
        "| drafter | times plain",
        {f"K = {k}": column for column, k in ((1, 1), (3, 3), (5, 6))},
        mark=1,
    ),
    "trees": Bars(
        "tokens per step of the target",
        "| draft | nodes",
        {"temperature 0": 2, "temperature 0.8": 6},
        keep=lambda c: not re.search("K = [1357]|children per depth [34]|[24] matches", c[0]),
        mark=1,
    ),
    "rollouts": Bars(
        "times plain decoding, five checkpoints together",
        "| | together",
        {"times plain": 1},
        mark=1,
    ),
    "tunix": Bars("tokens per second", "| | tokens/s", {"tokens per second": 1}),
    "planning": Bars(
        "memory of a step by its compiler, by what a plan takes, MB",
        "| step | CPU",
        {"H100's compiler": 3, "stand-in": 2},
        label=lambda c: c[0].replace("beside a draft model of one layer", "with a draft model"),
    ),
    "seeded-noise": Bars(
        "what sampling costs beyond greedy, in % of a step",
        "| vocabulary | logits | sampling | ms | ms more",
        {"1 row": 5, "8 rows": 6},
        label=lambda c: f"{c[2]}, vocabulary {c[0]}",
        keep=lambda c: c[1] == "peaked" and bool(c[5]),
        unit=" %",
    ),
    "kernels": Bars(
        "attention: the bound of its arithmetic, in % of the memory's bandwidth",
        "| device, chips | nodes",
        {"whole tiles": (5, 0), "rows of 2,048": (5, 1)},
        keep=lambda c: c[1] != "5, 8",
        label=lambda c: f"{c[0]} chip{'s' * (c[0][-1] != '1')}, nodes: {c[1]}",
        unit=" %",
        mark=100,
    ),
    "roofline": Bars(
        "times the bytes that a step must move: 32 rows, four chips of v5e",
        "| step | ratio",
        {"2,048 tokens of context": 1, "8,192": 2},
        keep=lambda c: "32 rows, v5e x4" in c[0],
        label=lambda c: c[0].replace(", 32 rows, v5e x4", ""),
        least=1,
    ),
    "h100": Bars(
        "milliseconds of a step, by what runs in CUDA graphs",
        "| rows | commands",
        {"K = 0": 2, "K = 4": 3},
        label=lambda c: f"{c[0]} row{'s' * (c[0] != '1')}: {c[1]}",
    ),
    "h200": Bars(
        "times plain decoding, embedded pair, temperature 0.8",
        "| batch | plain",
        {"K = 2": 2, "K = 4": 3, "goodput chooses": 4},
        label=lambda c: f"batch {c[0]}",
        mark=1,
    ),
}
DRAWN = {f"benchmarks/{page}": plot(page) for page, plot in PLOTS.items()}

if __name__ == "__main__":
    write(DRAWN)
