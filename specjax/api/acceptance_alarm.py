"""Says what is likely wrong where hardly a draft is accepted.

A head that is read wrongly, or that belongs to another target, changes no text: it is only never
accepted. An EAGLE head read as EAGLE-3, or captured layers off by one, look just like hard text.
"""

from __future__ import annotations

import warnings

import jax

from specjax.engine.request import AcceptanceCounts
from specjax.heads.loading import LoadedDrafter
from specjax.runtime.stack_level import of_the_caller

# Steps that drafted after which it is judged, and the largest share of them whose first draft token
# was accepted that is an alarm. Of a head with a share of 0.3, which is a poor one, 24 steps accept
# none once in 5,000 times.
LEAST_STEPS, MOST_SHARE = 24, 0.02


class AcceptanceAlarm:
    """Warns once where hardly a draft of a model or a head is accepted.

    Drafters without weights are not judged: what they find depends on the text alone.

    Attributes:
      is_over: whether it judges no more.
    """

    def __init__(self, drafter: LoadedDrafter, verification: str):
        self._drafter = drafter
        # Under "synthetic" draws decide, and not what the drafter says.
        self.is_over = verification == "synthetic" or not jax.tree.leaves(drafter.params)

    def look(self, counts: AcceptanceCounts) -> None:
        """Judges what was counted so far, over the steps of all requests."""
        if self.is_over or not counts.drafted_at or counts.drafted_at[0] < LEAST_STEPS:
            return
        num_steps, num_accepted = counts.drafted_at[0], counts.accepted_at[0]
        if num_accepted > MOST_SHARE * num_steps:
            return
        self.is_over = True
        warnings.warn(self._message(), stacklevel=of_the_caller())

    def _message(self) -> str:
        """The text without counts: Python shows equal warnings of one line once."""
        drafter = self._drafter
        faults = "; or ".join(drafter.spec.likely_faults)
        notes = f" As it was loaded it {'; '.join(drafter.notes)}." if drafter.notes else ""
        return (
            f"hardly a draft of {drafter.name!r} was accepted: in {MOST_SHARE:.0%} of the steps "
            f"that drafted, or fewer. Text is not affected, and nothing is gained. Likely {faults}."
            f"{notes}"
        )
