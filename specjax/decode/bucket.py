"""Buckets: the padded sizes that bursts are compiled for."""

from __future__ import annotations

from typing import NamedTuple


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


def standing_row_buckets(rows: int, num_shards: int = 1) -> list[int]:
    """Returns the default row buckets of a policy, ascending.

    They are the powers of two of rows per shard, times num_shards. The bucket of all `rows`
    exists besides.
    """
    per_shard = rows // num_shards
    return [num_shards << power for power in range(per_shard.bit_length())]
