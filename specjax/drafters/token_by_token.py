"""Chains and trees drafted token by token, by a model that is fed one draft token to draw the next.

A draft model is such a model, and so is a head over the target. `TokenByToken` is what they have
in common: how tokens are fed is theirs, and how tokens are drawn, chained and made into trees is
here. A tree is fed level by level, without its leaves.
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

from specjax.drafters.base import NOT_KEPT, Draft, DrafterContext
from specjax.drafters.draws import draw_siblings, noise_keys
from specjax.paged.forward import make_batch, make_tree_batch
from specjax.sampling import TreeHistory, choose_tokens, process_logits
from specjax.sampling.processing import History
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.sampling.vocabulary_part import VocabularyPart
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


class _Drawn(NamedTuple):
    """Children of some nodes of every row."""

    token_ids: Array  # i32[rows, n, count]
    probs: Array | None = None  # f32[rows, n, vocab]; None without keeps_probs
    # f32[rows, n, count] each, given the node: see Proposal. None without says_confidence.
    prior_confidence: Array | None = None
    probability: Array | None = None


class Fed(NamedTuple):
    """A draft token of each row, which is fed to a model.

    Attributes:
      history: i32[rows, max_length], the tokens, drafts among them.
      positions: i32[rows], of the tokens that are fed.
      is_fed: bool[rows].
      hidden: [rows, width], after the token before each.
      depth: i32[], of these tokens, in all rows; that of the root is 0.
    """

    decode_state: Any
    history: Array
    positions: Array
    is_fed: Array
    hidden: Array
    depth: int | Array


class FedNodes(NamedTuple):
    """Some nodes of every row's tree, at one depth; their ancestors were fed before.

    Attributes:
      token_ids: i32[rows, num_drafts], of the tree.
      nodes: static, ascending.
      takes_part: bool[rows].
      hidden: [rows, len(nodes), width], after the parent of each.
      depth: of all these nodes; that of the root is 0.
    """

    decode_state: Any
    token_ids: Array
    tree: DraftTree
    nodes: Sequence[int]
    takes_part: Array
    hidden: Array
    depth: int

    def batch(self) -> TokenBatch:
        """Lays out these nodes of the rows that take part."""
        cache, nodes = self.decode_state.cache, self.nodes
        return make_tree_batch(
            self.decode_state.history,
            cache.block_table,
            cache.lengths,
            jnp.where(self.takes_part, len(nodes), 0),
            self.token_ids,
            self.tree,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
            nodes=nodes,
            num_new_keys=jnp.full(self.decode_state.rows, nodes[-1] + 1, jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class TokenByToken:
    """A model that drafts token by token.

    Its functions take and return `hidden`, [rows, width] or [rows, n, width]: what it says after a
    token of each row. Its logits are read from it, and it goes along with the next token that
    is fed.

    Attributes:
      vocab_size: of the target.
      keeps_probs: whether the distributions are kept, f32[rows, num_drafts, vocab].
      says_confidence: whether proposals estimate the acceptance of their tokens, which
        costs some passes over the vocabulary.
      keeps_fed: whether the keys and values of a draft token that was fed are final once it is
        accepted. If not, it is told of every committed token (`Drafter.absorb`), or sets
        `Draft.written` itself.
    """

    vocab_size: int
    keeps_probs: bool
    says_confidence: bool
    keeps_fed: bool

    def begin(
        self, params: DecoderParams, state: Any, decode_state: Any, takes_part: Array
    ) -> tuple[Array, Any]:
        """Returns hidden [rows, width] after each row's root, and the state.

        Args:
          takes_part: bool[rows]; hidden of other rows means nothing.
        """
        raise NotImplementedError

    def feed(self, params: DecoderParams, state: Any, fed: Fed) -> tuple[Array, Any]:
        """Feeds a draft token of each row; returns hidden [rows, width] after it, and the state."""
        raise NotImplementedError

    def feed_nodes(self, params: DecoderParams, state: Any, fed: FedNodes) -> tuple[Array, Any]:
        """Feeds nodes; returns hidden [rows, len(nodes), width] after them, and the state."""
        raise NotImplementedError

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        """Returns logits f32[num_tokens, n], and of which tokens: all, a slice, or some alone.

        Args:
          hidden: [num_tokens, width], of what `begin` or `feed` returned.
          depth: i32[], of the tokens that hidden follows; that of the root is 0.
        """
        raise NotImplementedError

    def logits(self, params: DecoderParams, hidden: Array, depth: int | Array) -> Array:
        """Returns f32[num_tokens, vocab]: gathered from slices, -inf for tokens it cannot say."""
        scores, vocabulary = self.own_logits(params, hidden, depth)
        return vocabulary.whole(scores)

    def confidence(self, hidden: Array) -> Array | None:
        """Returns the model's own estimate that the next draft token is accepted, f32[num_tokens].

        It depends on what was drawn before alone. None: it makes none, and the probability of its
        likeliest token is taken.

        Args:
          hidden: [num_tokens, width], after the token before.
        """
        del hidden
        return None

    def draw(
        self,
        params: DecoderParams,
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
            scores, vocabulary = self.own_logits(params, flat, depth)
            choice = choose_tokens(
                scores, certain, *where[1:], role=TARGET_TOKEN, vocabulary=vocabulary
            )
            # Where no token could be chosen without NaN, sampling parameters forbid all tokens:
            # that is no fault of the model.
            is_nan = choice.is_invalid & _has_nan(scores, choice.is_invalid, vocabulary)
            return _Drawn(by_row(jnp.where(is_nan, NOT_A_TOKEN, choice.token_ids)))
        scores = self.logits(params, flat, depth)
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
        own = self.confidence(flat)
        if own is None:
            # By rank, not by token: probabilities of the likeliest token, the next, ...
            prior, _ = jax.lax.top_k(jax.nn.softmax(processed), count)
        else:
            prior = jnp.broadcast_to(own[:, None], (len(own), count))
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
            lambda: gumbel_noise(keys, self.vocab_size),
            lambda: jnp.zeros_like(processed),
        )
        return processed + jnp.where(is_shared[row_ids][:, None], noise, 0.0)

    def rank(
        self,
        params: DecoderParams,
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
        scores = self.logits(params, hidden.reshape(rows * width, -1), depth)
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


def of_head(config: Any, context: DrafterContext) -> dict[str, Any]:
    """Returns the fields of a head over the target: `TokenByToken`'s, its config and the context.

    A head absorbs committed tokens anew, so that it keeps nothing that it was fed for a draft.
    """
    return {
        "vocab_size": config.target_vocab_size,
        "keeps_probs": context.keeps_probs,
        "says_confidence": context.says_confidence,
        "keeps_fed": False,
        "config": config,
        "context": context,
    }


def own_vocabulary(params: DecoderParams, config: Any) -> Vocabulary:
    """Returns the tokens that a head's own matrix is about: the target's, or a part of them."""
    if not config.maps_vocabulary:
        return WHOLE
    return VocabularyPart(
        token_ids=params.drafter["target_ids"], vocab_size=config.target_vocab_size
    )


def head_vocabulary(
    params: DecoderParams, config: Any, context: DrafterContext, width: int
) -> Vocabulary:
    """Returns which tokens logits of a width are about: by a head's own matrix or the target's."""
    if config.has_head:
        return own_vocabulary(params, config)
    return Vocabulary.of_width(width, config.target_vocab_size, context.tensor_axis)


def batch_of_rows(decode_state: Any, first: Array, counts: Array, num_tokens: int) -> TokenBatch:
    """Lays out `counts` tokens of each row's text, from position `first` on; see `make_batch`."""
    cache = decode_state.cache
    return make_batch(
        decode_state.history,
        cache.block_table,
        first,
        counts,
        num_tokens=num_tokens,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )


def token_at(history: Array, positions: Array) -> Array:
    """Returns the token at a position of each row, i32[rows]; history i32[rows, max_length]."""
    places = jnp.minimum(positions, history.shape[1] - 1)
    return jnp.take_along_axis(history, places[:, None], axis=1)[:, 0]


def keep_newest(newest: Array, said: Array, fed: TokenBatch, row_ids: Array) -> Array:
    """Returns `newest` [rows, width] with what is said of the last token of each row that was fed.

    Args:
      said: [num_tokens, width], of the tokens that were fed.
      fed, row_ids: as of `Drafter.absorb`.
    """
    counts = jnp.diff(fed.row_starts)
    last = jnp.clip(fed.row_starts[1:] - 1, 0, said.shape[0] - 1)
    rows = jnp.where(counts > 0, row_ids[: counts.shape[0]], newest.shape[0])
    return newest.at[rows].set(said[last], mode="drop")


def draft(
    model: TokenByToken,
    depth: int,
    shape: TreeShape | Growth | None,
    params: DecoderParams,
    state: Any,
    decode_state: Any,
    num_tokens: Array,
) -> Draft:
    """Drafts as `Drafter.draft` does, the arguments from `params` on.

    Args:
      depth: K, of chains.
      shape: shape of a tree, whose depth is K, or how it grows; None: chains.
    """
    if shape is None:
        propose = functools.partial(_draft_chain, model, depth)
    elif isinstance(shape, Growth):
        propose = functools.partial(_draft_dynamic_tree, model, shape)
    else:
        propose = functools.partial(_draft_tree, model, shape)
    return propose(params, state, decode_state, num_tokens)


def _draft_chain(
    model: TokenByToken,
    depth: int,
    params: DecoderParams,
    state: Any,
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

    def extend(index: Array, carry: tuple[Any, Array, Array, _Drawn]) -> Any:
        """Feeds the last draft token; draws the next."""
        state, hidden, history, drawn = carry
        fed = Fed(decode_state, history, root + index, index < num_tokens, hidden, index)
        hidden, state = model.feed(params, state, fed)
        return state, hidden, *propose(index, hidden, history, drawn)

    one = jnp.zeros((rows, depth, 1))
    nothing = _Drawn(
        token_ids=one.astype(jnp.int32),
        probs=jnp.zeros((rows, depth, model.vocab_size)) if model.keeps_probs else None,
        prior_confidence=one if model.says_confidence else None,
        probability=one if model.says_confidence else None,
    )
    hidden, state = model.begin(params, state, decode_state, takes_part)
    carry = state, hidden, *propose(jnp.int32(0), hidden, decode_state.history, nothing)
    if depth > 1:
        most = jnp.max(num_tokens, initial=0)
        carry = jax.lax.fori_loop(1, most, extend, carry)
    state, _, _, drawn = carry
    along = lambda figure: None if figure is None else figure[..., 0].cumprod(axis=1)
    proposal = Proposal(
        token_ids=drawn.token_ids[..., 0],
        num_tokens=num_tokens,
        probs=drawn.probs,
        prior_confidence=along(drawn.prior_confidence),
        path_probability=along(drawn.probability),
    )
    if not model.keeps_fed:
        return Draft(proposal, state)
    # The last draft token is proposed but not fed.
    first = decode_state.drafter_lengths
    return Draft(proposal, state, jnp.where(takes_part, root + num_tokens, first))


def _draft_tree(
    model: TokenByToken,
    shape: TreeShape,
    params: DecoderParams,
    state: Any,
    decode_state: Any,
    num_tokens: Array,
) -> Draft:
    rows, root = decode_state.rows, decode_state.cache.lengths
    takes_part = decode_state.is_active & (num_tokens > 0)
    hidden, state = model.begin(params, state, decode_state, takes_part)
    hidden = hidden[:, None]
    tree = shape.draft_tree(rows)
    token_ids = jnp.zeros((rows, shape.num_drafts), jnp.int32)
    all_probs: list[Any] = [None] * shape.num_drafts
    # Prior confidence and probability of the path to each node, the root's first.
    figures = [jnp.ones((rows, shape.num_nodes))] * 2
    nodes: Sequence[int] = ()
    for depth in range(shape.max_depth):
        nodes, before = shape.parents_at(depth), nodes
        if depth:
            above = hidden[:, np.array([before.index(shape.parents[node]) for node in nodes])]
            fed = FedNodes(decode_state, token_ids, tree, nodes, takes_part, above, depth)
            hidden, state = model.feed_nodes(params, state, fed)
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
    if not model.keeps_fed:
        return Draft(proposal, state)
    node = np.arange(shape.num_nodes)
    kept_at = np.where(np.isin(node, shape.parents), node, NOT_KEPT)
    written = jnp.where(takes_part, root + 1, decode_state.drafter_lengths)
    return Draft(proposal, state, written, _in_rows(kept_at, takes_part))


def _draft_dynamic_tree(
    model: TokenByToken,
    growth: Growth,
    params: DecoderParams,
    state: Any,
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
    hidden, state = model.begin(params, state, decode_state, takes_part)
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
            above = jnp.take_along_axis(hidden, frontier.origins[:, :, None], axis=1)
            fed = FedNodes(decode_state, token_ids, tree, nodes, takes_part, above, depth)
            hidden, state = model.feed_nodes(params, state, fed)
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
            parents_of = nodes[0] + frontier.origins
            parents = parents.at[:, children].set(parents_of.astype(jnp.int32))
    grown = expanding.rerank(candidates, num_drafts=growth.num_drafts)
    assert grown.candidates is not None
    proposal = Proposal(
        token_ids=grown.token_ids,
        num_tokens=jnp.where(takes_part, grown.num_tokens, 0),
        tree=grown.tree,
        path_probability=grown.path_probability,
    )
    if not model.keeps_fed:
        return Draft(proposal, state)
    node_kept_at = jnp.take_along_axis(kept_at, grown.candidates, axis=1)
    # An unused place has candidate 0, the root.
    node_kept_at = jnp.where(grown.candidates > 0, node_kept_at, NOT_KEPT)
    node_kept_at = jnp.pad(node_kept_at, ((0, 0), (1, 0)))
    node_kept_at = jnp.where(takes_part[:, None], node_kept_at, NOT_KEPT)
    written = jnp.where(takes_part, root + 1, decode_state.drafter_lengths)
    return Draft(proposal, state, written, node_kept_at)


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
