"""A task that is learnt in a minute: running sums of digits, written down step by step.

    prompt       a3b1c4d2=
    answer       a33b14c43d20.

Letter, digit, and the sum so far, of which only the last digit to base 5 is written. Every symbol
is a token. Demonstrations slip now and then, and go on from what they wrote; a
model that is trained on them slips as often: what is left for reinforcement to mend. Long
prompts have long answers, so that a batch ends in a tail of few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PAD, BEGIN, END = 0, 1, 2
BASE = 5
MOST_DIGITS = 15
LETTERS = "abcdefghijklmnopqrstuvwxyz"[:MOST_DIGITS]
ALL_SYMBOLS = "0123456789=." + LETTERS
SYMBOLS = {symbol: number for number, symbol in enumerate(ALL_SYMBOLS, start=3)}
NAMES = {number: symbol for symbol, number in SYMBOLS.items()}
VOCAB_SIZE = 40


@dataclasses.dataclass(frozen=True)
class Problem:
    """Digits to be summed, each under a letter."""

    digits: tuple[int, ...]

    @property
    def prompt_ids(self) -> list[int]:
        return [BEGIN, *encode(_lettered(self.digits) + "=")]

    @property
    def sums(self) -> list[int]:
        """The last digit of each partial sum, to base BASE."""
        return [int(total) % BASE for total in np.cumsum(self.digits)]

    @property
    def answer(self) -> str:
        """The right one."""
        return self._answer(self.sums)

    def demonstration(self, rng: np.random.Generator, slips: float) -> list[int]:
        """Returns an answer in which each digit is off by one with probability `slips`."""
        total, written = 0, []
        for digit in self.digits:
            total += digit
            if rng.random() < slips:
                total += int(rng.choice([-1, 1]))
            written.append(total % BASE)
        return [*encode(self._answer(written)), END]

    def _answer(self, sums: Sequence[int]) -> str:
        steps = zip(LETTERS, self.digits, sums, strict=False)
        return "".join(f"{letter}{digit}{total}" for letter, digit, total in steps) + "."


def _lettered(digits: Sequence[int]) -> str:
    return "".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits))


def encode(text: str) -> list[int]:
    """Returns the token ids of digits and signs."""
    return [SYMBOLS[symbol] for symbol in text]


def decode(token_ids: Sequence[int]) -> str:
    """Returns the text; what is no digit or sign is left out."""
    return "".join(NAMES.get(int(token), "") for token in token_ids)


def draw(rng: np.random.Generator, count: int) -> list[Problem]:
    """Returns random problems of 3 to MOST_DIGITS digits, few of them long."""
    sizes = (2 + rng.geometric(0.15, size=count)).clip(max=MOST_DIGITS)
    return [Problem(tuple(rng.integers(0, BASE, size).tolist())) for size in sizes]


def reward(problem: Problem, completion_ids: Sequence[int]) -> float:
    """Returns how far the answer is right, as a share of the right one; 0 to 1."""
    written, right = decode(completion_ids), problem.answer
    agrees = [a == b for a, b in zip(written, right)]
    return [*agrees, False].index(False) / len(right)
