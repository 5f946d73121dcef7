"""Rewrites a draft model of another vocabulary in the target's.

The rows of its embedding and of its head are put in the order of the target's token ids. So the
rest of the program sees a draft model of the target's vocabulary: it is fed the target's tokens,
one position each, and its logits are over the target's tokens.

- A token that both vocabularies have gets the draft model's own row.
- Any other token of the target is never drafted. Where the target chose one, the draft model is
  fed the mean embedding of the tokens of its own that spell the same bytes (Gee et al. 2022, Fast
  Vocabulary Transfer, section 3).

Drafts are from the intersection of the vocabularies (Timor et al. 2025, Accelerating LLM Inference
with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies, section 3.3), drawn
from a distribution over them that verification is told, so that every rule stays exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax.drafters.token_set import TokenSet
from specjax.models.base import Model
from specjax.models.families import family_of
from specjax.text.token_bytes import Meaning, meanings
from specjax.text.tokenization import Tokenizer

SPELT_AT_ONCE = 8192  # rows of which the mean is taken at once: the sums are float32
UNKNOWN = -1


class Recoding(NamedTuple):
    """A draft model's tokens by those of a target.

    Attributes:
      own: i32[target's vocabulary], the draft model's token of each, or UNKNOWN.
      said: those of the target's tokens that may be drafted. No two have one token of the draft
        model.
      spelt: the draft model's tokens that spell each other token of the target, by its id.
    """

    own: np.ndarray
    said: TokenSet
    spelt: Mapping[int, tuple[int, ...]]

    def note(self) -> str:
        """Returns what a user should know of it."""
        return (
            f"drafts {len(self.said):,} of the target's {self.said.size:,} tokens: those that are "
            "in its own vocabulary too"
        )


def recoding(target: Model, draft: Model) -> Recoding | None:
    """Returns what makes a draft model one of the target's vocabulary; None if it is one.

    Raises:
      ValueError: the sizes differ and one of the two has no tokenizer, or no token is in both.
    """
    sizes = target.config.vocab_size, draft.config.vocab_size
    names = f"target {target.name!r} and draft {draft.name!r}"
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if sizes[0] == sizes[1]:
            return None
        raise ValueError(
            f"{names} have vocabularies of {sizes[0]} and {sizes[1]} tokens, and "
            f"{'the target' if ours is None else 'the draft'} has no tokenizer that says which are "
            "the same. Load both from folders with tokenizer.json, or choose a draft of the "
            "target's vocabulary."
        )
    if _are_equal(ours, theirs):
        return None if sizes[0] == sizes[1] else _of_padding(*sizes)
    found = _of_tokenizers(ours, theirs, *sizes)
    if not len(found.said):
        raise ValueError(
            f"no token of the target {target.name!r} is one of the draft {draft.name!r}; choose a "
            "draft whose tokenizer.json writes text as the target's does."
        )
    return found


@functools.lru_cache(maxsize=4)  # a draft model may be given to every call
def _are_equal(ours: Tokenizer, theirs: Tokenizer) -> bool:
    return ours is theirs or ours.vocabulary() == theirs.vocabulary()


def _of_padding(target_size: int, draft_size: int) -> Recoding:
    """Returns the recoding of equal tokenizers: the smaller model has fewer rows for no token."""
    ids = np.arange(target_size, dtype=np.int32)
    is_said = ids < draft_size
    return Recoding(np.where(is_said, ids, np.int32(UNKNOWN)), TokenSet.of(is_said), {})


@functools.lru_cache(maxsize=4)
def _of_tokenizers(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
) -> Recoding:
    theirs = {i: m for i, m in meanings(draft).items() if i < draft_size}
    # Of several tokens of one meaning the one that the file spells shortest counts: "A", not the
    # byte "<0x41>".
    spellings = {i: token for token, i in draft.vocabulary().items()}
    by_meaning: dict[Meaning, int] = {}
    for token_id in sorted(theirs, key=lambda i: (len(spellings[i]), i)):
        by_meaning.setdefault(theirs[token_id], token_id)
    ours = {i: m for i, m in meanings(target).items() if i < target_size}
    own = np.full(target_size, UNKNOWN, np.int32)
    for token_id, meaning in ours.items():
        own[token_id] = by_meaning.get(meaning, UNKNOWN)
    for named in ("bos_token_id", "eos_token_id"):
        ends, theirs_ends = getattr(target, named), getattr(draft, named)
        is_free = ends is not None and ends < target_size and own[ends] == UNKNOWN
        if is_free and theirs_ends is not None and theirs_ends < draft_size:
            own[ends] = theirs_ends
    is_said = _first_of_each(own, target)
    texts = {meaning.text: i for meaning, i in by_meaning.items() if not meaning.is_special}
    longest = max(map(len, texts), default=0)
    spelt = {
        i: _pieces(ours[i].text, texts, longest)
        for i in np.flatnonzero(own == UNKNOWN).tolist()
        if i in ours
    }
    return Recoding(own, TokenSet.of(is_said), spelt)


def _first_of_each(own: np.ndarray, target: Tokenizer) -> np.ndarray:
    """Returns the target's tokens that may be drafted: one for each of the draft model's.

    Of several it is the one with the shortest spelling.
    """
    is_said = np.zeros(len(own), bool)
    taken = set()
    spellings = {i: token for token, i in target.vocabulary().items()}
    known = np.flatnonzero(own != UNKNOWN).tolist()
    for token_id in sorted(known, key=lambda i: (len(spellings[i]), i)):
        if own[token_id] not in taken:
            taken.add(own[token_id])
            is_said[token_id] = True
    return is_said


def _pieces(text: bytes, texts: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """Returns the tokens that spell a text, each the longest that fits; unknown bytes are left
    out."""
    found, at = [], 0
    while at < len(text):
        for end in range(min(len(text), at + longest), at, -1):
            if (token_id := texts.get(text[at:end])) is not None:
                found.append(token_id)
                at = end
                break
        else:
            at += 1
    return tuple(found)


def recoded(draft: Model, by: Recoding) -> Model:
    """Returns a draft model with its weights in the order of the target's tokens.

    Leaves without a row per token are the draft model's own, not copies.
    """
    config = dataclasses.replace(draft.config, vocab_size=by.said.size)
    axes = family_of(draft.config).axes(draft.config)
    return dataclasses.replace(
        draft, config=config, params=_map_rows(by, draft.params, axes), tokenizer=None
    )


def _map_rows(by: Recoding, params: Any, axes: Any) -> Any:
    """Returns weights, those with a row per token with rows by the target's tokens."""
    if isinstance(params, Mapping):
        return {name: _map_rows(by, leaf, axes[name]) for name, leaf in params.items()}
    if isinstance(params, list | tuple):
        return type(params)(_map_rows(by, *each) for each in zip(params, axes, strict=True))
    if "vocab" not in axes:
        return params
    assert axes[0] == "vocab", "a row per token"
    return _rows(by, params)


def _rows(by: Recoding, table: Array) -> Array:
    """Returns [target's vocabulary, ...] from rows by the draft model's tokens.

    They lie on the devices on which the table lies, split as it is where that is even.
    """
    rows = table[np.maximum(by.own, 0)]
    others = np.flatnonzero(by.own == UNKNOWN)
    for start in range(0, len(others), SPELT_AT_ONCE):
        some = others[start : start + SPELT_AT_ONCE]
        pieces = [by.spelt.get(token_id, ()) for token_id in some.tolist()]
        counts = np.array([len(each) for each in pieces])
        of_row = np.repeat(np.arange(len(some)), counts)
        flat = np.array(list(itertools.chain.from_iterable(pieces)), np.int32)
        rows = _with_means(rows, table, some, flat, of_row, np.maximum(counts, 1))
    return jax.device_put(rows, _place_of(rows, table.sharding))


@functools.partial(jax.jit, donate_argnums=0)
def _with_means(
    rows: Array, table: Array, token_ids: Array, pieces: Array, of_row: Array, counts: Array
) -> Array:
    """Returns rows, those of token_ids replaced by means of the table's.

    Args:
      pieces: i32[m], rows of the table.
      of_row: i32[m], index into token_ids of each.
      counts: i32[token_ids], how many each has; 1 for none, whose mean is 0.
    """
    sums = jax.ops.segment_sum(table[pieces].astype(jnp.float32), of_row, len(token_ids))
    means = sums / counts.reshape(-1, *[1] * (table.ndim - 1))
    return rows.at[token_ids].set(means.astype(rows.dtype))


def _place_of(rows: Array, place: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the place of a table for one of another number of rows."""
    if not isinstance(place, NamedSharding):
        return place
    by_row, *others = place.spec or (None,)
    names = by_row if isinstance(by_row, tuple) else (by_row,) if by_row else ()
    num_parts = math.prod(place.mesh.shape[name] for name in names)
    kept = by_row if rows.shape[0] % num_parts == 0 else None
    return NamedSharding(place.mesh, PartitionSpec(kept, *others))
