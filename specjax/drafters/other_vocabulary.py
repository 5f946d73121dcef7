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
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.drafters.token_set import TokenSet
from specjax.models.base import Model
from specjax.models.families import family_of
from specjax.models.partition import automatic
from specjax.runtime.stack_level import of_the_caller
from specjax.text.token_bytes import Meaning, meanings
from specjax.text.tokenization import Tokenizer

SPELT_AT_ONCE = 8192  # rows of which the mean is taken at once: the sums are float32
UNKNOWN = -1
FEW = 0.25  # share of the target's tokens below which a warning says that few can be drafted


class Recoding(NamedTuple):
    """A draft model's tokens by those of a target.

    Attributes:
      own: i32[target's vocabulary], the draft model's token of each, or UNKNOWN.
      said: those of the target's tokens that may be drafted; None: all. No two have one token of
        the draft model.
      spelt: the draft model's tokens that spell each other token of the target, by its id.
    """

    own: np.ndarray
    said: TokenSet | None
    spelt: Mapping[int, tuple[int, ...]]

    def note(self) -> str:
        """Returns what a user should know of it."""
        return (
            f"drafts {self.num_said:,} of the target's {len(self.own):,} tokens: those that are in "
            "its own vocabulary too"
        )

    def warn(self) -> None:
        """Warns where few of the target's tokens can be drafted."""
        if self.num_said < FEW * len(self.own):
            warnings.warn(
                f"the draft model {self.note()}; drafts of other tokens are never right. Choose a "
                "draft model of the target's family.",
                stacklevel=of_the_caller(),
            )

    @property
    def num_said(self) -> int:
        return len(self.own) if self.said is None else len(self.said)


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
    if are_equal(ours, theirs):
        return None if sizes[0] == sizes[1] else _of_padding(*sizes)
    found = _of_tokenizers(ours, theirs, *sizes)
    if not found.num_said:
        raise ValueError(
            f"no token of the target {target.name!r} is one of the draft {draft.name!r}; choose a "
            "draft whose tokenizer.json writes text as the target's does."
        )
    return found


@functools.lru_cache(maxsize=4)  # a draft model may be given to every call
def are_equal(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Returns whether two tokenizers have the same tokens with the same ids."""
    return ours is theirs or ours.vocabulary() == theirs.vocabulary()


def _of_padding(target_size: int, draft_size: int) -> Recoding:
    """Returns the recoding of equal tokenizers: the smaller model has fewer rows for no token."""
    ids = np.arange(target_size, dtype=np.int32)
    is_said = ids < draft_size
    return Recoding(np.where(is_said, ids, np.int32(UNKNOWN)), _set_of(is_said), {})


def _set_of(is_said: np.ndarray) -> TokenSet | None:
    return None if is_said.all() else TokenSet.of(is_said)


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
    return Recoding(own, _set_of(is_said), spelt)


def _first_of_each(own: np.ndarray, target: Tokenizer) -> np.ndarray:
    """Returns the target's tokens that may be drafted: one for each of the draft model's.

    Of several it is the one that ends a text, else that with the shortest spelling.
    """
    is_said = np.zeros(len(own), bool)
    taken = set()
    spellings = {i: token for token, i in target.vocabulary().items()}
    known = np.flatnonzero(own != UNKNOWN).tolist()
    order = lambda i: (i != target.eos_token_id, len(spellings[i]), i)
    for token_id in sorted(known, key=order):
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

    Leaves without a row per token are the draft model's own, not copies. A mask token for which the
    target has no row is left out of the config.
    """
    mask = draft.config.mask_token_id
    if mask is not None:
        by, mask = _with_mask(by, mask)
    config = dataclasses.replace(draft.config, vocab_size=len(by.own), mask_token_id=mask)
    axes = family_of(draft.config).axes(draft.config)
    return dataclasses.replace(
        draft, config=config, params=_map_rows(by, draft.params, axes), tokenizer=None
    )


def _with_mask(by: Recoding, mask: int) -> tuple[Recoding, int | None]:
    """Returns a recoding in which a row of the target is the mask token's, and that row.

    It is that of a token that both have, else one for which the target's tokenizer has no token;
    None where there is neither.
    """
    rows = np.flatnonzero(by.own == mask).tolist()
    if rows:
        return by, rows[0]
    free = [i for i in np.flatnonzero(by.own == UNKNOWN).tolist() if i not in by.spelt]
    if not free:
        return by, None
    row = mask if mask in free else free[-1]
    own = by.own.copy()
    own[row] = mask
    return by._replace(own=own), row


def _map_rows(by: Recoding, params: Any, axes: Any) -> Any:
    """Returns weights, those with a row per token with rows by the target's tokens."""
    if isinstance(params, Mapping):
        return {name: _map_rows(by, leaf, axes[name]) for name, leaf in params.items()}
    if isinstance(params, list | tuple):
        return type(params)(_map_rows(by, *each) for each in zip(params, axes, strict=True))
    if "vocab" not in axes:
        return params
    if axes[0] != "vocab":
        raise ValueError(
            f"a weight of the axes {axes} has no row per token, so that the draft model cannot be "
            "rewritten in the target's vocabulary; choose one with the target's tokenizer."
        )
    if isinstance(params, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(by.own), *params.shape[1:]), params.dtype)
    return _rows(by, _on_automatic_axes(jnp.asarray(params)))


def _rows(by: Recoding, table: Array) -> Array:
    """Returns [target's vocabulary, ...] from rows by the draft model's tokens.

    They lie on the devices on which the table lies, split as it is where that is even.
    """
    others = np.flatnonzero(by.own == UNKNOWN)
    # An index into the table for a token that the draft model has, and into the means for others.
    own = np.maximum(by.own, 0)
    own[others] = np.arange(len(others))
    place = _place_of(len(own), table)
    return _chosen(place)(by.own != UNKNOWN, own, table, _means(by, others, table))


def _means(by: Recoding, token_ids: np.ndarray, table: Array) -> Array:
    """Returns the mean of the rows that spell each token, 0 for none, [max(n, 1), ...]."""
    pieces = [by.spelt.get(token_id, ()) for token_id in token_ids.tolist()] or [()]
    groups = [pieces[at : at + SPELT_AT_ONCE] for at in range(0, len(pieces), SPELT_AT_ONCE)]
    most = max(sum(map(len, group)) for group in groups)
    means = []
    for group in groups:
        counts = np.array([len(each) for each in group])
        flat, of_row = np.zeros(most, np.int32), np.full(most, SPELT_AT_ONCE)  # none, by default
        flat[: counts.sum()] = list(itertools.chain.from_iterable(group))
        of_row[: counts.sum()] = np.repeat(np.arange(len(group)), counts)
        padded = np.ones(SPELT_AT_ONCE)
        padded[: len(group)] = np.maximum(counts, 1)
        means.append(_means_of(table, flat, of_row, padded)[: len(group)])
    return jnp.concatenate(means)


@jax.jit
def _means_of(table: Array, pieces: Array, of_row: Array, counts: Array) -> Array:
    """Returns means of rows, as the table's.

    Args:
      pieces: i32[m], rows of the table.
      of_row: i32[m], index into counts of each; len(counts) counts for none.
    """
    sums = jax.ops.segment_sum(table[pieces].astype(jnp.float32), of_row, len(counts))
    return (sums / counts.reshape(-1, *[1] * (table.ndim - 1))).astype(table.dtype)


@functools.lru_cache(maxsize=8)
def _chosen(place: jax.sharding.Sharding | None) -> Any:
    """Returns the function that takes each row from the table or from the means, at a place."""

    def choose(is_known: Array, index: Array, table: Array, means: Array) -> Array:
        is_known = is_known.reshape(-1, *[1] * (table.ndim - 1))
        clipped = lambda rows: rows[jnp.minimum(index, rows.shape[0] - 1)]
        return jnp.where(is_known, clipped(table), clipped(means))

    return jax.jit(choose, out_shardings=place)


def _on_automatic_axes(table: Array) -> Array:
    """Returns an array whose sharding is not part of its type, as on a mesh of `jax.make_mesh`."""
    place = getattr(table, "sharding", None)
    if isinstance(table, Tracer) or not isinstance(place, NamedSharding):
        return table
    mesh = automatic(cast(Mesh, place.mesh))
    assert mesh is not None
    return jax.device_put(table, NamedSharding(mesh, place.spec))


def _place_of(num_rows: int, table: Array) -> jax.sharding.Sharding | None:
    """Returns the place for a table of another number of rows; None while it is traced."""
    if isinstance(table, Tracer):
        return None
    place = table.sharding
    if not isinstance(place, NamedSharding):
        return place
    by_row, *others = place.spec or (None,)
    names = by_row if isinstance(by_row, tuple) else (by_row,) if by_row else ()
    num_parts = math.prod(place.mesh.shape[name] for name in names)
    return NamedSharding(
        place.mesh, PartitionSpec(None if num_rows % num_parts else by_row, *others)
    )
