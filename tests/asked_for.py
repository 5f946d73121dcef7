"""Which tests a run is asked for: the quick set, unless markers or files are named.

pytest                          the quick set: tests with none of the markers below
pytest -m full                  the rest of the gate
pytest -m "full or not full"    both
pytest -m slow                  what is marked slow, whether or not it is marked full
pytest tests/x/test_y.py        all of that file but what is marked slow, reference, ...
pytest -m full --share 1/4      a quarter of these: the second of them, the sixth, ...
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Iterable
from typing import Any

import pytest

ON_DEMAND = ("slow", "reference", "tunix", "notebook")


def is_asked_for(markers: set[str], expression: str, names_a_file: bool) -> bool:
    """Returns whether a run asks for a test.

    Args:
      markers: the names of the test's markers.
      expression: what -m was given, "" where nothing.
      names_a_file: whether the command line names files or tests rather than folders.
    """
    named = set(re.findall(r"\w+", expression))
    on_demand = markers.intersection(ON_DEMAND)
    if on_demand:
        return bool(on_demand & named)
    return "full" not in markers or "full" in named or names_a_file


def share_of(text: str) -> tuple[int, int]:
    """Returns (k, n) of "k/n": the k-th of n shares, the first being 0."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise ArgumentTypeError(f"--share is {text!r}; expected K/N with 0 <= K < N, as in 0/4.")
    return int(k), int(n)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="K/N",
        type=share_of,
        help="only the K-th of N shares of the tests: every N-th of them",
    )


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the tests that a run does not ask for; pytest itself applies -m besides."""
    expression = config.option.markexpr or ""
    names_a_file = any(".py" in argument for argument in config.args)
    kept, dropped = [], []
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        (kept if is_asked_for(markers, expression, names_a_file) else dropped).append(item)
    if config.option.share is not None:
        k, n = config.option.share
        dropped += [item for place, item in enumerate(kept) if place % n != k]
        kept = kept[k::n]
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def quick(cases: Iterable[Any], *chosen: Any, slow: Iterable[Any] = ()) -> list[Any]:
    """Returns the cases of a parametrised test, of which only the chosen are in the quick set.

    Args:
      slow: cases that run on demand alone. All others are in the gate.
    """
    cases, slow = list(cases), list(slow)
    unknown = [one for one in [*chosen, *slow] if one not in cases]
    if unknown:
        raise ValueError(f"{unknown} are not among the cases {cases}.")

    def marked(one: Any) -> Any:
        mark = pytest.mark.slow if one in slow else pytest.mark.full
        return one if one in chosen else pytest.param(one, marks=mark)

    return [marked(one) for one in cases]
