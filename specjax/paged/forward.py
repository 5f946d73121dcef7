"""Forward of any model over flat tokens of several rows, with attention over pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.implementations import by_platform
from pallas_kernels.path_attention import path_attention
from pallas_kernels.tree_attention import tree_attention
from specjax.models.base import Attend, Family, MeshAxes, ModelConfig, Params
from specjax.models.families import family_of
from specjax.paged import kv_cache
from specjax.paged.kv_cache import Pages
from specjax.paged.token_buckets import in_buckets
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees import draft_tree
from specjax.types import DraftTree, TokenBatch, lay_out


class Part(NamedTuple):
    """A batch, and the most tokens that any of its rows has."""

    batch: TokenBatch
    max_tokens_per_row: int


def make_batch(
    history: Array,
    block_table: Array,
    lengths: Array,
    counts: Array,
    *,
    num_tokens: int,
    page_size: int,
    num_slots: int,
) -> TokenBatch:
    """Lays out the next `counts` tokens of each row, from position `lengths` on.

    Args:
      history: i32[rows, max_length], tokens by position.
      block_table: i32[rows, pages_per_row].
      lengths, counts: i32[rows].
      num_tokens: the token bucket, at least the sum of counts.
    """
    rows, max_length = history.shape
    row_starts, row_ids, offsets = lay_out(counts, num_tokens)
    row = jnp.minimum(row_ids, rows - 1)
    positions = jnp.where(row_ids < rows, lengths[row] + offsets, 0)
    return TokenBatch(
        token_ids=history[row, jnp.minimum(positions, max_length - 1)],
        positions=positions,
        row_ids=row_ids,
        slot_mapping=kv_cache.slots(
            block_table, row_ids, positions, page_size=page_size, num_slots=num_slots
        ),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
    )


def make_decode_batch(
    history: Array,
    block_table: Array,
    lengths: Array,
    takes_part: Array,
    *,
    page_size: int,
    num_slots: int,
) -> TokenBatch:
    """Lays out the token at position `lengths` of each row that takes part.

    It returns what `make_batch` returns for one token per row, in fewer operations.

    Args:
      takes_part: bool[rows].
    """
    rows, max_length = history.shape
    row_starts, row_ids, _ = lay_out(takes_part.astype(jnp.int32), rows)
    each = jnp.arange(rows, dtype=jnp.int32)
    last = jnp.minimum(lengths, max_length - 1)
    slots = kv_cache.slots(block_table, each, lengths, page_size=page_size, num_slots=num_slots)
    by_row = jnp.stack([history[each, last], lengths, slots], axis=1)
    token_ids, positions, slot_mapping = by_row[jnp.minimum(row_ids, rows - 1)].T
    is_token = row_ids < rows
    return TokenBatch(
        token_ids=token_ids,
        positions=jnp.where(is_token, positions, 0),
        row_ids=row_ids,
        slot_mapping=jnp.where(is_token, slot_mapping, num_slots),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
    )


def make_tree_batch(
    history: Array,
    block_table: Array,
    lengths: Array,
    counts: Array,
    token_ids: Array,
    tree: DraftTree,
    *,
    num_tokens: int | None = None,
    page_size: int,
    num_slots: int,
    nodes: Sequence[int] | None = None,
    num_new_keys: Array | None = None,
    by_path: bool = False,
) -> TokenBatch:
    """Lays out the first `counts` nodes of each row's tree, or of a subset of its nodes.

    The key of node j is in the slot of position lengths + j; its rotary position is
    lengths + depth.

    Args:
      history: i32[rows, max_length]; only the root is read.
      counts: i32[rows], nodes including the root.
      token_ids: i32[rows, num_nodes - 1], of the nodes after the root.
      num_tokens: the token bucket; None: the nodes of all rows.
      nodes: subset of nodes, static, whose ancestors were fed before; None: all nodes.
      num_new_keys: i32[rows], see tree_attention; needed with `nodes`.
      by_path: whether the batch holds each node's path, as `forward` with a token_bucket
        needs it, instead of its ancestor bits.
    """
    rows, max_length = history.shape
    chosen = jnp.array(tuple(range(tree.num_nodes)) if nodes is None else tuple(nodes))
    num_tokens = rows * chosen.size if num_tokens is None else num_tokens
    row_starts, row_ids, offset = lay_out(counts, num_tokens)
    row, offset = jnp.minimum(row_ids, rows - 1), jnp.clip(offset, 0, chosen.size - 1)
    node = chosen[offset]
    is_token = row_ids < rows
    root = jnp.minimum(lengths, max_length - 1)
    root_ids = jnp.take_along_axis(history, root[:, None], axis=1)
    ancestors = (
        {"path_offsets": _path_offsets(tree)[row, node]}
        if by_path
        else {"ancestor_bits": draft_tree.ancestor_bits(tree)[row, node]}
    )
    return TokenBatch(
        token_ids=jnp.concatenate([root_ids, token_ids], axis=1)[row, node],
        positions=jnp.where(is_token, lengths[row] + tree.depths[row, node], 0),
        row_ids=row_ids,
        slot_mapping=kv_cache.slots(
            block_table,
            row_ids,
            jnp.where(is_token, lengths[row] + node, 0),
            page_size=page_size,
            num_slots=num_slots,
        ),
        row_starts=row_starts,
        lengths=lengths,
        block_table=block_table,
        num_new_keys=num_new_keys,
        **ancestors,
    )


def _path_offsets(tree: DraftTree) -> Array:
    """Returns the nodes on the path from the root to each node, i32[rows, num_nodes, max_depth +
    1]."""
    rows, num_nodes = tree.parents.shape
    nodes = draft_tree.paths(tree, jnp.full(rows, num_nodes - 1, jnp.int32))
    return jnp.pad(jnp.maximum(nodes, 0), ((0, 0), (0, 0), (1, 0)))


class Tapped(NamedTuple):
    """Hidden states of some layers, [num_tokens, hidden_size] per tap, for both parts."""

    batch: tuple[Array, ...]
    beside: tuple[Array, ...]  # () without a part `beside`


@overload
def forward(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    *,
    max_tokens_per_row: int,
    token_bucket: int | None = None,
    tensor_axis: MeshAxes | None = None,
    beside: Part | None = None,
    kv_scales: Array | None = None,
    taps: None = None,
) -> tuple[Array, tuple[Pages, ...]]: ...


@overload
def forward(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    *,
    max_tokens_per_row: int,
    token_bucket: int | None = None,
    tensor_axis: MeshAxes | None = None,
    beside: Part | None = None,
    kv_scales: Array | None = None,
    taps: tuple[int, ...],
) -> tuple[Array, tuple[Pages, ...], Tapped]: ...


def forward(
    params: Params,
    config: ModelConfig,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    *,
    max_tokens_per_row: int,
    token_bucket: int | None = None,
    tensor_axis: MeshAxes | None = None,
    beside: Part | None = None,
    kv_scales: Array | None = None,
    taps: tuple[int, ...] | None = None,
) -> Any:
    """Runs a model over flat tokens, writing their keys and values into the pages.

    Every layer writes before it reads, so a token sees itself and the pool is
    updated in place.

    Args:
      token_bucket: number of tokens computed at a time, each with its own attention (see
        `specjax.paged.token_buckets`); the batch is a multiple of it. None: all at once.
      beside: tokens of other rows, which run through the same matmuls, with attention of
        their own. Neither part reads what the other writes. Not with a token_bucket.
      kv_scales: f32[2, layers, kv_heads], `PagedKVCache.scales`. Not with a token_bucket.
      taps: static; layers whose hidden states are returned as well, for every token. Tap i is
        the input of layer i, tap num_layers the output after the final norm, tap num_layers + 1
        that before it. None returns no `Tapped`; () returns an empty one, without more
        computation.

    Returns:
      hidden [num_tokens, hidden_size] of `batch` after the final norm, and the pages; with
      taps, a `Tapped` too. Hidden states of padding, and of buckets without tokens, are
      meaningless.

    Raises:
      ValueError: a tap is not between 0 and num_layers + 1.
    """
    model = _Model(params, config, tensor_axis, taps or ())
    if token_bucket is not None:
        assert beside is None, "what runs beside has a shape of its own"
        assert kv_scales is None, "path_attention reads no quantised pages"
        hidden, pages, seen = _forward_by_bucket(model, pages, batch, token_bucket)
        return (hidden, pages) if taps is None else (hidden, pages, Tapped(seen, ()))
    parts = [Part(batch, max_tokens_per_row), *([] if beside is None else [beside])]
    attend = attention_over(config, parts, kv_scales=kv_scales)
    ends = _ends(parts)

    def along(name: str) -> Array:
        return jnp.concatenate([getattr(part.batch, name) for part in parts])

    is_token = None
    if model.family.has_experts:  # row ids are local to each part
        is_token = jnp.concatenate([_is_token(part.batch, part.batch.row_ids) for part in parts])
    hidden, pages, seen = model.run(
        along("token_ids"), along("positions"), attend, pages, is_token=is_token
    )
    if taps is None:
        return hidden[: ends[0]], pages
    both = Tapped(
        jax.tree.map(lambda tap: tap[: ends[0]], seen),
        () if beside is None else jax.tree.map(lambda tap: tap[ends[0] :], seen),
    )
    return hidden[: ends[0]], pages, both


def attention_over(
    config: ModelConfig,
    parts: Sequence[Part],
    *,
    kv_scales: Array | None = None,
    first_key: int = 0,
    is_written: bool = False,
) -> Attend:
    """Returns the function that writes keys and values of a layer into its pages, and attends.

    Args:
      config: what it says of attention is used.
      parts: batches, laid end to end. Neither reads what the others write.
      kv_scales: as for `forward`.
      first_key: static; positions of a row before it hold no key.
      is_written: static; whether the pages hold these keys and values already. Then they are not
        read, and what they were to be made of is not computed.
    """
    ends = _ends(parts)
    slot_mapping = jnp.concatenate([part.batch.slot_mapping for part in parts])

    def attend(
        layer: int, q: Array, k: Array, v: Array, pages: Pages, sinks: Array | None = None
    ) -> tuple[Array, Pages]:
        k_scale, v_scale = kv_cache.scales_of(kv_scales, layer)
        if not is_written:
            pages = kv_cache.write(pages, k, v, slot_mapping, k_scale, v_scale)
        if kv_scales is not None:
            # int8 has no NaN: a token whose key or value is not finite is NaN itself instead.
            is_finite = jnp.isfinite(k).all((1, 2)) & jnp.isfinite(v).all((1, 2))
            q = jnp.where(is_finite[:, None, None], q, jnp.nan)
        outs = [
            tree_attention(
                queries,
                *pages,
                part.batch.block_table,
                part.batch.row_starts,
                part.batch.lengths,
                num_kv_heads=k.shape[1],
                ancestor_bits=part.batch.ancestor_bits,
                num_new_keys=part.batch.num_new_keys,
                sinks=sinks,
                max_tokens_per_row=part.max_tokens_per_row,
                k_scale=k_scale,
                v_scale=v_scale,
                first_key=first_key,
                **config.attention_options(layer),
            )
            for queries, part in zip(jnp.split(q, ends[:-1]), parts)
        ]
        return jnp.concatenate(outs), pages

    return attend


def _ends(parts: Sequence[Part]) -> list[int]:
    """Returns where each part ends among the flat tokens of all."""
    return list(itertools.accumulate(part.batch.token_ids.shape[0] for part in parts))


class _Model(NamedTuple):
    """A model, and the layers whose hidden states are returned."""

    params: Params
    config: ModelConfig
    tensor_axis: MeshAxes | None
    taps: tuple[int, ...]

    @property
    def family(self) -> Family:
        return family_of(self.config)

    def run(
        self,
        token_ids: Array,
        positions: Array,
        attend: Any,
        pages: tuple[Pages, ...],
        *,
        is_token: Array | None,
    ) -> tuple[Array, tuple[Pages, ...], tuple[Array, ...]]:
        hidden, pages, seen = self.family.forward(
            self.params,
            self.config,
            token_ids,
            positions,
            attend,
            pages,
            self.tensor_axis,
            taps=self.taps,
            is_token=is_token,
        )
        if self.config.activation_dtype is not None:
            dtype = jax.tree.leaves(self.params)[0].dtype
            seen = tuple(tap.astype(dtype) for tap in seen)
        return hidden, pages, seen


def _is_token(batch: TokenBatch, row_ids: Array) -> Array:
    """Returns which flat tokens belong to a row, bool[n]; False for padding."""
    return row_ids < batch.lengths.shape[0]


def _forward_by_bucket(
    model: _Model,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    token_bucket: int,
) -> tuple[Array, tuple[Pages, ...], tuple[Array, ...]]:
    """Runs `forward` on one bucket of tokens after the other; ancestors come in earlier places."""
    tokens = _BucketTokens(
        batch.token_ids,
        batch.positions,
        batch.row_ids,
        batch.slot_mapping,
        batch.path_offsets,
    )

    def run(
        pages: tuple[Pages, ...], part: _BucketTokens
    ) -> tuple[tuple[Pages, ...], tuple[Array, tuple[Array, ...]]]:
        def attend(
            layer: int, q: Array, k: Array, v: Array, pages: Pages, sinks: Array | None = None
        ) -> tuple[Array, Pages]:
            pages = kv_cache.write(pages, k, v, part.slot_mapping)
            out = path_attention(
                q,
                *pages,
                batch.block_table,
                part.row_ids,
                batch.lengths,
                part.positions,
                num_kv_heads=k.shape[1],
                path_offsets=part.path_offsets,
                sinks=sinks,
                **model.config.attention_options(layer),
            )
            return out, pages

        hidden, pages, seen = model.run(
            part.token_ids,
            part.positions,
            attend,
            pages,
            is_token=_is_token(batch, part.row_ids) if model.family.has_experts else None,
        )
        return pages, (hidden, seen)

    num_used = batch.row_starts[-1]
    pages, (hidden, seen) = in_buckets(run, pages, tokens, token_bucket, num_used)
    return hidden, pages, seen


class _BucketTokens(NamedTuple):
    """The per-token fields of a TokenBatch."""

    token_ids: Array
    positions: Array
    row_ids: Array
    slot_mapping: Array
    path_offsets: Array | None


def logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: MeshAxes | None = None
) -> Array:
    """Returns logits f32[num_tokens, vocab], row-major in memory.

    Over a tensor axis that splits the vocabulary, they are gathered to every device.
    """
    return _by_token(family_of(config).logits(params, config, hidden, tensor_axis))


def own_logits(
    params: Params, config: ModelConfig, hidden: Array, tensor_axis: MeshAxes | None = None
) -> tuple[Array, Vocabulary]:
    """Returns this device's slice of `logits`, f32[num_tokens, width], and how they are split.

    A vocabulary that the tensor axis does not divide is whole on every device.
    """
    scores = family_of(config).logits(params, config, hidden)
    vocabulary = Vocabulary.of_width(scores.shape[-1], config.vocab_size, tensor_axis)
    return _by_token(scores), vocabulary


def _by_token(scores: Array) -> Array:
    """Returns scores [num_tokens, n] with each token's in a row of memory.

    On a CPU `linear` gives them transposed, and every branch of a lax.cond that reads them
    would transpose them again. Under jax 0.10's automatic partitioning a layout constraint
    gathers sharded arrays; the programs here are sharded by hand.
    """
    by_token = lambda scores: with_layout_constraint(scores, Layout((0, 1)))
    return by_platform(scores, cpu=by_token, default=lambda same: same)
