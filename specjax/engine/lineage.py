"""Which weights a sample comes from: those that drew each token, and those of its cache."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class CacheFill(NamedTuple):
    """The keys and values of a sample's tokens, computed at once.

    When it had `num_output_tokens`, those of all its tokens but the last were computed under the
    weights of `params_version`: its prompt is fed so, and all of its text after a preemption.
    """

    num_output_tokens: int
    params_version: int


@dataclasses.dataclass
class Lineage:
    """The versions of weights that one sample is a function of.

    The weights that draw output token j also compute the keys and values of the token before
    it, whatever is drafted. `fills` says what else was computed.
    """

    fills: list[CacheFill] = dataclasses.field(default_factory=list)
    # (first output token, version): it draws the tokens from there to the next entry's.
    _drawn: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def fill(self, num_output_tokens: int, version: int) -> None:
        """Notes that the sample is about to be fed, its prompt and that many output tokens.

        A fill is dropped if no token was drawn after it. One that computes again what the same
        weights had computed is not noted.
        """
        last = self.fills[-1] if self.fills else None
        if last is not None and last.params_version == version:
            return  # and so are all tokens drawn since: versions only increase
        if last is not None and last.num_output_tokens == num_output_tokens:
            self.fills.pop()
        self.fills.append(CacheFill(num_output_tokens, version))

    def draw(self, first: int, version: int) -> None:
        """Notes that weights drew output token `first` and those after it."""
        if not self._drawn or self._drawn[-1][1] != version:
            self._drawn.append((first, version))

    @property
    def oldest(self) -> int | None:
        """The version that drew the first token of this run; None if there is none yet."""
        return self._drawn[0][1] if self._drawn else None

    def versions(self, first: int, end: int) -> list[int]:
        """Returns the version that drew each output token from `first` to before `end`.

        -1 for a token of another run.
        """
        versions = [-1] * (end - first)
        for start, version in self._drawn:
            start = max(start, first)
            versions[start - first :] = [version] * (end - start)
        return versions
