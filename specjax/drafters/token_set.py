"""A set of token ids that is part of a compiled step."""

from __future__ import annotations

import dataclasses
import hashlib

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.sampling.vocabulary import WHOLE, Vocabulary


@dataclasses.dataclass(frozen=True)
class TokenSet:
    """Some of the token ids 0 to size - 1; hashable, as a drafter's spec has to be.

    Attributes:
      bits: a bit per token, the first of a byte the highest, as `numpy.packbits` lays them.
    """

    size: int
    bits: bytes

    @classmethod
    def of(cls, flags: np.ndarray) -> TokenSet:
        """Returns the set of the tokens whose flag is set, bool[size]."""
        return cls(len(flags), np.packbits(flags).tobytes())

    @property
    def flags(self) -> np.ndarray:
        """Whether each token is in the set, bool[size]."""
        packed = np.frombuffer(self.bits, np.uint8)
        return np.unpackbits(packed, count=self.size).astype(bool)

    def __len__(self) -> int:
        return int(self.flags.sum())

    def __repr__(self) -> str:
        # A digest stands for the bits: the text is part of the key of kept executables.
        digest = hashlib.sha256(self.bits).hexdigest()[:16]
        return f"TokenSet({len(self)} of {self.size}, {digest})"

    def keep(self, scores: Array, vocabulary: Vocabulary = WHOLE) -> Array:
        """Returns logits with -inf for tokens that are not in the set.

        Args:
          scores: f32[n, width], all of the vocabulary or a device's slice of it.
        """
        flags, width = jnp.asarray(self.flags), scores.shape[1]
        if vocabulary.is_split:
            flags = lax.dynamic_slice_in_dim(flags, vocabulary.first_id(width), width)
        return jnp.where(flags, scores, -jnp.inf)
