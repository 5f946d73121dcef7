"""What a run goes on without, once it failed: the drafter, a K, a row bucket, mixed steps."""

from __future__ import annotations

import dataclasses
import warnings

from specjax.bucket import Bucket
from specjax.decode.decoder import TooLarge
from specjax.drafters.base import DrafterError
from specjax.types import NOT_A_NUMBER, OUTSIDE_VOCABULARY

# Of a step that was not sent: the device's state is as it was before.
RECOVERABLE = (DrafterError, TooLarge)
_WHAT_IT_PROPOSED = {
    OUTSIDE_VOCABULARY: "it proposed token ids outside the vocabulary",
    NOT_A_NUMBER: "it proposed NaN, as weights that are NaN do",
}


@dataclasses.dataclass
class Faults:
    """What was dropped, each with one warning.

    Whoever plans a burst asks `is_dropped` what is left.
    """

    drafter: str  # its name
    num_rows: int  # of the decoder
    is_drafter_off: bool = False
    has_mixed: bool = True  # whether prompts may be fed beside rows that decode
    _dropped: set[Bucket] = dataclasses.field(default_factory=set)

    def is_dropped(self, bucket: Bucket) -> bool:
        """Returns whether a bucket did not fit, or one of as many rows that does no more."""
        if self.is_drafter_off and bucket.num_speculative_tokens:
            return True
        return any(
            bucket.rows == dropped.rows
            and bucket.num_speculative_tokens >= dropped.num_speculative_tokens
            and bucket.num_slots >= dropped.num_slots
            for dropped in self._dropped
        )

    def turn_drafter_off(self, reason: str) -> None:
        """Drafts nothing from now on; says so the first time."""
        if self.is_drafter_off:
            return
        self.is_drafter_off = True
        warnings.warn(
            f"drafter {self.drafter!r} is turned off for this run: {reason}. Decoding goes on "
            "without it, and the text is the same.",
            stacklevel=2,
        )

    def drop(self, error: TooLarge) -> None:
        """Does without an executable from now on.

        Raises:
          TooLarge: nothing else could do its work.
        """
        match error.key:
            case ("burst", int(depth), *more) if depth or more:
                rows = more[0] if more else self.num_rows
                most = more[1] if len(more) > 1 else None
                self._dropped.add(Bucket(rows, depth, most))
                what = f"a burst of {rows} rows at K = {depth}"
                instead = "other sizes, or K = 0"
            case ("mixed", *_) if self.has_mixed:
                self.has_mixed = False
                what, instead = "steps with prompts beside", "steps of their own"
            case _:
                raise error
        warnings.warn(
            f"{what} is dropped for this run; it goes on with {instead}: {error}. Lower "
            "max_rows, num_speculative_tokens or num_pages to have room.",
            stacklevel=2,
        )


def what_it_proposed(fault: int) -> str:
    """Returns what a drafter did, from the number that the device reports."""
    return _WHAT_IT_PROPOSED[fault]
