"""What a run goes on without, once it failed: the drafter, a K, a row bucket, mixed steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

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

    Whoever plans a burst asks `depth` and `row_buckets` what is left.
    """

    drafter: str  # its name
    is_drafter_off: bool = False
    has_mixed: bool = True  # whether prompts may be fed beside rows that decode
    _least_dropped: int | None = None  # the smallest K that did not fit
    _dropped_buckets: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    def depth(self, wanted: int) -> int:
        """Returns the K to decode with: 0 where the wanted one was dropped."""
        is_large = self._least_dropped is not None and wanted >= self._least_dropped
        return 0 if self.is_drafter_off or is_large else wanted

    def row_buckets(self, depth: int, buckets: Sequence[int]) -> list[int]:
        """Returns the row buckets that are left for a K; a burst of all rows is no bucket."""
        return [rows for rows in buckets if (depth, rows) not in self._dropped_buckets]

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
            case ("burst", int(depth), int(rows)):
                self._dropped_buckets.add((depth, rows))
                what, instead = (
                    f"the bucket of {rows} rows at K = {depth}",
                    "larger ones",
                )
            case ("burst", int(depth)) if depth > 0:
                self._least_dropped = depth
                what, instead = f"K = {depth}", "K = 0 where it is chosen"
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
