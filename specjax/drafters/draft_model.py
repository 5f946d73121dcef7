"""A drafter that is a smaller model with the target's vocabulary; drafts chains and trees.

Its keys and values use the target's page ids, in arrays of its own. After full acceptance
one committed token is missing there, because the last draft token is proposed but never
fed: it is fed together with the root. A tree is fed level by level, without its leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels.move_kv import move_kv
from pallas_kernels.ragged import tokens_of
from specjax.drafters.base import NOT_KEPT, Draft, Drafter, by_page
from specjax.drafters.draws import draw_siblings, noise_keys
from specjax.models.base import MeshAxes, ModelConfig, Params
from specjax.paged import kv_cache
from specjax.paged.forward import (
    forward,
    logits,
    make_batch,
    make_decode_batch,
    make_tree_batch,
    own_logits,
)
from specjax.sampling import TreeHistory, choose_tokens, process_logits
from specjax.sampling.processing import History
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees import draft_tree, expanding
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import (
    DELTA,
    NO_PARENT,
    NOT_A_TOKEN,
    DecoderParams,
    DraftTree,
    Proposal,
    TokenBatch,
    is_by_law,
)

CATCH_UP_WIDTH = 16  # tokens of each row per catch-up forward

_Pages = tuple[kv_cache.Pages, ...]  # of every layer


class Partition(NamedTuple):
    """How the model is split over a mesh; by default each device holds all of it.

    Attributes:
      num_shards: devices that share its heads.
      axis: mesh axes that its heads are split over; None for one shard.
      copies_axis: mesh axis along which devices hold the same shard, where axis is part of the
        target's tensor axis.
    """

    num_shards: int = 1
    axis: MeshAxes | None = None
    copies_axis: str | None = None

    def agreed(self, draft: Draft) -> Draft:
        """Returns the first copy's draft on every copy.

        The target verifies one draft on all of its devices. Sums over the shards of different
        copies may round differently, and could choose different tokens.
        """
        axis = self.copies_axis
        if axis is None:
            return draft

        def of_first(value: Array) -> Array:
            is_first = jax.lax.axis_index(axis) == 0
            return jax.lax.psum(jnp.where(is_first, value, jnp.zeros_like(value)), axis)

        common = jax.tree.map(of_first, draft._replace(state=()))
        return common._replace(state=draft.state)


WHOLE = Partition()


def drafter(
    config: ModelConfig,
    *,
    num_speculative_tokens: int,
    dtype: Any,
    keeps_probs: bool,
    shape: TreeShape | Growth | None = None,
    says_confidence: bool = False,
    max_positions: int | None = None,
    partition: Partition = WHOLE,
) -> Drafter:
    """Returns a drafter that samples from a model.

    Under `greedy` and `seeded` it draws with the target's own noise, so that equal
    distributions propose equal tokens; under `delta` it proposes its likeliest tokens,
    which this rule accepts most often; under the other rules it draws with its own noise.

    Args:
      keeps_probs: whether the distributions are kept, f32[rows, num_drafts, vocab].
      shape: shape of a tree, whose depth is num_speculative_tokens, or how it grows;
        None: chains.
      says_confidence: whether proposals estimate the acceptance of their tokens, which
        costs some passes over the vocabulary.
      max_positions: most positions that the model is fed; None:
        config.max_position_embeddings.
      partition: how the model is split over a mesh.
    """
    model = _DraftModel(config, keeps_probs, says_confidence, partition.axis)

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> _Pages:
        del rows, max_length
        shards = partition.num_shards
        return kv_cache.init_pages(config, num_pages, page_size, dtype, kv_shards=shards)

    def prefill(
        params: DecoderParams,
        state: _Pages,
        batch: TokenBatch,
        row_ids: Array,
        max_tokens_per_row: int,
    ) -> _Pages:
        del row_ids  # pages are found by the batch's block table
        _, state = model.forward(params.drafter, state, batch, max_tokens_per_row)
        return state

    if shape is None:
        propose = functools.partial(_draft_chain, model, num_speculative_tokens)
    elif isinstance(shape, Growth):
        propose = functools.partial(_draft_dynamic_tree, model, shape)
    else:
        propose = functools.partial(_draft_tree, model, shape)

    def draft(params: DecoderParams, state: _Pages, decode_state: Any, num_tokens: Array) -> Draft:
        return partition.agreed(propose(params.drafter, state, decode_state, num_tokens))

    return Drafter(
        draft,
        init=init,
        prefill=prefill,
        move=move_kv,
        state_axes=by_page if partition.num_shards == 1 else _by_page_and_head,
        max_positions=max_positions or config.max_position_embeddings,
        draws_afresh=True,
    )


def _by_page_and_head(state: _Pages) -> Any:
    return jax.tree.map(lambda leaf: PartitionSpec("pages", "kv_heads"), state)


class _Drawn(NamedTuple):
    """Children of some nodes of every row."""

    token_ids: Array  # i32[rows, n, count]
    probs: Array | None = None  # f32[rows, n, vocab]; None without keeps_probs
    # f32[rows, n, count] each, given the node: see Proposal. None without says_confidence.
    prior_confidence: Array | None = None
    probability: Array | None = None


@dataclasses.dataclass(frozen=True)
class _DraftModel:
    config: ModelConfig
    keeps_probs: bool
    says_confidence: bool
    axis: MeshAxes | None = None  # mesh axes that its heads are split over

    def forward(
        self, params: Params, pages: _Pages, batch: TokenBatch, max_tokens_per_row: int
    ) -> tuple[Array, _Pages]:
        """Runs the model over flat tokens; returns hidden [num_tokens, hidden_size] and pages."""
        return forward(
            params,
            self.config,
            pages,
            batch,
            max_tokens_per_row=max_tokens_per_row,
            tensor_axis=self.axis,
        )

    def logits(self, params: Params, hidden: Array) -> Array:
        """Returns f32[num_tokens, vocab] from hidden [num_tokens, hidden_size]."""
        return logits(params, self.config, hidden, self.axis)

    def feed(
        self,
        params: Params,
        pages: _Pages,
        decode_state: Any,
        history: Array,
        positions: Array,
        counts: Array,
        width: int,
    ) -> tuple[Array, _Pages]:
        """Feeds `counts` tokens of each row, from `positions` on.

        Args:
          history: i32[rows, max_length], the tokens.
          positions: i32[rows].
          counts: i32[rows], 0 to width.

        Returns:
          hidden [rows, hidden_size] after each row's last token, and the pages.
        """
        cache, num_tokens = decode_state.cache, decode_state.rows * width
        sizes = {"page_size": cache.page_size, "num_slots": cache.num_slots}
        place = history, cache.block_table, positions
        if width == 1:
            batch = make_decode_batch(*place, counts > 0, **sizes)
        else:
            batch = make_batch(*place, counts, num_tokens=num_tokens, **sizes)
        hidden, pages = self.forward(params, pages, batch, width)
        # Rows that are not fed take no place among the flat tokens.
        return hidden[jnp.clip(batch.row_starts[1:] - 1, 0, num_tokens - 1)], pages

    def feed_root(
        self, params: Params, pages: _Pages, decode_state: Any, takes_part: Array
    ) -> tuple[Array, _Pages]:
        """Feeds the committed tokens that the drafter has not seen, the root included.

        After full acceptance one token is missing: it goes with the root into one forward. After
        steps without drafts more are missing, fed before, CATCH_UP_WIDTH at a time.

        Returns:
          hidden [rows, hidden_size] after the root, and the pages.
        """
        root, first = decode_state.cache.lengths, decode_state.drafter_lengths
        num_behind = jnp.where(takes_part, root - first, 0)
        history = decode_state.history

        def is_behind(carry: tuple[_Pages, Array]) -> Array:
            return jnp.max(num_behind - carry[1], initial=0) > 1

        def catch_up(carry: tuple[_Pages, Array]) -> tuple[_Pages, Array]:
            pages, num_fed = carry
            counts = jnp.clip(num_behind - num_fed, 0, CATCH_UP_WIDTH)
            _, pages = self.feed(
                params, pages, decode_state, history, first + num_fed, counts, CATCH_UP_WIDTH
            )
            return pages, num_fed + counts

        nothing = jnp.zeros_like(num_behind)
        pages, num_fed = jax.lax.while_loop(is_behind, catch_up, (pages, nothing))
        missing = num_behind - num_fed  # 0 or 1
        counts = jnp.where(takes_part, missing + 1, 0)
        return self.feed(params, pages, decode_state, history, root - missing, counts, 2)

    def feed_nodes(
        self,
        params: Params,
        pages: _Pages,
        decode_state: Any,
        token_ids: Array,
        tree: DraftTree,
        nodes: Sequence[int],
        takes_part: Array,
    ) -> tuple[Array, _Pages]:
        """Feeds some nodes of every row's tree; their ancestors were fed before.

        Args:
          nodes: static, ascending.
          takes_part: bool[rows].

        Returns:
          hidden [rows, len(nodes), hidden_size] and the pages.
        """
        cache, rows = decode_state.cache, decode_state.rows
        batch = make_tree_batch(
            decode_state.history,
            cache.block_table,
            cache.lengths,
            jnp.where(takes_part, len(nodes), 0),
            token_ids,
            tree,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
            nodes=nodes,
            num_new_keys=jnp.full(rows, nodes[-1] + 1, jnp.int32),
        )
        hidden, pages = self.forward(params, pages, batch, len(nodes))
        flat = tokens_of(batch.row_starts, rows * len(nodes), len(nodes))
        return hidden[flat], pages

    def draw(
        self,
        params: Params,
        hidden: Array,
        decode_state: Any,
        nodes: Array,
        depth: int | Array,
        history: History,
        count: int,
    ) -> _Drawn:
        """Draws the children of some nodes of every row, all at one depth.

        Args:
          hidden: [rows, n, hidden_size], after these nodes.
          nodes: i32[n].
          history: as `process_logits` takes it, for rows * n nodes.
        """
        rows, width = hidden.shape[:2]
        row_ids = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), width)
        roots = decode_state.cache.lengths[row_ids]
        flat = hidden.reshape(rows * width, -1)
        sampling, rules = decode_state.sampling, decode_state.rules
        where = (sampling, row_ids, roots + depth, history)
        by_row = lambda x: x.reshape(rows, width, -1)
        if count == 1 and not (self.keeps_probs or self.says_confidence):
            # choose_tokens has short paths for logits that sampling parameters do not change.
            temperature = jnp.where(rules == DELTA, 0.0, sampling.temperature)
            certain = dataclasses.replace(sampling, temperature=temperature)
            # Over slices of the vocabulary: no logits of another shard are needed.
            scores, vocabulary = own_logits(params, self.config, flat, self.axis)
            choice = choose_tokens(
                scores, certain, *where[1:], role=TARGET_TOKEN, vocabulary=vocabulary
            )
            # Where no token could be chosen without NaN, sampling parameters forbid all tokens:
            # that is no fault of the model.
            is_nan = choice.is_invalid & _has_nan(scores, choice.is_invalid, vocabulary)
            return _Drawn(by_row(jnp.where(is_nan, NOT_A_TOKEN, choice.token_ids)))
        scores = self.logits(params, flat)
        keys = noise_keys(sampling, rules, row_ids, roots + depth, roots, jnp.tile(nodes, rows))
        siblings = draw_siblings(
            scores,
            *where,
            rules=rules,
            keys=keys,
            count=count,
            keeps_probs=self.keeps_probs,
        )
        probs = None if siblings.probs is None else by_row(siblings.probs)
        is_nan = jnp.any(~(scores < jnp.inf), axis=1)[:, None]
        drawn = _Drawn(by_row(jnp.where(is_nan, NOT_A_TOKEN, siblings.token_ids)), probs)
        if not self.says_confidence:
            return drawn
        processed = process_logits(scores, *where)
        # By rank, not by token: probabilities of the likeliest token, the next, ...
        prior, _ = jax.lax.top_k(jax.nn.softmax(processed), count)
        probability = jnp.take_along_axis(
            jax.nn.softmax(self._with_noise(processed, decode_state, row_ids, depth)),
            siblings.token_ids,
            axis=1,
        )
        return drawn._replace(prior_confidence=by_row(prior), probability=by_row(probability))

    def _with_noise(
        self, processed: Array, decode_state: Any, row_ids: Array, depth: int | Array
    ) -> Array:
        """Adds the noise of the target's choice under rules that share it, [num_tokens, vocab]."""
        sampling, rules = decode_state.sampling, decode_state.rules
        positions = decode_state.cache.lengths[row_ids] + depth
        keys = token_keys(sampling.seeds[row_ids], positions + 1, TARGET_TOKEN)
        is_shared = (sampling.temperature > 0) & (rules != DELTA) & ~is_by_law(rules)
        noise = jax.lax.cond(
            jnp.any(is_shared),
            lambda: gumbel_noise(keys, self.config.vocab_size),
            lambda: jnp.zeros_like(processed),
        )
        return processed + jnp.where(is_shared[row_ids][:, None], noise, 0.0)

    def rank(
        self,
        params: Params,
        hidden: Array,
        decode_state: Any,
        depth: int | Array,
        history: History,
        count: int,
    ) -> tuple[Array, Array]:
        """Returns the likeliest children of some nodes of every row, all at one depth.

        Arguments as for `draw`.

        Returns:
          log_probs f32[rows, n, count], the largest first, and token_ids i32[rows, n, count].
        """
        rows, width = hidden.shape[:2]
        row_ids = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), width)
        positions = decode_state.cache.lengths[row_ids] + depth
        scores = self.logits(params, hidden.reshape(rows * width, -1))
        sampling = decode_state.sampling
        is_nan = jnp.any(~(scores < jnp.inf), axis=1)[:, None]
        scores = process_logits(scores, sampling, row_ids, positions, history)
        scores = self._with_noise(scores, decode_state, row_ids, depth)
        log_probs, token_ids = jax.lax.top_k(jax.nn.log_softmax(scores), count)
        # NaN gets log-probability 0, the highest rank, so that the fault is kept and found.
        token_ids = jnp.where(is_nan, NOT_A_TOKEN, token_ids)
        log_probs = jnp.where(is_nan, 0.0, log_probs)
        shape = rows, width, count
        return log_probs.reshape(shape), token_ids.astype(jnp.int32).reshape(shape)


def _has_nan(scores: Array, is_suspect: Array, vocabulary: Vocabulary) -> Array:
    """Returns which logits hold NaN or +inf; they are read only if any is suspect.

    Args:
      scores: f32[n, width], a slice of the vocabulary or all of it.
      is_suspect: bool[n], the same on all shards.
    """
    return jax.lax.cond(
        jnp.any(is_suspect),
        lambda: vocabulary.any(jnp.any(~(scores < jnp.inf), axis=1)),
        lambda: jnp.zeros_like(is_suspect),
    )


def _draft_chain(
    model: _DraftModel,
    depth: int,
    params: Params,
    state: _Pages,
    decode_state: Any,
    num_tokens: Array,
) -> Draft:
    rows, root = decode_state.rows, decode_state.cache.lengths
    takes_part = decode_state.is_active & (num_tokens > 0)

    def propose(index: Array, hidden: Array, history: Array, drawn: _Drawn) -> tuple[Array, _Drawn]:
        """Draws draft token number `index`; returns the history with it, and all drawn."""
        new = model.draw(params, hidden[:, None], decode_state, index[None], index, history, 1)
        place = jnp.where(index < num_tokens, root + index + 1, history.shape[1])
        token = new.token_ids[:, 0, 0]
        history = history.at[jnp.arange(rows), place].set(token, mode="drop")
        put = lambda every, one: every.at[:, index].set(one[:, 0])
        return history, jax.tree.map(put, drawn, new)

    def extend(index: Array, carry: tuple[_Pages, Array, _Drawn]) -> tuple[_Pages, Array, _Drawn]:
        """Feeds the last draft token; draws the next."""
        pages, history, drawn = carry
        is_fed = (index < num_tokens).astype(jnp.int32)
        hidden, pages = model.feed(params, pages, decode_state, history, root + index, is_fed, 1)
        return pages, *propose(index, hidden, history, drawn)

    one = jnp.zeros((rows, depth, 1))
    vocab = model.config.vocab_size
    nothing = _Drawn(
        token_ids=one.astype(jnp.int32),
        probs=jnp.zeros((rows, depth, vocab)) if model.keeps_probs else None,
        prior_confidence=one if model.says_confidence else None,
        probability=one if model.says_confidence else None,
    )
    hidden, pages = model.feed_root(params, state, decode_state, takes_part)
    carry = pages, *propose(jnp.int32(0), hidden, decode_state.history, nothing)
    if depth > 1:
        most = jnp.max(num_tokens, initial=0)
        carry = jax.lax.fori_loop(1, most, extend, carry)
    pages, _, drawn = carry
    along = lambda figure: None if figure is None else figure[..., 0].cumprod(axis=1)
    proposal = Proposal(
        token_ids=drawn.token_ids[..., 0],
        num_tokens=num_tokens,
        probs=drawn.probs,
        prior_confidence=along(drawn.prior_confidence),
        path_probability=along(drawn.probability),
    )
    # The last draft token is proposed but not fed.
    first = decode_state.drafter_lengths
    return Draft(proposal, pages, jnp.where(takes_part, root + num_tokens, first))


def _draft_tree(
    model: _DraftModel,
    shape: TreeShape,
    params: Params,
    state: _Pages,
    decode_state: Any,
    num_tokens: Array,
) -> Draft:
    rows, root = decode_state.rows, decode_state.cache.lengths
    takes_part = decode_state.is_active & (num_tokens > 0)
    hidden, pages = model.feed_root(params, state, decode_state, takes_part)
    hidden = hidden[:, None]
    tree = shape.draft_tree(rows)
    token_ids = jnp.zeros((rows, shape.num_drafts), jnp.int32)
    all_probs: list[Any] = [None] * shape.num_drafts
    # Prior confidence and probability of the path to each node, the root's first.
    figures = [jnp.ones((rows, shape.num_nodes))] * 2
    for depth in range(shape.max_depth):
        nodes = shape.parents_at(depth)
        if depth:
            hidden, pages = model.feed_nodes(
                params, pages, decode_state, token_ids, tree, nodes, takes_part
            )
        drawn = model.draw(
            params,
            hidden,
            decode_state,
            jnp.array(nodes),
            depth,
            _history(decode_state, tree, token_ids, nodes),
            shape.widths[depth],
        )
        children = shape.nodes_at(depth + 1)
        above = np.array([shape.parents[child] for child in children])
        source = np.array([nodes.index(parent) for parent in above])
        rank = np.array([shape.ranks[child] for child in children])
        here = np.array(children)
        token_ids = token_ids.at[:, here - 1].set(drawn.token_ids[:, source, rank])
        if drawn.prior_confidence is not None and drawn.probability is not None:
            figures = [
                figure.at[:, here].set(figure[:, above] * new[:, source, rank])
                for figure, new in zip(figures, (drawn.prior_confidence, drawn.probability))
            ]
        for place, node in enumerate(nodes):
            if drawn.probs is not None:
                all_probs[node] = drawn.probs[:, place]
    says = model.says_confidence
    proposal = Proposal(
        token_ids=token_ids,
        num_tokens=jnp.where(takes_part, shape.num_drafts, 0),
        probs=_stack(all_probs) if model.keeps_probs else None,
        tree=tree,
        prior_confidence=figures[0][:, 1:] if says else None,
        path_probability=figures[1][:, 1:] if says else None,
    )
    node = np.arange(shape.num_nodes)
    kept_at = np.where(np.isin(node, shape.parents), node, NOT_KEPT)
    written = jnp.where(takes_part, root + 1, decode_state.drafter_lengths)
    return Draft(proposal, pages, written, _in_rows(kept_at, takes_part))


def _draft_dynamic_tree(
    model: _DraftModel,
    growth: Growth,
    params: Params,
    state: _Pages,
    decode_state: Any,
    num_tokens: Array,
) -> Draft:
    """Grows each row's tree at its likeliest nodes, and keeps the best candidates.

    Fed nodes form a tree of their own, `growth.width` per depth. The score of a child is
    the draft model's log-probability of it with the noise of the target's choice: how
    likely the target is to choose it with this noise, not how likely it is in general.
    """
    rows, root = decode_state.rows, decode_state.cache.lengths
    takes_part = decode_state.is_active & (num_tokens > 0)
    hidden, pages = model.feed_root(params, state, decode_state, takes_part)
    hidden = hidden[:, None]
    width, num_fed = growth.width, growth.num_fed
    candidates = expanding.init(rows, max_depth=growth.max_depth, width=width, top_k=width)
    frontier = expanding.root_frontier(rows)
    token_ids = jnp.zeros((rows, num_fed), jnp.int32)
    parents = jnp.zeros((rows, num_fed + 1), jnp.int32).at[:, 0].set(NO_PARENT)
    # Indexed by candidate number; candidate 0 is the root.
    kept_at = jnp.full((rows, 1 + growth.num_candidates), NOT_KEPT, jnp.int32)
    for depth in range(growth.max_depth):
        nodes = growth.nodes_at(depth)
        tree = draft_tree.from_parents(parents, growth.max_depth)
        if depth:
            hidden, pages = model.feed_nodes(
                params, pages, decode_state, token_ids, tree, nodes, takes_part
            )
        kept_at = kept_at.at[jnp.arange(rows)[:, None], frontier.nodes].set(
            jnp.array(nodes, jnp.int32)
        )
        scores, drawn = model.rank(
            params,
            hidden,
            decode_state,
            depth,
            _history(decode_state, tree, token_ids, nodes),
            width,
        )
        is_within = (depth < num_tokens)[:, None, None]
        scores = jnp.where(is_within, scores, -jnp.inf)
        candidates, frontier = expanding.expand(candidates, frontier, scores, drawn, depth=depth)
        if depth + 1 < growth.max_depth:
            children = np.array(growth.nodes_at(depth + 1))
            token_ids = token_ids.at[:, children - 1].set(frontier.token_ids)
            above = nodes[0] + frontier.origins
            parents = parents.at[:, children].set(above.astype(jnp.int32))
    grown = expanding.rerank(candidates, num_drafts=growth.num_drafts)
    assert grown.candidates is not None
    proposal = Proposal(
        token_ids=grown.token_ids,
        num_tokens=jnp.where(takes_part, grown.num_tokens, 0),
        tree=grown.tree,
        path_probability=grown.path_probability,
    )
    node_kept_at = jnp.take_along_axis(kept_at, grown.candidates, axis=1)
    # An unused place has candidate 0, the root.
    node_kept_at = jnp.where(grown.candidates > 0, node_kept_at, NOT_KEPT)
    node_kept_at = jnp.pad(node_kept_at, ((0, 0), (1, 0)))
    node_kept_at = jnp.where(takes_part[:, None], node_kept_at, NOT_KEPT)
    written = jnp.where(takes_part, root + 1, decode_state.drafter_lengths)
    return Draft(proposal, pages, written, node_kept_at)


def _history(decode_state: Any, tree: DraftTree, token_ids: Array, nodes: Sequence[int]) -> History:
    """Returns the prefix of each of some nodes of all rows, in the form that sampling reads."""
    if tuple(nodes) == (0,):
        return decode_state.history
    paths = draft_tree.path_token_ids(tree, token_ids)[:, np.array(nodes)]
    roots = jnp.repeat(decode_state.cache.lengths, len(nodes))
    flat = paths.reshape(roots.shape[0], -1)
    return TreeHistory(decode_state.history, roots, flat)


def _in_rows(kept_at: np.ndarray, takes_part: Array) -> Array:
    return jnp.where(takes_part[:, None], jnp.asarray(kept_at, jnp.int32), NOT_KEPT)


def _stack(all_probs: list[Any]) -> Array:
    """Returns f32[rows, num_drafts, vocab]; nodes without children have zeros."""
    nothing = jnp.zeros_like(all_probs[0])
    return jnp.stack([nothing if p is None else p for p in all_probs], axis=1)
