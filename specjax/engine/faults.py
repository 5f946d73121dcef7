"""Tracks what failed and is no longer used: the drafter, a K, a row bucket, mixed steps."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax

from specjax.decode.bucket import Bucket
from specjax.decode.executables import TooLarge
from specjax.decode.sizes import PromptShape
from specjax.drafters.guard import DrafterError
from specjax.runtime.stack_level import of_the_caller
from specjax.types import NOT_A_NUMBER, OUTSIDE_VOCABULARY

# Raised before a step is sent: the device's state is unchanged.
RECOVERABLE = (DrafterError, TooLarge)
_WHAT_IT_PROPOSED = {
    OUTSIDE_VOCABULARY: "it proposed token ids outside the vocabulary",
    NOT_A_NUMBER: "it proposed NaN, as weights that are NaN do",
}


class LostWeights(RuntimeError):
    """Weights of the target were deleted while requests needed them."""

    def __init__(self, names: list[str]):
        super().__init__(
            f"the target's {_were_deleted(names)}; keep the arrays while requests run, or go "
            "on with those that came out of that function."
        )


def lost_weights(params: Any, part: str) -> list[str]:
    """Returns the names of the deleted weights in a part of DecoderParams."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(getattr(params, part, None))
    return [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if isinstance(leaf, jax.Array) and leaf.is_deleted()
    ]


def _were_deleted(names: list[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"weights {names[0]}{others} were deleted, as donating them to another function does"


@dataclasses.dataclass
class Faults:
    """Parts that a run no longer uses, each dropped with one warning.

    Code that plans a burst asks `is_dropped` for each bucket.
    """

    drafter: str  # its name
    num_rows: int  # of the decoder
    is_drafter_off: bool = False
    has_mixed: bool = True  # whether prompts may be fed beside rows that decode
    _unsaid: str | None = None  # reason for the drafter's absence, not yet given in a warning
    # With the prompt tokens beside them; 0 for bursts.
    _dropped: set[tuple[Bucket, int]] = dataclasses.field(default_factory=set)

    def is_dropped(self, bucket: Bucket, beside: PromptShape | None = None) -> bool:
        """Returns whether a step, or one of the same rows with no more work, did not fit.

        Args:
          beside: the prompts in the same step.
        """
        if self.is_drafter_off and bucket.num_speculative_tokens:
            return True
        prompt_tokens = 0 if beside is None else beside.num_tokens
        return bool(self._dropped) and any(
            bucket.rows == dropped.rows
            and bucket.num_speculative_tokens >= dropped.num_speculative_tokens
            and bucket.num_slots >= dropped.num_slots
            and prompt_tokens >= tokens
            for dropped, tokens in self._dropped
        )

    def lose_drafter(self, names: list[str], *, is_missed: bool) -> None:
        """Turns the drafter off because its weights were deleted.

        Args:
          names: of the weights.
          is_missed: whether a request asks for drafts. If not, the warning waits for one.
        """
        if is_missed:
            self.turn_drafter_off(_were_deleted(names))
        elif not self.is_drafter_off:
            self.is_drafter_off, self._unsaid = True, _were_deleted(names)

    def miss_drafter(self) -> None:
        """Warns that the drafter is off, if not done yet, because a request asks for drafts."""
        if self._unsaid is not None:
            self._say_drafter_is_off(self._unsaid)

    def turn_drafter_off(self, reason: str) -> None:
        """Turns the drafter off; warns the first time."""
        if self.is_drafter_off:
            return
        self.is_drafter_off = True
        self._say_drafter_is_off(reason)

    def _say_drafter_is_off(self, reason: str) -> None:
        self._unsaid = None
        warnings.warn(
            f"drafter {self.drafter!r} is turned off for this run: {reason}. Decoding goes on "
            "without it; under seeded, greedy and delta the text is the same.",
            stacklevel=of_the_caller(),
        )

    def drop(self, error: TooLarge) -> None:
        """Drops an executable for the rest of the run, with a warning.

        Raises:
          TooLarge: no other executable can do its work.
        """
        bucket, prompts = error.key.bucket, error.key.prompts
        beside = "" if prompts is None else " beside prompts"
        if bucket is not None and (bucket.num_speculative_tokens or bucket.rows < self.num_rows):
            self._dropped.add((bucket, 0 if prompts is None else prompts.num_tokens))
            what, instead = str(error.key), f"other sizes, or K = 0{beside}"
        elif beside and bucket is not None and self.has_mixed:
            self.has_mixed = False
            what, instead = "steps with prompts beside", "steps of their own"
        else:
            raise error
        warnings.warn(
            f"{what} is dropped for this run, for lack of memory; it goes on with {instead}: "
            f"{error.why}. Lower "
            "max_rows, num_speculative_tokens or num_pages to have room.",
            stacklevel=of_the_caller(),
        )


def what_it_proposed(fault: int) -> str:
    """Returns the description of a drafter's fault, from the number that the device reports."""
    return _WHAT_IT_PROPOSED[fault]
