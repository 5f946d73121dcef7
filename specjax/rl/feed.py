"""A stream's feed of prompts, one at a time: it may have none now, be over, or fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Feed:
    """The prompts of an iterator.

    Attributes:
      has_none_now: whether it was asked and had no prompt, but may have one later.
      error: what it raised, which ends it; None if nothing.
    """

    def __init__(self, prompts: Iterator[Any]):
        self._prompts: Iterator[Any] | None = prompts
        self.has_none_now = False
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether no prompt comes any more."""
        return self._prompts is None

    def next(self) -> Any:
        """Returns the next prompt; None if there is none now, or none any more."""
        if self._prompts is None:
            return None
        try:
            prompt = next(self._prompts)
        except StopIteration:
            prompt = self.close()
        except Exception as error:  # raised later, once all that had begun was returned
            self.error = error
            prompt = self.close()
        else:
            self.has_none_now = prompt is None
        return prompt

    def close(self) -> None:
        """Ends it, and lets the iterator go."""
        self._prompts, self.has_none_now = None, False

    def raise_error(self) -> None:
        """Raises what it raised, once; does nothing if that is nothing."""
        error, self.error = self.error, None
        if error is not None:
            raise error
