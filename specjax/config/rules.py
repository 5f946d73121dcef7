"""The verification rules: by name for users, by number in the rows of a batch."""

from __future__ import annotations

import enum
from typing import Any, Literal, TypeAlias

# The names that users write; Rule has them as numbers.
VerificationRule: TypeAlias = Literal[
    "greedy",
    "seeded",
    "delta",
    "rejection",
    "block",
    "traversal",
    "lenient",
    "typical",
    "synthetic",
]


class Rule(enum.IntEnum):
    """How drafts are verified. A row carries the number; users write the name in lower case."""

    GREEDY = 0
    SEEDED = 1
    DELTA = 2
    REJECTION = 3
    BLOCK = 4
    TRAVERSAL = 5
    LENIENT = 6
    TYPICAL = 7
    SYNTHETIC = 8

    @property
    def label(self) -> str:
        """The name that users write."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Rule:
        """Returns the rule of a name that users write.

        Raises:
          ValueError: there is none.
        """
        if label not in VERIFICATION_RULES:
            raise ValueError(unknown_rule(label))
        return cls[label.upper()]


VERIFICATION_RULES = tuple(rule.label for rule in Rule)

# Rules that compare the distributions of draft and target ("rules by law"), so that drafts need
# noise of their own. They are a range because compiled steps test membership by comparing with
# its ends.
BY_LAW = range(Rule.REJECTION, Rule.LENIENT + 1)

# Rules under which the output is not the target's.
LOSSY_RULES = tuple(rule.label for rule in (Rule.LENIENT, Rule.TYPICAL, Rule.SYNTHETIC))


def unknown_rule(rule: Any) -> str:
    return f"verification={rule!r} is unknown; expected one of {', '.join(VERIFICATION_RULES)}."
