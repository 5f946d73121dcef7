"""The verification rules by name."""

from __future__ import annotations

from typing import Any

VERIFICATION_RULES = (
    "greedy",
    "seeded",
    "delta",
    "rejection",
    "block",
    "traversal",
    "lenient",
    "typical",
    "synthetic",
)

# Output under these is not the target's.
LOSSY_RULES = ("lenient", "typical", "synthetic")


def unknown_rule(rule: Any) -> str:
    return f"verification={rule!r} is unknown; expected one of {', '.join(VERIFICATION_RULES)}."
