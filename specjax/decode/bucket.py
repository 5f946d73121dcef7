"""Buckets and keys: what steps are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from specjax.decode.sizes import PromptShape
from specjax.sampling import EVERYTHING, Uses

BURST, MIXED, PREFILL = "burst", "mixed", "prefill"  # kinds of steps that run the target
ADMIT, REMEMBER, SCORE = "admit", "remember", "score"


class Bucket(NamedTuple):
    """Numbers of rows and draft tokens of a step; each bucket has one executable."""

    rows: int
    num_speculative_tokens: int  # K; 0 is plain decoding
    # Most draft tokens verified per step over all rows and data shards, those likeliest to
    # be accepted; None: as many as DecoderConfig.max_drafts_per_shard allows.
    max_drafts: int | None = None

    @property
    def num_slots(self) -> int:
        """Most draft tokens of chains that a step verifies, over all rows."""
        most = self.rows * self.num_speculative_tokens
        return most if self.max_drafts is None else self.max_drafts


class StepKey(NamedTuple):
    """What a step is compiled for; a decoder has one executable for each.

    Attributes:
      bucket: of a burst, or of the rows that decode in a mixed step.
      prompts: those fed in a prefill or a mixed step, on each shard.
      count: places that ADMIT takes, pieces of text of REMEMBER, texts of SCORE.
      uses: what rows of a burst or a mixed step may ask of it.
    """

    kind: str
    bucket: Bucket | None = None
    prompts: PromptShape | None = None
    count: int = 0
    uses: Uses = EVERYTHING

    @property
    def is_plain_burst(self) -> bool:
        """Whether it is a burst of K = 0."""
        bucket = self.bucket
        return self.kind == BURST and bucket is not None and not bucket.num_speculative_tokens

    def __str__(self) -> str:
        fed = ""
        if self.prompts is not None:
            fed = f"{self.prompts.num_tokens} prompt tokens in {self.prompts.places} places"
        if self.bucket is None:
            return f"{self.kind} of {fed or self.count}"
        step = f"{self.bucket.rows} rows at K = {self.bucket.num_speculative_tokens}"
        if self.bucket.max_drafts is not None:
            step += f" and {self.bucket.max_drafts} drafts"
        return f"a step of {step} beside {fed}" if fed else f"a burst of {step}"


def standing_row_buckets(rows: int, num_shards: int = 1) -> list[int]:
    """Returns the default row buckets of a policy, ascending.

    They are the powers of two of rows per shard, times num_shards. The bucket of all `rows`
    exists besides.
    """
    per_shard = rows // num_shards
    return [num_shards << power for power in range(per_shard.bit_length())]
