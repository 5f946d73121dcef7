"""What a burst is compiled for."""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """Rows and draft tokens of a step: one executable each."""

    rows: int
    num_speculative_tokens: int  # K; 0 is plain decoding
    # Most draft tokens verified per step over all rows and data shards, those likeliest to
    # stand; None: as many as DecoderConfig.max_drafts_per_shard allows.
    max_drafts: int | None = None

    @property
    def num_slots(self) -> int:
        """Draft tokens that chains have room for, of all rows together."""
        most = self.rows * self.num_speculative_tokens
        return most if self.max_drafts is None else self.max_drafts


def standing_row_buckets(rows: int, num_shards: int = 1) -> list[int]:
    """Returns the row buckets that a policy chooses from where nobody names any, ascending.

    Powers of two of rows per shard, of all shards together; `rows` itself counts besides.
    """
    per_shard = rows // num_shards
    return [num_shards << power for power in range(per_shard.bit_length())]
